"""SharedState: several routers, on several machines, share their state over Redis.

Workers' messages reach the other routers over one channel of Redis, with a delay of some hundredths of a second.
Records are also stored in Redis, for routers that start later. Those routers request the prefixes from another router.
Redis is optional: while it is down, each router works with its own data. Afterwards the routers exchange their data
again.

A fleet is the set of routers with the same Redis server and the same database number. A Redis channel is common to all
databases, so the names of the channel and of the keys contain the number.
"""

from __future__ import annotations

import asyncio
import logging
import re
import reprlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from router.settings import ROUTER_GONE_SECONDS, SettingsError
from router.sharing.channels import pack, unpack
from router.sharing.records import STALE_SECONDS

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub

__all__ = ["SharedState"]

_log = logging.getLogger("router.sharing.shared_state")

# This version changes with the format of messages, so that routers with different formats ignore each other.
FORMAT = 3

# Minimum interval between batches of messages. Without messages, an empty batch is sent after ALIVE_SECONDS.
SEND_SECONDS = 0.002
ALIVE_SECONDS = 1.0
# A router counts as dead if it sends no message for this time. Redis counts as down if this router does not receive its
# own messages for this time. Both are detected at most SILENCE_SECONDS later.
GONE_SECONDS = ROUTER_GONE_SECONDS
SILENCE_SECONDS = 0.1
ANSWER_SECONDS = 2.0
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 3.0
# More messages wait only while Redis hangs. Then the oldest are dropped, because all data is sent again afterwards.
MAX_WAITING = 10_000
# Maximum number of messages in one batch. All messages that wait after an interruption can have more than 100 MB, which
# is too much for a network within ANSWER_SECONDS, and for the buffer in Redis of each subscriber (32 MB). If more
# messages wait, a batch is sent only after this router has received the one before.
MAX_BATCH = 100
# A new router waits at most this time for the first message of another router. Then it requests prefixes from at most
# this number of routers, one after the other, each with this timeout. (It must be less than ANSWER_SECONDS, the timeout
# of each Redis command.)
FIRST_MESSAGE_SECONDS = 1.5
MAX_ROUTERS_ASKED = 2
PREFIXES_SECONDS = 1.5
# A full prefix index takes 13 MB. A larger one than this limit is not sent. Redis drops prefixes that nobody fetches.
MAX_PREFIXES_BYTES = 64 * 1024 * 1024
PREFIXES_EXPIRY_SECONDS = 10

# The types of messages that routers send each other; see ``hub.py``.
_KINDS = frozenset({"publish", "keep", "gone", "ask", "answers", "hello", "limits", "want_prefixes"})
_QUERIES = frozenset({"ask", "answers", "want_prefixes"})
_FIRST = frozenset({"hello", "keep"})  # these are sent first after an interruption
_PATH = re.compile(r"rediss?://[^/?#]*/([^?#]+)")


