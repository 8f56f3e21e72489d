"""TokenRates: limits the tokens per second of each client, prompt and generated tokens together.

Each client has a token bucket. It fills at the client's rate, and holds at most the tokens of ``BURST_SECONDS``. A
request may begin while the bucket is not empty. Its prompt tokens are removed at the beginning, its other tokens at its
end. So a bucket can become negative, and a prompt larger than the bucket is served, too. On average, no client exceeds
its rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

__all__ = ["TokenRates"]

BURST_SECONDS = 10.0


class TokenRates:
    """The token buckets of all clients, which limit their tokens per second."""

    def __init__(self, common: float, own: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            common: rate in tokens per second of each client that is not in ``own``; 0 means no limit.
            own: rate of each client that has its own; 0 means no limit.
            clock: returns the time in seconds.
        """
        self._common = common
        self._own = own
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens in the bucket, and the time of that level

    @property
    def is_limited(self) -> bool:
        """Whether any client has a limit."""
        return self._common > 0 or any(self._own.values())

    def rate_of(self, client: str) -> float:
        """Return the client's rate in tokens per second; 0 means no limit."""
        return self._own.get(client, self._common)

    def seconds_to_wait(self, client: str) -> float:
        """Return the seconds until a request of ``client`` may begin; 0 if it may begin now."""
        rate = self.rate_of(client)
        if not rate:
            return 0.0
        tokens = self._count_tokens(client, rate)
        return max(0.0, 1.0 - tokens) / rate if tokens < 1.0 else 0.0

    def charge_tokens(self, client: str, tokens: float) -> None:
        """Remove tokens from the client's bucket; a negative number adds tokens."""
        rate = self.rate_of(client)
        if rate and tokens:
            left = min(self._count_tokens(client, rate) - tokens, _bucket_size(rate))
            self._buckets[client] = (left, self._clock())

    def _count_tokens(self, client: str, rate: float) -> float:
        """Return the number of tokens that are now in the client's bucket."""
        tokens, since = self._buckets.get(client, (_bucket_size(rate), 0.0))
        return min(_bucket_size(rate), tokens + (self._clock() - since) * rate)


def _bucket_size(rate: float) -> float:
    return max(1.0, rate * BURST_SECONDS)
