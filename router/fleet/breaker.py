"""The circuit breaker: excludes an instance from selection when live requests keep failing there.

A probe of /health cannot detect that an engine answers every request with 500; the requests themselves can::

    closed ──FAILURES in a row──► open ──OPEN_SECONDS later, one request is tried──► half_open
      ▲                            ▲                                                    │
      └────────── a success ───────┼────────────────────────────────────────────────────┤
                                   └──────────────────── a failure ─────────────────────┘

If a trial ends without a result (its client left), another one follows OPEN_SECONDS later.
"""

from __future__ import annotations

import math

__all__ = ["FAILURES", "OPEN_SECONDS", "Breaker"]

FAILURES = 5
OPEN_SECONDS = 5.0


class Breaker:
    """Breaker of one instance. Times are seconds of one monotonic clock."""

    __slots__ = ("failures", "retry_at", "state")

    def __init__(self) -> None:
        self.state = "closed"
        """``closed``, ``open`` or ``half_open``."""
        self.failures = 0
        """Number of failed requests in a row."""
        self.retry_at = -math.inf
        """Time from which on the instance may get a request."""

    def __repr__(self) -> str:
        return f"<Breaker {self.state} failures={self.failures}>"

    def admits(self, now: float) -> bool:
        """Return whether the instance may get a request."""
        return now >= self.retry_at

    def record_success(self) -> bool:
        """Note a successful request; return whether this closed the breaker."""
        self.failures = 0
        if self.state == "closed":
            return False
        self.state, self.retry_at = "closed", -math.inf
        return True

    def record_failure(self, now: float) -> bool:
        """Note a failed request; return whether this opened the breaker."""
        self.failures += 1
        # Requests that were running when the breaker opened give no new information.
        if self.state == "open" or (self.state == "closed" and self.failures < FAILURES):
            return False
        self.state, self.retry_at = "open", now + OPEN_SECONDS
        return True

    def begin_half_open_trial(self, now: float) -> None:
        """Let one request through although the breaker is not closed, and no other one until the trial ends."""
        self.state, self.retry_at = "half_open", now + OPEN_SECONDS
