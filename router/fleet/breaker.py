"""The circuit breaker: excludes an instance from selection after several requests in a row failed there.

An engine may fail every request although it responds to probes of /health. The breaker counts the failed requests::

    closed ──FAILURES in a row──► open ──OPEN_SECONDS later, one request is tried──► half_open
      ▲                            ▲                                                    │
      └────────── a success ───────┼────────────────────────────────────────────────────┤
                                   └──────────────────── a failure ─────────────────────┘

If the tried request has no result after OPEN_SECONDS (for example, its client disconnected), another one is tried.
"""

from __future__ import annotations

import math

__all__ = ["FAILURES", "OPEN_SECONDS", "Breaker"]

FAILURES = 5
OPEN_SECONDS = 5.0


class Breaker:
    """The circuit breaker of one instance. All times are seconds of one monotonic clock."""

    __slots__ = ("failures", "retry_at", "state")

    def __init__(self) -> None:
        self.state = "closed"
        """State of the breaker: ``closed``, ``open`` or ``half_open``."""
        self.failures = 0
        """Number of failed requests in a row."""
        self.retry_at = -math.inf
        """Time from which the instance may get a request; ``-inf`` while the breaker is closed."""

    def admits(self, now: float) -> bool:
        """Return whether the instance may get a request at the time ``now``."""
        return now >= self.retry_at

    def record_success(self) -> bool:
        """Record a successful request. Return whether the success has closed the breaker."""
        self.failures = 0
        if self.state == "closed":
            return False
        self.state, self.retry_at = "closed", -math.inf
        return True

    def record_failure(self, now: float) -> bool:
        """Record a failed request. Return whether the failure has opened the breaker."""
        self.failures += 1
        # While the breaker is open, only requests fail that were sent before it opened.
        if self.state == "open" or (self.state == "closed" and self.failures < FAILURES):
            return False
        self.state, self.retry_at = "open", now + OPEN_SECONDS
        return True

    def begin_half_open_trial(self, now: float) -> None:
        """Record that one request is tried now. Another one is tried after its result, or OPEN_SECONDS later."""
        self.state, self.retry_at = "half_open", now + OPEN_SECONDS
