"""SharedState: several routers, on several machines, share their state over Redis.

Workers' messages reach the other routers over one channel of Redis with a delay of some hundredths of a second. Records
are also stored in Redis, for routers that start later; those request prefixes from another router. Redis is optional:
while it is down, each router works with its own data, and afterwards they exchange their data again.

A fleet is the set of routers with the same Redis and the same database number. Redis' channels are common to all
databases, so the number is a part of every name.
"""

from __future__ import annotations

import asyncio
import logging
import re
import reprlib
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from router.settings import ROUTER_GONE_SECONDS, SettingsError
from router.sharing.channels import pack, unpack
from router.sharing.records import STALE_SECONDS

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["SharedState"]

_log = logging.getLogger("router.sharing.shared_state")

# The number changes with the format of messages, so that routers of two versions ignore each other.
FORM = 2

# Minimum interval between batches of messages. From time to time an empty batch shows that this router is alive.
SEND_SECONDS = 0.002
ALIVE_SECONDS = 1.0
# A router without a message for this time is gone. So is Redis, if a router does not receive its own messages. The
# second value is the interval of this check.
GONE_SECONDS = ROUTER_GONE_SECONDS
SILENCE_SECONDS = 0.1
ANSWER_SECONDS = 2.0
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 3.0
# More messages wait only while Redis hangs; the oldest are dropped, because all data is sent again soon.
MAX_WAITING = 10_000
# A new router waits this long for messages of others. Then it requests prefixes from this many of them, one after the
# other, with this time-out (less than ANSWER_SECONDS, the time-out of each Redis command).
FIRST_HEARD_SECONDS = 1.5
MAX_ASKED = 2
PREFIXES_SECONDS = 1.5
# A full prefix index takes 13 MB; a larger one than this limit is not sent. Redis drops those that are not fetched.
MAX_PREFIXES_BYTES = 64 * 1024 * 1024
KEPT_PREFIXES_SECONDS = 10

# What routers send each other; see ``hub.py``.
_KINDS = frozenset({"publish", "keep", "gone", "ask", "answers", "hello", "limits", "want_prefixes"})
_PATH = re.compile(r"rediss?://[^/?#]*/([^?#]+)")


