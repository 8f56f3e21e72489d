"""Policy, its input and its output. These are plain data, so that router, tests and simulator use the same policies.

A policy gets a prompt as a list of chunk hashes. A chunk is 128 tokens of the prompt, and its hash also covers all
earlier chunks. So prompts with the same beginning have the same first hashes.

The router has no tokenizer. It cuts the chunks from the members that a chat template would render, as JSON and in the
template's order; or from the token ids, if the client sent token ids. A request contains the whole conversation, and
the next turn appends messages to it. So the next turn has all chunks of the previous turn.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
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
    "request_features",
]

TOKENS_PER_CHUNK = 128
"""Number of tokens in a chunk: exact for token ids, approximate for text."""

# The part of a prompt after a million tokens is ignored: hashing it would block the router.
MAX_CHUNKS = 8192

# Chunks of text and of token ids have the same size: a token is about four bytes of text, a token id four bytes.
_BYTES_PER_TOKEN = 4
_CHUNK_BYTES = _BYTES_PER_TOKEN * TOKENS_PER_CHUNK
_MAX_BYTES = MAX_CHUNKS * _CHUNK_BYTES
_MAX_TOKENS = MAX_CHUNKS * TOKENS_PER_CHUNK
# ``_clip_members`` counts each part of a prompt with at least this many bytes, which limits the number of parts.
_PART_BYTES = 200
_MAX_DEPTH = 20
# Members of a request that the KV of a text depends on, besides the text itself.
_SALTS = ("model", "cache_salt", "lora_path", "lora_request")
# With these an engine computes cached tokens again, or the prompt is not the text that the router sees.
_NOT_READING_CACHE = ("prompt_logprobs", "echo", "truncate_prompt_tokens", "chat_template_kwargs")
# Members that chat templates render before the messages.
_RENDERED_FIRST = ("chat_template", "tools", "documents", "system", "instructions")


class RequestFeatures:
    """The properties of a request that a policy may use. The prompt is hashed only when a policy reads ``chunks``."""

    def __init__(
        self,
        prompt_tokens: int,
        prefix: Callable[[], Sequence[int]] | None = None,
        *,
        text: Callable[[], bytes] = bytes,
        tokens_per_chunk: int = 0,
        key: str = "",
        home: str = "",
        model: object = "",
        reads_cache: bool = True,
    ) -> None:
        """
        Args:
            prompt_tokens: estimated number of prompt tokens.
            prefix: returns the hashes of the prompt's whole chunks, first to last.
            text: returns the text from which the chunks are cut.
            tokens_per_chunk: estimated number of tokens per chunk; 0 if the request has no chunks.
            key: session or user of the request; ``""`` if the request names none.
            home: session for the choice among instances of the same cost. Requests with the same ``home`` use the same
                instance. Requests with ``""`` use these instances in turn.
            model: name of the model, as the client sent it; ``""`` if the request names none.
            reads_cache: whether the engine's number of cached tokens says what it has cached of the prompt. False if
                the request makes the engine compute cached tokens again, or changes the prompt.
        """
        self.prompt_tokens = prompt_tokens
        self.tokens_per_chunk = tokens_per_chunk
        self.key = key
        self.home = home
        self.model = model
        self.reads_cache = reads_cache
        self._text = text
        if prefix is None:
            self.chunks = ()
        else:
            self._hash_prefix = prefix

    @cached_property
    def chunks(self) -> Sequence[int]:
        """Hashes of the prompt's whole chunks. Prompts with the same beginning have the same first hashes."""
        return self._hash_prefix()

    def text_after(self, num_chunks: int) -> bytes:
        """Return the prompt's text after its first ``num_chunks`` chunks."""
        return self._text()[num_chunks * _CHUNK_BYTES :]


@dataclass(slots=True)
class InstanceLoad:
    """The load of one instance: its requests that have not ended, of all processes that share their counts."""

    key: str
    """Address of the instance as ``host:port``."""
    requests: int = 0
    """Number of requests that were sent to the instance and have no complete response yet."""
    tokens: int = 0
    """Number of prompt tokens of the requests whose prefill is not complete."""
    queued: float = 0.0
    """Sum of ``Decision.work`` of the requests whose prefill is not complete."""
    running: int | None = None
    """Number of running requests that the instance reports, which includes all routers' requests; None if unknown."""
    waiting: int | None = None
    """Number of waiting requests that the instance reports; None if unknown."""

    def add_request(self, tokens: int, work: float) -> None:
        """Add a request with ``tokens`` prompt tokens, whose prefill costs ``work`` (``Decision.work``)."""
        self.requests += 1
        self.tokens += tokens
        self.queued += work

    def remove_prefill(self, tokens: int, work: float) -> None:
        """Remove the prompt of a request, because its prefill is complete."""
        self.tokens -= tokens
        self.queued -= work

    def remove_request(self, tokens: int, work: float) -> None:
        """Remove a request that has ended; ``tokens`` and ``work`` are 0 if its prefill has already ended."""
        self.requests -= 1
        self.tokens -= tokens
        self.queued -= work


