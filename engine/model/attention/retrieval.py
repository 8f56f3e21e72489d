"""Sparse attention: a step reads the initial blocks, the window, and the best of the other blocks.

An index finds the best blocks (``block_index.py``). Each KV head chooses its own blocks. The order of the blocks does
not matter, because keys include their positions (RoPE).

If the sequence is offloaded, its full blocks are in host memory; otherwise they are in KV memory. The newest block is
always in KV memory. A CPU reads the blocks where they are. A GPU cannot read host memory in attention, so a step copies
the blocks that it reads of an offloaded sequence to the GPU, to the sequence's working set (``working_set.py``).

The tables of a step are computed once for all layers (``plan.py``). The host waits for the device only to fill working
sets. All objects here belong to the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from engine.model.attention.block_index import BlockIndex, Index, Search
from engine.model.attention.pages import PageReader
from engine.model.attention.plan import StepPlan
from engine.model.attention.working_set import WorkingSet
from engine.model.device_copies import send_numbers, send_tensor
from engine.scheduling.request import Sequence as EngineSequence
from engine.scheduling.retrieval_config import BlockPartition, Regime, RetrievalConfig

__all__ = ["Retrieval", "SparseState", "allocate_host_memory", "reads_host_memory"]

log = logging.getLogger(__name__)

# A prompt from another instance is indexed as a whole. This is done in pieces, because each piece is copied.
MAX_MOVED_BYTES = 2 << 20


class SparseState:
    """State of sparse attention for one sequence: its row of the index, and its blocks in host memory."""

    def __init__(self, sequence: EngineSequence, row: int, kv: torch.Tensor, config: RetrievalConfig) -> None:
        self.sequence = sequence
        self.row = row
        self.num_indexed = 0
        """Number of leading blocks that are in the index and, if the sequence is offloaded, in host memory."""
        self._kv = kv
        self._config = config
        self._max_context = sequence.num_prompt_tokens + sequence.request.params.max_tokens
        self._sets: list[WorkingSet] = []
        self.window_starts: dict[bool, int] = {}
        """First block of the window in the last step, by whether a layer reads all blocks (True) or not (False)."""
        self.host: torch.Tensor | None = None
        """Full blocks in host memory, ``[index, layer, 2, kv_head, token, head_dim]``; None without offload."""
        if sequence.regime is Regime.OFFLOADED:
            try:
                self.host = allocate_host_memory(-(-self._max_context // config.block_size), kv)
            except RuntimeError as exc:
                log.warning(
                    "request %s: its KV stays in device memory, because host memory is too small to offload it: %s",
                    *(sequence.request.request_id, exc),
                )
                sequence.regime = Regime.SPARSE

    @property
    def context_length(self) -> int:
        """Number of tokens up to and including the token that this step computes."""
        return self.sequence.num_computed + 1

    @property
    def newest_block(self) -> int:
        """The block of KV memory with the newest token."""
        return self.sequence.block_table[(self.context_length - 1) // self._config.block_size]

    @property
    def num_filled(self) -> int:
        """Number of tokens in the newest block."""
        return (self.context_length - 1) % self._config.block_size + 1

    def must_choose(self, is_dense: bool, partition: BlockPartition) -> bool:
        """Return whether blocks must be chosen again in this step.

        Args:
            is_dense: True: for the layers that read all blocks; False: for the other layers.
            partition: the parts of the sequence's blocks in these layers.
        """
        steps = self.context_length - self.sequence.num_prompt_tokens
        return self.window_starts.get(is_dense) != partition.window_start or steps % self._config.stride == 0

    def working_set(self, layer: int) -> WorkingSet:
        """Return the working set of a layer. The first call creates the working sets of all layers."""
        if not self._sets:
            for i in range(self._kv.shape[1]):
                self._sets.append(WorkingSet(self._config.max_blocks_read(self._max_context, i), self._kv))
        return self._sets[layer]

    def attend_working_set(
        self, layer: int, numbers: torch.Tensor, queries: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Update the working set of a layer and compute attention to it.

        Args:
            layer: the index of the layer.
            numbers: the indices of the full blocks to read, ``[kv_head, n]``; the newest block is read, too.
            queries: the queries of one token, ``[kv_head, group, head_dim]``.
            scale: factor of the scores, or None for 1 / sqrt(head_dim).

        Returns:
            The output, ``[kv_head, group, head_dim]``.
        """
        assert self.host is not None
        wanted = torch.zeros(len(numbers), len(self.host), dtype=torch.bool, device=numbers.device)
        # The host waits for the device here, so earlier copies of blocks to host memory have ended, too.
        wanted = wanted.scatter_(1, numbers, True).cpu()
        working_set = self.working_set(layer)
        working_set.fill(wanted, self.host, layer)
        working_set.append_newest(self._kv[self.newest_block, layer], self.num_filled)
        return working_set.attend(queries, scale)


