"""A prompt to be continued (``Request``), and the state of its computation (``Sequence``)."""

from __future__ import annotations

import enum
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
"""Bounds of ``repetition_penalty``: beyond them, a logit might become infinite."""

# Sources in ``Sequence.prompt_sources``, by their names in metrics.
_ORIGINS = {"own cache": "own_cache", "the pool": "pool", "the prefill instance": "handed_over"}


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling defaults for requests that give no value; a checkpoint's generation_config.json may set them.

    The names are those of ``SamplingParams``; ``max_tokens`` None means as many as the context holds.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions; OpenAI's names and meanings if it has them.

    ``temperature`` 0 (or ``top_p`` 0, as in FastDeploy's examples) is greedy. ``top_k`` 0 means all tokens.
    ``repetition_penalty`` above 1 makes tokens of the prompt and the answer less likely to come again. ``seed`` makes
    the choice a function of (seed, position, logits). ``logprobs`` is the number of alternatives to report in addition
    to the chosen token; None reports nothing.
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
    """One prompt to be continued.

    Blocks are shared only among requests of the same ``cache_salt``. ``choice_of`` is the id of the request that this
    is a further choice of; "" if it is not. The last ``num_begun`` tokens of the prompt are the answer's beginning, and
    the client has its text. ``hints`` say how long to cache its blocks.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    choice_of: str = ""
    num_begun: int = 0
    hints: tuple[CacheHint, ...] = ()


class State(enum.Enum):
    """The state of a sequence in the scheduler."""

    WAITING = "waiting"
    LOADING = "loading"
    """It holds blocks, and a load reads leading ones from the pool."""
    READY = "ready"
    """It holds blocks, with all KV that is not computed here, and waits to be scheduled."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities: of the chosen token, and of the likeliest ones in falling order."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenOutput:
    """The output of one step for a request. ``token_id`` None: it ended without a further token (aborted, failed)."""

    token_id: int | None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


@dataclass
class Saves:
    """The saves of a sequence's blocks to the pool: how many, and when."""

    num_begun: int = 0
    """Number of blocks that were passed to saves."""
    num_done: int = 0
    """Of these, the number of blocks that the pool has."""
    began_at: float = 0.0
    """When the first save began; this and the next are on ``time.monotonic``, and 0 until then."""
    ended_at: float = 0.0
    """When the last save so far ended."""


@dataclass(eq=False)
class Sequence:
    """The state of a request that runs. KV exists for ``token_ids[:num_computed]``, in the blocks of ``block_table``.

    The ``*_cached_tokens`` counts and ``prompt_sources`` say where the prompt's KV came from when it was first
    admitted, and ``pool_use`` explains the part from the pool; they are final once the first token exists.
    """

    request: Request
    block_size: int
    token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    """Number of leading blocks published to the prefix cache already."""
    num_saved: int = 0
    """Number of leading blocks passed to the pool already."""
    gathered: frozenset[int] = frozenset()
    """Blocks that were loaded from another sharding, where the pool has them."""
    num_exported: int = 0
    """Number of the prompt's leading blocks passed to its listener already."""
    num_offloaded: int = 0
    """Number of leading blocks that were released; their entries in ``block_table`` are undefined."""
    regime: Regime = Regime.DENSE
    blocks_read: int = 0
    """What sparse attention saves: blocks that steps read, summed over steps and layers ..."""
    blocks_passed: int = 0
    """... and blocks that dense attention would have read."""
    pending_saves: int = 0
    state: State = State.WAITING
    aborted: bool = False
    finish_reason: str | None = None
    own_cached_tokens: int = 0
    pool_cached_tokens: int = 0
    prompt_sources: list[tuple[str, int]] = field(default_factory=list)
    """Where the prompt's leading tokens came from, in order; the others were computed here."""
    pool_use: PoolUse = NOT_ASKED
    pool_load_seconds: float = 0.0
    num_preemptions: int = 0
    """How often the sequence had to release its blocks and start again."""
    arrival: float = field(default_factory=lambda: time.monotonic())
    started_at: float | None = None
    """When it was first scheduled to run."""
    first_token_at: float | None = None
    submitted_at: float = 0.0
    """When the engine got it; this and the others are on ``time.monotonic``, and 0 until then."""
    ended_at: float = 0.0
    look_up: tuple[float, float] | None = None
    """Beginning and end of the first look-up in the pool, if there was one ..."""
    load: tuple[float, float] | None = None
    """... and of the read from it, if there was one."""
    saves: Saves = field(default_factory=Saves)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self._root = root_hash(self.request.cache_salt)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def count_origins(self) -> dict[str, int]:
        """Return the prompt's tokens by the source of their KV, without those that were never computed."""
        counts = dict.fromkeys(_ORIGINS.values(), 0)
        for source, count in self.prompt_sources:
            counts[_ORIGINS[source]] += count
        rest = max(0, self.num_prompt_tokens - sum(counts.values()))
        return {**counts, "computed": rest if self.first_token_at is not None else 0}

    @property
    def num_exact(self) -> int:
        """Number of leading tokens with exact KV, which may be shared: sparse steps compute an approximation."""
        return self.num_computed if self.regime is Regime.DENSE else min(self.num_computed, self.num_prompt_tokens)

    @property
    def is_prefilling(self) -> bool:
        """Whether more than one token lacks KV: the next step computes a chunk, not just the newest token."""
        return len(self.token_ids) - self.num_computed > 1

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token lacks KV, and it was generated."""
        return self.num_computed >= self.num_prompt_tokens and not self.is_prefilling

    def hashes(self) -> SequenceOf[bytes]:
        """The hashes of all full blocks of ``token_ids``, computed or not."""
        return extend_block_hashes(self.block_hashes, self.token_ids, self.block_size, self._root)

    def list_ungathered(self, first: int, last: int) -> list[range]:
        """Return runs of the blocks from ``first`` to ``last`` that were not loaded from another sharding."""
        if not self.gathered:
            return [range(first, last)]
        return list(join_runs([i for i in range(first, last) if i not in self.gathered]))

    def hashes_of(self, block_size: int) -> SequenceOf[bytes]:
        """Return the hashes of all full blocks under another instance's block size."""
        return extend_block_hashes([], self.token_ids, block_size, self._root)
