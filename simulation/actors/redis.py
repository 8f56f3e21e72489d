"""RedisActor: simulates the part of Redis that routers use: keys, sets, lists and channels."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.world import Process, World

__all__ = ["RedisActor"]

PORT = 6379


class RedisActor:
    """A Redis server. ``start`` starts it, also again after its end, without data."""

    def __init__(self, world: World, name: str = "redis") -> None:
        self.world, self.name = world, name
        self.process: Process

    def start(self) -> None:
        """Start the server's process."""
        self.process = self.world.make_process(self.name)
        self.keys: dict[bytes, Any] = {}
        self.ends: dict[bytes, float] = {}
        self.channels: dict[bytes, dict[_Connection, None]] = {}
        self.waiting: dict[bytes, deque[_Connection]] = {}
        self.process.start_loop(self._main)

    async def _main(self) -> None:
        await asyncio.get_running_loop().create_server(lambda: _Connection(self), self.name, PORT)
        await asyncio.Event().wait()

    def find(self, key: bytes, make: Callable[[], Any] = lambda: None) -> Any:
        """Return the value of a key. If there is none, create it with ``make``."""
        if key in self.ends and self.world.now >= self.ends[key]:
            del self.ends[key]
            self.keys.pop(key, None)
        if key not in self.keys and (made := make()) is not None:
            self.keys[key] = made
        return self.keys.get(key)


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, redis: RedisActor) -> None:
        self._redis = redis
        self._data = b""
        self._is_new = False  # whether the client uses version 3 of the protocol (RESP3)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        for listeners in self._redis.channels.values():
            listeners.pop(self, None)
        for waiting in self._redis.waiting.values():
            if self in waiting:
                waiting.remove(self)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (parsed := _parse(self._data)) is not None:
            command, self._data = parsed
            handler = getattr(self, f"_on_{command[0].lower().decode()}", None)
            if handler is None:
                self.say(RuntimeError(f"ERR unknown command '{command[0].decode()}'"))
            else:
                handler(*command[1:])

    def say(self, value: Any) -> None:
        """Send the answer to a command."""
        if not self.transport.is_closing():
            self.transport.write(_encode(value))

    def push(self, value: list[Any]) -> None:
        """Send a message that is no answer to a command."""
        if not self.transport.is_closing():
            data = _encode(value)
            self.transport.write(b">" + data[1:] if self._is_new else data)

    def _on_hello(self, version: bytes, *_: bytes) -> None:
        self._is_new = version == b"3"
        self.transport.write(b"%%1\r\n$5\r\nproto\r\n:%d\r\n" % int(version))

    def _on_client(self, *_: bytes) -> None:
        self.say(True)

    _on_select = _on_multi = _on_client

    def _on_ping(self, *_: bytes) -> None:
        self.say(b"PONG")

    def _on_subscribe(self, channel: bytes) -> None:
        self._redis.channels.setdefault(channel, {})[self] = None
        self.push([b"subscribe", channel, 1])

    def _on_unsubscribe(self, *channels: bytes) -> None:
        for channel in channels or list(self._redis.channels):
            self._redis.channels.get(channel, {}).pop(self, None)
            self.push([b"unsubscribe", channel, 0])

    def _on_publish(self, channel: bytes, data: bytes) -> None:
        listeners = self._redis.channels.get(channel, {})
        for listener in listeners:
            listener.push([b"message", channel, data])
        self.say(len(listeners))

    def _on_pubsub(self, _: bytes, channel: bytes) -> None:
        self.say([channel, len(self._redis.channels.get(channel, {}))])

    def _on_set(self, key: bytes, value: bytes, *options: bytes) -> None:
        self._redis.keys[key] = value
        if options:
            self._redis.ends[key] = self._redis.world.now + int(options[1])
        self.say(True)

    def _on_expire(self, key: bytes, seconds: bytes) -> None:
        self._redis.ends[key] = self._redis.world.now + int(seconds)
        self.say(1)

    def _on_mget(self, *keys: bytes) -> None:
        self.say([self._redis.find(key) for key in keys])

    def _on_smembers(self, key: bytes) -> None:
        self.say(list(self._redis.find(key) or ()))

    def _on_sadd(self, key: bytes, *members: bytes) -> None:
        self._redis.find(key, dict).update(dict.fromkeys(members))
        self.say(len(members))

    def _on_srem(self, key: bytes, *members: bytes) -> None:
        known = self._redis.find(key) or {}
        self.say(sum(known.pop(member, 0) is None for member in members))

    def _on_rpush(self, key: bytes, value: bytes) -> None:
        waiting = self._redis.waiting.get(key)
        if waiting:
            waiting.popleft().say([key, value])
        else:
            self._redis.find(key, list).append(value)
        self.say(1)

    def _on_blpop(self, key: bytes, seconds: bytes) -> None:
        found = self._redis.find(key)
        if found:
            self.say([key, found.pop(0)])
            return
        waiting = self._redis.waiting.setdefault(key, deque())
        waiting.append(self)

        def give_up() -> None:
            if self in waiting:
                waiting.remove(self)
                self.say(None)

        asyncio.get_running_loop().call_later(float(seconds), give_up)

    def _on_exec(self) -> None:
        self.say([True, True])


def _parse(data: bytes) -> tuple[list[bytes], bytes] | None:
    """Return the first command in ``data``, and the data after it; None: the command is not complete."""
    if not data.startswith(b"*") or b"\r\n" not in data:
        return None
    count, _, rest = data[1:].partition(b"\r\n")
    parts = []
    for _number in range(int(count)):
        head, separator, rest = rest.partition(b"\r\n")
        if not separator or len(rest) < int(head[1:]) + 2:
            return None
        size = int(head[1:])
        parts.append(rest[:size])
        rest = rest[size + 2 :]
    return parts, rest


def _encode(value: Any) -> bytes:
    if value is True:
        return b"+OK\r\n"
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    if isinstance(value, list):
        return b"*%d\r\n%s" % (len(value), b"".join(map(_encode, value)))
    return b"-%s\r\n" % str(value).encode()
