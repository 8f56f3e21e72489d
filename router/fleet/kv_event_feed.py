"""KvEventFeed: reads the KV events of one instance or publisher, and asks for those that were lost.

The format of the events and of the replay is that of vLLM 0.32 (``vllm/distributed/kv_events.py``). An instance sends
events in numbered batches. After a lost connection, the router asks for a replay that begins with the last batch that
it has applied. If the instance sends a different batch with this number, its process is a different one. The numbers
alone do not show this, because a new process may have sent as many batches as the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kvcommon.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    decode_batch,
    decode_member,
    decode_message,
    encode_sequence,
)
from kvcommon.waiting import wait_for_event
from router.policies import PlacedPrompt, PrefixPolicy, pack_tokens, seed_of

if TYPE_CHECKING:
    import zmq

__all__ = ["Followed", "KvEventFeed", "Publisher"]

_log = logging.getLogger("router.fleet.kv_events")

# Number of batches that are applied before other work runs. A batch takes about 20 microseconds.
_BATCHES_AT_ONCE = 20
# No further batch is applied before other work runs if those before it have more than this. If they contain only very
# small events, they take about 70 milliseconds.
_BYTES_AT_ONCE = 256 * 1024
_REPLAY_SECONDS = 2.0
# A replay is requested again if batches are missing in it, but not more often than this.
_MAX_REPLAYS = 50
_VERIFY_SECONDS, _RECHECK_SECONDS = 1.0, 5.0
_HEARTBEAT_MILLISECONDS = 5000
_OWN_MEDIA = (None, "GPU", "gpu")
# Kinds of groups (vLLM's ``KVCacheSpecKind``) that need only some blocks of a prefix. Their events may omit blocks.
_SPARSE_KINDS = frozenset(("sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba"))
# The tokens of an event with at most this number of blocks are stored in a form that needs less memory.
_FEW_BLOCKS = 4
# Tokens that need more than this are stored in that form, too, because they include those of other blocks.
_MAX_ENCODED_TOKEN_BYTES = 6
# Maximum size of a batch. A batch with a million tokens has 6 MB.
_MAX_MESSAGE_BYTES = 8 * 1024 * 1024
# The first and the longest pause before the router connects to a publisher again. They are long, because the address of
# a publisher may be wrong.
_RETRY_MILLISECONDS, _MAX_RETRY_MILLISECONDS = 1000, 5000


class Followed(Protocol):
    """An instance or a publisher whose events are read."""

    cache_known: str | None
    """How exactly its cache is known: ``exact``, ``degraded`` if events are missing, or None if none are read."""

    @property
    def key(self) -> str: ...

    @property
    def kv_events(self) -> Mapping[str, str]: ...


@dataclass(slots=True)
class Publisher:
    """A source of KV events that was registered only for the ``BlockIndex``. The router sends it no requests."""

    instance_id: str
    tenant: str
    rank: int
    """Data-parallel rank. Each rank publishes the events of its own cache."""
    model: str
    block_size: int
    lora_name: str
    """LoRA adapter of the blocks whose events name none."""
    salt: str
    """Only queries with this salt may find the publisher's blocks."""
    kv_events: Mapping[str, str]
    cache_known: str | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """Name of the publisher, as in Mooncake's conductor. It is never equal to the key of an instance."""
        return f"{self.instance_id}|{self.tenant}|{self.rank}"


