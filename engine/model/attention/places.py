"""Computes where the tokens and states of a step are in KV memory, for each group of layers.

The computation has two parts, so that the numbers of all groups are sent to the device in one copy. A plan
(``TablePlan``, ``StatePlan``) computes its numbers on the host. Then ``place`` gets these numbers as tensors on the
device, and returns the places (``Tables``, ``States``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

import torch
from torch.nn.attention.bias import causal_lower_right

from engine.model.attention.retrieval import SparseState
from kvstore_backend.groups import Group

__all__ = [
    "AttentionForm",
    "ChunkShape",
    "Decodes",
    "Prefill",
    "StatePlan",
    "StateRun",
    "States",
    "TablePlan",
    "Tables",
]


@dataclass(frozen=True)
class AttentionForm:
    """Settings of attention that are fast on one type of device. They do not change the result.

    Attributes:
        max_gathered_bytes: maximum size of K and V that are gathered for one group of decodes (chunks of one token).
        joined_bytes: groups of decodes up to this size may have decodes of very different lengths; all are padded to
            the longest. In larger groups the longest decode is at most twice as long as the shortest.
        has_causal_kernels: whether the device has kernels that compute the causal mask of a chunk by themselves. Then
            the mask for the padding of decodes is a bias of KV's dtype. Otherwise all masks are of bool.
    """

    max_gathered_bytes: int
    joined_bytes: int
    has_causal_kernels: bool


@dataclass(frozen=True)
class ChunkShape:
    """A chunk: the tokens of one sequence that a step computes; and the blocks of this sequence.

    Attributes:
        num_computed: number of tokens of the sequence that have KV already.
        num_tokens: number of tokens of the chunk, directly after the tokens with KV.
        block_table: the blocks of the sequence in the first group of layers.
        samples: whether the logits of the chunk's last token are needed.
        sparse_state: the state of sparse attention, if the chunk uses it. Then the chunk has one token, and of the
            blocks in ``block_table`` only the newest must be in KV memory.
        side_tables: the blocks of the sequence in the second and each further group of layers.
    """

    num_computed: int
    num_tokens: int
    block_table: Sequence[int]
    samples: bool = True
    sparse_state: SparseState | None = None
    side_tables: Sequence[Sequence[int]] = ()

    def table_of(self, number: int) -> Sequence[int]:
        """Return the blocks of the sequence in group ``number``."""
        return self.side_tables[number - 1] if number else self.block_table

    @property
    def context_length(self) -> int:
        """Number of tokens of the sequence up to and including the chunk's last token."""
        return self.num_computed + self.num_tokens

    def list_positions(self) -> range:
        """Return the positions of the chunk's tokens in their sequence."""
        return range(self.num_computed, self.context_length)

    def list_write_blocks(self, block_size: int, number: int = 0) -> Iterator[int]:
        """Yield for each token of the chunk its block in group ``number``."""
        table = self.table_of(number)
        for place in range(self.num_computed // block_size, self.count_blocks(block_size)):
            start, stop = max(self.num_computed, place * block_size), (place + 1) * block_size
            yield from repeat(table[place], min(stop, self.context_length) - start)

    def count_blocks(self, block_size: int) -> int:
        """Return the number of blocks of the sequence up to and including the chunk's last token."""
        return -(-self.context_length // block_size)


@dataclass(frozen=True)
class Prefill:
    """A chunk of several tokens in one group of attention layers.

    The *context* is the tokens that the chunk may attend to: tokens before the chunk, and the chunk itself.
    """

    start: int  # position of the chunk's first token in the step's row of tokens
    stop: int  # position after the chunk's last token
    num_before: int  # number of tokens of the context before the chunk
    span: int  # window: number of tokens that each token attends to, including itself; 0: no window
    pages: torch.Tensor  # pages of the context, [2 * kv_heads * n], see TablePlan.find_pages
    mask: torch.Tensor | None  # [tokens, context], or None for causal attention without tokens before the chunk

    @property
    def context(self) -> int:
        """Number of tokens of the context."""
        return self.num_before + self.stop - self.start

    @cached_property
    def attention_mask(self) -> torch.Tensor:
        """Bool mask ``[tokens, context]``: the tokens that each token of the chunk attends to."""
        mask = torch.ones(self.stop - self.start, self.context, dtype=torch.bool, device=self.pages.device)
        mask = mask.tril(self.num_before)
        return mask.triu(self.num_before - self.span + 1) if self.span else mask


@dataclass(frozen=True)
class Decodes:
    """N chunks of one token each, in one group of attention layers. Their contexts are padded to the longest one."""

    rows: torch.Tensor | None  # [N], positions of the chunks' tokens in the step, or None for all positions, in order
    pages: torch.Tensor  # pages of the contexts, [2 * N * kv_heads * n], see TablePlan.find_pages
    first: int  # number of leading tokens in the pages that no chunk attends to
    width: int  # number of tokens in the pages that are read, including the first ones
    mask: torch.Tensor | None  # [N, 1, 1, width], or None if all chunks have the same length


@dataclass(frozen=True)
class Tables:
    """Positions of a step's tokens in KV memory, for one group of attention layers."""

    write_blocks: torch.Tensor  # [tokens], the block to which the KV of each token is written
    prefills: list[Prefill]
    decodes: list[Decodes]
    span: int  # length in tokens of the layers' sliding window; 0: full attention


@dataclass(frozen=True)
class StateRun:
    """A chunk in one group of convolution layers that has several tokens, or begins its sequence.

    All other chunks of a step are computed together (``States.rows``).
    """

    start: int  # position of the chunk's first token in the step's row of tokens
    stop: int  # position after the chunk's last token
    source: torch.Tensor | None  # [], block with the state before the chunk, or None if it begins the sequence
    targets: torch.Tensor  # [n], blocks to which states are written
    ends: torch.Tensor  # [n], for each of these states, the number of the chunk's tokens after which it is taken


@dataclass(frozen=True)
class States:
    """Positions of a step's states in KV memory, for one group of convolution layers."""

    runs: list[StateRun]
    rows: torch.Tensor  # [N], positions in the row of the chunks with one token and a state before it
    sources: torch.Tensor  # [N], blocks with the states before these tokens
    targets: torch.Tensor  # [N], blocks to which the states after these tokens are written
    offsets: torch.Tensor  # the numbers from 0 to below the length of a state


@dataclass(frozen=True)
class _Row:
    """The KV that one chunk of a step reads in one group of attention layers.

    With a sliding window, the leading blocks that lie before the window are left out. ``low`` and ``high`` are counted
    from the first block that is read.
    """

    row: int  # position of the chunk's first token in the step's row of tokens
    chunk: ChunkShape
    low: int  # position of the first token that the chunk's first token attends to
    high: int  # number of tokens up to and including the chunk's last token
    table: Sequence[int]  # the blocks that are read

    @classmethod
    def of_chunk(cls, start: int, chunk: ChunkShape, number: int, group: Group) -> _Row:
        """Describe ``chunk`` in group ``number``. The chunk begins at index ``start`` of the step's tokens."""
        size, begin = group.block_size, group.find_first_needed(chunk.num_computed)
        low = max(0, chunk.num_computed - group.span + 1) - begin * size if group.span else 0
        table = chunk.table_of(number)[begin : chunk.count_blocks(size)]
        return cls(start, chunk, low, chunk.context_length - begin * size, table)


class TablePlan:
    """Computes where a step's tokens are in KV memory, for one group of attention layers.

    Args:
        kv: the KV memory, ``[block, layer, 2, kv_head, token, head_dim]``.
        form: the settings of attention for the device.
        number: the index of the group.
        group: the layers' window, or full attention.
        chunks: the chunks of the step.

    Attributes:
        numbers: the lists of numbers to send to the device; each list becomes one tensor.
    """

    def __init__(
        self, kv: torch.Tensor, form: AttentionForm, number: int, group: Group, chunks: Sequence[ChunkShape]
    ) -> None:
        _, self._num_layers, _, self._kv_heads, self._block_size, head_dim = kv.shape
        self._block_bytes = 2 * self._kv_heads * self._block_size * head_dim * kv.element_size()
        self._dtype = kv.dtype
        self._form = form
        self._span = group.span
        self._prefills: list[_Row] = []
        singles: list[_Row] = []
        start = 0
        for chunk in chunks:
            row = _Row.of_chunk(start, chunk, number, group)
            if chunk.num_tokens > 1:
                self._prefills.append(row)
            elif chunk.sparse_state is None or group.kind != "full":
                singles.append(row)
            start += chunk.num_tokens
        self._num_tokens = start
        self._decodes = self._group_by_length(singles)
        write_blocks = [block for chunk in chunks for block in chunk.list_write_blocks(self._block_size, number)]
        self.numbers: list[Sequence[int]] = [write_blocks, *(row.table for row in self._prefills)]
        for decodes in self._decodes:
            self.numbers += self._pad_tables(decodes)

    def place(self, sent: Sequence[torch.Tensor]) -> Tables:
        """Return where the step's tokens are in KV memory, as tensors.

        Args:
            sent: the lists of ``numbers``, as tensors on the device.
        """
        write_blocks, *others = sent
        tables, padded = others[: len(self._prefills)], iter(others[len(self._prefills) :])
        prefills = [self._place_prefill(row, table) for row, table in zip(self._prefills, tables, strict=True)]
        decodes = [
            self._place_decodes(rows, *tensors)
            for rows, tensors in zip(self._decodes, zip(padded, padded, padded, padded, strict=True), strict=True)
        ]
        return Tables(write_blocks, prefills, decodes, self._span)

    def find_pages(self, tables: torch.Tensor) -> torch.Tensor:
        """Return the page indices of K and V in layer 0 for the blocks ``tables``: ``[2, N, kv_head, n]``, flattened.

        A page is the part of a block for one layer, K or V, and one KV head. Page 0 of KV memory is the K of block 0,
        layer 0 and KV head 0.

        Args:
            tables: blocks, ``[N, n]``, or ``[n]`` for N = 1.
        """
        heads = torch.arange(self._kv_heads, device=tables.device)[:, None]
        kinds = torch.arange(2, device=tables.device)[:, None, None, None]
        first = tables.view(-1, 1, tables.shape[-1]) * (self._num_layers * 2 * self._kv_heads)
        return (first + kinds * self._kv_heads + heads).flatten()

    def _group_by_length(self, rows: list[_Row]) -> list[list[_Row]]:
        """Divide decodes into groups that are padded and gathered together, within the limits of ``AttentionForm``.

        In each group the decodes are in the order of the step.
        """
        groups: list[list[_Row]] = []
        narrowest = 0
        for row in sorted(rows, key=lambda row: row.high):
            width = len(row.table)
            padded = width * (len(groups[-1]) + 1) * self._block_bytes if groups else 0
            is_like = width <= 2 * narrowest or padded <= self._form.joined_bytes
            if groups and is_like and padded <= self._form.max_gathered_bytes:
                groups[-1].append(row)
            else:
                groups.append([row])
                narrowest = width
        return [sorted(group, key=lambda row: row.row) for group in groups]

    def _pad_tables(self, rows: list[_Row]) -> list[Sequence[int]]:
        """Return the numbers that the device needs for a group of decodes, as four lists.

        Returns:
            The fields ``row``, ``high`` and ``low`` of all decodes (no ``low`` if the layers have no window), and their
            block tables, padded to the same length and joined to one list.
        """
        width = max(len(row.table) for row in rows)
        # The mask hides the padding of a table, but a masked NaN is still NaN. So the padding is the first block of the
        # sequence, not a block to which a load may be writing.
        tables: list[int] = []
        for row in rows:
            tables += row.table
            tables += [row.table[0]] * (width - len(row.table))
        lows = [row.low for row in rows] if self._span else []
        return [[row.row for row in rows], [row.high for row in rows], lows, tables]

    def _place_prefill(self, row: _Row, table: torch.Tensor) -> Prefill:
        num_before, num_tokens = row.high - row.chunk.num_tokens, row.chunk.num_tokens
        span = self._span if row.chunk.context_length > self._span else 0
        prefill = Prefill(row.row, row.row + num_tokens, num_before, span, self.find_pages(table[None]), None)
        if num_before == 0 and not span:
            return prefill
        if self._form.has_causal_kernels and not span:
            return replace(prefill, mask=causal_lower_right(num_tokens, row.high))
        return replace(prefill, mask=prefill.attention_mask)

    def _place_decodes(
        self, group: list[_Row], rows: torch.Tensor, highs: torch.Tensor, lows: torch.Tensor, tables: torch.Tensor
    ) -> Decodes:
        pages = self.find_pages(tables.view(len(group), -1))
        every_row = None if len(group) == self._num_tokens else rows
        if len({(row.low, row.high) for row in group}) == 1:
            return Decodes(every_row, pages, group[0].low, group[0].high, None)
        width = len(tables) // len(group) * self._block_size
        places = torch.arange(width, device=rows.device)
        mask = places < highs[:, None]
        if len(lows):
            mask &= places >= lows[:, None]
        mask = mask[:, None, None]
        if self._form.has_causal_kernels:
            mask = torch.zeros_like(mask, dtype=self._dtype).masked_fill_(~mask, -torch.inf)
        return Decodes(every_row, pages, 0, width, mask)


class StatePlan:
    """Computes where a step's states are in KV memory, for one group of convolution layers.

    Args:
        number: the index of the group.
        block_size: number of tokens in a block.
        length: number of tokens whose inputs a state contains.
        chunks: the chunks of the step.

    Attributes:
        numbers: the lists of numbers to send to the device; each list becomes one tensor.
    """

    def __init__(self, number: int, block_size: int, length: int, chunks: Sequence[ChunkShape]) -> None:
        self._length = length
        self._runs: list[tuple[int, int, bool]] = []
        singles: list[tuple[int, int, int]] = []
        of_runs: list[Sequence[int]] = []
        start = 0
        for chunk in chunks:
            table, computed, end = chunk.table_of(number), chunk.num_computed, chunk.context_length
            source = [table[(computed - 1) // block_size]] if computed else []
            if source and chunk.num_tokens == 1:
                singles.append((start, source[0], table[computed // block_size]))
            else:
                ends = [*range((computed // block_size + 1) * block_size, end, block_size), end]
                targets = [table[(each - 1) // block_size] for each in ends]
                self._runs.append((start, start + chunk.num_tokens, computed > 0))
                of_runs += [source, targets, [each - computed for each in ends]]
            start += chunk.num_tokens
        self.numbers: list[Sequence[int]] = [[single[i] for single in singles] for i in range(3)] + of_runs

    def place(self, sent: Sequence[torch.Tensor]) -> States:
        """Return where the step's states are in KV memory, as tensors.

        Args:
            sent: the lists of ``numbers``, as tensors on the device.
        """
        rows, sources, targets, *others = sent
        each = iter(others)
        runs = [
            StateRun(start, stop, source[0] if follows else None, blocks, ends)
            for (start, stop, follows), (source, blocks, ends) in zip(
                self._runs, zip(each, each, each, strict=True), strict=True
            )
        ]
        return States(runs, rows, sources, targets, torch.arange(self._length, device=rows.device))
