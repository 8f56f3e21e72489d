"""TokenRates: how many tokens a second each client may use, prompt and generated ones together.

Each client has a bucket that fills at its rate, up to ``BURST_SECONDS`` of it. A request may begin while there is
something in the bucket, and takes out the tokens of its prompt; at its end it is charged for all that it used. So a
bucket may be in debt, a prompt larger than the bucket is served, too, and over time nobody uses more than the rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

__all__ = ["TokenRates"]

BURST_SECONDS = 10.0


class TokenRates:
    """The buckets of all clients."""

    def __init__(self, common: float, own: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            common: tokens a second for each client that has no rate of its own; 0 is no limit.
            own: the rates of those that have; 0 is no limit.
            clock: gives seconds.
        """
        self._common = common
        self._own = own
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens in it, and when that was

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit at all."""
        return self._common > 0 or any(self._own.values())

    def rate_of(self, client: str) -> float:
        """Tokens a second; 0 is no limit."""
        return self._own.get(client, self._common)

    def seconds_to_wait(self, client: str) -> float:
        """How long until a request of ``client`` may begin; 0 if it may now."""
        rate = self.rate_of(client)
        if not rate:
            return 0.0
        tokens = self._count_tokens(client, rate)
        return max(0.0, 1.0 - tokens) / rate if tokens < 1.0 else 0.0

    def charge_tokens(self, client: str, tokens: float) -> None:
        """Take so many tokens out of the client's bucket; a negative number puts them back."""
        rate = self.rate_of(client)
        if rate and tokens:
            left = min(self._count_tokens(client, rate) - tokens, _bucket_size(rate))
            self._buckets[client] = (left, self._clock())

    def _count_tokens(self, client: str, rate: float) -> float:
        """The tokens in a client's bucket by now."""
        tokens, since = self._buckets.get(client, (_bucket_size(rate), 0.0))
        return min(_bucket_size(rate), tokens + (self._clock() - since) * rate)


def _bucket_size(rate: float) -> float:
    return max(1.0, rate * BURST_SECONDS)
