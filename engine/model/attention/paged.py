"""Full attention over paged KV memory, for models that use transformers' AttentionInterface.

KV memory is one tensor ``[block, layer, k/v, kv_head, token, head_dim]``. So a block is contiguous, and the pool stores
it as one value. If the model has several groups of layers (``layer_groups.py``), a block belongs to one group, and the
second axis is the place of a layer in its group.

A forward pass computes all chunks of a step as one row of tokens. ``PagedBatch`` says which tokens belong to which
sequence. The model is called with the keyword argument ``paged``, and transformers passes it on to ``paged_attention``
in each layer.

The host does not wait for the device here. All numbers of a step are computed on the host and sent in one copy, and the
shape of a tensor never depends on values on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.model.attention.places import (
    AttentionForm,
    ChunkShape,
    Decodes,
    Prefill,
    StatePlan,
    States,
    TablePlan,
    Tables,
)
from engine.model.attention.retrieval import Retrieval, SparseState
from engine.model.device_copies import send_numbers
from engine.model.layer_groups import LayerGroups

__all__ = ["ATTENTION_NAME", "AttentionForm", "ChunkShape", "PagedBatch", "form_for", "register_attention"]

ATTENTION_NAME = "kvstore_paged"

_MAX_SCORE_BYTES = 64 << 20
"""Maximum size in bytes of the scores that attention with soft-capping or sinks computes at a time."""


# On a CPU, only as much K and V is gathered at a time as stays in a cache. Decodes of 16 sequences with 2,000 tokens
# each, in 8 layers, took 35 ms, and 71 ms if all K and V of a layer were gathered first. On a GPU each further group of
# decodes costs as much time as reading some MiB, so there are fewer and larger groups.
_ON_CPU = AttentionForm(4 << 20, 0, False)
_ELSEWHERE = AttentionForm(256 << 20, 32 << 20, True)


def form_for(device: torch.device) -> AttentionForm:
    """Return the settings of attention that are fastest on a device."""
    return _ON_CPU if device.type == "cpu" else _ELSEWHERE


@dataclass(frozen=True)
class _Sparse:
    """The chunks of a step that use sparse attention; each has one token."""

    rows: torch.Tensor  # [N], position of each chunk's token in the step's row of tokens
    states: list[SparseState]


class PagedBatch:
    """The tokens of one step, and their places in KV memory. Created once, and used by all layers.

    Args:
        kv: the KV memory, ``[block, layer, 2, kv_head, token, head_dim]``.
        chunks: the chunks of the step.
        token_ids: the tokens of all chunks, in the same order.
        retrieval: computes sparse attention, or None if it is not enabled.
        groups: the groups of layers. Default: one group with full attention.

    Attributes:
        input_ids: the tokens, ``[1, tokens]``.
        position_ids: the position of each token in its sequence, ``[1, tokens]``.
        write_offsets: the position of each token in its block, ``[tokens]``.
        logit_rows: for each chunk that samples, the position of its last token in ``token_ids``. If no chunk samples,
            it has one position, because the model computes the logits of at least one token.
        tables: where the tokens are in KV memory, for each group of attention layers, by the index of the group.
        states: where the states are in KV memory, for each group of convolution layers, by the index of the group.
        places: for each layer, the index of its group, and its index among the layers of a block of this group.
        ignored_window: length of a sliding window that no sequence exceeds, so that its layers have full attention.
            0: there is no such window.
        layers: the layers that were computed so far.
        scores_changed: whether one of the layers in ``layers`` has soft-capping or sinks.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        chunks: Sequence[ChunkShape],
        token_ids: Sequence[int],
        retrieval: Retrieval | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        self.kv = kv
        self.retrieval = retrieval
        self.layers: set[int] = set()
        self.scores_changed = False
        _, num_layers, _, self.kv_heads, self._block_size, self.head_dim = kv.shape
        self._groups = groups or LayerGroups.of_full(num_layers, self._block_size)
        self.places = self._groups.places
        self.ignored_window = self._groups.ignored_window
        self._gathered = kv.new_empty(0)
        sparse = _list_sparse(chunks)
        positions = [position for chunk in chunks for position in chunk.list_positions()]
        numbers: list[Sequence[int]] = [token_ids, positions, _find_logit_rows(chunks), [row for row, _ in sparse]]
        plans = [self._plan(number, chunks) for number in range(len(self._groups.members))]
        for plan in plans:
            numbers += plan.numbers
        input_ids, position_row, self.logit_rows, rows, *sent = send_numbers(numbers, kv.device)
        self.input_ids, self.position_ids = input_ids[None], position_row[None]
        self.write_offsets = position_row % self._block_size
        self.sparse = _Sparse(rows, [state for _, state in sparse])
        self.tables: dict[int, Tables] = {}
        self.states: dict[int, States] = {}
        for number, plan in enumerate(plans):
            own, sent = sent[: len(plan.numbers)], sent[len(plan.numbers) :]
            if isinstance(plan, StatePlan):
                self.states[number] = plan.place(own)
            else:
                self.tables[number] = plan.place(own)

    @cached_property
    def state_memory(self) -> torch.Tensor:
        """The states of convolution layers: a view of KV memory, ``[block, layer, token, channel]``."""
        conv = self._groups.conv
        assert conv is not None
        pages = self.kv.flatten(1)
        count = pages.shape[1] // conv.size
        states: torch.Tensor = pages[:, : count * conv.size].unflatten(1, (count, conv.length, conv.width))
        return states

    def gather_pages(self, pages: torch.Tensor, layer: int) -> torch.Tensor:
        """Copy K and V of one layer to contiguous memory.

        Args:
            pages: the pages to copy, from ``TablePlan.find_pages``, ``[n]``.
            layer: the index of the layer among the layers of a block.

        Returns:
            The pages in the given order, ``[n, block_size * head_dim]``. The next call overwrites this memory, because
            new memory for each layer takes longer than the copy.
        """
        page_size = self._block_size * self.head_dim
        count = pages.numel()
        if self._gathered.shape[0] < count:
            self._gathered = self.kv.new_empty(count, page_size)
        gathered = self._gathered[:count]
        from_layer = self.kv.view(-1, page_size)[layer * 2 * self.kv_heads :]
        return torch.index_select(from_layer, 0, pages, out=gathered)

    def _plan(self, number: int, chunks: Sequence[ChunkShape]) -> TablePlan | StatePlan:
        group = self._groups.members[number].group
        if group.kind == "state":
            assert self._groups.conv is not None
            return StatePlan(number, self._block_size, self._groups.conv.length, chunks)
        return TablePlan(self.kv, form_for(self.kv.device), number, group, chunks)