class SharedState:
    """One router's connection to the other routers over Redis."""

    def __init__(
        self,
        url: str,
        name: str,
        on_message: Callable[[list[Any]], None],
        list_records: Callable[[], dict[str, dict[str, Any]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            url: for example ``redis://host:6379/0``.
            name: name of this router for the other routers.
            on_message: called with the other routers' messages, and with messages about the connection to them.
            list_records: returns this router's records by key.
            clock: monotonic clock in seconds. It decides when a router counts as dead.

        Raises:
            SettingsError: ``url`` is invalid, or redis-py is not installed.
        """
        self.name = name
        self._on_message = on_message
        self._list_records = list_records
        self._clock = clock
        self._redis = _make_client(url)
        fleet = f"kvrouter:{FORMAT}:{self._redis.connection_pool.connection_kwargs.get('db') or 0}"
        self._channel, self._prefixes = f"{fleet}:bus", f"{fleet}:prefixes:"
        # The key of the set of instances, and the prefix of the keys of their records. Redis expires the records by
        # its own clock.
        self._instances, self._record = f"{fleet}:instances", f"{fleet}:instance:"
        self._waiting: deque[Sequence[Any]] = deque(maxlen=MAX_WAITING)
        self._has_waiting = asyncio.Event()
        # Other routers: the time of the last message from each, and the names of its processes.
        self._received_at: dict[str, float] = {}
        self._processes: dict[str, set[str]] = {}
        # The index of this router's last batch, and of the last batch from each other router. A dead router's index
        # stays, because a late batch of it may still arrive. If the router starts again, it has another name.
        self._num_batches = 0
        self._last_batches: dict[str, int] = {}
        self._received_own_at = 0.0
        self._has_received_last = asyncio.Event()  # whether this router has received its own last batch
        self._is_up: bool | None = None
        self._was_tried = asyncio.Event()
        self._is_exchanging = self._is_closing = False
        self._sending_prefixes: set[asyncio.Task[None]] = set()

    def send_message(self, *message: Any) -> None:
        """Send a message to all other routers with the next batch."""
        self._waiting.append(message)
        self._has_waiting.set()

    def list_routers(self) -> list[str]:
        """Return the names of the other routers that are alive; none while Redis is down."""
        return list(self._received_at) if self._is_up else []

    async def wait_for_records(self) -> None:
        """Wait until the records in Redis have been loaded, at most ``ANSWER_SECONDS``, because Redis may be down."""
        give_up = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._was_tried.set)
        await self._was_tried.wait()
        give_up.cancel()

    async def fetch_prefixes(self) -> dict[str, Any]:
        """Return the prefixes of another router; empty if there is no other router, or if none answers in time."""
        from redis.exceptions import RedisError

        try:
            # This router itself is one subscriber.
            if not self._is_up or (await self._redis.pubsub_numsub(self._channel))[0][1] < 2:
                return {}
            give_up_at = self._clock() + FIRST_MESSAGE_SECONDS
            while not self._received_at and self._clock() < give_up_at:
                await asyncio.sleep(SILENCE_SECONDS)
            for router in self.list_routers()[:MAX_ROUTERS_ASKED]:
                self.send_message("want_prefixes", router, self.name)
                found: Any = await self._redis.blpop([self._prefixes + self.name], timeout=PREFIXES_SECONDS)
                prefixes: dict[str, Any] = unpack(found[1]) if found else {}
                if any(num_chunks for num_chunks, _ in prefixes.values()):
                    return prefixes
        except (RedisError, OSError, ValueError, TypeError, AttributeError) as exc:
            _log.warning("this router starts without the prompt prefixes that the other routers know: %s", exc)
        return {}

    def send_prefixes(self, router: str, answers: list[dict[str, Any]]) -> None:
        """Send another router the prefixes in ``answers``, which has the answer of one worker or is empty."""
        sending = asyncio.ensure_future(self._store_prefixes(self._prefixes + router, answers[0] if answers else {}))
        self._sending_prefixes.add(sending)
        sending.add_done_callback(self._sending_prefixes.discard)

    async def keep_connection(self) -> None:
        """Exchange messages with the other routers until ``disconnect`` is called. Reconnect after each failure."""
        from redis.exceptions import RedisError

        while not self._is_closing:
            try:
                await self._exchange_messages()
            except (RedisError, OSError, asyncio.TimeoutError) as exc:
                self._set_trouble(str(exc) or type(exc).__name__)
            except Exception:
                _log.exception("the connection to the other routers failed; it is opened again")
                self._set_trouble("the connection failed")
            if not self._is_closing:
                await asyncio.sleep(RETRY_SECONDS)

    async def disconnect(self, connecting: asyncio.Future[None]) -> None:
        """End ``keep_connection``, which runs in the task ``connecting``. Send the last messages if Redis is up."""
        from redis.exceptions import RedisError

        self._is_closing = True  # redis-py may take the cancellation for its own timeout, and continue
        connecting.cancel()
        await asyncio.wait([connecting], timeout=CLOSE_SECONDS)
        if self._is_up:
            try:
                while self._waiting:
                    await self._send_batch()
            except (RedisError, OSError) as exc:
                _log.info("the other routers could not be informed that this router ends: %s", exc)
        await self._redis.aclose()

    async def _store_prefixes(self, key: str, prefixes: dict[str, Any]) -> None:
        """Store prefixes in Redis under a key that only the requesting router reads."""
        from redis.exceptions import RedisError

        data = pack(prefixes)
        if len(data) > MAX_PREFIXES_BYTES:
            _log.warning(
                "the prompt prefixes that this router knows are too large to send to a new router (%d bytes); the new "
                "router learns prefixes from its requests",
                len(data),
            )
            data = pack({})
        try:
            async with self._redis.pipeline() as pipeline:
                pipeline.rpush(key, data)
                pipeline.expire(key, PREFIXES_EXPIRY_SECONDS)
                await pipeline.execute()
        except (RedisError, OSError) as exc:
            _log.warning("the prompt prefixes that a new router asked for could not be sent to it: %s", exc)

    async def _exchange_messages(self) -> None:
        """Connect to Redis, and exchange messages until something fails."""
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(self._channel)
            await self._exchange_records()
            while self._waiting and self._waiting[0][0] in _FIRST:  # a full or read-only Redis does not store records
                await self._send_batch()
            self._received_own_at = self._clock()
            self._set_trouble("")
            self._on_message(["hello"])
            self._is_exchanging = True
            sending = asyncio.ensure_future(self._keep_sending())
            receiving = asyncio.ensure_future(self._keep_receiving(subscription))
            try:
                await asyncio.gather(sending, receiving)
            finally:
                self._is_exchanging = False
                sending.cancel()
                receiving.cancel()
                await asyncio.wait([sending, receiving], timeout=CLOSE_SECONDS)

    async def _keep_receiving(self, subscription: PubSub) -> None:
        # Both flags end the loop even if redis-py takes the cancellation for its own timeout.
        while self._is_exchanging and not self._is_closing:
            oldest = min([self._received_own_at, *self._received_at.values()])
            timeout = max(0.0, oldest + GONE_SECONDS - self._clock()) + SILENCE_SECONDS
            message = await subscription.get_message(ignore_subscribe_messages=True, timeout=timeout)
            if message is not None:
                self._on_batch(message["data"])
            self._check_silence()

    async def _exchange_records(self) -> None:
        """Load the records from Redis, and store there the records that Redis lacks."""
        members: list[Any] = sorted(await self._redis.smembers(self._instances))  # the same order in each run
        names = [self._record.encode() + member for member in members]
        stored: list[Any] = await self._redis.mget(names) if members else []
        known: dict[str, Any] = {}
        for member, data in zip(members, stored, strict=True):
            if data is None:  # the record has expired
                await self._redis.srem(self._instances, member)
                continue
            try:
                key = member.decode()
                known[key] = unpack(data)
            except ValueError as exc:
                _log.error("the record of instance %r in Redis cannot be read and is ignored: %s", member[:100], exc)
            else:
                self._on_message(["keep", key, known[key]])
        # An unsent record may be older than the one in Redis, so the present one is sent in its place.
        unsent = {message[1] for message in self._waiting if message[0] == "keep"}
        first: list[Sequence[Any]] = [("hello",)]  # a new router and the others do not have each other's data yet
        for key, record in self._list_records().items():
            if record != known.get(key) or key in unsent:
                first.append(("keep", key, record))
        others = [message for message in _remove_late(self._waiting) if message[0] not in _FIRST]
        too_many = max(0, len(first) + len(others) - MAX_WAITING)
        self._waiting = deque([*first, *others[too_many:]], MAX_WAITING)
        self._has_waiting.set()

    async def _keep_sending(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_closing:
            await self._send_batch()
            alive = loop.call_later(ALIVE_SECONDS, self._has_waiting.set)
            await self._has_waiting.wait()
            alive.cancel()
            await asyncio.sleep(SEND_SECONDS)
            if len(self._waiting) > MAX_BATCH:
                await self._has_received_last.wait()

    async def _send_batch(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
        if not self._waiting:
            self._has_waiting.clear()
        self._num_batches += 1
        self._has_received_last.clear()
        try:
            data = pack([self.name, self._num_batches, batch])
        except ValueError:  # a worker's message may be nested too deeply, if it is wrapped in a batch
            batch = [message for message in batch if _can_be_sent(message)]
            data = pack([self.name, self._num_batches, batch])
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for message in batch:
                    if message[0] == "keep":
                        # The record is written before the member: routers remove a member that has no record.
                        pipeline.set(self._record + message[1], pack(message[2]), ex=int(STALE_SECONDS))
                        pipeline.sadd(self._instances, message[1])
                pipeline.publish(self._channel, data)
                await pipeline.execute()
        except BaseException:  # send the batch again, even if others have received it: a second reception has no effect
            self._waiting = deque([*batch, *self._waiting], MAX_WAITING)
            raise

    def _on_batch(self, data: bytes) -> None:
        try:
            sender, number, batch = unpack(data)
            if not (isinstance(sender, str) and isinstance(number, int) and isinstance(batch, list)):
                raise TypeError("it must be a list of a router's name, a batch's index and a list of messages")
        except (ValueError, TypeError) as exc:
            _log.error("a batch of messages from another router is ignored: %s", exc)
            return
        if sender == self.name:
            self._received_own_at = self._clock()
            if number == self._num_batches:
                self._has_received_last.set()
            return
        # After a failure, a router sends the same messages again over a new connection. The network may still deliver
        # the earlier batch over the old connection, even after later batches.
        is_back = sender in self._last_batches and sender not in self._received_at
        last = self._last_batches.setdefault(sender, number - 1)
        if number <= last:
            return
        self._last_batches[sender] = number
        if number > last + 1:  # this router has missed batches, which may have reported the end of a process
            self._forget_processes(sender)
        if sender not in self._received_at:
            _log.info("router %s shares its state with this router", sender)
            if is_back:  # this router has forgotten the other's limits, because it was silent
                self.send_message("hello")
        self._received_at[sender] = self._clock()
        for message in batch:
            try:
                self._on_router_message(sender, message, may_be_late=is_back)
            except Exception:  # continue with the next message
                _log.exception("a message from router %s could not be handled: %s", sender, reprlib.repr(message))

    def _on_router_message(self, sender: str, message: list[Any], *, may_be_late: bool) -> None:
        if message[0] not in _KINDS:  # the hub would accept the other types, too, which only its workers may send
            raise ValueError(f"the message has the type {message[0]!r}, which routers do not send")
        if message[0] == "publish":
            self._processes.setdefault(sender, set()).add(message[1])
        elif message[0] == "gone":
            self._processes.get(sender, set()).discard(message[1])
        for each in _remove_late([message]) if may_be_late else [message]:
            self._on_message(list(each))

    def _check_silence(self) -> None:
        """Forget the routers that have sent no message for ``GONE_SECONDS``.

        Raises:
            TimeoutError: Redis has not delivered this router's own messages for that time.
        """
        now = self._clock()
        if now - self._received_own_at > GONE_SECONDS:
            raise asyncio.TimeoutError(f"Redis sent nothing for {GONE_SECONDS:g} s")
        for router in [router for router, received_at in self._received_at.items() if now - received_at > GONE_SECONDS]:
            _log.warning("router %s, which shared its state with this router, has stopped responding", router)
            self._forget_router(router)

    def _forget_router(self, router: str) -> None:
        del self._received_at[router]
        self._forget_processes(router)
        self._on_message(["gone", router])  # because it may have died before this router knew any of its processes
        self._on_message(["limits", router, {}, {}])

    def _forget_processes(self, router: str) -> None:
        """Forget how many requests a router's processes run, because messages from them may be missing."""
        for name in self._processes.pop(router, ()):
            self._on_message(["gone", name])

    def _set_trouble(self, trouble: str) -> None:
        self._was_tried.set()
        if self._is_up == (not trouble):
            return
        self._is_up = not trouble
        if trouble:
            _log.warning(
                "Redis (server.shared-state) cannot be reached; this router works without the others: %s", trouble
            )
            for router in list(self._received_at):
                self._forget_router(router)
        else:
            _log.info("Redis (server.shared-state) can be reached; this router exchanges data with the others")
        self._on_message(["state", trouble])


def _remove_late(messages: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Remove from messages what other routers must not receive late or twice.

    These are charged tokens, and queries. Nobody waits for the answers any more, and the query ``abort`` would end
    later requests.
    """
    in_time = [message for message in messages if message[0] not in _QUERIES]
    return [(*message[:3], {}) if message[0] == "limits" else message for message in in_time]


def _can_be_sent(message: Sequence[Any]) -> bool:
    try:
        pack(["", [message]])
    except ValueError as exc:
        _log.error("a message could not be sent to the other routers: %s: %s", exc, reprlib.repr(message))
        return False
    return True


def _make_client(url: str) -> Redis:
    try:
        from redis.asyncio import Redis
    except ImportError:
        raise SettingsError(
            "server.shared-state needs redis-py: pip install '/path/to/this/repository[shared-state]'"
        ) from None
    try:
        path = _PATH.match(url)
        if path is not None and not path[1].isdecimal():  # redis-py would use 0
            raise ValueError(f"the database {path[1]!r} is not a number")
        return Redis.from_url(url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
    except ValueError as exc:
        raise SettingsError(
            f"server.shared-state is not the address of a Redis server, such as redis://host:6379/0: {exc}"
        ) from exc
