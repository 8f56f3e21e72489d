"""Exact attention over paged KV memory, for any model that asks transformers' AttentionInterface.

KV memory is one tensor ``[block, layer, k/v, kv_head, token, head_dim]``: a block is one contiguous span, which
a pool stores as one value. A forward pass runs all chunks of a step as one row of tokens; ``PagedBatch`` says which
tokens belong to which sequence, and reaches ``paged_attention`` as a keyword argument that transformers passes
through every model's layers untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention.retrieval import Retrieval, SparseState

__all__ = ["ATTENTION_NAME", "ChunkShape", "PagedBatch", "register_attention"]

ATTENTION_NAME = "kvstore_paged"

# How much of K and V is gathered before it is attended to. On a CPU as much as stays in a cache: decodes over 2,000
# tokens each took 35 ms for 16 sequences and 8 layers, and 71 ms where the whole was gathered first.
_GATHERED_BYTES = {"cpu": 4 << 20}
_GATHERED_BYTES_ELSEWHERE = 256 << 20


@dataclass(frozen=True)
class ChunkShape:
    """One chunk: ``num_tokens`` new tokens after ``num_computed`` with KV, in the blocks of ``block_table``.

    With ``sparse_state`` it is one token of a sequence that decodes sparsely; of its blocks only the newest need
    be there.
    """

    num_computed: int
    num_tokens: int
    block_table: Sequence[int]
    sparse_state: SparseState | None = None

    @property
    def context_length(self) -> int:
        """Tokens that the chunk's last token attends to, itself included."""
        return self.num_computed + self.num_tokens


@dataclass(frozen=True)
class _Prefill:
    """A chunk of several tokens: rows ``start:stop`` of the step's row of tokens."""

    start: int
    stop: int
    context: int
    pages: torch.Tensor  # [2 * kv_heads * n], see PagedBatch._find_pages
    mask: torch.Tensor | None  # [tokens, context]; None: nothing came before, plain causal


@dataclass(frozen=True)
class _Decodes:
    """Chunks of one token each and of similar length, padded to the longest."""

    rows: torch.Tensor  # [N] rows of the step's row of tokens
    pages: torch.Tensor  # [2 * N * kv_heads * n], see PagedBatch._find_pages
    mask: torch.Tensor  # [N, 1, 1, n * block_size]


@dataclass(frozen=True)
class _Sparse:
    """Chunks of one token each that look blocks up."""

    rows: list[int] = field(default_factory=list)  # of the step's row of tokens
    states: list[SparseState] = field(default_factory=list)