class Decision(NamedTuple):
    """The choice of an instance: its key, and the values that decided the choice."""

    key: str
    reasons: Mapping[str, float | str]
    work: float
    """Cost of the request's prefill, in computed tokens. Cached tokens cost nothing, or less than computed ones."""
    cached_tokens: int = 0
    """Number of prompt tokens that the instance will not have to compute, as the policy expects."""
    computed_before: tuple[int, int] = (0, 0)
    """Numbers of leading chunks of the prompt that earlier requests have computed: at the instance; at any instance."""


class Outcome(NamedTuple):
    """The result of a request, for the policy that chose its instance."""

    key: str
    """Key of the instance that served the request."""
    queued: float
    """``InstanceLoad.queued`` when the request was sent to the instance, without the request's own work."""
    ttft: float | None
    """Seconds from sending the request to its first token; None if the time of the first token is unknown."""
    prompt_tokens: int | None
    """Number of prompt tokens that the engine counted; None if the engine did not report it."""
    cached_tokens: int | None
    """Number of prompt tokens that the engine did not compute; None if the engine did not report it."""
    own_cached_tokens: int | None = None
    """Number of cached tokens from the instance's own cache, not from the pool; None if the engine did not report
    it.
    """
    completion_tokens: int | None = None
    """Number of generated tokens; None if the engine did not report it."""
    seconds: float = 0.0
    """Seconds since the request was sent to the instance."""


class PolicyOptions(NamedTuple):
    """Settings of the policies; ``RouterSettings`` explains them. FastDeploy's Go router also has most of them."""

    eviction_duration_mins: float = 30.0
    balance_abs_threshold: float = 1.0
    balance_rel_threshold: float = 0.2
    hit_ratio_weight: float = 1.0
    load_balance_weight: float = 0.05
    waiting_weight: float = 10.0
    prefix_index_entries: int = DEFAULT_MAX_ENTRIES


