"""The circuit breaker: takes an instance out of the choice when live requests keep failing there.

A probe of /health cannot see that an engine answers every request with 500; the requests themselves can::

    closed ──FAILURES in a row──► open ──OPEN_SECONDS later, one request is tried──► half_open
       ▲                            ▲                                                    │
       └────────── a success ───────┼────────────────────────────────────────────────────┤
                                    └──────────────────── a failure ─────────────────────┘

A trial that ends without a verdict (its client left) is followed by another one OPEN_SECONDS later.
"""

from __future__ import annotations

import math

__all__ = ["FAILURES", "OPEN_SECONDS", "Breaker"]

FAILURES = 5
OPEN_SECONDS = 5.0


class Breaker:
    """One instance's breaker. Times are seconds of one monotonic clock."""

    __slots__ = ("failures", "retry_at", "state")

    def __init__(self) -> None:
        self.state = "closed"
        """``closed``, ``open`` or ``half_open``."""
        self.failures = 0
        """Failed requests in a row."""
        self.retry_at = -math.inf
        """The time from which on a request may go there."""

    def __repr__(self) -> str:
        return f"<Breaker {self.state} failures={self.failures}>"

    def admits(self, now: float) -> bool:
        """Whether a request may go there."""
        return now >= self.retry_at

    def record_success(self) -> bool:
        """Note a request that was answered; return whether this closed the breaker."""
        self.failures = 0
        if self.state == "closed":
            return False
        self.state, self.retry_at = "closed", -math.inf
        return True

    def record_failure(self, now: float) -> bool:
        """Note a request that failed; return whether this opened the breaker."""
        self.failures += 1
        # Requests that were under way when it opened say nothing new.
        if self.state == "open" or (self.state == "closed" and self.failures < FAILURES):
            return False
        self.state, self.retry_at = "open", now + OPEN_SECONDS
        return True

    def begin_half_open_trial(self, now: float) -> None:
        """Let one request through although the breaker is not closed, and no other one for the time being."""
        self.state, self.retry_at = "half_open", now + OPEN_SECONDS
