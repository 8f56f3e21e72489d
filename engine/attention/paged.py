"""Exact attention over paged KV memory, for any model that asks transformers' AttentionInterface.

KV memory is one tensor ``[block, layer, k/v, kv_head, token, head_dim]``: a block is one contiguous span, which
is what a pool stores. A forward pass runs all chunks of a step as one row of tokens; ``PagedBatch`` says which
tokens belong to which sequence, and reaches ``paged_attention`` as a keyword argument that transformers passes
through every model's layers untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["ATTENTION_NAME", "ChunkShape", "PagedBatch", "register"]

ATTENTION_NAME = "kvstore_paged"


@dataclass(frozen=True)
class ChunkShape:
    """One chunk: ``num_tokens`` new tokens after ``num_computed`` with KV, in the blocks of ``block_table``."""

    num_computed: int
    num_tokens: int
    block_table: Sequence[int]

    @property
    def context(self) -> int:
        """Tokens that the chunk's last token attends to, itself included."""
        return self.num_computed + self.num_tokens


@dataclass(frozen=True)
class _Prefill:
    """A chunk of several tokens: rows ``start:stop`` of the step's row of tokens."""

    start: int
    stop: int
    context: int
    blocks: torch.Tensor  # [n]
    mask: torch.Tensor | None  # [tokens, context]; None: nothing came before, plain causal


@dataclass(frozen=True)
class _Decodes:
    """Chunks of one token each and of similar length, padded to the longest."""

    rows: torch.Tensor  # [N] rows of the step's row of tokens
    blocks: torch.Tensor  # [N, n]
    mask: torch.Tensor  # [N, 1, 1, n * block_size]


class PagedBatch:
    """Where the tokens of one step lie, worked out once for all layers.

    Args:
        kv: the KV memory, ``[block, layer, 2, kv_head, token, head_dim]``.
        chunks: the step's chunks, in the order of their tokens in the row.
    """

    def __init__(self, kv: torch.Tensor, chunks: Sequence[ChunkShape]) -> None:
        self.kv = kv
        self.layers: set[int] = set()
        """Layers that attended so far."""
        self.block_size = kv.shape[4]
        device = kv.device
        positions: list[int] = []
        write_blocks: list[int] = []
        last_rows: list[int] = []
        self.prefills: list[_Prefill] = []
        by_size: dict[int, list[tuple[int, ChunkShape]]] = {}
        for chunk in chunks:
            start = len(positions)
            stop = start + chunk.num_tokens
            chunk_positions = range(chunk.num_computed, chunk.context)
            positions += chunk_positions
            write_blocks += (chunk.block_table[position // self.block_size] for position in chunk_positions)
            last_rows.append(stop - 1)
            num_blocks = -(-chunk.context // self.block_size)
            if chunk.num_tokens == 1:
                # Groups of like length (up to twice) bound what padding can cost.
                by_size.setdefault(num_blocks.bit_length(), []).append((start, chunk))
            else:
                blocks = torch.tensor(chunk.block_table[:num_blocks], device=device)
                self.prefills.append(_Prefill(start, stop, chunk.context, blocks, _lower_right(chunk, device)))
        self.decodes = [self._group(rows, device) for rows in by_size.values()]
        position_row = torch.tensor(positions, device=device)
        self.position_ids = position_row[None]  # [1, tokens]
        self.write_blocks = torch.tensor(write_blocks, device=device)  # [tokens]
        self.write_offsets = position_row % self.block_size  # [tokens]
        self.last_rows = torch.tensor(last_rows, device=device)  # [chunks]: each chunk's last token

    def _group(self, rows: list[tuple[int, ChunkShape]], device: torch.device) -> _Decodes:
        contexts = torch.tensor([chunk.context for _, chunk in rows], device=device)
        width = -(-max(chunk.context for _, chunk in rows) // self.block_size)
        # The mask hides what pads a table, but a masked NaN is still NaN: so pad with the sequence's own first
        # block, not with a block that a load may be writing just now.
        tables = [(list(chunk.block_table[:width]) + [chunk.block_table[0]] * width)[:width] for _, chunk in rows]
        mask = torch.arange(width * self.block_size, device=device)[None] < contexts[:, None]
        return _Decodes(
            torch.tensor([row for row, _ in rows], device=device),
            torch.tensor(tables, device=device),
            mask[:, None, None],
        )


def _lower_right(chunk: ChunkShape, device: torch.device) -> torch.Tensor | None:
    """Causal mask of a chunk that continues a context; None where there is no context before it."""
    if chunk.num_computed == 0:
        return None
    return torch.ones(chunk.num_tokens, chunk.context, dtype=torch.bool, device=device).tril(chunk.num_computed)


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
        sliding_window, softcap, s_aux: what some models ask for beyond plain attention; must not be given.

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
    keys, values = paged.kv[:, layer, 0], paged.kv[:, layer, 1]  # [block, kv_head, token, head_dim], no copy
    keys[paged.write_blocks, :, paged.write_offsets] = key[0].transpose(0, 1)
    values[paged.write_blocks, :, paged.write_offsets] = value[0].transpose(0, 1)

    heads, tokens, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    # Query heads that share a KV head stand together, so that K and V are read once for the whole group.
    grouped = query[0].view(kv_heads, heads // kv_heads, tokens, head_dim)
    output = torch.empty(tokens, kv_heads, heads // kv_heads, head_dim, dtype=query.dtype, device=query.device)
    for prefill in paged.prefills:
        shape = (kv_heads, heads // kv_heads, prefill.context, head_dim)
        attended = scaled_dot_product_attention(
            grouped[:, :, prefill.start : prefill.stop],
            _gather(keys, prefill.blocks)[:, None, : prefill.context].expand(shape),
            _gather(values, prefill.blocks)[:, None, : prefill.context].expand(shape),
            attn_mask=prefill.mask,
            is_causal=prefill.mask is None,
            scale=scaling,
        )
        output[prefill.start : prefill.stop] = attended.permute(2, 0, 1, 3)
    for decodes in paged.decodes:
        attended = scaled_dot_product_attention(
            grouped[:, :, decodes.rows].permute(2, 0, 1, 3),
            _gather(keys, decodes.blocks),
            _gather(values, decodes.blocks),
            attn_mask=decodes.mask,
            scale=scaling,
        )
        output[decodes.rows] = attended
    return output.view(1, tokens, heads, head_dim), None


def _gather(memory: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """``[block, kv_head, token, d]`` at ``blocks [..., n]`` -> ``[..., kv_head, n * token, d]``."""
    gathered = memory[blocks].transpose(-4, -3)
    return gathered.reshape(*gathered.shape[:-3], -1, gathered.shape[-1])


def _no_mask(*_: object, **__: object) -> None:
    """transformers builds no mask of its own: sequences share one row of tokens here."""


def register() -> None:
    """Make ``attn_implementation=ATTENTION_NAME`` known to transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
