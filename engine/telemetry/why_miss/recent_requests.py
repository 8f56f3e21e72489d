"""The last requests of an instance, to explain later why one was a miss.

A request is recorded when it has ended, in the event loop: the engine's steps are not involved. Their number is bounded
by the tokens of all their prompts together, 4 bytes each (and their messages, which are about as long).
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from engine.scheduling.pool_use import PoolUse
from engine.scheduling.request import Saves, Sequence

__all__ = ["PastRequest", "RecentRequests", "digest_salt"]

MAX_REQUESTS = 2000
MAX_TOKENS = 4_000_000
# Prefixes of a request's id in the ids of its answers.
_ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


@dataclass(frozen=True)
class PastRequest:
    """One request that has ended.

    Attributes:
        tokens: the tokens of its prompt.
        salt: ``digest_salt`` of its ``cache_salt``.
        cached_tokens: leading tokens that were in the instance's own cache or came from the pool.
        asked_at: when it queried the pool, or arrived, on ``time.monotonic``.
        was_read: whether blocks' bytes were read from the pool.
        saves: its saves to the pool, which may still run.
        messages: the messages that its prompt was rendered from, as the client sent them.
    """

    request_id: str
    tokens: SequenceOf[int]
    salt: str
    pool_use: PoolUse
    cached_tokens: int
    asked_at: float
    was_read: bool
    saves: Saves
    messages: SequenceOf[Mapping[str, Any]] = field(default=(), repr=False)

    @property
    def came_at(self) -> str:
        """The time of its look-up or arrival in readable form, in UTC."""
        return format_moment(self.asked_at)


class RecentRequests:
    """The last requests; if several have one id, the newest is found."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._requests: deque[PastRequest] = deque()

    def __iter__(self) -> Iterator[PastRequest]:
        """Iterate over the requests, the newest first."""
        return iter(list(reversed(self._requests)))

    def add_sequence(self, sequence: Sequence) -> None:
        """Record the request of an ended sequence; further choices of a request are skipped."""
        request = sequence.request
        if request.choice_of:
            return
        asked_at = sequence.look_up[0] if sequence.look_up else sequence.arrival
        self._requests.append(
            PastRequest(
                request.request_id,
                array("I", request.prompt_token_ids),
                digest_salt(request.cache_salt),
                sequence.pool_use,
                sequence.own_cached_tokens + sequence.pool_cached_tokens,
                asked_at,
                sequence.load is not None,
                sequence.saves,
                request.messages,
            )
        )
        self._num_tokens += sequence.num_prompt_tokens
        while len(self._requests) > MAX_REQUESTS or (self._num_tokens > self._max_tokens and len(self._requests) > 1):
            self._num_tokens -= len(self._requests.popleft().tokens)

    def find_request(self, request_id: str) -> PastRequest | None:
        """Return the newest request with this id, as clients and routers write it; None: it is not known (any more)."""
        names = {request_id, *(request_id.removeprefix(prefix) for prefix in _ID_PREFIXES)}
        return next((each for each in self if each.request_id in names), None)


def digest_salt(salt: str) -> str:
    """Return a digest that distinguishes salts without revealing them; empty for none."""
    return hashlib.sha256(b"salt" + salt.encode(errors="surrogatepass")).hexdigest()[:16] if salt else ""


def format_moment(moment: float) -> str:
    """Format a moment on ``time.monotonic`` as readable time in UTC."""
    return time.strftime("%H:%M:%SZ", time.gmtime(time.time() - (time.monotonic() - moment)))
