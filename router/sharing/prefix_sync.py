"""PrefixSync: one index of prefixes for all processes: a prompt placed by one is soon known to the others."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from router.policies import Policy, PrefixPolicy

if TYPE_CHECKING:
    from router.fleet import Role
    from router.sharing.link import Link

__all__ = ["PrefixSync"]

_log = logging.getLogger("router.sharing.prefix_sync")

TELL_SECONDS = 0.1
# As many are sent earlier: the peers add a message's chunks in one step, which takes 0.3 microseconds for each.
MAX_CHUNKS_TOLD = 2048

# By role: how many chunks the policy knows, and its dump.
_Prefixes = Mapping[str, Sequence[Any]]


class PrefixSync:
    """Sends the other processes the placed prompts, and adds theirs to the policies."""

    def __init__(self, link: Link, policies: Mapping[Role, Policy]) -> None:
        self._link = link
        self._policies = {role.value: each for role, each in policies.items() if isinstance(each, PrefixPolicy)}
        # Keys are role, instance and last hash, which identifies all hashes before it.
        self._placed: dict[tuple[str, str, int], bytes] = {}
        self._num_chunks = 0
        self._timer: asyncio.TimerHandle | None = None
        if not link.is_alone:
            for role, policy in self._policies.items():
                policy.subscribe_to_chains(partial(self._on_chain, role))
            link.subscribe_to_topic("chains", self._on_chains)
            link.subscribe_to_topic("prefixes", self._on_prefixes)
            link.answer_topic("prefixes", self._dump_prefixes)

    async def take_over(self) -> None:
        """Load everything that another process knows, if there is one: this process is new."""
        for prefixes in await self._link.ask_others("prefixes"):
            self._load_prefixes(prefixes)

    def _on_chain(self, role: str, chunks: Sequence[int], key: str) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TELL_SECONDS, self._tell_chains)
        placed = (role, key, chunks[-1])
        if placed not in self._placed:
            self._placed[placed] = array("Q", chunks).tobytes()
            self._num_chunks += len(chunks)
            if self._num_chunks >= MAX_CHUNKS_TOLD:
                self._timer.cancel()
                self._tell_chains()

    def _tell_chains(self) -> None:
        self._timer, self._num_chunks = None, 0
        placed, self._placed = self._placed, {}
        self._link.publish_event("chains", [(role, key, data) for (role, key, _), data in placed.items()])

    def _on_chains(self, _: str, placed: list[Any]) -> None:
        for role, key, data in placed:
            if policy := self._policies.get(role):
                policy.note_chain(array("Q", data), key)

    def _on_prefixes(self, _: str, prefixes: _Prefixes) -> None:
        """Load the prefixes that another router knows."""
        self._load_prefixes(prefixes)

    def _load_prefixes(self, prefixes: _Prefixes) -> None:
        """Load the prefixes of each policy that knows fewer itself, because they replace its own."""
        for role, (num_chunks, dump) in prefixes.items():
            try:
                if num_chunks > self._policies[role].num_chunks:
                    self._policies[role].load_dump(dump)
            except Exception as exc:  # optional: without them this process works, too
                _log.warning("the prefixes of another process are not taken over: %r", exc)

    async def _dump_prefixes(self, _: None) -> _Prefixes:
        dumps = {role: (policy.num_chunks, policy.prepare_dump()) for role, policy in self._policies.items()}
        return {role: (number, await asyncio.to_thread(encode)) for role, (number, encode) in dumps.items()}
