"""``Request``: what the client sent for one prompt. ``Sequence``: the state of its computation in the engine."""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine.scheduling.cache_hints import CacheHint
from engine.scheduling.pool_use import NOT_ASKED, PoolUse
from engine.scheduling.retrieval_config import Regime
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.resharding.peers import join_runs

__all__ = [
    "GREATEST_PENALTY",
    "LEAST_PENALTY",
    "BlockTable",
    "Request",
    "SamplingDefaults",
    "SamplingParams",
    "Saves",
    "Sequence",
    "State",
    "TokenLogprobs",
    "TokenOutput",
]

LEAST_PENALTY, GREATEST_PENALTY = 0.01, 100.0
"""Bounds of ``repetition_penalty``. With a value outside of these bounds, a logit might become infinite."""

# The sources in ``Sequence.prompt_sources``, each with its label in metrics.
_ORIGINS = {"own cache": "own_cache", "the pool": "pool", "the prefill instance": "handed_over"}


@dataclass(frozen=True)
class SamplingDefaults:
    """Default sampling parameters, for fields that a request does not give.

    A checkpoint may set them in its generation_config.json. The fields are those of ``SamplingParams``. If
    ``max_tokens`` is None, the context length limits the answer.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request, with OpenAI's names where it has them.

    Attributes:
        max_tokens: maximum number of tokens of the answer.
        min_tokens: minimum number of tokens of the answer: no end token is sampled and no stop string ends it before.
        temperature: divisor of the logits; 0: choose the most likely token (greedy).
        top_p: sample from the fewest most likely tokens with this total probability; 0: greedy, as in FastDeploy.
        top_k: sample from this number of most likely tokens; 0: from all tokens.
        repetition_penalty: a value above 1 makes tokens of the prompt and the answer less likely.
        seed: seed of the random draws; None: each sequence gets a random one. The chosen token depends only on the
            seed, the position and the logits.
        stop: strings that end the answer.
        stop_token_ids: tokens that end the answer.
        ignore_eos: whether the answer continues after the model's end tokens.
        logprobs: number of alternatives to report for each token, or None to report no log probabilities.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True)
class Request:
    """One prompt, with the parameters of its answer.

    Attributes:
        request_id: the id of the request.
        prompt_token_ids: the tokens of the prompt.
        params: how to sample the answer.
        cache_salt: the salt; only requests with the same salt share blocks.
        choice_of: the id of the client's request, if this is its second or a later answer; "" if it is the first.
        num_begun: number of tokens at the end of the prompt that are the beginning of the answer. The client has their
            text already.
        hints: how long to cache the blocks of the prompt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    choice_of: str = ""
    num_begun: int = 0
    hints: tuple[CacheHint, ...] = ()


class State(enum.Enum):
    """State of a sequence in the scheduler."""

    WAITING = "waiting"
    """The sequence has no blocks."""
    LOADING = "loading"
    """The sequence has blocks, and a load from the pool writes into them."""
    READY = "ready"
    """The sequence has blocks, no load is running, and it waits for a place in the batch."""
    RUNNING = "running"
    """The sequence has a place in the batch."""
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities of the chosen token, and of the most likely tokens, the most likely first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenOutput:
    """The output of one step for a sequence.

    Attributes:
        token_id: the new token, or None if the sequence was aborted or failed, and so has ended without a new token.
        finish_reason: why the sequence has ended, or None if it continues.
        logprobs: the log probabilities of the token, if the client requested them.
    """

    token_id: int | None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


@dataclass
class Saves:
    """Numbers and times of the saves of one sequence's blocks to the pool."""

    num_begun: int = 0
    """Number of blocks for which a save began."""
    num_done: int = 0
    """Number of blocks that the pool has after their save."""
    began_at: float = 0.0
    """Time of ``time.monotonic`` at which the first save began; 0: no save has begun."""
    ended_at: float = 0.0
    """Time of ``time.monotonic`` at which the latest save ended; 0: no save has ended."""


@dataclass
class BlockTable:
    """The blocks of a sequence in one group of layers, in the order of its tokens."""

    blocks: list[int] = field(default_factory=list)
    num_released: int = 0
    """Number of leading blocks that the sequence has released. Their entries in ``blocks`` must not be used."""