def _find_logit_rows(chunks: Sequence[ChunkShape]) -> list[int]:
    rows: list[int] = []
    stop = 0
    for chunk in chunks:
        stop += chunk.num_tokens
        if chunk.samples:
            rows.append(stop - 1)
    return rows or [chunks[0].num_tokens - 1]


def _list_sparse(chunks: Sequence[ChunkShape]) -> list[tuple[int, SparseState]]:
    """Return, for each chunk with sparse attention, the position of its one token in the step, and its state."""
    starts = accumulate((chunk.num_tokens for chunk in chunks), initial=0)
    return [
        (row, chunk.sparse_state) for row, chunk in zip(starts, chunks, strict=False) if chunk.sparse_state is not None
    ]


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
    """Write the new K and V of a layer to KV memory, and compute attention of each token over its sequence.

    transformers calls this function for each layer.

    Args:
        module: the attention layer; its ``layer_idx`` gives the group of the layer and its index in this group.
        query: the queries, ``[1, heads, tokens, head_dim]``, after RoPE.
        key, value: the new K and V, ``[1, kv_heads, tokens, head_dim]``; the keys after RoPE.
        attention_mask: unused; ``paged`` has the masks.
        paged: the tokens of the step and where they are in KV memory.
        scaling: factor of the scores, or None for 1 / sqrt(head_dim).
        sliding_window: the window of the layer; must equal the window of the group, or ``paged.ignored_window``.
        softcap: limit of the scores, as in Gemma 2, or None for no limit.
        s_aux: sinks as in gpt-oss, ``[heads]``: for each head a score that takes part in the softmax but has no value;
            None if the model has no sinks.

    Returns:
        The output ``[1, tokens, heads, head_dim]``, and None in place of the weights.

    Raises:
        NotImplementedError: the layer differs from the model's configuration, or is not supported.
    """
    index = int(module.layer_idx)  # type: ignore[arg-type]
    number, layer = paged.places[index]
    tables = paged.tables[number]
    _check_layer(paged, index, tables.span, key, value, sliding_window)
    paged.layers.add(index)
    for kind, new in enumerate((key, value)):
        paged.kv[:, layer, kind][tables.write_blocks, :, paged.write_offsets] = new[0].transpose(0, 1)

    heads, tokens, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    attend: Callable[..., torch.Tensor] = scaled_dot_product_attention
    attend_chunk: Callable[..., torch.Tensor] | None = None
    if softcap is not None or s_aux is not None:
        paged.scores_changed = True
        sinks = None if s_aux is None else s_aux.view(kv_heads, -1, 1)
        attend = partial(_attend_with_scores, softcap=softcap, sinks=sinks)
        attend_chunk = partial(_attend_with_scores, softcap=softcap, sinks=None if sinks is None else sinks[..., None])
    # The query heads of one KV head are adjacent. So K and V are read once for all of them.
    grouped = query[0].view(kv_heads, heads // kv_heads, tokens, head_dim)
    if tables.decodes and tables.decodes[0].rows is None:
        return _attend_decodes(paged, tables.decodes[0], layer, grouped, scaling, attend).reshape(
            1, tokens, heads, head_dim
        ), None
    output = torch.empty(tokens, kv_heads, heads // kv_heads, head_dim, dtype=query.dtype, device=query.device)
    for prefill in tables.prefills:
        queries = grouped[:, :, prefill.start : prefill.stop]
        attended = _attend_prefill(paged, prefill, layer, queries, scaling, attend_chunk)
        output[prefill.start : prefill.stop] = attended.permute(2, 0, 1, 3)
    for decodes in tables.decodes:
        output[decodes.rows] = _attend_decodes(paged, decodes, layer, grouped[:, :, decodes.rows], scaling, attend)
    if number == 0 and paged.retrieval is not None and paged.sparse.states:
        if attend_chunk is not None:
            raise NotImplementedError("sparse attention with soft-capping or sinks is not supported")
        sparse = grouped[:, :, paged.sparse.rows].permute(2, 0, 1, 3)
        output[paged.sparse.rows] = paged.retrieval.attend_sparsely(layer, paged.sparse.states, sparse, scaling)
    return output.view(1, tokens, heads, head_dim), None


def _check_layer(
    paged: PagedBatch, index: int, span: int, key: torch.Tensor, value: torch.Tensor, sliding_window: int | None
) -> None:
    """Raise ``NotImplementedError`` if the layer differs from the model's configuration.

    Args:
        paged: the tokens of the step.
        index: the index of the layer.
        span: the window of the layer's group; 0 for no window.
        key, value, sliding_window: the arguments of ``paged_attention``.
    """
    window = 0 if sliding_window == paged.ignored_window else sliding_window or 0
    if window != span:
        raise NotImplementedError(
            f"layer {index} has a sliding window of {window} tokens, but config.json says {span} (0: no window)"
        )
    if key.shape[1] != paged.kv_heads or not key.shape[3] == value.shape[3] == paged.head_dim:
        raise NotImplementedError(f"number or size of the KV heads of layer {index} differ from the config.json")


def _attend_prefill(
    paged: PagedBatch,
    prefill: Prefill,
    layer: int,
    queries: torch.Tensor,
    scaling: float | None,
    attend: Callable[..., torch.Tensor] | None,
) -> torch.Tensor:
    """Return the output for the tokens of one prefill chunk, in the shape of ``queries``.

    Args:
        paged: the tokens of the step.
        prefill: the chunk and the places of its tokens in KV memory.
        layer: the index of the layer among the layers of a block.
        queries: the chunk's queries, ``[kv_heads, heads per kv_head, tokens, head_dim]``.
        scaling: factor of the scores, or None for 1 / sqrt(head_dim).
        attend: computes attention with soft-capping or sinks; None if the layer has neither.
    """
    kv_heads, group, _, head_dim = queries.shape
    gathered = paged.gather_pages(prefill.pages, layer).view(2, kv_heads, 1, -1, head_dim)
    keys, values = gathered[..., : prefill.context, :].unbind()
    if attend is not None:
        return attend(queries, keys, values, attn_mask=prefill.attention_mask, scale=scaling)
    shape = (kv_heads, group, prefill.context, head_dim)
    return scaled_dot_product_attention(
        queries,
        keys.expand(shape),
        values.expand(shape),
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        scale=scaling,
    )


def _attend_decodes(
    paged: PagedBatch,
    decodes: Decodes,
    layer: int,
    queries: torch.Tensor,
    scaling: float | None,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Compute attention for one group of decodes.

    Args:
        paged: the tokens of the step and where they are in KV memory.
        decodes: the group of decodes.
        layer: the index of the layer among the layers of a block.
        queries: the queries, ``[kv_heads, group, N, head_dim]``.
        scaling: factor of the scores, or None for 1 / sqrt(head_dim).
        attend: computes attention; has the arguments of ``scaled_dot_product_attention``.

    Returns:
        The output, ``[N, kv_heads, group, head_dim]``.
    """
    kv_heads, _, count, head_dim = queries.shape
    gathered = paged.gather_pages(decodes.pages, layer).view(2, count, kv_heads, -1, head_dim)
    keys, values = gathered[..., decodes.first : decodes.width, :].unbind()
    return attend(queries.permute(2, 0, 1, 3), keys, values, attn_mask=decodes.mask, scale=scaling)


def _attend_with_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention with soft-capping or sinks; otherwise the same as ``scaled_dot_product_attention``.

    Args:
        queries: ``[..., heads, tokens, head_dim]``.
        keys, values: ``[..., heads, context, head_dim]``, or with 1 in the place of ``heads``: all heads share them.
        attn_mask: a bool mask, or a bias that is added to the scores; it can be broadcast to
            ``[..., heads, tokens, context]``. None if each token attends to the whole context.
        scale: factor of the scores, or None for 1 / sqrt(head_dim).
        softcap: limit of the scores, or None for no limit.
        sinks: scores of the attention sinks, which take part in the softmax but have no value; they can be broadcast to
            ``[..., heads, tokens, 1]``. None if there are no sinks.
    """
    context, kv_heads = keys.shape[-2], keys.shape[-3]
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    row_bytes = queries[..., 0, 0].numel() * context * torch.float32.itemsize
    pieces = queries.split(max(1, _MAX_SCORE_BYTES // row_bytes), dim=-2)
    masks = [attn_mask] * len(pieces)
    if attn_mask is not None and attn_mask.shape[-2] > 1:
        masks = list(attn_mask.split(pieces[0].shape[-2], dim=-2))
    attended = []
    for piece, mask in zip(pieces, masks, strict=True):
        # One matrix product for all heads that share K and V: broadcasting would copy K and V once per head.
        rows = (piece * scale).unflatten(-3, (kv_heads, -1)).flatten(-3, -2)
        scores = (rows @ keys.transpose(-1, -2)).view(*piece.shape[:-1], context)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
        scores = scores.float()
        highest = scores.amax(-1, keepdim=True)
        if sinks is not None:
            highest = highest.maximum(sinks)
        weights = scores.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total += (sinks - highest).exp()
        weights = weights.div_(total).to(queries.dtype).unflatten(-3, (kv_heads, -1)).flatten(-3, -2)
        attended.append((weights @ values).view(piece.shape))
    return torch.cat(attended, dim=-2)


def register_attention() -> None:
    """Register ``paged_attention`` with transformers, as ``attn_implementation=ATTENTION_NAME``.

    The name is not registered for masks, so transformers creates no masks. To create masks, it would check whether
    the tokens belong to several sequences, and wait for the device in each step.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
