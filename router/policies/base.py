"""Policy, and its input and output: plain data, so that router, tests and simulator use the same policies.

A policy sees a prompt as a chain of chunk hashes: prompts with the same beginning have the same first hashes. No
tokenizer is needed: the chunks are cut from the text that a chat template would render, or from the token ids if the
client sent these. The order of the parts is the order in which they are rendered, and the whole conversation is
included: the next turn of a conversation, which appends messages, shares all whole chunks with the previous turn.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson
import xxhash

from router.policies.prefix_index import DEFAULT_MAX_ENTRIES

__all__ = [
    "DEFAULTS",
    "TOKENS_PER_CHUNK",
    "Decision",
    "InstanceLoad",
    "Outcome",
    "Policy",
    "PolicyBase",
    "PolicyOptions",
    "RequestFeatures",
    "Turns",
    "chunk_hashes",
    "find_session",
    "request_features",
]

TOKENS_PER_CHUNK = 128
"""Tokens per chunk: exact for token ids, approximate for text."""

# The part of a prompt after a million tokens is ignored: hashing it would block the router.
MAX_CHUNKS = 8192

# Both kinds of chunk have the same size: 128 tokens with about four bytes of text each, or four bytes per token id.
_BYTES_PER_TOKEN = 4
_CHUNK_BYTES = _BYTES_PER_TOKEN * TOKENS_PER_CHUNK
_MAX_BYTES = MAX_CHUNKS * _CHUNK_BYTES
_MAX_TOKENS = MAX_CHUNKS * TOKENS_PER_CHUNK
# Each part of a prompt counts as at least this size, which limits the number of parts.
_PART_BYTES = 200
_MAX_DEPTH = 20
# If one of these differs, equal text has different KV.
_SALTS = ("model", "cache_salt", "lora_path", "lora_request")
# Members that chat templates render before the messages.
_RENDERED_FIRST = ("chat_template", "tools", "documents", "system", "instructions")


class RequestFeatures:
    """Properties of a request that a policy may use. Its prefix is hashed only if a policy reads it."""

    def __init__(
        self,
        prompt_tokens: int,
        prefix: Callable[[], Sequence[int]] | None = None,
        *,
        tokens_per_chunk: int = 0,
        key: str = "",
        model: object = "",
    ) -> None:
        """
        Args:
            prompt_tokens: estimated number of prompt tokens.
            prefix: returns the chained hashes of the prompt's whole chunks, first to last.
            tokens_per_chunk: estimated number of tokens per chunk.
            key: session or user of the request; ``""`` if it names none.
            model: name of the model in the request, as the client sent it; ``""`` if it names none.
        """
        self.prompt_tokens = prompt_tokens
        self.tokens_per_chunk = tokens_per_chunk
        self.key = key
        self.model = model
        if prefix is None:
            self.chunks = ()
        else:
            self._hash_prefix = prefix

    @cached_property
    def chunks(self) -> Sequence[int]:
        """Chained hashes of the prompt's whole chunks: equal first hashes mean an equal beginning."""
        return self._hash_prefix()


@dataclass(slots=True)
class InstanceLoad:
    """The requests that the router has running on one instance. Policies choose among these, read-only."""

    key: str
    """``host:port``."""
    requests: int = 0
    """Number of requests sent to it and not completely answered."""
    tokens: int = 0
    """Prompt tokens of those requests."""
    queued: float = 0.0
    """Work of those requests that have no first token yet: the sum of their decisions' ``work``."""
    running: int | None = None
    """Number of running requests that the instance reports, from all routers; None if unknown."""
    waiting: int | None = None
    """Number of waiting requests that the instance reports; None if unknown."""

    def add_request(self, tokens: int, work: float) -> None:
        """Count a request that is sent to it, with this number of prompt tokens and a prefill that costs ``work``."""
        self.requests += 1
        self.tokens += tokens
        self.queued += work

    def remove_prefill(self, tokens: int, work: float) -> None:
        """Note that the prefill of a request is complete."""
        self.tokens -= tokens
        self.queued -= work

    def remove_request(self, tokens: int, work: float) -> None:
        """Note that a request has ended. ``tokens`` and ``work`` are those of its prefill, if that was not complete."""
        self.requests -= 1
        self.tokens -= tokens
        self.queued -= work


