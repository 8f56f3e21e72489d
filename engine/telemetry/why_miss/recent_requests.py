"""The last requests of an instance, so that it can be told later why one was a miss.

A request is taken down when it has ended, in the event loop: the engine's steps know nothing of it. The number kept is
bounded by the tokens of all their prompts together, 4 bytes each (and their messages, which are about as long).
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
# Before the id of a request in the ids of its answers.
_ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


@dataclass(frozen=True)
class PastRequest:
    """One request that has ended.

    Attributes:
        tokens: of its prompt.
        salt: ``digest_salt`` of its ``cache_salt``.
        cached_tokens: leading ones that were in the instance's own cache or came from the pool.
        asked_at: when it asked the pool, or came, on ``time.monotonic``.
        was_read: whether the pool was asked for blocks' bytes.
        saves: its saves to the pool, which may still run.
        messages: that its prompt was rendered from, as the client sent them.
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
        """When it asked, as people write it, in UTC."""
        return format_moment(self.asked_at)


class RecentRequests:
    """The last requests, the newest of an id first."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._requests: deque[PastRequest] = deque()

    def __iter__(self) -> Iterator[PastRequest]:
        """The newest first."""
        return iter(list(reversed(self._requests)))

    def add_sequence(self, sequence: Sequence) -> None:
        """Keep the request of a sequence that has ended; further choices of one are passed over."""
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
        """The last one of this id, as clients and routers write it; None: it is not known, or not any more."""
        names = {request_id, *(request_id.removeprefix(prefix) for prefix in _ID_PREFIXES)}
        return next((each for each in self if each.request_id in names), None)


def digest_salt(salt: str) -> str:
    """By which two salts are told apart, and not known; empty for none."""
    return hashlib.sha256(b"salt" + salt.encode(errors="surrogatepass")).hexdigest()[:16] if salt else ""


def format_moment(moment: float) -> str:
    """A moment on ``time.monotonic`` as people write it, in UTC."""
    return time.strftime("%H:%M:%SZ", time.gmtime(time.time() - (time.monotonic() - moment)))
