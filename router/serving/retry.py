"""Retries of one request: which instances may still be tried, and how long to wait before the next attempt."""

from __future__ import annotations

import random
import time
from asyncio import sleep

from router.http import TimedOut, UpstreamError
from router.policies import RequestFeatures
from router.serving.attempt import LegFailed
from router.serving.selection import NoInstance, Selection, Selector

__all__ = ["Retries"]

# Before the second attempt after a failure that another instance may share, and doubled before each further one.
BACK_OFF_SECONDS = 0.05

# An instance that closed the connection, as one that dies does, and that may be chosen after so long, has come back.
RETURN_SECONDS = 2.0

_NONE: frozenset[str] = frozenset()


class Retries:
    """The instances at which a request has failed, by their keys."""

    __slots__ = ("_avoided", "_excluded", "_failures", "_hung", "_returns", "stale")

    def __init__(self) -> None:
        self.stale = _NONE
        """Instances whose idle connections had been closed: the next attempt uses a connection of its own there."""
        self._excluded = _NONE  # not to be used again
        self._avoided = _NONE  # used again only if there is no other
        self._hung = _NONE
        self._returns: dict[str, float] | None = None  # of those excluded that may come back: from when on they may
        self._failures = 0

    def select(self, selector: Selector, features: RequestFeatures, is_completion: bool) -> Selection:
        """The instance or the pair for the next attempt.

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
                pass  # rather one of those than none
        return choose(features, self._excluded)

    def avoid(self, key: str) -> None:
        """Use this instance again only if there is no other."""
        self._avoided |= {key}

    def begin_again(self, key: str, *, is_hung: bool) -> None:
        """The instance failed half-way: those that failed before may be used again, and it itself as a last resort.

        Args:
            is_hung: it is not to be used again, as it might hang without end.
        """
        if is_hung:
            self._hung |= {key}
        self._excluded, self._returns = self._hung, None
        self._avoided = frozenset({key})
        self._failures = 0

    async def record_failure_and_back_off(self, failure: LegFailed, selection: Selection) -> None:
        """Note which instances the next attempt should not use, and give the others a moment."""
        key = failure.instance.key
        if failure.stale and key not in self.stale:
            self.stale |= {key}
            return
        if failure.in_hand_over and selection.prefill is not None:
            self._avoided |= {selection.prefill.key, selection.answering.key}
        else:
            self._excluded |= {key}
            cause = failure.__cause__
            if isinstance(cause, UpstreamError) and not isinstance(cause, TimedOut) and key not in self._hung:
                self._returns = {**(self._returns or {}), key: time.monotonic() + RETURN_SECONDS}
        self._failures += 1
        if self._failures > 1:
            await sleep(BACK_OFF_SECONDS * 2 ** (self._failures - 2) * random.uniform(0.5, 1.0))