class Decision(NamedTuple):
    """The chosen instance's key, and the values that decided the choice."""

    key: str
    reasons: Mapping[str, float | str]
    work: float
    """Cost of its prefill in computed tokens: the tokens of the prompt without the cached ones."""
    cached_tokens: int = 0
    """Number of the prompt's tokens that the policy expects not to be computed."""


class Outcome(NamedTuple):
    """The result of a request that a policy placed."""

    key: str
    """Key of the instance."""
    queued: float
    """Its ``InstanceLoad.queued`` when the request was sent there, without the request's own work."""
    ttft: float | None
    """Seconds from sending to the first token; None if no single moment shows it."""
    prompt_tokens: int | None
    """Number of prompt tokens as the engine counted them; None if it did not report it."""
    cached_tokens: int | None
    """Number of prompt tokens that the engine did not compute; None if it did not report it."""
    own_cached_tokens: int | None = None
    """Number of those from the instance's own cache, not from the pool; None if the engine did not report it."""


class PolicyOptions(NamedTuple):
    """Settings of policies. Most names and defaults are those of FastDeploy's Go router."""

    eviction_duration_mins: float = 30.0
    balance_abs_threshold: float = 1.0
    balance_rel_threshold: float = 0.2
    hit_ratio_weight: float = 1.0
    load_balance_weight: float = 0.05
    waiting_weight: float = 10.0
    prefix_index_entries: int = DEFAULT_MAX_ENTRIES


