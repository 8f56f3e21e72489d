"""After a failure at any line, or a cancellation at any await, an exchange leaves no connection and no task behind."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import router.http
from router.http import Address, ConnectionPool, ResponseReader, UpstreamError

FILES = tuple(str(Path(router.http.__file__).parent / name) for name in ("exchange.py", "pool.py"))
# asyncio does not close a socket if a protocol's constructor fails; the other functions begin or end a connection.
EXCEPT = frozenset(
    {"__init__", "connection_made", "_set_options", "add_open", "abort", "close", "fail", "connection_lost", "connect"}
    | {"discard_open", "take_idle"}
)


class Injected(Exception):
    """An error in the router's own code."""


class RaiseAt:
    """Raises ``Injected`` before the given executed line of ``FILES``, except in the functions of ``EXCEPT``."""

    def __init__(self, number: int) -> None:
        """
        Args:
            number: the line before which it raises, counted from 1; 0: it never raises.
        """
        self.left = number
        self.executed: list[tuple[str, int]] = []

    def __enter__(self) -> RaiseAt:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, _: object) -> Any:
        return self._on_line if frame.f_code.co_filename in FILES and frame.f_code.co_name not in EXCEPT else None

    def _on_line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.executed.append((frame.f_code.co_filename, frame.f_lineno))
            self.left -= 1
            if self.left == 0:
                raise Injected(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return self._on_line


class Instances:
    """A server that answers each request in two pieces."""

    def __init__(self) -> None:
        self.open: set[asyncio.StreamWriter] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab")
                await asyncio.sleep(0)
                writer.write(b"cd")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.open.discard(writer)
        finally:
            writer.close()


Scenario = Callable[[ConnectionPool, Address], Coroutine[Any, Any, None]]


async def fetch(pool: ConnectionPool, address: Address) -> None:
    assert (await pool.fetch(address, "GET", "/x", timeout=20)).body == b"abcd"


async def stream(pool: ConnectionPool, address: Address) -> None:
    for _ in range(2):
        exchange = pool.exchange(address, "GET", b"/x", [], b"")
        try:
            reader = ResponseReader(exchange)
            await reader.head()
            while await reader.chunk():
                pass
        finally:
            exchange.close()


class Collector:
    """A receiver without a task."""

    def __init__(self) -> None:
        self.body = b""
        self.ended = asyncio.get_running_loop().create_future()

    def on_data(self, data: bytes, is_end: bool) -> None:
        self.body += data
        if is_end and not self.ended.done():
            self.ended.set_result(None)

    def on_failed(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def collect(pool: ConnectionPool, address: Address) -> None:
    exchange, receiver = pool.exchange(address, "GET", b"/x", [], b""), Collector()
    try:
        exchange.send(receiver)
        await asyncio.wait_for(receiver.ended, 0.05)
        assert receiver.body == b"abcd"
    finally:
        exchange.close()


SCENARIOS = (fetch, stream, collect)


async def _run(scenario: Scenario, disturb: Callable[[Coroutine[Any, Any, None]], Awaitable[None]]) -> None:
    instances = Instances()
    server = await asyncio.start_server(instances, "127.0.0.1", 0)
    pool = ConnectionPool()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # it gets the errors of callbacks
    try:
        await disturb(scenario(pool, Address("127.0.0.1", server.sockets[0].getsockname()[1])))
        # The remaining connections are idle, and the instance has no others.
        await _wait_until(lambda: pool._open <= _list_idle(pool) and len(pool._open) == len(instances.open))
        pool.close()
        await _wait_until(lambda: not pool._open and not instances.open)
        await _wait_until(lambda: not [task for task in asyncio.all_tasks() if any(f in repr(task) for f in FILES)])
    finally:
        server.close()


def _list_idle(pool: ConnectionPool) -> set[Any]:
    return {connection for idle in pool._idle.values() for _, connection in idle}


async def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 10.0
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.001)


# asyncio warns about objects that an error in a callback leaves to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_an_error_before_any_line_leaves_no_connection_open(scenario: Scenario) -> None:
    executed = _run_with(scenario, RaiseAt(0)).executed
    # Raise before the first and before the last execution of each line.
    last = {line: number for number, line in enumerate(executed, 1)}
    first = {line: number for number, line in reversed(list(enumerate(executed, 1)))}
    numbers = {*first.values(), *last.values()}
    assert len(numbers) > 50
    for number in sorted(numbers):
        _run_with(scenario, RaiseAt(number))


def _run_with(scenario: Scenario, at: RaiseAt) -> RaiseAt:
    async def disturb(work: Coroutine[Any, Any, None]) -> None:
        with at, contextlib.suppress(Injected, UpstreamError, asyncio.TimeoutError, AssertionError):
            await asyncio.wait_for(work, 0.1)

    asyncio.run(_run(scenario, disturb))
    return at


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_a_cancellation_at_any_await_leaves_no_connection_open(scenario: Scenario) -> None:
    for turns in range(25):

        async def disturb(work: Coroutine[Any, Any, None], turns: int = turns) -> None:
            task = asyncio.ensure_future(work)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

        asyncio.run(_run(scenario, disturb))
