"""Exact attention over paged KV memory, for any model that uses transformers' AttentionInterface.

KV memory is one tensor ``[block, layer, k/v, kv_head, token, head_dim]``: a block is one contiguous span, which a pool
stores as one value. A forward pass runs all chunks of a step as one row of tokens; ``PagedBatch`` says which tokens
belong to which sequence, and reaches ``paged_attention`` as a keyword argument that transformers passes through every
model's layers untouched.

The host never waits for the device here: all numbers of a step are computed on the host and sent in one copy, and no
tensor's shape or address depends on another's values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.model.attention.retrieval import Retrieval, SparseState
from engine.model.device_copies import send_numbers

__all__ = ["ATTENTION_NAME", "AttentionForm", "ChunkShape", "PagedBatch", "form_for", "register_attention"]

ATTENTION_NAME = "kvstore_paged"


@dataclass(frozen=True)
class AttentionForm:
    """The form of attention that is fastest on a kind of device; all forms compute the same result.

    ``max_gathered_bytes`` of K and V are gathered before attention reads them. Decodes of different lengths are padded
    to the longest as long as a group's total is at most ``joined_bytes``. With ``has_causal_kernels`` the kernel
    computes from two lengths which tokens a chunk of a prompt may see, and a bias of KV's dtype hides the padding of a
    decode;
    without, masks do both.
    """

    max_gathered_bytes: int
    joined_bytes: int
    has_causal_kernels: bool


# On a CPU, gather as much as stays in a cache: decodes over 2,000 tokens each took 35 ms for 16 sequences and 8 layers,
# and 71 ms when everything was gathered first. On other devices a further group costs as much as reading some MiB.
_ON_CPU = AttentionForm(4 << 20, 0, False)
_ELSEWHERE = AttentionForm(256 << 20, 32 << 20, True)


def form_for(device: torch.device) -> AttentionForm:
    """Return the form of attention for a device."""
    return _ON_CPU if device.type == "cpu" else _ELSEWHERE


@dataclass(frozen=True)
class ChunkShape:
    """One chunk: ``num_tokens`` new tokens after ``num_computed`` with KV, in the blocks of ``block_table``.

    With ``samples`` the caller needs the logits after its last token. With ``sparse_state`` it is one token of a
    sequence that decodes sparsely; then only the newest of its blocks must be in KV memory.
    """

    num_computed: int
    num_tokens: int
    block_table: Sequence[int]
    samples: bool = True
    sparse_state: SparseState | None = None

    @property
    def context_length(self) -> int:
        """Number of tokens that the chunk's last token attends to, itself included."""
        return self.num_computed + self.num_tokens

    def list_positions(self) -> range:
        """Return the positions of the chunk's tokens in their sequence."""
        return range(self.num_computed, self.context_length)

    def list_write_blocks(self, block_size: int) -> Iterator[int]:
        """Yield the block of each of the chunk's tokens."""
        for number in range(self.num_computed // block_size, self.count_blocks(block_size)):
            start, stop = max(self.num_computed, number * block_size), (number + 1) * block_size
            yield from repeat(self.block_table[number], min(stop, self.context_length) - start)

    def count_blocks(self, block_size: int) -> int:
        """Return the number of blocks that the chunk attends to."""
        return -(-self.context_length // block_size)


@dataclass(frozen=True)
class _Prefill:
    """A chunk of several tokens: rows ``start:stop`` of the step's row of tokens."""

    start: int
    stop: int
    context: int
    pages: torch.Tensor  # [2 * kv_heads * n], see PagedBatch._find_pages
    mask: torch.Tensor | None  # [tokens, context]; None: no context before it, plain causal attention


@dataclass(frozen=True)
class _Decodes:
    """Chunks of one token each, padded to the longest."""

    rows: torch.Tensor | None  # [N] rows of the step's row of tokens; None: all of them, in order
    pages: torch.Tensor  # [2 * N * kv_heads * n], see PagedBatch._find_pages
    width: int  # number of tokens attended to
    mask: torch.Tensor | None  # [N, 1, 1, width]; None: all have the same length


@dataclass(frozen=True)
class _Sparse:
    """Chunks of one token each with sparse attention."""

    rows: torch.Tensor  # [N] rows of the step's row of tokens
    states: list[SparseState]


@dataclass(frozen=True)
class _Places:
    """Chunks grouped by their kind of attention, each with the row of its first token."""

    prefills: list[tuple[int, ChunkShape]] = field(default_factory=list)
    singles: list[tuple[int, ChunkShape]] = field(default_factory=list)
    sparse: list[tuple[int, SparseState]] = field(default_factory=list)

    @classmethod
    def of_chunks(cls, chunks: Sequence[ChunkShape]) -> _Places:
        """Group chunks that follow each other in the step's row of tokens."""
        places, start = cls(), 0
        for chunk in chunks:
            if chunk.sparse_state is not None:
                places.sparse.append((start, chunk.sparse_state))
            else:
                (places.singles if chunk.num_tokens == 1 else places.prefills).append((start, chunk))
            start += chunk.num_tokens
        return places


class PagedBatch:
    """Positions of one step's tokens in KV memory, computed once for all layers.

    Args:
        kv: the KV memory, ``[block, layer, 2, kv_head, token, head_dim]``.
        chunks: the step's chunks, in the order of their tokens in the row.
        token_ids: the tokens of all chunks, one after the other.
        retrieval: owns the sparse states of the chunks, if they have any.

    Attributes:
        input_ids: ``[1, tokens]``.
        position_ids: ``[1, tokens]``.
        write_blocks: ``[tokens]``, the block of each token, and ``write_offsets`` its position there.
        logit_rows: rows of the last tokens of all chunks that sample; the first one's if none does.
        layers: the layers that have attended so far.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        chunks: Sequence[ChunkShape],
        token_ids: Sequence[int],
        retrieval: Retrieval | None = None,
    ) -> None:
        self.kv = kv
        self.retrieval = retrieval
        self.layers: set[int] = set()
        _, self._num_layers, _, self._kv_heads, self._block_size, self._head_dim = kv.shape
        self._form = form_for(kv.device)
        self._gathered = kv.new_empty(0)
        places = _Places.of_chunks(chunks)
        groups = self._group_by_length(places.singles)
        positions = [position for chunk in chunks for position in chunk.list_positions()]
        write_blocks = [block for chunk in chunks for block in chunk.list_write_blocks(self._block_size)]
        sparse_rows = [row for row, _ in places.sparse]
        tables = [chunk.block_table[: chunk.count_blocks(self._block_size)] for _, chunk in places.prefills]
        numbers = [token_ids, positions, write_blocks, _find_logit_rows(chunks), sparse_rows, *tables]
        for group in groups:
            numbers += self._pad_tables(group)
        input_ids, position_row, self.write_blocks, self.logit_rows, rows, *sent = send_numbers(numbers, kv.device)
        self.input_ids, self.position_ids = input_ids[None], position_row[None]
        self.write_offsets = position_row % self._block_size
        self.sparse = _Sparse(rows, [state for _, state in places.sparse])
        self.prefills = [
            _Prefill(
                row, row + chunk.num_tokens, chunk.context_length, self._find_pages(table[None]), self._hide(chunk)
            )
            for (row, chunk), table in zip(places.prefills, sent, strict=False)
        ]
        padded = iter(sent[len(tables) :])
        self.decodes = [
            self._join_group(group, *of_group)
            for group, of_group in zip(groups, zip(padded, padded, padded, strict=True), strict=True)
        ]

    def gather_pages(self, pages: torch.Tensor, layer: int) -> torch.Tensor:
        """Gather K and V of ``pages`` in one layer, ``[2, sequences * kv_heads, n * block_size, head_dim]`` flattened.

        The result is in memory that the next call reuses: new memory for each layer costs more than the copy.
        """
        page_size = self._block_size * self._head_dim
        count = pages.numel()
        if self._gathered.shape[0] < count:
            self._gathered = self.kv.new_empty(count, page_size)
        gathered = self._gathered[:count]
        from_layer = self.kv.view(-1, page_size)[layer * 2 * self._kv_heads :]
        return torch.index_select(from_layer, 0, pages, out=gathered)

    def _find_pages(self, tables: torch.Tensor) -> torch.Tensor:
        """Convert block tables ``[N, n]`` or ``[n]`` to their pages in layer 0, in the order ``[2, N, kv_head, n]``.

        A page is one block's part of one layer's K or V for one head; page 0 of KV memory is that of block 0, layer 0,
        K, head 0.
        """
        heads = torch.arange(self._kv_heads, device=tables.device)[:, None]
        kinds = torch.arange(2, device=tables.device)[:, None, None, None]
        first = tables.view(-1, 1, tables.shape[-1]) * (self._num_layers * 2 * self._kv_heads)
        return (first + kinds * self._kv_heads + heads).flatten()

    def _group_by_length(self, rows: list[tuple[int, ChunkShape]]) -> list[list[tuple[int, ChunkShape]]]:
        """Group rows of similar length (up to twice, which bounds padding), few enough to gather together.

        The rows of a group stay in their order.
        """
        block_bytes = 2 * self._kv_heads * self._block_size * self._head_dim * self.kv.element_size()
        groups: list[list[tuple[int, ChunkShape]]] = []
        narrowest = 0
        for row in sorted(rows, key=lambda row: row[1].context_length):
            width = row[1].count_blocks(self._block_size)
            padded = width * (len(groups[-1]) + 1) * block_bytes if groups else 0
            is_like = width <= 2 * narrowest or padded <= self._form.joined_bytes
            if groups and is_like and padded <= self._form.max_gathered_bytes:
                groups[-1].append(row)
            else:
                groups.append([row])
                narrowest = width
        return [sorted(group, key=lambda row: row[0]) for group in groups]

    def _pad_tables(self, group: list[tuple[int, ChunkShape]]) -> tuple[list[int], list[int], list[int]]:
        """Return a group's rows, lengths, and block tables as one list, each table padded to the longest."""
        width = max(chunk.count_blocks(self._block_size) for _, chunk in group)
        # The mask hides the padding of a table, but a masked NaN is still NaN: so pad with the sequence's own first
        # block, not with a block that a load may be writing.
        tables: list[int] = []
        for _, chunk in group:
            own = chunk.block_table[: chunk.count_blocks(self._block_size)]
            tables += own
            tables += [own[0]] * (width - len(own))
        return [row for row, _ in group], [chunk.context_length for _, chunk in group], tables

    def _join_group(
        self, group: list[tuple[int, ChunkShape]], rows: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor
    ) -> _Decodes:
        pages = self._find_pages(tables.view(len(group), -1))
        every_row = None if len(group) == self.input_ids.shape[1] else rows
        contexts = [chunk.context_length for _, chunk in group]
        if (longest := max(contexts)) == min(contexts):
            return _Decodes(every_row, pages, longest, None)
        width = len(tables) // len(group) * self._block_size
        mask = (torch.arange(width, device=rows.device) < lengths[:, None])[:, None, None]
        if self._form.has_causal_kernels:
            mask = torch.zeros_like(mask, dtype=self.kv.dtype).masked_fill_(~mask, -torch.inf)
        return _Decodes(every_row, pages, width, mask)

    def _hide(self, chunk: ChunkShape) -> torch.Tensor | None:
        """Return the causal mask of a chunk that continues a context; None if there is no context before it."""
        if chunk.num_computed == 0:
            return None
        if self._form.has_causal_kernels:
            return causal_lower_right(chunk.num_tokens, chunk.context_length)
        seen = torch.ones(chunk.num_tokens, chunk.context_length, dtype=torch.bool, device=self.kv.device)
        return seen.tril(chunk.num_computed)


def _find_logit_rows(chunks: Sequence[ChunkShape]) -> list[int]:
    rows: list[int] = []
    stop = 0
    for chunk in chunks:
        stop += chunk.num_tokens
        if chunk.samples:
            rows.append(stop - 1)
    return rows or [chunks[0].num_tokens - 1]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write this layer's new K and V, then attend over each sequence's blocks.

    Args:
        module: the model's attention layer; its ``layer_idx`` picks the layer in KV memory.
        query: ``[1, heads, tokens, head_dim]``; key, value: ``[1, kv_heads, tokens, head_dim]``, after RoPE.
        attention_mask: unused, each sequence's own mask is in ``paged``.
        sliding_window, softcap, s_aux: some models need them in addition to plain attention; they must not be given.

    Returns:
        ``[1, tokens, heads, head_dim]`` and None for the weights.

    Raises:
        NotImplementedError: the model needs more than plain attention.
    """
    if sliding_window is not None or softcap is not None or s_aux is not None:
        asked = {"a sliding window": sliding_window, "soft-capping": softcap, "sinks": s_aux}
        names = [name for name, given in asked.items() if given is not None]
        raise NotImplementedError(f"attention with {names[0]} is not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    paged.layers.add(layer)
    for kind, new in enumerate((key, value)):
        paged.kv[:, layer, kind][paged.write_blocks, :, paged.write_offsets] = new[0].transpose(0, 1)

    heads, tokens, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    # Query heads that share a KV head are adjacent, so that K and V are read once for the whole group.
    grouped = query[0].view(kv_heads, heads // kv_heads, tokens, head_dim)
    if paged.decodes and paged.decodes[0].rows is None:
        return _attend_decodes(paged, paged.decodes[0], layer, grouped, scaling).reshape(
            1, tokens, heads, head_dim
        ), None
    output = torch.empty(tokens, kv_heads, heads // kv_heads, head_dim, dtype=query.dtype, device=query.device)
    for prefill in paged.prefills:
        shape = (kv_heads, heads // kv_heads, prefill.context, head_dim)
        keys, values = paged.gather_pages(prefill.pages, layer).view(2, kv_heads, 1, -1, head_dim)
        attended = scaled_dot_product_attention(
            grouped[:, :, prefill.start : prefill.stop],
            keys[:, :, : prefill.context].expand(shape),
            values[:, :, : prefill.context].expand(shape),
            attn_mask=prefill.mask,
            is_causal=prefill.mask is None,
            scale=scaling,
        )
        output[prefill.start : prefill.stop] = attended.permute(2, 0, 1, 3)
    for decodes in paged.decodes:
        output[decodes.rows] = _attend_decodes(paged, decodes, layer, grouped[:, :, decodes.rows], scaling)
    if paged.retrieval is not None and paged.sparse.states:
        sparse = grouped[:, :, paged.sparse.rows].permute(2, 0, 1, 3)
        output[paged.sparse.rows] = paged.retrieval.attend_sparsely(layer, paged.sparse.states, sparse, scaling)
    return output.view(1, tokens, heads, head_dim), None


def _attend_decodes(
    paged: PagedBatch, decodes: _Decodes, layer: int, queries: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Compute attention of queries ``[kv_heads, group, N, head_dim]``; return ``[N, kv_heads, group, head_dim]``."""
    kv_heads, _, count, head_dim = queries.shape
    gathered = paged.gather_pages(decodes.pages, layer).view(2, count, kv_heads, -1, head_dim)
    keys, values = gathered[..., : decodes.width, :].unbind()
    return scaled_dot_product_attention(
        queries.permute(2, 0, 1, 3), keys, values, attn_mask=decodes.mask, scale=scaling
    )


def register_attention() -> None:
    """Make ``attn_implementation=ATTENTION_NAME`` known to transformers. May be called again.

    It is not registered for transformers' masks, so transformers makes none: here sequences share one row of tokens,
    and to detect that, transformers would wait for the device.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