class KvEventFeed:
    """Reads the KV events of one instance or publisher."""

    def __init__(
        self,
        zmq: Any,
        context: zmq.Context[Any],
        followed: Followed,
        policy: PrefixPolicy,
        on_readable: Callable[[KvEventFeed], None],
    ) -> None:
        """
        Args:
            zmq: the module of pyzmq.
            context: ZeroMQ's context, in which the feed opens its sockets.
            followed: the instance or publisher.
            policy: stores the cached blocks that the events report.
            on_readable: called when batches have arrived. It must arrange a later call of ``read_batches``.
        """
        self._zmq, self._context, self._followed, self._policy = zmq, context, followed, policy
        self._on_readable = on_readable
        self._key = followed.key
        self.source: Mapping[str, str] = followed.kv_events
        self._lora_name = followed.lora_name if isinstance(followed, Publisher) else ""
        self._is_connected = False
        self._expected = 0
        """Sequence number of the batch that is expected next."""
        self._last = b""
        """The last batch that was applied."""
        self._last_ts = 0.0
        self._lacks_events = False
        self._has_read = False
        """Whether a batch was read since ``follow`` last checked for missing batches."""
        self._is_waiting = False
        """Whether ``on_readable`` was called, and ``read_batches`` was not called after that."""
        self._is_behind = False
        """Whether batches must be replayed before further ones are read."""
        self._early: tuple[int, bytes, Batch] | None = None
        """A batch that has arrived, although earlier batches must be replayed first."""
        self._wake = asyncio.Event()
        self._failure: Exception | None = None
        self._group: int | None = None
        self._socket = self._make_socket(zmq.Socket, zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 100_000)
        # Heartbeats detect a host that has failed without closing its connections.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MILLISECONDS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MILLISECONDS)
        self._socket.setsockopt(zmq.SUBSCRIBE, self.source.get("topic", "").encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._on_arrival)
        self._loop.add_reader(self._monitor.FD, self._on_connection)
        self._monitor.getsockopt(zmq.EVENTS)  # a socket sends its first signal only after it was found empty
        try:
            self._socket.connect(self.source["endpoint"])
        except zmq.ZMQError:
            self.close()
            raise
        self.cache = policy.watch_cache(self._key)
        followed.cache_known = "degraded"

    def _make_socket(self, make: type[Any], kind: int) -> Any:
        socket = make(self._context, kind)
        socket.setsockopt(self._zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        if isinstance(self._followed, Publisher):
            socket.setsockopt(self._zmq.RECONNECT_IVL, _RETRY_MILLISECONDS)
            socket.setsockopt(self._zmq.RECONNECT_IVL_MAX, _MAX_RETRY_MILLISECONDS)
        return socket

    def is_of(self, followed: Followed | None, policy: PrefixPolicy | None) -> bool:
        """Return whether this feed reads the events of ``followed`` from its present endpoints, for ``policy``.

        The policy of an instance changes if its role changes.
        """
        if followed is None or followed is not self._followed or policy is not self._policy:
            return False
        return followed.kv_events == self.source

    def close(self) -> None:
        """Close the connections of this feed."""
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def settle(self) -> list[tuple[PlacedPrompt, BlockHash]]:
        """Find the cached blocks of the prompts of ended requests. Return the found prompts with their last blocks."""
        return self._policy.settle_cache(self._key)

    async def follow(self) -> None:
        """Request the missing batches from the instance when necessary, until this task is cancelled.

        If no batch has arrived for some time, a replay shows whether the last batches were lost. Without a replay, a
        loss is noticed only when a later batch arrives.
        """
        can_replay, is_verified = bool(self.source.get("replay_endpoint")), False
        while True:
            was_woken = await wait_for_event(self._wake, _RECHECK_SECONDS if is_verified else _VERIFY_SECONDS)
            if self._failure is not None:
                raise self._failure
            is_quiet, self._has_read = not self._has_read, False
            if was_woken or (is_quiet and can_replay):
                self._wake.clear()
                self._is_behind = True
                is_verified = await self._catch_up() and not was_woken
                early, self._early = self._early, None
                if early is not None and (early[0] == self._expected or not can_replay):
                    self._on_batch(*early)
                self._is_behind = self._wake.is_set()
                self._read_soon()
            else:
                is_verified = is_quiet

    def read_batches(self) -> bool:
        """Apply some of the batches that have arrived; return whether there may be more of them."""
        self._is_waiting, num_bytes = False, 0
        if self._failure is not None or self._socket.closed:
            return False
        try:
            for _ in range(_BATCHES_AT_ONCE):
                if self._is_behind:
                    return False  # after the replay, ``follow`` calls ``on_readable``
                frames = self._socket.recv_multipart(self._zmq.NOBLOCK)
                self._has_read = True
                try:
                    number, data = decode_message(frames)
                except ValueError as exc:
                    self._on_damage(exc)
                else:
                    batch = self._decode(data)
                    num_bytes += len(data)
                    self._on_connection()  # before the batch, because another process may have sent it
                    if self._wake.is_set():
                        if not self.source.get("replay_endpoint"):
                            self._early = number, data, batch
                        return False
                    self._on_batch(number, data, batch)
                if num_bytes > _BYTES_AT_ONCE:
                    break
        except self._zmq.Again:
            return False
        except Exception as exc:
            self._failure = exc
            self._wake.set()
            return False
        self._is_waiting = True
        return True

    def _on_arrival(self) -> None:
        """Handle a signal of the socket. It sends no further signal until all batches were read."""
        if self._socket.getsockopt(self._zmq.EVENTS) & self._zmq.POLLIN:
            self._read_soon()

    def _read_soon(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._on_readable(self)

    def _on_connection(self) -> None:
        """Handle that the connection to the instance was opened or lost."""
        while self._monitor.getsockopt(self._zmq.EVENTS) & self._zmq.POLLIN:
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")
            self._is_connected = event != self._zmq.EVENT_DISCONNECTED
            if self._is_connected:
                self._is_behind = True
                self._wake.set()
                if self.source.get("replay_endpoint"):  # the unread batches may be those of another process
                    with contextlib.suppress(self._zmq.Again):
                        while True:
                            self._socket.recv_multipart(self._zmq.NOBLOCK)
            else:
                self._set_exact(False)
                _log.info("the connection for the KV events of %s was lost", self._key)

    def _on_batch(self, number: int, data: bytes, batch: Batch) -> None:
        is_restarted = number < self._expected and batch.ts > self._last_ts
        if number > self._expected or is_restarted:
            self._set_exact(False)
            if self.source.get("replay_endpoint"):
                self._is_behind, self._early = True, (number, data, batch)
                self._wake.set()
                return
            self._skip_to(number, is_restarted=is_restarted)
        if number == self._expected:
            self._apply(number, data, batch)
            self._set_exact(not self._lacks_events)

    def _skip_to(self, number: int, *, is_restarted: bool) -> None:
        """Continue with the batch ``number``, because the batches before it are missing and cannot be replayed."""
        if is_restarted:
            self._policy.empty_cache(self._key)
        self._lacks_events, self._expected = number > 0, number

    async def _catch_up(self) -> bool:
        """Ask the instance for the batches that were missed; for all batches if its process is a different one.

        Returns:
            False if the instance did not respond. Then its cache is not known exactly, and the caller tries again.
        """
        if not self.source.get("replay_endpoint"):
            self._lacks_events = True  # until a new process of the instance publishes its first batch
            self._set_exact(False)
            return True
        asked_again_at = -1
        for attempt in range(1, _MAX_REPLAYS + 1):
            first = max(0, self._expected - 1)
            is_first, is_cut = True, False
            try:
                async with contextlib.aclosing(self._replay(self.source["replay_endpoint"], first)) as replayed:
                    async for number, data in replayed:
                        if is_first and number == first < self._expected and data != self._last:
                            return await self._start_over("another process publishes at its endpoint")
                        is_cut = number > self._expected and not is_first and asked_again_at != self._expected
                        if is_cut and attempt < _MAX_REPLAYS:
                            break
                        is_first = False
                        if number > self._expected:
                            self._lacks_events, self._expected = True, number
                        if number == self._expected:
                            self._apply(number, data, self._decode(data))
            except (asyncio.TimeoutError, ValueError, self._zmq.ZMQError) as exc:
                why = exc or f"no response in {_REPLAY_SECONDS:g} s"
                _log.info("%s did not send missed KV events again: %s", self._key, why)
                self._set_exact(False)
                return False
            if not is_cut:
                break
            # The instance's socket drops batches of a long replay. If the next replay lacks the same batch, it is lost.
            asked_again_at = self._expected
        if is_first and self._expected:
            return await self._start_over("its present process has published nothing yet")
        self._set_exact(not self._lacks_events)
        return True

    async def _start_over(self, why: str) -> bool:
        _log.info("the router discards what it knows about the cache of %s: %s", self._key, why)
        self._expected, self._last, self._last_ts, self._lacks_events = 0, b"", 0.0, False
        self._policy.empty_cache(self._key)
        return await self._catch_up()

    async def _replay(self, endpoint: str, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield sequence number and data of each batch that the instance still has, from the number ``first`` on.

        Raises:
            asyncio.TimeoutError: the instance does not respond.
            ValueError: the response has another format.
        """
        socket = self._make_socket(self._zmq.asyncio.Socket, self._zmq.DEALER)
        socket.setsockopt(self._zmq.RCVHWM, 0)  # no limit, because ZeroMQ would drop the batches beyond it
        try:
            socket.connect(endpoint)
            await socket.send_multipart([b"", encode_sequence(first)])
            num_bytes = 0
            for count in itertools.count(1):
                if not await socket.poll(int(1000 * _REPLAY_SECONDS)):
                    raise asyncio.TimeoutError
                frames = await socket.recv_multipart()
                number, data = decode_message(frames[1:])
                if number == END_OF_REPLAY:
                    return
                yield number, data
                num_bytes += len(data)
                if count % _BATCHES_AT_ONCE == 0 or num_bytes > _BYTES_AT_ONCE:
                    num_bytes = 0
                    await asyncio.sleep(0)
        finally:
            socket.close(linger=0)

    def _apply(self, number: int, data: bytes, batch: Batch) -> None:
        self._expected, self._last, self._last_ts = number + 1, data, batch.ts
        self._lacks_events &= number > 0
        removed: list[BlockHash] = []
        if self._lacks_events:
            self.cache.forget_copies()
        for event in batch.events:
            if isinstance(event, BlockRemoved):
                if self._is_own(event):
                    removed += event.block_hashes  # vLLM sends an event for each block
                continue
            if removed:
                self.cache.remove_blocks(removed)
                removed = []
            if isinstance(event, AllBlocksCleared):
                self._policy.empty_cache(self._key)
                self._lacks_events = False
            elif self._is_own(event):
                self._store_blocks(event)
        if removed:
            self.cache.remove_blocks(removed)

    def _store_blocks(self, event: BlockStored) -> None:
        hashes, parent, size = event.block_hashes, event.parent_block_hash, event.block_size
        try:
            num_plain, salt = _count_plain(event)
        except ValueError as exc:
            self._on_damage(exc)
            num_plain, salt = 0, ""
        seed = seed_of(event.lora_name or self._lora_name, salt)
        if len(hashes) <= _FEW_BLOCKS or len(event.token_ids) > _MAX_ENCODED_TOKEN_BYTES * len(hashes) * size:
            self.cache.store_blocks(hashes, parent, size, _pack_first(event.token_ids, num_plain * size), seed)
        else:  # a copy of the tokens, because otherwise the whole batch would stay in memory
            pack = partial(_pack_first, event.token_ids.copy(), num_plain * size)
            self.cache.store_blocks(hashes, parent, size, pack, seed)

    def _is_own(self, event: BlockStored | BlockRemoved) -> bool:
        """Return whether the event is about the own cache of the instance, in the group of layers that is read."""
        return event.medium in _OWN_MEDIA and not self._is_of_other_group(event)

    def _is_of_other_group(self, event: BlockStored | BlockRemoved) -> bool:
        """Return whether the event is about a group of layers that this feed does not read.

        The feed reads only the first group that needs all blocks of a prefix. If a model has other groups, its cache is
        never known exactly, because a block is a hit only if all groups have the blocks that they need.
        """
        if event.group_idx in (None, self._group):
            return False
        if isinstance(event, BlockRemoved):
            return True
        if self._group is None and event.kv_cache_spec_kind not in _SPARSE_KINDS:
            self._group = event.group_idx
            return False
        self._lacks_events = True
        self._set_exact(False)
        return True

    def _decode(self, data: bytes) -> Batch:
        """Decode a batch. A batch that cannot be decoded is treated as a batch without events."""
        try:
            return decode_batch(data)
        except ValueError as exc:
            self._on_damage(exc)
            return Batch(self._last_ts, [], None)

    def _on_damage(self, exc: ValueError) -> None:
        _log.warning("%s sends KV events that cannot be read: %s", self._key, exc)
        self._lacks_events = True
        self._set_exact(False)

    def _set_exact(self, is_exact: bool) -> None:
        is_current = self._is_connected and not self._wake.is_set()  # otherwise another replay is necessary
        is_exact = is_exact and is_current and (self._early is None or self._early[0] < self._expected)
        if self.cache.is_exact != is_exact:
            self._policy.set_exact(self._key, is_exact=is_exact)
            self._followed.cache_known = "exact" if is_exact else "degraded"
            if is_exact:
                _log.info("the router knows exactly which blocks %s has cached", self._key)
            else:
                _log.info("the router may lack KV events of %s, so it does not know the cache exactly", self._key)


def _count_plain(event: BlockStored) -> tuple[int, str]:
    """Return the number of the event's leading blocks that only tokens and salt identify, and the salt.

    The other blocks have further keys, because of an image or of embeddings in place of tokens.

    Raises:
        ValueError: the keys are damaged.
    """
    salt = event.cache_salt or ""
    for place, keys in enumerate(decode_member(event.extra_keys)):
        if keys is None:
            continue
        others = keys if isinstance(keys, list) else [keys]
        if event.lora_name and others[:1] == [event.lora_name]:
            others = others[1:]
        if [type(key) for key in others] == [str] and place == 0 and event.parent_block_hash is None:
            salt = others[0]
        elif others:
            return place, salt
    return len(event.block_hashes), salt


def _pack_first(token_ids: list[int] | msgspec.Raw, count: int) -> bytes:
    """Return the first ``count`` tokens of an event as bytes; none if they are damaged."""
    try:
        return pack_tokens(decode_member(token_ids)[:count])
    except TypeError:
        return b""  # with EAGLE, SGLang sends pairs of tokens; such blocks have no names
    except (ValueError, OverflowError) as exc:
        _log.warning("the tokens of a KV event cannot be read: %s", exc)
        return b""
