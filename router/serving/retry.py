"""Retries of one request: what may be sent again, to which instances, and after which pause.

Only the table ``RULES`` decides whether a request is sent again. The columns of its rows are what was sent (``Sent``),
how far that got (``Reached``) and what went wrong (``Trouble``). The first matching row gives the number of attempts
that may end like this. Two rules explain the numbers:

- A request that may have ended its instance may end at most two, counting prefill and decode, before and during its
  answer: a request that kills instances cannot be distinguished from an instance that dies by chance.
- A request that may change the state of the instance is not sent again once it was sent (RFC 9110, 9.2.2).
"""

from __future__ import annotations

import enum
import itertools
import random
import time
from asyncio import sleep
from collections.abc import Iterator, Mapping, Sequence

from router.fleet import Instance
from router.http import Response, TimedOut, UpstreamError
from router.policies import RequestFeatures
from router.serving.reading.api import GENERATING
from router.serving.selection import NoInstance, Selection, Selector

__all__ = [
    "MAX_ATTEMPTS",
    "MAX_DEATHS",
    "RULES",
    "LegFailed",
    "Reached",
    "Retries",
    "Sent",
    "Trouble",
    "classify",
    "find_limit",
]

MAX_ATTEMPTS = 6
MAX_DEATHS = 2

# Pause before the second attempt after a failure that other instances may share; doubled before each further attempt.
BACK_OFF_SECONDS = 0.05

# After a lost connection, an instance that is selectable again after this time has restarted.
RETURN_SECONDS = 2.0