@dataclass(eq=False)
class Sequence:
    """State of the computation of one request: its tokens, its blocks, and figures for logs and metrics.

    The tokens ``token_ids[:num_computed]`` have KV in the blocks of ``tables``, which has one table for each group of
    layers.

    ``own_cached_tokens``, ``pool_cached_tokens`` and ``prompt_sources`` say where the prompt's KV came from at the
    first admission of the sequence; a preemption does not change these values. The values are final when the first
    token exists.
    """

    request: Request
    block_size: int
    token_ids: list[int] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=lambda: [BlockTable()])
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    """Number of leading blocks that were published to the prefix cache."""
    num_saved: int = 0
    """Number of leading blocks for which a save to the pool was started or dropped."""
    gathered: frozenset[int] = frozenset()
    """Indices of blocks that were built from blocks of another sharding in the pool; they are not saved again."""
    num_exported: int = 0
    """Number of leading blocks of the prompt that were passed to ``Listener.on_computed``."""
    regime: Regime = Regime.DENSE
    blocks_read: int = 0
    """Number of blocks that sparse attention has read, summed over steps and layers."""
    blocks_passed: int = 0
    """Number of blocks that full attention would have read in the same steps and layers."""
    pending_saves: int = 0
    """Number of saves to the pool that have begun and not ended."""
    state: State = State.WAITING
    aborted: bool = False
    finish_reason: str | None = None
    own_cached_tokens: int = 0
    pool_cached_tokens: int = 0
    prompt_sources: list[tuple[str, int]] = field(default_factory=list)
    """Source and number of tokens of each leading part of the prompt, in order. The remaining tokens were computed."""
    pool_use: PoolUse = NOT_ASKED
    pool_load_seconds: float = 0.0
    num_preemptions: int = 0
    """How often the sequence had to release its blocks and start again."""
    arrival: float = field(default_factory=lambda: time.monotonic())
    """Time of ``time.monotonic`` at which the sequence was created. The times below are of this clock, too."""
    started_at: float | None = None
    """When the sequence first got a place in the batch; None: it got none yet."""
    first_token_at: float | None = None
    submitted_at: float = 0.0
    """When the sequence was submitted to the engine; 0: it was not submitted yet."""
    ended_at: float = 0.0
    """When the sequence ended; 0: it has not ended."""
    look_up: tuple[float, float] | None = None
    """Start and end of the look-up in the pool at the first admission, or None if there was none."""
    load: tuple[float, float] | None = None
    """Start and end of the read from the pool at the first admission, or None if there was none."""
    saves: Saves = field(default_factory=Saves)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self._root = root_hash(self.request.cache_salt)
        seed = self.request.params.seed
        self.seed = secrets.randbits(62) if seed is None else seed

    @property
    def block_table(self) -> list[int]:
        """The blocks of the sequence in the first group of layers."""
        return self.tables[0].blocks

    @block_table.setter
    def block_table(self, blocks: list[int]) -> None:
        self.tables[0].blocks = blocks

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def count_origins(self) -> dict[str, int]:
        """Return the number of prompt tokens for each source of their KV, by the labels in metrics.

        If the sequence got its first token, the tokens that have no other source count as computed.
        """
        counts = dict.fromkeys(_ORIGINS.values(), 0)
        for source, count in self.prompt_sources:
            counts[_ORIGINS[source]] += count
        rest = max(0, self.num_prompt_tokens - sum(counts.values()))
        return {**counts, "computed": rest if self.first_token_at is not None else 0}

    @property
    def num_exact(self) -> int:
        """Number of leading tokens with exact KV, which may be shared. KV from sparse attention is not exact."""
        return self.num_computed if self.regime is Regime.DENSE else min(self.num_computed, self.num_prompt_tokens)

    @property
    def is_prefilling(self) -> bool:
        """Whether more than one token has no KV, so that the next step computes a chunk of these tokens."""
        return len(self.token_ids) - self.num_computed > 1

    @property
    def is_decoding(self) -> bool:
        """Whether the sequence is in decode: the whole prompt has KV, and at most the newest token has none."""
        return self.num_computed >= self.num_prompt_tokens and not self.is_prefilling

    def hashes(self) -> SequenceOf[bytes]:
        """Return the block hashes of all full blocks of ``token_ids``, whether the blocks have KV or not."""
        return extend_block_hashes(self.block_hashes, self.token_ids, self.block_size, self._root)

    def list_ungathered(self, first: int, last: int) -> list[range]:
        """Return the indices from ``first`` to ``last - 1`` that are not in ``gathered``, as ranges."""
        if not self.gathered:
            return [range(first, last)]
        return list(join_runs([i for i in range(first, last) if i not in self.gathered]))

    def hashes_of(self, block_size: int) -> SequenceOf[bytes]:
        """Return the block hashes that an instance with another block size has for all full blocks of ``token_ids``."""
        return extend_block_hashes([], self.token_ids, block_size, self._root)