class _Step:
    """The tables and the search of one step, for all layers that read the same number of blocks."""

    def __init__(
        self, states: Sequence[SparseState], partitions: Sequence[BlockPartition], is_dense: bool, kv: torch.Tensor
    ) -> None:
        self.states, self.partitions = list(states), partitions
        self._contexts = [state.context_length for state in states]
        rows = [state.row for state in states]
        newest = [(state.newest_block, state.num_filled) for state in states]
        self.plan = StepPlan(partitions, rows, newest, kv.shape[4], kv.device)
        some = [i for i, state in enumerate(states) if state.must_choose(is_dense, partitions[i])]
        some = [i for i in some if partitions[i].num_recalled < partitions[i].num_outside]
        for state, partition in zip(states, partitions, strict=True):
            state.window_starts[is_dense] = partition.window_start
        self.search: Search | None = None
        """The search for the sequences that choose blocks again in this step, or None if no sequence does."""
        self.searching, self.searched_rows = (
            send_tensor(torch.tensor(which, dtype=torch.long), kv.device) for which in (some, [rows[i] for i in some])
        )
        if some:
            outside = [(partitions[i].num_initial, partitions[i].window_start) for i in some]
            most = max(partitions[i].num_recalled for i in some)
            self.search = Search([rows[i] for i in some], outside, most, kv.device)
        self.away = [i for i, state in enumerate(states) if state.host is not None]
        """Indexes of the sequences with blocks in host memory."""
        here = [i for i, state in enumerate(states) if state.host is None]
        self.here = send_tensor(torch.tensor(here, dtype=torch.long), kv.device)

    def is_of(self, states: Sequence[SparseState]) -> bool:
        """Return whether this object is for ``states``, each with the number of tokens that it has now."""
        return self.states == list(states) and self._contexts == [state.context_length for state in states]