_NONE: frozenset[str] = frozenset()
# RFC 9110, 9.2.2.
_IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
# At these paths, the result of engines depends only on the request, and is not stored.
_COMPUTING_PATHS = frozenset(
    {
        *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/v1/classify", "/tokenize", "/detokenize"),
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/messages/count_tokens"),
        *("/v1/moderations", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/reward"),
    }
)


class Sent(enum.Enum):
    """Kind of the request that was sent."""

    GENERATION = "generation"
    """A request whose answer is generated: chat, completions, responses, messages."""
    REPEATABLE = "repeatable"
    """Another request that can be served twice without an additional effect."""
    ONCE = "once"
    """Any other request: it may change the state of the instance."""


class Reached(enum.Enum):
    """Progress of the request at its failure."""

    UNSENT = "unsent"
    """No instance has received it."""
    SENT = "sent"
    """It was sent, and no byte came back."""
    HEAD = "head"
    """The response has begun, and the client has seen nothing of it."""
    RELAYED = "relayed"
    """The client has seen a part of the response."""


class Trouble(enum.Enum):
    """Cause of a failure."""

    UNREACHABLE = "unreachable"
    """No connection was made, or a pair was not ready."""
    DEATH = "death"
    """The connection ended or did not carry HTTP, the instance stopped answering, or its engine reports its death."""
    ERROR = "error"
    """The instance refused it, temporarily or permanently, for a reason of its own: 429 or 5xx."""
    HAND_OVER = "hand-over"
    """The KV transfer between prefill and decode failed; it is unknown which of them is the cause."""
    REJECTION = "rejection"
    """The instance refused it because of the request: another status that is not a success."""
    STALL = "stall"
    """A stream is silent, although its instance is alive."""


class LegFailed(Exception):
    """A leg failed before the first byte of the response: with the instance's own ``response``, or without one."""

    def __init__(
        self,
        instance: Instance,
        message: str,
        response: Response | None = None,
        *,
        reached: Reached = Reached.HEAD,
        trouble: Trouble,
        is_stale: bool = False,
    ) -> None:
        """
        Args:
            is_stale: whether an idle connection ended when the request was sent on it: most likely it was already
                closed.
        """
        super().__init__(message)
        self.instance = instance
        self.response = response
        self.reached = reached
        self.trouble = trouble
        self.is_stale = is_stale


_ANY_SENT, _ANY_REACH, _ANY_TROUBLE = frozenset(Sent), frozenset(Reached), frozenset(Trouble)

RULES: Sequence[tuple[frozenset[Sent], frozenset[Reached], frozenset[Trouble], int]] = (
    # columns: what was sent, how far it got, what went wrong, number of attempts that may end like this (1: no retry)
    (_ANY_SENT, _ANY_REACH, frozenset({Trouble.REJECTION}), 1),
    (_ANY_SENT, frozenset({Reached.UNSENT}), _ANY_TROUBLE, MAX_ATTEMPTS),
    (frozenset({Sent.ONCE}), _ANY_REACH, _ANY_TROUBLE, 1),
    (frozenset({Sent.REPEATABLE}), frozenset({Reached.RELAYED}), _ANY_TROUBLE, 1),
    # Deaths are counted in total, before and during an answer; other failures since the last byte that the client got.
    (_ANY_SENT, _ANY_REACH, frozenset({Trouble.DEATH}), MAX_DEATHS),
    # Stalled streams are resumed up to --stream-resume-count times.
    (_ANY_SENT, _ANY_REACH, _ANY_TROUBLE, MAX_ATTEMPTS),
)


def classify(method: str, path: str) -> Sent:
    """Return the kind of a client's request."""
    if path in GENERATING:
        return Sent.GENERATION
    if method in _IDEMPOTENT_METHODS or path in _COMPUTING_PATHS:
        return Sent.REPEATABLE
    return Sent.ONCE


def _list_limits() -> Iterator[tuple[tuple[Sent, Reached, Trouble], int]]:
    for cell in itertools.product(Sent, Reached, Trouble):
        row = next(row for row in RULES if all(value in allowed for value, allowed in zip(cell, row[:3], strict=True)))
        yield cell, row[3]


_LIMITS: Mapping[tuple[Sent, Reached, Trouble], int] = dict(_list_limits())


def find_limit(sent: Sent, reached: Reached, trouble: Trouble) -> int:
    """Return how many attempts for one request may end like this; 1: it is not sent again."""
    return _LIMITS[sent, reached, trouble]


class Retries:
    """The failed attempts of one request, and the keys of the instances at which they failed."""

    __slots__ = ("_avoided", "_deaths", "_excluded", "_failed", "_hung", "_pauses", "_returns", "_sent", "wants_fresh")

    def __init__(self, sent: Sent) -> None:
        self.wants_fresh = False
        """Whether idle connections had been closed: from now on each leg gets a new connection."""
        self._sent = sent
        self._deaths = 0  # instances that ended while they served it, or may have
        self._failed = 0  # attempts since the last byte that the client got
        self._excluded = _NONE  # not to be used again
        self._avoided = _NONE  # used again only if there is no other
        self._hung = _NONE
        self._returns: dict[str, float] | None = None  # of excluded instances that may return: the times from which on
        self._pauses = 0

    def select(self, selector: Selector, features: RequestFeatures, is_completion: bool) -> Selection:
        """Select the instance or the pair for the next attempt.

        Raises:
            NoInstance: none is left.
        """
        choose = selector.choose if is_completion else selector.choose_any
        if self._returns:
            now = time.monotonic()
            self._excluded -= {key for key, at in self._returns.items() if now >= at}
        if self._avoided:
            try:
                return choose(features, self._excluded | self._avoided)
            except NoInstance:
                pass  # better an avoided one than none
        return choose(features, self._excluded)

    def excludes(self, key: str) -> bool:
        """Return whether the request must not be sent to this instance again."""
        return key in self._excluded

    def avoid(self, key: str) -> None:
        """Use this instance again only if there is no other."""
        self._avoided |= {key}

    def find_end(self, reached: Reached, trouble: Trouble, deaths: int) -> str:
        """Note a failed attempt; return why the request is not sent again, ``""`` if it is.

        Args:
            deaths: number of instances that ended in this attempt, or may have.
        """
        self._deaths += deaths
        self._failed += 1
        limit = find_limit(self._sent, reached, trouble)
        if limit == 1:
            return "a request of this kind is not sent again" if trouble is not Trouble.REJECTION else "it is refused"
        if deaths and self._deaths >= find_limit(self._sent, reached, Trouble.DEATH):
            return f"{self._deaths} instances have failed under the request, so it is not sent again"
        return f"it was sent {self._failed} times" if self._failed >= limit else ""

    def begin_again(self, key: str, *, is_hung: bool) -> None:
        """Begin again after a failure in the middle: earlier failed instances may be used again, this one as last
        resort.

        Args:
            is_hung: whether it must not be used again, because it might hang repeatedly.
        """
        if is_hung:
            self._hung |= {key}
        self._excluded, self._returns = self._hung, None
        self._avoided = frozenset({key})
        self._failed = self._pauses = 0

    async def exclude_and_back_off(self, failure: LegFailed, selection: Selection) -> None:
        """Note which instances the next attempt should not use, and pause before it."""
        key = failure.instance.key
        if failure.is_stale:
            self.wants_fresh = True
            return
        if failure.trouble is Trouble.HAND_OVER and selection.prefill is not None:
            self._avoided |= {selection.prefill.key, selection.answering.key}
        else:
            self._excluded |= {key}
            cause = failure.__cause__
            if isinstance(cause, UpstreamError) and not isinstance(cause, TimedOut) and key not in self._hung:
                self._returns = {**(self._returns or {}), key: time.monotonic() + RETURN_SECONDS}
        self._pauses += 1
        if self._pauses > 1:
            await sleep(BACK_OFF_SECONDS * 2 ** (self._pauses - 2) * random.uniform(0.5, 1.0))
