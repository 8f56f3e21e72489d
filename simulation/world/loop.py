"""SimulatedLoop: asyncio's own loop, whose ``select`` waits in virtual time and whose connections are the network's.

A loop that has callbacks to run goes on without giving way to other threads: whether it takes one turn or two for the
same work, which differs between versions of Python, changes nothing outside.
"""

from __future__ import annotations

import asyncio
from asyncio import base_events, events
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from simulation.world.scheduler import MAX_TURNS, SECOND, Livelock, current
from simulation.world.threads import Thread, get_ident

if TYPE_CHECKING:
    from simulation.world.process import Process
    from simulation.world.scheduler import SimThread

__all__ = ["SimulatedLoop"]


class SimulatedLoop(base_events.BaseEventLoop):
    """The event loop of one simulated thread."""

    _selector: _Selector

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self._selector = _Selector(self)
        self._clock_resolution = 1 / SECOND
        self.set_exception_handler(_report)

    def run_main(self, main: Coroutine[Any, Any, Any]) -> Any:
        """As ``asyncio.run``, and the loop is closed: the tasks that are left end as cancelled."""
        try:
            return self.run_until_complete(main)
        finally:
            left = sorted(asyncio.all_tasks(self), key=lambda task: _number_of(task))
            for task in left:
                task.cancel()
            if left:
                self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.close()

    def __del__(self) -> None:
        return None  # one of a process that crashed was never closed

    def time(self) -> float:
        return self.process.clock.monotonic_ns() / SECOND

    def run_forever(self) -> None:
        self._check_closed()  # type: ignore[attr-defined]
        self._check_running()  # type: ignore[attr-defined]
        self._thread_id = get_ident()
        events._set_running_loop(self)
        try:
            while True:
                self._run_once()  # type: ignore[attr-defined]
                if self._stopping:  # type: ignore[has-type]
                    break
        finally:
            self._stopping = False
            self._thread_id = None  # type: ignore[assignment]
            events._set_running_loop(None)

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Have ``callback`` run in the loop, from outside: what the operating system tells it."""
        if not self._closed and self.process.is_alive:  # type: ignore[attr-defined]
            self.call_soon_threadsafe(callback, *args)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        future = self.create_future()

        def run() -> None:
            try:
                done, value = future.set_result, func(*args)
            except BaseException as exc:
                done, value = future.set_exception, exc
            if not self._closed:  # type: ignore[attr-defined]
                self.call_soon_threadsafe(lambda: None if future.done() else done(value))

        Thread(target=run, name=f"executor-{getattr(func, '__name__', 'call')}").start()
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        return None

    async def shutdown_asyncgens(self) -> None:
        return None

    def _process_events(self, event_list: list[Any]) -> None:
        return None

    def _write_to_self(self) -> None:
        self._selector.wake()

    def close(self) -> None:
        if not self.is_closed():
            self.process.network.on_loop_end(self)
            super().close()

    # The network.

    async def create_connection(
        self,
        protocol_factory: Callable[[], Any],
        host: str | None = None,
        port: int | None = None,
        *,
        sock: Any = None,
        ssl: Any = None,
        **_: Any,
    ) -> Any:
        if ssl:
            raise NotImplementedError("TLS is not simulated")
        if sock is not None:
            return await self.process.network.adopt(self, protocol_factory, sock)
        return await self.process.network.connect(self, protocol_factory, str(host), int(port or 0))

    async def create_unix_connection(
        self, protocol_factory: Callable[[], Any], path: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        return await self.process.network.adopt(self, protocol_factory, sock)

    async def connect_accepted_socket(
        self, protocol_factory: Callable[[], Any], sock: Any, *, ssl: Any = None, **_: Any
    ) -> Any:
        if ssl:
            raise NotImplementedError("TLS is not simulated")
        return await self.process.network.adopt(self, protocol_factory, sock)

    async def create_server(
        self,
        protocol_factory: Callable[[], Any],
        host: Any = None,
        port: int | None = None,
        *,
        sock: Any = None,
        ssl: Any = None,
        **_: Any,
    ) -> Any:
        if ssl:
            raise NotImplementedError("TLS is not simulated")
        port = sock.getsockname()[1] if sock is not None else port
        return self.process.network.listen(self, protocol_factory, int(port or 0), sock)

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return await self.process.network.resolve(self, host, port)

    def add_reader(  # type: ignore[override]
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        fd.watch(self, lambda: callback(*args))

    def remove_reader(self, fd: Any) -> bool:
        return bool(fd.watch(self, None))

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        self.process.signal_handlers[sig] = lambda: self.post(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.process.signal_handlers.pop(sig, None) is not None

    def subprocess_exec(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("processes are not started from a simulated loop")


class _Selector:
    """What a loop asks for events: it waits in virtual time."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._thread: SimThread | None = None
        self._is_told = False
        self._turns, self._turned_at = 0, -1

    def select(self, timeout: float | None) -> list[Any]:
        scheduler = current()
        if timeout is not None and timeout <= 0:
            if scheduler.now != self._turned_at:
                self._turns, self._turned_at = 0, scheduler.now
            self._turns += 1
            if self._turns > MAX_TURNS:
                raise Livelock(f"the loop of {self._loop.process.name} turns and turns")
            return []
        if self._is_told:
            self._is_told = False
            return []
        self._thread = scheduler.running
        scheduler.block(timeout, "events")
        self._thread, self._is_told = None, False
        process = self._loop.process
        if process.lag_seconds and process.lags.random() < 0.5:
            # What happens meanwhile is seen in the same turn.
            scheduler.block(process.lags.expovariate(1 / process.lag_seconds), "lag")
        return []

    def wake(self) -> None:
        self._is_told = True
        if self._thread is not None:
            current().wake(self._thread)

    def get_map(self) -> dict[Any, Any]:
        return {}

    def close(self) -> None:
        return None


def _number_of(task: Any) -> tuple[int, str]:
    name = task.get_name()
    head, _, number = name.rpartition("-")
    return (int(number), head) if number.isdigit() else (0, name)


def _report(loop: Any, context: dict[str, Any]) -> None:
    exc = context.get("exception")
    if isinstance(exc, Livelock):
        raise exc
    if not loop.process.is_alive:
        return  # what a process that was killed leaves undone
    current().report(f"loop of {loop.process.name}: {context['message']}", exc)