class SharedState:
    """One router's connection to the others."""

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
            name: name of this router for the others.
            on_message: called with the other routers' messages, and with those about the connection to them.
            list_records: returns this router's records by key.
            clock: monotonic clock in seconds, to detect silent routers.

        Raises:
            SettingsError: ``url`` is invalid, or redis-py is not installed.
        """
        self.name = name
        self._on_message = on_message
        self._list_records = list_records
        self._clock = clock
        self._redis = _make_client(url)
        fleet = f"kvrouter:{FORM}:{self._redis.connection_pool.connection_kwargs.get('db') or 0}"
        self._channel, self._prefixes = f"{fleet}:bus", f"{fleet}:prefixes:"
        # The key of the set of instances, and the prefix of the keys of their records, which Redis expires by its own
        # clock.
        self._instances, self._record = f"{fleet}:instances", f"{fleet}:instance:"
        self._waiting: deque[tuple[Any, ...]] = deque(maxlen=MAX_WAITING)
        self._has_waiting = asyncio.Event()
        # Other routers: the time of the last message from each, and the names of its processes.
        self._heard_at: dict[str, float] = {}
        self._processes: dict[str, set[str]] = {}
        self._heard_self_at = 0.0
        self._is_up: bool | None = None
        self._was_tried = asyncio.Event()
        self._is_closing = False
        self._sending_prefixes: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<SharedState with {list(self._heard_at)}>"

    def send_message(self, *message: Any) -> None:
        """Send a message to all other routers soon."""
        self._waiting.append(message)
        self._has_waiting.set()

    def list_routers(self) -> list[str]:
        """Return the names of the other routers with recent messages."""
        return list(self._heard_at) if self._is_up else []

    async def wait_for_records(self) -> None:
        """Wait until the records in Redis have been loaded; with a short time-out, because Redis may be down."""
        give_up = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._was_tried.set)
        await self._was_tried.wait()
        give_up.cancel()

    async def fetch_prefixes(self) -> dict[str, Any]:
        """Return the prefixes of another router; empty if there is no other one, or none answers soon."""
        from redis.exceptions import RedisError

        try:
            # This router itself is one subscriber.
            if not self._is_up or (await self._redis.pubsub_numsub(self._channel))[0][1] < 2:
                return {}
            give_up_at = self._clock() + FIRST_HEARD_SECONDS
            while not self._heard_at and self._clock() < give_up_at:
                await asyncio.sleep(SILENCE_SECONDS)
            for router in self.list_routers()[:MAX_ASKED]:
                self.send_message("want_prefixes", router, self.name)
                found: Any = await self._redis.blpop([self._prefixes + self.name], timeout=PREFIXES_SECONDS)
                prefixes: dict[str, Any] = unpack(found[1]) if found else {}
                if any(num_chunks for num_chunks, _ in prefixes.values()):
                    return prefixes
        except (RedisError, OSError, ValueError, TypeError, AttributeError) as exc:
            _log.warning("no prefixes were had of the other routers: %s", exc)
        return {}

    def send_prefixes(self, router: str, answers: list[dict[str, Any]]) -> None:
        """Send another router the prefixes in the answer of a worker, if there is one."""
        sending = asyncio.ensure_future(self._store_prefixes(self._prefixes + router, answers[0] if answers else {}))
        self._sending_prefixes.add(sending)
        sending.add_done_callback(self._sending_prefixes.discard)

    async def keep_connection(self) -> None:
        """Exchange messages with the other routers, and reconnect whenever Redis was down; until ``disconnect``."""
        from redis.exceptions import RedisError

        while not self._is_closing:
            try:
                await self._exchange_messages()
            except (RedisError, OSError, asyncio.TimeoutError) as exc:
                self._set_trouble(str(exc) or type(exc).__name__)
            except Exception:
                _log.exception("the exchange with other routers failed; it begins anew")
                self._set_trouble("it failed")
            if not self._is_closing:
                await asyncio.sleep(RETRY_SECONDS)

    async def disconnect(self, connecting: asyncio.Future[None]) -> None:
        """End ``keep_connection``, which runs in the task ``connecting``, and sign off if Redis is reachable."""
        from redis.exceptions import RedisError

        self._is_closing = True  # redis-py may treat a cancellation as its own time-out, and continue
        connecting.cancel()
        await asyncio.wait([connecting], timeout=CLOSE_SECONDS)
        if self._is_up:
            try:
                await self._send_batch()
            except (RedisError, OSError) as exc:
                _log.info("the other routers notice only later that this one has ended: %s", exc)
        await self._redis.aclose()

    async def _store_prefixes(self, key: str, prefixes: dict[str, Any]) -> None:
        """Store the prefixes where the other router waits for them, so that only that router has to read them."""
        from redis.exceptions import RedisError

        data = pack(prefixes)
        if len(data) > MAX_PREFIXES_BYTES:
            _log.warning("a router that has just started learns prefixes anew: these would take %d bytes", len(data))
            data = pack({})
        try:
            async with self._redis.pipeline() as pipeline:
                pipeline.rpush(key, data)
                pipeline.expire(key, KEPT_PREFIXES_SECONDS)
                await pipeline.execute()
        except (RedisError, OSError) as exc:
            _log.warning("prefixes could not be sent to another router: %s", exc)

    async def _exchange_messages(self) -> None:
        """Connect, and exchange messages until something fails."""
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(self._channel)
            await self._exchange_records()
            self._heard_self_at = self._clock()
            self._set_trouble("")
            self.send_message("hello")  # a new router and the others do not have each other's data yet
            self._on_message(["hello"])
            sending = asyncio.ensure_future(self._keep_sending())
            try:
                while not sending.done() and not self._is_closing:
                    message = await subscription.get_message(ignore_subscribe_messages=True, timeout=SILENCE_SECONDS)
                    if message is not None:
                        self._take_batch(message["data"])
                    self._check_silence()
                if sending.done():
                    sending.result()
            finally:
                sending.cancel()
                await asyncio.wait([sending], timeout=CLOSE_SECONDS)

    async def _exchange_records(self) -> None:
        """Load the records in Redis, and store those that it lacks."""
        members: list[Any] = sorted(await self._redis.smembers(self._instances))  # in an order that no hash decides
        names = [self._record.encode() + member for member in members]
        stored: list[Any] = await self._redis.mget(names) if members else []
        known: dict[str, Any] = {}
        for member, data in zip(members, stored, strict=True):
            if data is None:  # it was not renewed for a long time
                await self._redis.srem(self._instances, member)
                continue
            try:
                key = member.decode()
                known[key] = unpack(data)
            except ValueError as exc:
                _log.error("the record of %r in the shared state is left aside: %s", member[:100], exc)
            else:
                self._on_message(["keep", key, known[key]])
        self._void_charges()
        for key, record in self._list_records().items():
            if record != known.get(key):
                self.send_message("keep", key, record)

    def _void_charges(self) -> None:
        """Remove the tokens from waiting messages: charged late, or twice, they would delay clients without reason."""
        voided = [(*message[:3], {}) if message[0] == "limits" else message for message in self._waiting]
        self._waiting = deque(voided, MAX_WAITING)

    async def _keep_sending(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_closing:
            await self._send_batch()
            alive = loop.call_later(ALIVE_SECONDS, self._has_waiting.set)
            await self._has_waiting.wait()
            alive.cancel()
            await asyncio.sleep(SEND_SECONDS)

    async def _send_batch(self) -> None:
        batch = list(self._waiting)
        self._waiting.clear()
        self._has_waiting.clear()
        try:
            data = pack([self.name, batch])
        except ValueError:  # a worker's message may be nested too deeply to be forwarded
            batch = [message for message in batch if _can_be_sent(message)]
            data = pack([self.name, batch])
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for message in batch:
                    if message[0] == "keep":
                        # In this order: a router that finds the key but no record removes the key.
                        pipeline.set(self._record + message[1], pack(message[2]), ex=int(STALE_SECONDS))
                        pipeline.sadd(self._instances, message[1])
                pipeline.publish(self._channel, data)
                await pipeline.execute()
        except BaseException:  # others may have received it: receiving a message twice has no effect
            self._waiting = deque([*batch, *self._waiting], MAX_WAITING)
            raise

    def _take_batch(self, data: bytes) -> None:
        try:
            sender, batch = unpack(data)
            if not isinstance(sender, str) or not isinstance(batch, list):
                raise TypeError("it is not a name and messages")
        except (ValueError, TypeError) as exc:
            _log.error("what another router sent is left aside: %s", exc)
            return
        if sender == self.name:
            self._heard_self_at = self._clock()
            return
        if sender not in self._heard_at:
            _log.info("router %s shares its state with this one", sender)
        self._heard_at[sender] = self._clock()
        for message in batch:
            try:
                self._take_message(sender, message)
            except Exception:  # the following messages are processed nevertheless
                _log.exception("a message of router %s was not understood: %s", sender, reprlib.repr(message))

    def _take_message(self, sender: str, message: list[Any]) -> None:
        if message[0] not in _KINDS:  # the hub takes others, too, but only from its own processes
            raise ValueError("routers send no such message")
        if message[0] == "publish":
            self._processes.setdefault(sender, set()).add(message[1])
        elif message[0] == "gone":
            self._processes.get(sender, set()).discard(message[1])
        self._on_message(message)

    def _check_silence(self) -> None:
        """Detect routers that are gone.

        Raises:
            TimeoutError: Redis does not answer.
        """
        now = self._clock()
        if now - self._heard_self_at > GONE_SECONDS:
            raise asyncio.TimeoutError(f"nothing came from it for {GONE_SECONDS:g} s")
        for router in [router for router, heard_at in self._heard_at.items() if now - heard_at > GONE_SECONDS]:
            _log.warning("router %s, which shared its state with this one, is gone", router)
            self._forget_router(router)

    def _forget_router(self, router: str) -> None:
        del self._heard_at[router]
        # Its own name, too, because it may have died before any of its processes was known.
        for name in (*self._processes.pop(router, ()), router):
            self._on_message(["gone", name])
        self._on_message(["limits", router, {}, {}])

    def _set_trouble(self, trouble: str) -> None:
        self._was_tried.set()
        if self._is_up == (not trouble):
            return
        self._is_up = not trouble
        if trouble:
            _log.warning("the shared state is gone, and this router goes on with what it knows: %s", trouble)
            for router in list(self._heard_at):  # no counts are better than old ones
                self._forget_router(router)
        else:
            _log.info("the shared state is there")
        self._on_message(["state", trouble])


def _can_be_sent(message: tuple[Any, ...]) -> bool:
    try:
        pack(["", [message]])
    except ValueError as exc:
        _log.error("a message is not sent to the other routers: %s: %s", exc, reprlib.repr(message))
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
            raise ValueError(f"{path[1]!r} is no database; it must be a number")
        return Redis.from_url(url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
    except ValueError as exc:
        raise SettingsError(
            f"server.shared-state is no address of a Redis, such as redis://host:6379/0: {exc}"
        ) from exc
