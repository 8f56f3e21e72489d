"""Settings of sparse attention, and the parts of a sequence's KV that a step reads.

The blocks of a long sequence have three parts. Each step reads the initial blocks and the window. Of the blocks between
them, it reads the share ``topk_percent`` that matters most to the query::

    block   0 .. initial │ initial .. window start │ window start .. last
            always read  │ searched                │ always read
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fractions import Fraction

from kvstore_backend import ConfigError

__all__ = ["RECOMMENDED_BLOCK_SIZE", "REPRESENTATIVES", "BlockPartition", "Regime", "RetrievalConfig"]

RECOMMENDED_BLOCK_SIZE = 128
"""The recommended block size for sparse attention."""

REPRESENTATIVES = ("min_max", "mean_std", "mean")
"""Kinds of vectors that represent a block in the index (see ``block_index.py``); the first is the default."""


class Regime(enum.Enum):
    """Kind of attention that a sequence uses in decode. It depends on the length of its prompt."""

    DENSE = "dense"
    """Full attention."""
    SPARSE = "sparse"
    """Sparse attention; all blocks stay in KV memory."""
    OFFLOADED = "offloaded"
    """Sparse attention; full blocks are copied to host memory, and released in KV memory."""


@dataclass(frozen=True)
class BlockPartition:
    """The parts of a sequence's blocks in one step, for one layer.

    Attributes:
        num_blocks: number of all blocks; the newest may be partly filled.
        num_initial: number of initial blocks.
        window_start: index of the first block of the window.
        num_recalled: number of blocks between the initial blocks and the window that each KV head reads.
    """

    num_blocks: int
    num_initial: int
    window_start: int
    num_recalled: int

    @property
    def num_outside(self) -> int:
        """Number of blocks between the initial blocks and the window."""
        return self.window_start - self.num_initial

    @property
    def num_read(self) -> int:
        """Number of blocks that each KV head reads: initial, recalled and window blocks."""
        return self.num_blocks - self.num_outside + self.num_recalled


@dataclass(frozen=True)
class RetrievalConfig:
    """Settings of sparse attention. All lengths are in tokens.

    Attributes:
        block_size: number of tokens in a block.
        init_tokens: length of the initial part; it is rounded up to whole blocks.
        local_tokens: length of the window. If the window begins within a block, the whole block is read, and counts as
            one of the blocks that ``topk_percent`` allows.
        topk_percent: share of the blocks between the initial part and the window that each head reads. The number of
            these blocks is rounded down, to at least 1.
        dense_boundary: sequences with shorter prompts use full attention.
        offload_boundary: sequences with longer prompts are offloaded.
        representative: one of ``REPRESENTATIVES``.
        stride: number of steps after which blocks are chosen again. Blocks are also chosen again when a
            block leaves the window.
        dense_layers: this number of layers, from the first one on, read all blocks.

    Raises:
        ConfigError: two values do not fit together, or a value is not possible; the message names the flag.
            The range of a single number is checked when its flag is parsed.
    """

    block_size: int
    init_tokens: int = 1024
    local_tokens: int = 7192
    topk_percent: float = 0.2
    dense_boundary: int = 32 << 10
    offload_boundary: int = 64 << 10
    representative: str = REPRESENTATIVES[0]
    stride: int = 1
    dense_layers: int = 0

    def __post_init__(self) -> None:
        if self.local_tokens <= self.block_size:
            raise ConfigError(
                f"--retrieval-local-tokens {self.local_tokens} is not more than one block; give more than "
                f"{self.block_size}, or lower --block-size"
            )
        if self.dense_boundary > self.offload_boundary:
            raise ConfigError(
                f"--retrieval-dense-boundary {self.dense_boundary} is above --retrieval-offload-boundary "
                f"{self.offload_boundary}; the offload boundary must not be lower"
            )
        if self.representative not in REPRESENTATIVES:
            raise ConfigError(
                f"--retrieval-representative {self.representative!r} is not one of {', '.join(REPRESENTATIVES)}"
            )
        if self.dense_layers < 0:
            raise ConfigError(f"--retrieval-dense-layers {self.dense_layers} is negative; use 0 or more")

    def choose_regime(self, num_prompt_tokens: int) -> Regime:
        """Return the kind of attention for a sequence with a prompt of this length."""
        if num_prompt_tokens < self.dense_boundary:
            return Regime.DENSE
        return Regime.SPARSE if num_prompt_tokens <= self.offload_boundary else Regime.OFFLOADED

    def partition_blocks(self, context: int, layer: int) -> BlockPartition:
        """Return how many blocks each part of a sequence has: initial blocks, window, and recalled blocks.

        Args:
            context: number of tokens up to and including the token that the step computes.
            layer: the layer that reads the blocks.
        """
        num_blocks = -(-context // self.block_size)
        num_initial = min(-(-self.init_tokens // self.block_size), num_blocks - 1)
        window_start, num_before = divmod(context - self.local_tokens, self.block_size)
        num_cut = int(window_start >= num_initial and num_before > 0)
        window_start = max(num_initial, window_start)
        num_outside = window_start - num_initial
        if layer < self.dense_layers:
            return BlockPartition(num_blocks, num_initial, window_start, num_outside)
        # A fraction of the decimal text, because a float may be a little less: 0.3 of 10 blocks must be 3.
        share = int(Fraction(str(self.topk_percent)) * (num_outside + num_cut)) - num_cut
        return BlockPartition(num_blocks, num_initial, window_start, min(num_outside, max(1, share)))

    def explain_block_size(self) -> str:
        """Return a sentence that recommends another block size; empty if the block size is the recommended one."""
        if self.block_size == RECOMMENDED_BLOCK_SIZE:
            return ""
        reason = (
            "shorter blocks need a larger index and a longer search"
            if self.block_size < RECOMMENDED_BLOCK_SIZE
            else "one representative for a longer block is less precise, and each recalled block has more "
            "tokens to read"
        )
        return f"--block-size {self.block_size}: {RECOMMENDED_BLOCK_SIZE} is recommended with retrieval, as {reason}"

    def max_blocks_read(self, max_context: int, layer: int) -> int:
        """Return the largest number of blocks that a step with up to ``max_context`` tokens reads in ``layer``."""
        # The number of blocks of the window varies by one while a block fills, and all other numbers only grow. So the
        # last ``block_size`` steps include the maximum.
        contexts = range(max(1, max_context - self.block_size), max_context)
        return max(self.partition_blocks(context, layer).num_read for context in [*contexts, max_context])
