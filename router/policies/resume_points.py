"""ResumePoints: learns from ``usage`` how much of a known prefix an instance, or the pool, can use.

An instance can continue a prompt only at a position for which all layers still have the KV or the state that they need.
In a model with sliding windows or recurrent layers, this position may be far before the end of the prefix that the
instance has computed. Either a block of a window was evicted, or the recurrent layers have stored no state at the
position where two prompts begin to differ.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["POOL", "ResumePoints"]

POOL = ""
"""The key that means the pool. All other keys are keys of instances."""

_MAX_ENTRIES = 20_000
_MAX_REMOVED = 4  # in one call, so that no request waits for many others' entries
# After one response with fewer cached tokens, the instance has computed the prefix again. If that has restored what was
# lost, the next response has all of it. So only a request that was sent later can confirm the first one.
_MIN_RESPONSES = 2


class _End(NamedTuple):
    """What was learned about one prefix at one instance."""

    resumed: int
    """Number of leading chunks that were cached, according to the last response."""
    responses: int
    """Number of successive responses that reported fewer cached chunks than the prefix has."""
    counted_at: float
    """Time at which the last of ``responses`` was counted."""


class ResumePoints:
    """Predicts how many chunks of a cached prefix an instance really uses, from the cached tokens in its responses.

    Args:
        lifetime_seconds: after this time without a response, what was learned about a prefix is forgotten.
        clock: returns the time in seconds.
    """

    def __init__(self, lifetime_seconds: float, clock: Callable[[], float]) -> None:
        self._lifetime_seconds = lifetime_seconds
        self._clock = clock
        self._ends: OrderedDict[tuple[str, int], _End] = OrderedDict()
        self.is_empty = True
        """Whether nothing is known, so that ``find`` returns the end of each prefix."""

    def find(self, key: str, chunk: int, end: int) -> int:
        """Return how many leading chunks of a prefix can probably be used from an instance's cache, or from the pool.

        Args:
            key: the instance, or ``POOL``.
            chunk: hash of the last chunk of the prefix.
            end: number of chunks in the prefix.
        """
        known = self._ends.get((key, chunk))
        if known is None or known.responses < _MIN_RESPONSES or self._is_old(known):
            return end
        return min(end, known.resumed)

    def observe(self, key: str, chunk: int, end: int, resumed: int, sent_at: float) -> None:
        """Learn from a response how much of a prefix was cached.

        Args:
            key: the instance, or ``POOL``.
            chunk: hash of the last chunk of the prefix.
            end: number of chunks in the prefix.
            resumed: number of its leading chunks that were cached.
            sent_at: time at which the request was sent, by this object's clock.
        """
        now = self._clock()
        before = self._ends.pop((key, chunk), None)
        # One chunk may be missing, because an engine caches whole blocks, which differ from the router's chunks.
        if resumed + 1 < end:
            if before is None:
                self._ends[key, chunk] = _End(resumed, 1, now)
            elif before.counted_at <= sent_at:
                self._ends[key, chunk] = _End(resumed, before.responses + 1, now)
            else:
                self._ends[key, chunk] = before._replace(resumed=resumed)
        for _ in range(min(_MAX_REMOVED, len(self._ends))):
            if len(self._ends) <= _MAX_ENTRIES and not self._is_old(next(iter(self._ends.values()))):
                break
            self._ends.popitem(last=False)
        self.is_empty = not self._ends

    def forget(self, key: str) -> None:
        """Delete what was learned about the instance ``key``, because it has lost its cache."""
        self._ends = OrderedDict((end, known) for end, known in self._ends.items() if end[0] != key)
        self.is_empty = not self._ends

    def _is_old(self, known: _End) -> bool:
        return self._clock() - known.counted_at > self._lifetime_seconds
