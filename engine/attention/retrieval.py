"""Sparse attention: a step reads the initial blocks, the window, and of all others those that an index finds best.

A step reads one contiguous working set of each layer, so that attention is one plain read of it::

    slot      0 ............................ n - 1 │ n
    holds     initial, recalled and window blocks  │ the newest block, as far as it is filled

Keys carry their positions (RoPE), so the order of slots means nothing, and a working set is updated only where other
blocks are wanted than before: blocks no longer wanted give their slots to those newly wanted. Each KV head chooses for
itself, so a slot holds different blocks for different heads.

A working set is a cache. The truth is in KV memory or, of sequences that are offloaded, in host memory; the newest
block is always in KV memory. The engine's thread owns everything here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.block_index import BlockIndex, Index
from engine.request import Sequence as EngineSequence
from engine.retrieval_config import BlockPartition, Regime, RetrievalConfig

__all__ = ["Retrieval", "SparseState", "WorkingSet"]

log = logging.getLogger(__name__)

# Blocks move through memory that stays in a cache.
MAX_MOVED_BYTES = 2 << 20


class WorkingSet:
    """K and V that steps read of one sequence in one layer.

    Args:
        num_slots: blocks that it can hold for each head, the newest one included.
        like: KV memory ``[block, layer, 2, kv_head, token, head_dim]``, whose dtype and device it has.
    """

    def __init__(self, num_slots: int, like: torch.Tensor) -> None:
        _, self._num_layers, _, self._kv_heads, self._block_size, head_dim = like.shape
        self._num_slots = num_slots
        self.kv = like.new_empty(2, self._kv_heads, num_slots * self._block_size, head_dim)
        """``[k/v, kv_head, slot * token, head_dim]``."""
        self._pages = self.kv.view(2 * self._kv_heads * num_slots, -1)
        self._block_in_slot = torch.full((self._kv_heads, num_slots), -1, dtype=torch.long)
        self.chosen: torch.Tensor | None = None
        """Which of the blocks outside are recalled, ``[kv_head, blocks]``."""
        self.partition: BlockPartition | None = None
        """The sequence's blocks when ``chosen`` was chosen."""
        self._num_full = -1  # slots before the newest block's

    def fill(self, wanted: torch.Tensor, source: torch.Tensor, blocks: torch.Tensor, layer: int) -> int:
        """Bring in the blocks that are missing, so that it holds exactly the blocks that are wanted.

        Args:
            wanted: ``[kv_head, block of the sequence]``, true for equally many blocks of each head.
            source: memory ``[block, layer, 2, kv_head, token, head_dim]`` to copy them from.
            blocks: where there the sequence's blocks lie.

        Returns:
            How many blocks of a head were copied.
        """
        count = int(wanted[0].sum())
        held = self._block_in_slot[:, :count]
        kept = (held >= 0) & wanted.gather(1, held.clamp(min=0))
        present = wanted.new_zeros(wanted.shape[0], wanted.shape[1] + 1)  # the last column takes what is not kept
        present.scatter_(1, torch.where(kept, held, wanted.shape[1]), True)
        # Sorted by head, and each head lacks as many blocks as it has slots to spare: these pair up one to one.
        heads, missing = (wanted & ~present[:, :-1]).nonzero(as_tuple=True)
        _, slots = (~kept).nonzero(as_tuple=True)
        if len(missing):
            self._copy_blocks(source, layer, blocks[missing], heads, slots)
            self._block_in_slot[heads, slots] = missing
        self._block_in_slot[:, count:] = -1
        if count != self._num_full:
            self._num_full, self._num_newest = count, 0
        return len(missing)

    def append_newest(self, newest: torch.Tensor, filled: int) -> None:
        """Take in the new tokens of the newest block ``[2, kv_head, token, head_dim]``; ``filled`` are there."""
        start = self._num_full * self._block_size
        have = self._num_newest if self._num_newest < filled else 0
        self.kv[:, :, start + have : start + filled] = newest[:, :, have:filled]
        self._num_newest = filled

    @property
    def num_blocks(self) -> int:
        """Blocks that ``attend`` reads for each head, the newest included."""
        return self._num_full + 1

    def attend(self, queries: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of queries ``[kv_head, group, head_dim]`` to everything held; of the same shape."""
        length = self._num_full * self._block_size + self._num_newest
        keys, values = self.kv[:, None, :, :length]
        return scaled_dot_product_attention(queries[None], keys, values, scale=scale)[0]

    def _copy_blocks(
        self, source: torch.Tensor, layer: int, blocks: torch.Tensor, heads: torch.Tensor, slots: torch.Tensor
    ) -> None:
        every_page = source.view(-1, self._pages.shape[1])
        kinds = torch.arange(2)[:, None]
        from_pages = (((blocks * self._num_layers + layer) * 2 + kinds) * self._kv_heads + heads).flatten()
        to_pages = ((kinds * self._kv_heads + heads) * self._num_slots + slots).flatten()
        at_once = max(1, MAX_MOVED_BYTES // (every_page.shape[1] * every_page.element_size()))
        for part in range(0, len(from_pages), at_once):
            moved = every_page.index_select(0, from_pages[part : part + at_once].to(every_page.device))
            to = to_pages[part : part + at_once].to(self._pages.device)
            self._pages.index_copy_(0, to, moved.to(self._pages.device))


class SparseState:
    """One sequence that decodes sparsely: its row of the index, its blocks in host memory, its working sets."""

    def __init__(self, sequence: EngineSequence, row: int, kv: torch.Tensor, config: RetrievalConfig) -> None:
        self.sequence = sequence
        self.row = row
        self.num_indexed = 0
        """Leading blocks that are in the index, and in host memory if the sequence is offloaded."""
        self._kv = kv
        self._config = config
        self._max_context = sequence.num_prompt_tokens + sequence.request.params.max_tokens
        self._sets: list[WorkingSet] = []
        self.host: torch.Tensor | None = None
        if sequence.regime is Regime.OFFLOADED:
            try:
                self.host = allocate_host_memory(-(-self._max_context // config.block_size), kv)
            except RuntimeError as exc:
                log.warning("No host memory to offload a sequence to; its blocks stay where they are: %s", exc)
                sequence.regime = Regime.SPARSE

    @property
    def context_length(self) -> int:
        """Tokens up to the one that is being computed, itself included."""
        return self.sequence.num_computed + 1

    def working_set(self, layer: int) -> WorkingSet:
        """The layer's; made for all layers when first asked for, large enough to the sequence's end."""
        if not self._sets:
            for i in range(self._kv.shape[1]):
                self._sets.append(WorkingSet(self._config.max_blocks_read(self._max_context, i), self._kv))
        return self._sets[layer]

    def must_choose(self, layer: int, partition: BlockPartition) -> bool:
        """Whether blocks are to be chosen anew in this step."""
        before = self.working_set(layer).partition
        if before is None or before.window_start != partition.window_start:
            return True
        return (self.context_length - self.sequence.num_prompt_tokens) % self._config.stride == 0

    def attend_layer(
        self, layer: int, partition: BlockPartition, queries: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """One step's attention of queries ``[kv_head, group, head_dim]``, once blocks are chosen."""
        working_set, sequence = self.working_set(layer), self.sequence
        assert working_set.chosen is not None
        wanted = torch.ones(len(working_set.chosen), partition.num_blocks - 1, dtype=torch.bool)
        wanted[:, partition.num_initial : partition.window_start] = working_set.chosen
        if self.host is None:
            source, blocks = self._kv, torch.tensor(sequence.block_table)
        else:
            source, blocks = self.host, torch.arange(len(self.host))
        sequence.blocks_copied += working_set.fill(wanted, source, blocks, layer)
        working_set.append_newest(
            self._kv[sequence.block_table[partition.num_blocks - 1], layer],
            (self.context_length - 1) % self._config.block_size + 1,
        )
        sequence.blocks_read += working_set.num_blocks
        sequence.blocks_passed += partition.num_blocks
        return working_set.attend(queries, scale)


class Retrieval:
    """All sequences that decode sparsely.

    Args:
        config: sizes; its block size is KV memory's.
        kv: KV memory ``[block, layer, 2, kv_head, token, head_dim]``.
        max_num_seqs: sequences at once.
        max_model_len: tokens of one sequence.
    """

    def __init__(self, config: RetrievalConfig, kv: torch.Tensor, max_num_seqs: int, max_model_len: int) -> None:
        self.config = config
        self._kv = kv
        _, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
        self.index: Index = BlockIndex(
            config.representative,
            rows=max_num_seqs,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_blocks=-(-max_model_len // block_size),
            dtype=kv.dtype,
            device=kv.device,
        )
        self._free_rows = set(range(max_num_seqs))
        self._states: dict[EngineSequence, SparseState] = {}

    def state_of(self, sequence: EngineSequence) -> SparseState:
        """The state of a sequence that decodes sparsely."""
        if sequence not in self._states:
            row = min(self._free_rows)
            self._free_rows.remove(row)
            self._states[sequence] = SparseState(sequence, row, self._kv, self.config)
        return self._states[sequence]

    def index_blocks(self, sequence: EngineSequence) -> None:
        """Take every newly full and computed block into the index, and copy it to host memory if it is offloaded.

        It does not matter who computed the blocks: the index is a function of their keys alone, so those from
        the pool, a prefix cache or another instance need nothing that would have to come with them.
        """
        state = self.state_of(sequence)
        first, last = state.num_indexed, sequence.num_computed // self.config.block_size
        if first >= last:
            return
        # A prompt that was handed over comes as a whole: in pieces, it takes no second memory as large as itself.
        at_once = max(1, MAX_MOVED_BYTES // (self._kv[0].numel() * self._kv.element_size()))
        for start in range(first, last, at_once):
            stop = min(start + at_once, last)
            blocks = self._kv[sequence.block_table[start:stop]]
            self.index.add_blocks(state.row, start, blocks[:, :, 0])
            if state.host is not None:
                state.host[start:stop].copy_(blocks, non_blocking=True)
        state.num_indexed = last

    def forget_all_but(self, sequences: Iterable[EngineSequence]) -> None:
        """Forget all sequences but these."""
        for sequence in self._states.keys() - set(sequences):
            self._free_rows.add(self._states.pop(sequence).row)

    def attend_sparsely(
        self, layer: int, states: Sequence[SparseState], queries: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """One step's attention of queries ``[sequences, kv_heads, group, head_dim]``; of the same shape."""
        partitions = [self.config.partition_blocks(state.context_length, layer) for state in states]
        choosing = [i for i, state in enumerate(states) if state.must_choose(layer, partitions[i])]
        chosen_for = [partitions[i] for i in choosing]
        self._choose_blocks(layer, [states[i] for i in choosing], chosen_for, queries[choosing], scale)
        output = torch.empty_like(queries)
        for i, state in enumerate(states):
            output[i] = state.attend_layer(layer, partitions[i], queries[i], scale)
        return output

    def _choose_blocks(
        self,
        layer: int,
        states: Sequence[SparseState],
        partitions: Sequence[BlockPartition],
        queries: torch.Tensor,
        scale: float | None,
    ) -> None:
        for state, partition in zip(states, partitions, strict=True):
            working_set = state.working_set(layer)
            working_set.partition = partition
            working_set.chosen = torch.ones(queries.shape[1], partition.num_outside, dtype=torch.bool)
        some = [i for i, partition in enumerate(partitions) if partition.num_recalled < partition.num_outside]
        if not some:
            return
        found = self.index.search_blocks(
            layer,
            [states[i].row for i in some],
            queries[some],
            [(part.num_initial, part.window_start, part.num_recalled) for part in (partitions[i] for i in some)],
            queries.shape[-1] ** -0.5 if scale is None else scale,
        )
        for i, chosen in zip(some, found, strict=True):
            states[i].working_set(layer).chosen = chosen.cpu()


def allocate_host_memory(num_blocks: int, kv: torch.Tensor) -> torch.Tensor:
    """Room for so many blocks of KV memory, which a GPU can copy from and to by itself.

    Raises:
        RuntimeError: the host has none.
    """
    return torch.empty((num_blocks, *kv.shape[1:]), dtype=kv.dtype, pin_memory=kv.is_cuda)