class PagedBatch:
    """Where the tokens of one step lie, worked out once for all layers.

    Args:
        kv: the KV memory, ``[block, layer, 2, kv_head, token, head_dim]``.
        chunks: the step's chunks, in the order of their tokens in the row.
        retrieval: owns the sparse states of the chunks, if they have any.
    """

    def __init__(self, kv: torch.Tensor, chunks: Sequence[ChunkShape], retrieval: Retrieval | None = None) -> None:
        self.kv = kv
        self.retrieval = retrieval
        self.sparse = _Sparse()
        self.layers: set[int] = set()
        """Layers that attended so far."""
        _, self._num_layers, _, self._kv_heads, self._block_size, self._head_dim = kv.shape
        self._gathered = kv.new_empty(0)
        device = kv.device
        positions: list[int] = []
        write_blocks: list[int] = []
        last_rows: list[int] = []
        self.prefills: list[_Prefill] = []
        singles: list[tuple[int, ChunkShape]] = []
        for chunk in chunks:
            start = len(positions)
            stop = start + chunk.num_tokens
            chunk_positions = range(chunk.num_computed, chunk.context_length)
            positions += chunk_positions
            write_blocks += (chunk.block_table[position // self._block_size] for position in chunk_positions)
            last_rows.append(stop - 1)
            if chunk.sparse_state is not None:
                self.sparse.rows.append(start)
                self.sparse.states.append(chunk.sparse_state)
            elif chunk.num_tokens == 1:
                singles.append((start, chunk))
            else:
                table = torch.tensor([chunk.block_table[: self._count_blocks(chunk)]], device=device)
                pages = self._find_pages(table)
                self.prefills.append(_Prefill(start, stop, chunk.context_length, pages, _lower_right(chunk, device)))
        self.decodes = [self._pad_group(group, device) for group in self._group_by_length(singles)]
        position_row = torch.tensor(positions, device=device)
        self.position_ids = position_row[None]  # [1, tokens]
        self.write_blocks = torch.tensor(write_blocks, device=device)  # [tokens]
        self.write_offsets = position_row % self._block_size  # [tokens]
        self.last_rows = torch.tensor(last_rows, device=device)  # [chunks]: each chunk's last token

    def gather_pages(self, pages: torch.Tensor, layer: int) -> torch.Tensor:
        """K and V of ``pages`` in one layer, ``[2, sequences * kv_heads, n * block_size, head_dim]`` flattened.

        They lie in memory that the next call uses again: fresh memory for each layer costs more than the copy.
        """
        page_size = self._block_size * self._head_dim
        if len(self._gathered) < len(pages):
            self._gathered = self.kv.new_empty(len(pages), page_size)
        gathered = self._gathered[: len(pages)]
        every_page = self.kv.view(-1, page_size)
        return torch.index_select(every_page, 0, pages + layer * 2 * self._kv_heads, out=gathered)

    def _count_blocks(self, chunk: ChunkShape) -> int:
        """Blocks that a chunk attends to."""
        return -(-chunk.context_length // self._block_size)

    def _find_pages(self, tables: torch.Tensor) -> torch.Tensor:
        """Block tables ``[N, n]`` -> the pages they mean in layer 0, in the order ``[2, N, kv_head, n]``.

        A page is one block's part of one layer's K or V for one head; page 0 of KV memory is that of block 0,
        layer 0, K, head 0.
        """
        heads = torch.arange(self._kv_heads, device=tables.device)[:, None]
        kinds = torch.arange(2, device=tables.device)[:, None, None, None]
        first = tables[:, None] * (self._num_layers * 2 * self._kv_heads)
        return (first + kinds * self._kv_heads + heads).flatten()

    def _group_by_length(self, rows: list[tuple[int, ChunkShape]]) -> list[list[tuple[int, ChunkShape]]]:
        """Rows of like length together (up to twice, which bounds padding), few enough to gather at once."""
        block_bytes = 2 * self._kv_heads * self._block_size * self._head_dim * self.kv.element_size()
        max_blocks = _GATHERED_BYTES.get(self.kv.device.type, _GATHERED_BYTES_ELSEWHERE) // block_bytes
        groups: list[list[tuple[int, ChunkShape]]] = []
        narrowest = 0
        for row in sorted(rows, key=lambda row: row[1].context_length):
            width = self._count_blocks(row[1])
            if groups and width <= 2 * narrowest and width * (len(groups[-1]) + 1) <= max_blocks:
                groups[-1].append(row)
            else:
                groups.append([row])
                narrowest = width
        return groups

    def _pad_group(self, rows: list[tuple[int, ChunkShape]], device: torch.device) -> _Decodes:
        contexts = torch.tensor([chunk.context_length for _, chunk in rows], device=device)
        width = max(self._count_blocks(chunk) for _, chunk in rows)
        # The mask hides what pads a table, but a masked NaN is still NaN: so pad with the sequence's own first
        # block, not with a block that a load may be writing just now.
        tables = [(list(chunk.block_table[:width]) + [chunk.block_table[0]] * width)[:width] for _, chunk in rows]
        mask = torch.arange(width * self._block_size, device=device)[None] < contexts[:, None]
        return _Decodes(
            torch.tensor([row for row, _ in rows], device=device),
            self._find_pages(torch.tensor(tables, device=device)),
            mask[:, None, None],
        )


def _lower_right(chunk: ChunkShape, device: torch.device) -> torch.Tensor | None:
    """Causal mask of a chunk that continues a context; None where there is no context before it."""
    if chunk.num_computed == 0:
        return None
    return torch.ones(chunk.num_tokens, chunk.context_length, dtype=torch.bool, device=device).tril(chunk.num_computed)


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
        sliding_window, softcap, s_aux: some models ask for them beyond plain attention; must not be given.

    Returns:
        ``[1, tokens, heads, head_dim]`` and None for the weights.

    Raises:
        NotImplementedError: the model asks for more than plain attention.
    """
    for asked, given in {"a sliding window": sliding_window, "soft-capping": softcap, "sinks": s_aux}.items():
        if given is not None:
            raise NotImplementedError(f"attention with {asked} is not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    paged.layers.add(layer)
    for kind, new in enumerate((key, value)):
        paged.kv[:, layer, kind][paged.write_blocks, :, paged.write_offsets] = new[0].transpose(0, 1)

    heads, tokens, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    # Query heads that share a KV head stand together, so that K and V are read once for the whole group.
    grouped = query[0].view(kv_heads, heads // kv_heads, tokens, head_dim)
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
        keys, values = paged.gather_pages(decodes.pages, layer).view(2, len(decodes.rows), kv_heads, -1, head_dim)
        output[decodes.rows] = scaled_dot_product_attention(
            grouped[:, :, decodes.rows].permute(2, 0, 1, 3), keys, values, attn_mask=decodes.mask, scale=scaling
        )
    if paged.retrieval is not None and paged.sparse.rows:
        sparse = grouped[:, :, paged.sparse.rows].permute(2, 0, 1, 3)
        output[paged.sparse.rows] = paged.retrieval.attend_sparsely(layer, paged.sparse.states, sparse, scaling)
    return output.view(1, tokens, heads, head_dim), None


def _no_mask(*_: object, **__: object) -> None:
    """transformers builds no mask of its own: sequences share one row of tokens here."""


def register_attention() -> None:
    """Make ``attn_implementation=ATTENTION_NAME`` known to transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