class Policy(Protocol):
    """Chooses an instance from candidates. A policy may store what it learns. Only one thread calls it."""

    token_seconds: float
    """Seconds that an instance needs for one token of ``Decision.work``; 0 if the policy has not learned this time."""

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Choose one of ``candidates``, of which there is at least one."""

    def observe_outcome(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """Learn from the result of a request that was sent to the instance in ``decision``."""

    def make_sibling(self) -> Policy:
        """Return a policy of the same kind for requests of another model.

        Both policies share the index of caches, but each has its own estimates.
        """

    def forget_instance(self, key: str) -> None:
        """Delete what is known about the cache of the instance ``key``, because the instance has restarted or ended."""


DEFAULTS = PolicyOptions()

requests_of = attrgetter("requests")
"""Function that returns ``InstanceLoad.requests``, for use with ``map``."""
tokens_of = attrgetter("tokens")
"""Function that returns ``InstanceLoad.tokens``, for use with ``map``."""


_AnyPolicy = TypeVar("_AnyPolicy", bound="PolicyBase")


class PolicyBase:
    """Base of policies that store nothing about instances or past requests."""

    token_seconds = 0.0
    """Seconds for one token of ``Decision.work``. It stays 0, because these policies do not learn this time."""

    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: returns the time in seconds; a simulator has its own clock.
        """
        self._options = options
        self._clock = clock
        self._turns = Turns()

    def observe_outcome(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """Do nothing, because these policies do not learn from results."""

    def make_sibling(self: _AnyPolicy) -> _AnyPolicy:
        """Return a policy of the same class and with the same options, for requests of another model."""
        return type(self)(self._options, self._clock)

    def forget_instance(self, key: str) -> None:
        """Do nothing, because these policies store nothing about instances."""


class Turns:
    """Chooses candidates in turn, so that candidates with equal scores get equal work."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0

    def take_next(self, candidates: Sequence[InstanceLoad]) -> InstanceLoad:
        """Return the next candidate in round-robin order."""
        chosen = candidates[self.taken % len(candidates)]
        self.taken += 1
        return chosen

    def take_least(self, candidates: Sequence[InstanceLoad], scores: Sequence[Any]) -> InstanceLoad:
        """Return the candidate with the lowest score. Candidates with equal scores are chosen in turn.

        Args:
            scores: the score of each candidate, in the same order.
        """
        count = len(candidates)
        start = self.taken % count
        self.taken += 1
        # No Python function is called for each candidate, because the request waits for this choice.
        return candidates[min([*range(start, count), *range(start)], key=scores.__getitem__)]


def request_features(
    members: Mapping[str, Any], prompt_tokens: int, session: str = "", parent: str = "", *, num_bytes: int = 0
) -> RequestFeatures:
    """Return the features of a request. Its prompt is hashed later, and only if a policy needs the hashes.

    Args:
        members: the members of the request's body.
        prompt_tokens: estimated number of tokens of the text.
        session: the session that the request's headers name.
        parent: the session that started ``session``, if the headers name it.
        num_bytes: size of the body, which includes images and other media.
    """
    size = max(prompt_tokens, num_bytes // _BYTES_PER_TOKEN)
    key = session or session_key(members)
    reads_cache = True
    for name in _NOT_READING_CACHE:  # a loop: a generator would be a call for each name of each request
        value = members.get(name)
        reads_cache = reads_cache and (value is None or value is False)
    return RequestFeatures(
        prompt_tokens,
        partial(chunk_hashes, members, size) if size >= TOKENS_PER_CHUNK else None,
        text=partial(_render_prompt, members, size),
        tokens_per_chunk=TOKENS_PER_CHUNK,
        key=key,
        home=parent or (key if key != members.get("user") else ""),
        model=members.get("model", ""),
        reads_cache=reads_cache,
    )


def session_key(members: Mapping[str, Any]) -> str:
    """Return the session or user that a request's body names; ``""`` if it names none.

    The first of these members counts: ``session_id``, ``session_id`` in ``extra_body``, ``prompt_cache_key`` (OpenAI's
    name for requests that share a prefix), ``user``.
    """
    key, extra = members.get("session_id"), members.get("extra_body")
    if not (isinstance(key, str) and key) and isinstance(extra, dict):  # as FastDeploy's Go router does
        key = extra.get("session_id")
    if not (isinstance(key, str) and key):
        key = members.get("prompt_cache_key") or members.get("user")
    return key if isinstance(key, str) else ""


def chunk_hashes(members: Mapping[str, Any], prompt_tokens: int = 0) -> list[int]:
    """Return the 64-bit hashes of the prompt's whole chunks, at most ``MAX_CHUNKS``; empty without a prompt.

    Each hash is ``xxh3_64(chunk, seed=previous hash)``. The first seed is computed from the model and the other members
    that the KV of a text depends on.

    Args:
        members: the members of the request's body.
        prompt_tokens: estimated number of tokens. It decides whether the end of a long prompt is cut off.
    """
    digest = xxhash.xxh3_64_intdigest
    data = _render_prompt(members, prompt_tokens)
    seed = digest(_encode_json([members.get(name) for name in _SALTS]))
    hashes = []
    for start in range(0, len(data) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
        seed = digest(data[start : start + _CHUNK_BYTES], seed)
        hashes.append(seed)
    return hashes


def _render_prompt(members: Mapping[str, Any], prompt_tokens: int) -> bytes:
    """Return the text of the prompt from which its chunks are cut."""
    if prompt_tokens > _MAX_TOKENS:
        members = _clip_members(members)
    return _encode_prompt(members)[:_MAX_BYTES]


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
    """Encode a prompt without the bracket or quote that would end it, so that equal beginnings give equal bytes."""
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
    """Return ``members`` with only about the first ``_MAX_BYTES`` bytes of the prompt's text."""
    clipped, room = dict(members), _MAX_BYTES
    for name in (*_RENDERED_FIRST, "messages", "input"):
        if name in members:
            clipped[name], room = _clip_value(members[name], room)
    return clipped


def _clip_value(value: Any, room: int, depth: int = 0) -> tuple[Any, int]:
    """Return the first parts of ``value`` that fit into ``room`` bytes of JSON, and the number of bytes that remain."""
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