class Policy(Protocol):
    """Chooses one of the candidates. It may have its own state, and is called from one thread."""

    token_seconds: float
    """Learned time that a token of work takes an instance, in seconds; 0 if not learned yet."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Return the choice among ``candidates``, which is not empty."""

    def observe_outcome(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """Learn from a request that was placed by ``decision`` and has been answered."""

    def make_sibling(self) -> Policy:
        """Return a policy of the same kind for requests of another model. It shares the known caches, but learns
        separately.
        """

    def forget_instance(self, key: str) -> None:
        """Discard all knowledge about this instance's cache: it has restarted or is gone."""


DEFAULTS = PolicyOptions()

requests_of = attrgetter("requests")
"""Get ``InstanceLoad.requests``, for ``map``."""
tokens_of = attrgetter("tokens")
"""Get ``InstanceLoad.tokens``, for ``map``."""


_AnyPolicy = TypeVar("_AnyPolicy", bound="PolicyBase")


class PolicyBase:
    """A policy that learns nothing and stores nothing about instances."""

    token_seconds = 0.0
    """See ``Policy.token_seconds``."""

    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: returns the time in seconds; a simulator has its own clock.
        """
        self._options = options
        self._clock = clock
        self._turns = Turns()

    def observe_outcome(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """See ``Policy.observe_outcome``."""

    def make_sibling(self: _AnyPolicy) -> _AnyPolicy:
        """See ``Policy.make_sibling``."""
        return type(self)(self._options, self._clock)

    def forget_instance(self, key: str) -> None:
        """See ``Policy.forget_instance``."""


class Turns:
    """Selects candidates in turn, so that equal ones share the work."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0

    def take_next(self, candidates: Sequence[InstanceLoad]) -> InstanceLoad:
        """Return the next candidate in turn."""
        chosen = candidates[self.taken % len(candidates)]
        self.taken += 1
        return chosen

    def take_least(self, candidates: Sequence[InstanceLoad], scores: Sequence[Any]) -> InstanceLoad:
        """Return the candidate with the lowest of ``scores``, which have the candidates' order. Equal ones take
        turns.
        """
        count = len(candidates)
        start = self.taken % count
        self.taken += 1
        # No Python function is called per candidate, because a request waits for this.
        return candidates[min([*range(start, count), *range(start)], key=scores.__getitem__)]


def request_features(
    members: Mapping[str, Any], prompt_tokens: int, session: str = "", num_bytes: int = 0
) -> RequestFeatures:
    """Return the features of the request with this body, and with this ``session`` in its headers; hash nothing yet.

    Args:
        prompt_tokens: estimate for the text only.
        num_bytes: size of the body: images and other media belong to a prefix, too.
    """
    size = max(prompt_tokens, num_bytes // _BYTES_PER_TOKEN)
    return RequestFeatures(
        prompt_tokens,
        partial(chunk_hashes, members, size) if size >= TOKENS_PER_CHUNK else None,
        tokens_per_chunk=TOKENS_PER_CHUNK,
        key=session or session_key(members),
        model=members.get("model", ""),
    )


def find_session(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the session named in a request's headers (in ASGI's format); ``""`` if there is none."""
    for name, value in headers:
        if name == b"x-session-id" and value:
            return value.decode("latin-1")
    return ""


def session_key(members: Mapping[str, Any]) -> str:
    """Return the session or user named in a request's body: ``session_id``, else that of ``extra_body``, else
    ``user``.
    """
    key, extra = members.get("session_id"), members.get("extra_body")
    if not (isinstance(key, str) and key) and isinstance(extra, dict):  # FastDeploy's Go router reads it there, too
        key = extra.get("session_id")
    if not (isinstance(key, str) and key):
        key = members.get("user")
    return key if isinstance(key, str) else ""


def chunk_hashes(members: Mapping[str, Any], prompt_tokens: int = 0) -> list[int]:
    """Return the chained 64-bit hashes of the prompt's whole chunks, at most ``MAX_CHUNKS``; empty without a prompt.

    Each hash is ``xxh3_64(chunk, seed=previous hash)``. The first seed is computed from the model and the other members
    for which equal text has different KV.

    Args:
        prompt_tokens: an estimate. Only the beginning of a prompt that is too long is used.
    """
    if prompt_tokens > _MAX_TOKENS:
        members = _clip_members(members)
    digest = xxhash.xxh3_64_intdigest
    data = _encode_prompt(members)[:_MAX_BYTES]
    seed = digest(_encode_json([members.get(name) for name in _SALTS]))
    hashes = []
    for start in range(0, len(data) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
        seed = digest(data[start : start + _CHUNK_BYTES], seed)
        hashes.append(seed)
    return hashes


def _encode_prompt(members: Mapping[str, Any]) -> bytes:
    token_ids = members.get("prompt_token_ids")
    if token_ids:
        return _encode_sequence(token_ids)
    messages = members.get("messages") or members.get("input")  # chat and Anthropic's messages; responses
    if messages:
        first = [members[name] for name in _RENDERED_FIRST if name in members]
        return (_encode_json(first) if first else b"") + _encode_sequence(messages)
    return _encode_sequence(members.get("prompt"))


def _encode_sequence(prompt: Any) -> bytes:
    """Encode a prompt so that equal beginnings give equal bytes: no closing bracket or quote ends the encoding."""
    if isinstance(prompt, str):
        return prompt[:_MAX_BYTES].encode(errors="surrogatepass")
    if not isinstance(prompt, list):
        return b""
    if prompt and isinstance(prompt[0], int):
        try:
            return array("I", prompt if len(prompt) <= _MAX_TOKENS else prompt[:_MAX_TOKENS]).tobytes()
        except (TypeError, OverflowError):  # numbers that are not token ids
            return _encode_json(prompt)[:-1]
    return _encode_json(prompt)[:-1]


def _clip_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``members`` without most of the text after the first ``_MAX_BYTES`` of the prompt."""
    clipped, room = dict(members), _MAX_BYTES
    for name in (*_RENDERED_FIRST, "messages", "input"):
        if name in members:
            clipped[name], room = _clip_value(members[name], room)
    return clipped


def _clip_value(value: Any, room: int, depth: int = 0) -> tuple[Any, int]:
    """Return ``value`` with as many of its first parts as fit into ``room`` bytes of JSON, and the remaining bytes."""
    if isinstance(value, str):
        return value[: max(0, room)], room - len(value) - _PART_BYTES
    if depth > _MAX_DEPTH or not value or not isinstance(value, list | dict):
        return value, room - _PART_BYTES
    kept: list[Any] = []
    for part in value.values() if isinstance(value, dict) else value:
        if room <= 0:
            break
        clipped, room = _clip_value(part, room, depth + 1)
        kept.append(clipped)
    return (dict(zip(value, kept, strict=False)) if isinstance(value, dict) else kept), room


def _encode_json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # half a surrogate pair, an integer of more than 64 bits, or nested more than 254 deep
        return _encode_odd_json(value)


def _encode_odd_json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b""
