"""Sizes of sparse attention, each in one place. It uses no tensors.

A long sequence's KV has three parts: initial blocks and a sliding window, which every step reads, and the blocks
between, of which a step reads the best ``topk_percent``::

    block   0 .. initial │ initial .. window start │ window start .. last
            always read  │ looked up               │ always read
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fractions import Fraction

from kvstore_backend import ConfigError

__all__ = ["RECOMMENDED_BLOCK_SIZE", "REPRESENTATIVES", "BlockPartition", "Regime", "RetrievalConfig"]

RECOMMENDED_BLOCK_SIZE = 128
"""The block size that the method recommends."""

REPRESENTATIVES = ("min_max", "mean_std", "mean")
"""The vectors that can represent a block in the index (see ``block_index``); the first is the default."""


class Regime(enum.Enum):
    """The way a sequence decodes; chosen once, by the length of its prompt."""

    DENSE = "dense"
    SPARSE = "sparse"
    """Blocks are looked up; all of them stay in KV memory."""
    OFFLOADED = "offloaded"
    """Blocks are looked up in host memory; the sequence's KV blocks are released to others."""


@dataclass(frozen=True)
class BlockPartition:
    """A sequence's ``num_blocks`` blocks (the newest may be partly filled) in the parts that one step reads."""

    num_blocks: int
    num_initial: int
    window_start: int
    num_recalled: int

    @property
    def num_outside(self) -> int:
        """Number of blocks that are looked up, not always read."""
        return self.window_start - self.num_initial

    @property
    def num_read(self) -> int:
        """Number of blocks that a step reads in a layer, for each head."""
        return self.num_blocks - self.num_outside + self.num_recalled


@dataclass(frozen=True)
class RetrievalConfig:
    """Settings of sparse attention; lengths in tokens.

    Prompts below ``dense_boundary`` use exact attention, those above ``offload_boundary`` are offloaded. The window is
    never smaller than ``local_tokens``, initial tokens are rounded up to whole blocks, and the number of blocks
    recalled is rounded down (but at least one). If the window begins within a block, the whole block is read, and
    counts as one of those that ``topk_percent`` allows. Blocks are chosen again every ``stride`` steps, and whenever
    one leaves the window. The first ``dense_layers`` layers read every block.

    Raises:
        ConfigError: impossible values, named by their flags.
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
        if self.init_tokens < 0:
            raise ConfigError(f"--retrieval-init-tokens {self.init_tokens} is negative; use 0 or more")
        if self.local_tokens <= self.block_size:
            raise ConfigError(
                f"--retrieval-local-tokens {self.local_tokens} is not more than a block; raise it above "
                f"{self.block_size}, or lower --block-size"
            )
        if not 0 < self.topk_percent <= 1:
            raise ConfigError(f"--retrieval-topk-percent {self.topk_percent} is not a share above 0 and at most 1")
        if not 0 <= self.dense_boundary <= self.offload_boundary:
            raise ConfigError(
                f"--retrieval-dense-boundary {self.dense_boundary} is above --retrieval-offload-boundary "
                f"{self.offload_boundary}; prompts turn sparse first, and are offloaded from a greater length on"
            )
        if self.representative not in REPRESENTATIVES:
            raise ConfigError(
                f"--retrieval-representative {self.representative!r} is none of {', '.join(REPRESENTATIVES)}"
            )
        if self.stride < 1:
            raise ConfigError(f"--retrieval-stride {self.stride}: blocks are recalled every step (1) or every n steps")
        if self.dense_layers < 0:
            raise ConfigError(f"--retrieval-dense-layers {self.dense_layers} is negative; use 0 or more")

    def choose_regime(self, num_prompt_tokens: int) -> Regime:
        """Return how a sequence with this prompt length decodes."""
        if num_prompt_tokens < self.dense_boundary:
            return Regime.DENSE
        return Regime.SPARSE if num_prompt_tokens <= self.offload_boundary else Regime.OFFLOADED

    def partition_blocks(self, context: int, layer: int) -> BlockPartition:
        """Return the blocks of a sequence for a step in ``layer`` that computes its ``context``-th token."""
        num_blocks = -(-context // self.block_size)
        num_initial = min(-(-self.init_tokens // self.block_size), num_blocks - 1)
        window_start, num_before = divmod(context - self.local_tokens, self.block_size)
        num_cut = int(window_start >= num_initial and num_before > 0)
        window_start = max(num_initial, window_start)
        num_outside = window_start - num_initial
        if layer < self.dense_layers:
            return BlockPartition(num_blocks, num_initial, window_start, num_outside)
        # Use the decimal number as written: 0.3 of 10 blocks is 3, though as a float it is a little less.
        share = int(Fraction(str(self.topk_percent)) * (num_outside + num_cut)) - num_cut
        return BlockPartition(num_blocks, num_initial, window_start, min(num_outside, max(1, share)))

    def explain_block_size(self) -> str:
        """Explain why another block size would be better; empty: it is the recommended one."""
        if self.block_size == RECOMMENDED_BLOCK_SIZE:
            return ""
        reason = (
            "of shorter blocks there are more, which takes a larger index and a longer search"
            if self.block_size < RECOMMENDED_BLOCK_SIZE
            else "what stands for a longer block hides more of its tokens, and each recalled block reads more of them"
        )
        return f"--block-size {self.block_size}: {RECOMMENDED_BLOCK_SIZE} is recommended with retrieval, as {reason}"

    def max_blocks_read(self, max_context: int, layer: int) -> int:
        """Return the most blocks that any step up to ``max_context`` tokens reads in ``layer``."""
        # The window's number of blocks varies by one as blocks fill; all other numbers only grow.
        contexts = range(max(1, max_context - self.block_size), max_context)
        return max(self.partition_blocks(context, layer).num_read for context in [*contexts, max_context])