class Retrieval:
    """Computes sparse attention for all sequences that use it.

    Args:
        config: the settings. ``block_size`` must be the block size of the KV memory.
        kv: the KV memory, ``[block, layer, 2, kv_head, token, head_dim]``.
        max_num_seqs: maximum number of concurrent sequences.
        max_model_len: maximum number of tokens of a sequence.
    """

    def __init__(self, config: RetrievalConfig, kv: torch.Tensor, max_num_seqs: int, max_model_len: int) -> None:
        self.config = config
        self._kv = kv
        _, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
        max_blocks = -(-max_model_len // block_size)
        self.index: Index = BlockIndex(
            config.representative,
            rows=max_num_seqs,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_blocks=max_blocks,
            dtype=kv.dtype,
            device=kv.device,
        )
        self._chosen = torch.zeros(
            num_layers, max_num_seqs, num_kv_heads, max_blocks, dtype=torch.long, device=kv.device
        )
        """For each layer, row and KV head, the indices of the blocks that were chosen last, the best first."""
        self._places = torch.zeros(max_num_seqs, max_blocks, dtype=torch.long, device=kv.device)
        """For each row and full block of its sequence, the index of the block in KV memory or in host memory."""
        self._reader = PageReader(kv)
        self._free_rows = set(range(max_num_seqs))
        self._states: dict[EngineSequence, SparseState] = {}
        self._steps: dict[bool, _Step] = {}

    def state_of(self, sequence: EngineSequence) -> SparseState:
        """Return the state of a sequence; the first call for a sequence creates it."""
        if sequence not in self._states:
            row = min(self._free_rows)
            self._free_rows.remove(row)
            self._states[sequence] = SparseState(sequence, row, self._kv, self.config)
        return self._states[sequence]

    def index_blocks(self, sequence: EngineSequence) -> None:
        """Add new full blocks of a sequence to the index. If the sequence is offloaded, also copy them to host memory.

        The index depends only on the keys in the blocks. So this also works for blocks from the pool, from the prefix
        cache, or from another instance.
        """
        state = self.state_of(sequence)
        first, last = state.num_indexed, sequence.num_computed // self.config.block_size
        at_once = max(1, MAX_MOVED_BYTES // (self._kv[0].numel() * self._kv.element_size()))
        for start in range(first, last, at_once):
            stop = min(start + at_once, last)
            [places] = send_numbers([sequence.block_table[start:stop]], self._kv.device)
            blocks = self._kv[places]
            self.index.add_blocks(state.row, start, blocks[:, :, 0])
            if state.host is not None:
                state.host[start:stop].copy_(blocks, non_blocking=True)
                places = torch.arange(start, stop, device=self._kv.device)
            self._places[state.row, start:stop] = places
        state.num_indexed = max(first, last)

    def forget_all_but(self, sequences: Iterable[EngineSequence]) -> None:
        """Remove the states of all sequences that are not in ``sequences``."""
        for sequence in self._states.keys() - set(sequences):
            self._free_rows.add(self._states.pop(sequence).row)
            self._steps.clear()

    def attend_sparsely(
        self, layer: int, states: Sequence[SparseState], queries: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Compute sparse attention of one layer in a step.

        Args:
            layer: the index of the layer.
            states: the states of the sequences in this step.
            queries: the queries of the newest token of each sequence, ``[sequences, kv_heads, group, head_dim]``.
            scale: factor of the scores, or None for 1 / sqrt(head_dim).

        Returns:
            The output, ``[sequences, kv_heads, group, head_dim]``.
        """
        step = self._plan_step(layer, states)
        if step.search is not None:
            search_scale = queries.shape[-1] ** -0.5 if scale is None else scale
            found = self.index.search_blocks(layer, step.search, queries[step.searching], search_scale)
            self._chosen[layer, :, :, : found.shape[-1]].index_copy_(0, step.searched_rows, found)
        numbers = step.plan.number_blocks(self._chosen[layer])
        for state, num_read, partition in zip(states, step.plan.lengths, step.partitions, strict=True):
            state.sequence.blocks_read += num_read
            state.sequence.blocks_passed += partition.num_blocks
        if reads_host_memory(self._kv.device):
            return self._attend_in_place(layer, step, numbers, queries, scale)
        return self._attend_on_device(layer, step, numbers, queries, scale)

    def _attend_in_place(
        self, layer: int, step: _Step, numbers: torch.Tensor, queries: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        output = torch.empty_like(queries)
        blocks = step.plan.find_blocks(numbers, self._places)
        for i, (state, length) in enumerate(zip(step.states, step.plan.lengths, strict=True)):
            memory = self._kv if state.host is None else state.host
            newest, filled = step.plan.newest[i]
            newest_kv = self._kv[newest, layer, :, :, :filled]
            full = blocks[i, :, 1:length]
            output[i] = self._reader.attend_in_pieces(queries[i], memory, full, layer, newest_kv, scale)
        return output

    def _attend_on_device(
        self, layer: int, step: _Step, numbers: torch.Tensor, queries: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        output, here = torch.empty_like(queries), step.here
        if len(here):
            blocks = step.plan.find_blocks(numbers, self._places)[here]
            mask = step.plan.mask[here]
            output[here] = self._reader.attend_at_once(queries[here], self._kv, blocks, layer, mask, scale)
        for i in step.away:
            full = numbers[i, :, 1 : step.plan.lengths[i]]
            output[i] = step.states[i].attend_working_set(layer, full, queries[i], scale)
        return output

    def _plan_step(self, layer: int, states: Sequence[SparseState]) -> _Step:
        is_dense = layer < self.config.dense_layers
        step = self._steps.get(is_dense)
        if step is None or not step.is_of(states):
            partitions = [self.config.partition_blocks(state.context_length, layer) for state in states]
            step = self._steps[is_dense] = _Step(states, partitions, is_dense, self._kv)
        return step


def allocate_host_memory(num_blocks: int, kv: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for ``num_blocks`` blocks, pinned if KV memory is on a GPU.

    Raises:
        RuntimeError: there is not enough host memory.
    """
    return torch.empty((num_blocks, *kv.shape[1:]), dtype=kv.dtype, pin_memory=kv.is_cuda)


def reads_host_memory(device: torch.device) -> bool:
    """Return whether attention on this device can read host memory."""
    return device.type == "cpu"
