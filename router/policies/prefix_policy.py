"""What policies that look at prefixes share: an index of who has computed which, kept over a restart."""

from __future__ import annotations

import time
from collections.abc import Callable

from router.policies.base import DEFAULTS, PolicyBase, PolicyOptions
from router.policies.prefix_index import PrefixIndex

__all__ = ["PrefixPolicy"]


class PrefixPolicy(PolicyBase):
    """A policy with a ``PrefixIndex`` of its own."""

    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(options, clock)
        self._index = PrefixIndex(options.prefix_index_entries, 60 * options.eviction_duration_mins, clock)

    def forget(self, key: str) -> None:
        """See ``Policy.forget``."""
        self._index.forget(key)

    def remembered(self) -> Callable[[], bytes]:
        """See ``Remembering.remembered``: what it knows of caches."""
        return self._index.copy().dump

    def load(self, data: bytes) -> None:
        """Take over what another one remembered.

        Raises:
            ValueError: it cannot be used.
        """
        self._index.load(data)
