"""KvEventReader: reads the KV events of instances, so that the router knows which blocks each instance has cached.

The registration of an instance that publishes KV events has a field ``kv_events``, with ``endpoint`` and usually
``replay_endpoint``. There are three levels of knowledge about the cache of an instance:

- exact: the router has applied all events since the start of the instance's process.
- degraded: events are missing. The connection broke, or the router has missed the first events and cannot get them.
- learned: the instance publishes no events. The router estimates its cache from its responses.

A publisher is a source of KV events that gets no requests from this router. Another scheduler has registered it, and
asks this router which blocks it has cached (``block_index.py``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvcommon.waiting import wait_for_event
from router.fleet.kv_event_feed import Followed, KvEventFeed, Publisher
from router.policies import CachedBlocks, PlacedPrompt, Policy, PrefixPolicy

if TYPE_CHECKING:
    from router.fleet.registration import Role
    from router.fleet.registry import Registry

__all__ = ["KvEventReader"]

_log = logging.getLogger("router.fleet.kv_events")

# Minimum time between two rounds of reading. Reading several batches in one round takes less CPU time.
_COLLECT_SECONDS = 0.05
_SETTLE_SECONDS = 0.1
# Maximum number of blocks of all publishers together; they need about 1 GB.
MAX_PUBLISHED_BLOCKS = 4_000_000
# Maximum number of blocks of one instance, far more than an accelerator's memory has.
MAX_INSTANCE_BLOCKS = 4_000_000


class KvEventReader:
    """Reads the KV events of all publishers, and of the instances that publish events, and updates the policies."""

    def __init__(self, registry: Registry, policies: Mapping[Role, Policy], publish: Callable[[Any], None]) -> None:
        """
        Args:
            registry: the instances.
            policies: the policy of each role. Only those that have a prefix index are updated.
            publish: sends an association of a prompt with its blocks to the other processes, which pass it to
                ``on_associated``.

        Raises:
            ImportError: pyzmq is not installed.
        """
        import zmq.asyncio

        self._zmq = zmq
        # Publishers have a ZeroMQ thread of their own, because resolving a publisher's host name may block this thread.
        self._context, self._publishers_context = zmq.Context(), zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_535)  # three for each instance; the default is 1,023
        self.publishers: dict[str, Publisher] = {}
        """The publishers by key. ``update_publishers`` changes this dictionary."""
        # The keys of the instances that have reported too many blocks, and have not restarted since.
        self._oversized: set[str] = set()
        registry.events.lost_caches.subscribe(self._oversized.discard)
        self._publishers_policy = PrefixPolicy()
        self._registry = registry
        self._policies = {role: each for role, each in policies.items() if isinstance(each, PrefixPolicy)}
        self._publish = publish
        self._feeds: dict[str, KvEventFeed] = {}
        self._readable: deque[KvEventFeed] = deque()
        """The feeds that have unread batches, in the order of arrival."""
        self._timer: asyncio.Handle | None = None
        self._read_at = 0.0
        self._arrived = asyncio.Event()
        registry.events.arrivals.subscribe(lambda _: self._arrived.set())

    async def keep_reading(self) -> None:
        """Read the events of all instances and publishers, until this task is cancelled."""
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._arrived.clear()
                self._limit_publishers()
                self._limit_instances()
                wanted = self._list_followed()
                for key, feed in list(self._feeds.items()):
                    if not feed.is_of(*wanted.get(key, (None, None))) and (task := tasks.pop(key, None)) is not None:
                        task.cancel()
                for key, (followed, policy) in wanted.items():
                    if key not in tasks or tasks[key].done():
                        tasks[key] = asyncio.ensure_future(self._follow(followed, policy))
                self._settle()
                busy = any(not feed.cache.is_settled for feed in self._feeds.values())
                await wait_for_event(self._arrived, _SETTLE_SECONDS if busy else 1.0)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            self._context.destroy(linger=0)
            self._publishers_context.destroy(linger=0)

    def find_cache(self, key: str) -> CachedBlocks | None:
        """Return the cached blocks of an instance or a publisher; None if its events are not read."""
        feed = self._feeds.get(key)
        return None if feed is None else feed.cache

    def update_publishers(self, added: Iterable[Publisher], removed: Iterable[str] = ()) -> None:
        """Begin to read the events of the publishers ``added``, and stop reading those with the keys ``removed``."""
        for key in removed:
            self.publishers.pop(key, None)
        self.publishers.update({each.key: each for each in added})
        self._arrived.set()

    def on_associated(self, content: Any) -> None:
        """Store a message from another router process: which cached block of an instance is the last block of a prompt.

        ``content`` is what that process passed to ``publish``.
        """
        key, chunks, leaf, *rest = content
        feed = self._feeds.get(key)
        if feed is not None:
            prompt = PlacedPrompt(array("Q", chunks), *rest)
            feed.cache.note_prompt(prompt._replace(ended_at=time.monotonic()), leaf)  # the clocks of routers differ

    def _list_followed(self) -> dict[str, tuple[Followed, PrefixPolicy]]:
        """Return the instances and publishers whose events should be read, by key, each with the policy that uses
        them.
        """
        followed: dict[str, tuple[Followed, PrefixPolicy]] = {
            key: (publisher, self._publishers_policy) for key, publisher in self.publishers.items()
        }
        for instance in self._registry:
            policy = self._policies.get(instance.role)
            if instance.kv_events and policy is not None and instance.key not in self._oversized:
                followed[instance.key] = instance, policy
        return followed

    def _limit_publishers(self) -> None:
        """Remove the publisher with the most blocks if all publishers together have too many blocks."""
        sizes = {key: len(self._feeds[key].cache) for key in self.publishers if key in self._feeds}
        if sum(sizes.values()) > MAX_PUBLISHED_BLOCKS:
            largest = max(sizes, key=lambda key: sizes[key])
            _log.error(
                "the KV event publisher %s, which has the most blocks, is unregistered: all publishers together have "
                "%d blocks, and this router stores at most %d; /query does not report its blocks until somebody "
                "registers it again",
                largest,
                sum(sizes.values()),
                MAX_PUBLISHED_BLOCKS,
            )
            del self.publishers[largest]

    def _limit_instances(self) -> None:
        """Stop reading the events of the instances that have reported too many blocks."""
        for instance in self._registry:
            feed = None if instance.key in self.publishers else self._feeds.get(instance.key)
            if feed is not None and len(feed.cache) > MAX_INSTANCE_BLOCKS:
                self._oversized.add(instance.key)
                _log.error(
                    "the KV events of instance %s are ignored until it restarts: it has reported %d blocks, and this "
                    "router stores at most %d of an instance",
                    *(instance.key, len(feed.cache), MAX_INSTANCE_BLOCKS),
                )

    async def _follow(self, followed: Followed, policy: PrefixPolicy) -> None:
        key, feed = followed.key, None
        context = self._publishers_context if policy is self._publishers_policy else self._context
        try:
            feed = self._feeds[key] = KvEventFeed(self._zmq, context, followed, policy, self._on_readable)
            await feed.follow()
        except Exception:
            _log.exception("reading the KV events of %s failed; the router connects again", key)
            await asyncio.sleep(1)
        finally:
            if feed is not None:
                if self._feeds.get(key) is feed:
                    del self._feeds[key]
                    policy.unwatch_cache(key)
                    if self._registry.get(key) is None:
                        policy.forget_instance(key)
                    followed.cache_known = None
                feed.close()

    def _on_readable(self, feed: KvEventFeed) -> None:
        """Let ``_read_feed`` read the batches of a feed soon, at least ``_COLLECT_SECONDS`` after the last reading."""
        self._readable.append(feed)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._read_at + _COLLECT_SECONDS), self._read_feed)

    def _read_feed(self) -> None:
        """Apply some batches of one feed. Apply further batches after other tasks of the event loop have run."""
        loop, feed = asyncio.get_running_loop(), self._readable.popleft()
        if feed.read_batches():
            self._readable.append(feed)
        self._read_at = loop.time()
        self._timer = loop.call_soon(self._read_feed) if self._readable else None

    def _settle(self) -> None:
        """Find the cached blocks of the prompts of ended requests, and send the results to the other processes."""
        for key, feed in self._feeds.items():
            try:
                settled = feed.settle()
            except Exception:
                _log.exception(
                    "the router cannot find which cached blocks of %s belong to the prompts of ended requests", key
                )
                continue
            for prompt, leaf in settled:
                self._publish([key, array("Q", prompt.chunks).tobytes(), leaf, *prompt[1:]])
