"""PrefixSync: keeps the same index of prefixes in all processes.

Each process sends the others the prompts that it has assigned to instances.
"""

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

SEND_SECONDS = 0.1
# If this many chunks wait, they are sent at once. Each prompt counts as ``CHUNKS_PER_PROMPT`` more chunks. (The peers
# add all prompts of a message in one step of their event loop, which takes 3 microseconds for each prompt and 0.1 for
# each chunk.)
MAX_CHUNKS_WAITING, CHUNKS_PER_PROMPT = 2048, 16

# For each role: the number of chunks that the policy knows, and its dump.
_Prefixes = Mapping[str, Sequence[Any]]


class PrefixSync:
    """Sends other processes the prompts that this process has assigned to instances, and receives such prompts.

    The policies learn the received prompts as if this process had assigned them.
    """

    def __init__(self, link: Link, policies: Mapping[Role, Policy]) -> None:
        self._link = link
        self._policies = {role.value: each for role, each in policies.items() if isinstance(each, PrefixPolicy)}
        # Keys are role, instance and the last hash, which depends on all hashes before it.
        self._placed: dict[tuple[str, str, int], bytes] = {}
        self._num_chunks = 0
        self._timer: asyncio.TimerHandle | None = None
        if not link.is_alone:
            for role, policy in self._policies.items():
                policy.subscribe_to_chains(partial(self._on_chain, role))
            link.subscribe_to_topic("chains", self._on_chains)
            link.subscribe_to_topic("prefixes", lambda _, prefixes: self._load_prefixes(prefixes))  # another router's
            link.answer_topic("prefixes", self._dump_prefixes)

    async def load_from_peers(self) -> None:
        """Load all prefixes that the other processes know. A new process calls this at its start."""
        for prefixes in await self._link.ask_peers("prefixes"):
            self._load_prefixes(prefixes)

    def _on_chain(self, role: str, chunks: Sequence[int], key: str) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SEND_SECONDS, self._send_chains)
        placed = (role, key, chunks[-1])
        if placed not in self._placed:
            self._placed[placed] = array("Q", chunks).tobytes()
            self._num_chunks += len(chunks) + CHUNKS_PER_PROMPT
            if self._num_chunks >= MAX_CHUNKS_WAITING:
                self._timer.cancel()
                self._send_chains()

    def _send_chains(self) -> None:
        self._timer, self._num_chunks = None, 0
        placed, self._placed = self._placed, {}
        self._link.publish_event("chains", [(role, key, data) for (role, key, _), data in placed.items()])

    def _on_chains(self, _: str, placed: list[Any]) -> None:
        for role, key, data in placed:
            if policy := self._policies.get(role):
                policy.note_chain(array("Q", data), key)

    def _load_prefixes(self, prefixes: _Prefixes) -> None:
        """Load ``prefixes`` into each policy that knows fewer chunks (pieces of prompts) than ``prefixes`` has."""
        for role, (num_chunks, dump) in prefixes.items():
            try:
                if num_chunks > self._policies[role].num_chunks:
                    self._policies[role].load_dump(dump)
            except Exception as exc:  # the process also works without these prefixes
                _log.warning("the prompt prefixes that another process has sent cannot be loaded: %r", exc)

    async def _dump_prefixes(self, _: None) -> _Prefixes:
        return {
            role: (policy.num_chunks, await asyncio.to_thread(policy.dump)) for role, policy in self._policies.items()
        }
