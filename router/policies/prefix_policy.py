"""PrefixPolicy: the base of policies that use prefixes, with an index that is stored across a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from router.policies.base import DEFAULTS, PolicyBase, PolicyOptions
from router.policies.prefix_index import PrefixIndex

__all__ = ["PrefixPolicy"]


_AnyPolicy = TypeVar("_AnyPolicy", bound="PrefixPolicy")


class PrefixPolicy(PolicyBase):
    """A policy with its own ``PrefixIndex``."""

    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(options, clock)
        self._index = PrefixIndex(options.prefix_index_entries, 60 * options.eviction_duration_mins, clock)
        self.note_chain: Callable[[Sequence[int], str], None] = self._index.add_chain
        """Called with the chain of a prompt and the instance on which this or another process placed it."""
        self._add_chain = self.note_chain

    @property
    def num_chunks(self) -> int:
        """Number of prompt chunks in the index."""
        return len(self._index)

    def subscribe_to_chains(self, callback: Callable[[Sequence[int], str], None]) -> None:
        """Call ``callback`` with the chain of each prompt that this policy places, and the instance."""

        def add_and_tell(chunks: Sequence[int], key: str) -> None:
            self._index.add_chain(chunks, key)
            callback(chunks, key)

        self._add_chain = add_and_tell

    def make_sibling(self: _AnyPolicy) -> _AnyPolicy:
        """See ``Policy.make_sibling``."""
        sibling = super().make_sibling()
        sibling._index, sibling.note_chain, sibling._add_chain = self._index, self.note_chain, self._add_chain
        return sibling

    def forget_instance(self, key: str) -> None:
        """See ``Policy.forget_instance``."""
        self._index.forget_holder(key)

    def prepare_dump(self) -> Callable[[], bytes]:
        """See ``PersistentPolicy.prepare_dump``."""
        return self._index.copy().dump

    def load_dump(self, data: bytes) -> None:
        """See ``PersistentPolicy.load_dump``.

        Raises:
            ValueError: ``data`` cannot be used.
        """
        self._index.load(data)
