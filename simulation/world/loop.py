"""SimulatedLoop: asyncio's event loop, which waits in virtual time and uses the simulated network.

While a loop has callbacks to run, it does not let other threads run. So it does not matter whether it needs one turn or
two for the same work; that differs between versions of Python. With ``spreads_over_turns``, callbacks that other
threads and the network add at the same moment are spread over several turns.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from simulation.world.scheduler import MAX_TURNS, SECOND, Livelock, current
from simulation.world.threads import Thread, get_ident

if TYPE_CHECKING:
    from simulation.world.process import Process
    from simulation.world.scheduler import SimThread

__all__ = ["SimulatedLoop"]

# Cancelled timers are removed when there are more than this number, and they are more than half of all timers.
MIN_CANCELLED = 100
RESOLUTION = 1 / SECOND
# Possible numbers of turns between two callbacks that were added at the same moment; -1: they run in the same turn.
_SPREAD = (-1, -1, 0, 1, 2)


class SimulatedLoop(base_events.BaseEventLoop):
    """The event loop of one simulated thread."""

    _ready: deque[_Handle]
    _scheduled: list[tuple[float, int, _TimerHandle]]
    _stopping: bool
    _closed: bool

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self._clock = process.clock
        self._thread: SimThread | None = None
        """The thread that waits for events."""
        self._num_scheduled = 0
        self._num_cancelled = 0
        self._arrived: deque[list[Any]] = deque()
        """Callbacks of other threads and the network that wait, each for some turns after the callback before it."""
        self.set_exception_handler(_report)

    def run_main(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end, as ``asyncio.run`` does; then cancel the remaining tasks and close the loop."""
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
        return None  # asyncio would warn: the loop of a crashed process is never closed

    get_debug = staticmethod(bool)  # False; asyncio asks for each future

    def time(self) -> float:
        return self._clock.monotonic_ns() / SECOND

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> _Handle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> _Handle:
        handle = self.call_soon(callback, *args, context=context)
        if self.process.spreads_over_turns and self._thread_id != get_ident():
            self._spread_last()
        if self._thread is not None:
            current().wake(self._thread)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> _TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> _TimerHandle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        timer = _TimerHandle(callback, args, self, context, when)
        self._num_scheduled += 1
        heapq.heappush(self._scheduled, (when, self._num_scheduled, timer))
        return timer

    def run_forever(self) -> None:
        self._check_closed()  # type: ignore[attr-defined]
        self._check_running()  # type: ignore[attr-defined]
        self._thread_id = get_ident()
        events._set_running_loop(self)
        try:
            self._run()
        finally:
            self._stopping = False
            self._thread_id = None  # type: ignore[assignment]
            events._set_running_loop(None)

    def _run(self) -> None:
        """Run callbacks until ``stop``, in asyncio's order. Timers of the same moment run in the order of creation."""
        scheduler, ready, clock = current(), self._ready, self.process.clock
        turns, turned_at = 0, -1
        while True:
            if self._num_cancelled > MIN_CANCELLED and 2 * self._num_cancelled > len(self._scheduled):
                self._remove_cancelled()
            self._take_arrived()
            scheduled = self._scheduled
            while scheduled and scheduled[0][2]._cancelled:
                heapq.heappop(scheduled)
                self._num_cancelled -= 1
            if ready or self._stopping:
                if scheduler.now != turned_at:
                    turns, turned_at = 0, scheduler.now
                turns += 1
                if turns > MAX_TURNS:
                    raise Livelock(f"the loop of {self.process.name} always has callbacks, so time does not pass")
            else:
                wait = scheduled[0][0] - clock.monotonic_ns() / SECOND if scheduled else None
                if wait is None or wait > 0:
                    self._thread = scheduler.running
                    scheduler.block(wait, "events")
                    self._thread = None
                    process = self.process
                    if process.lag_seconds and process.lags.random() < 0.5:
                        # Events of this time are processed in the same turn.
                        scheduler.block(process.lags.expovariate(1 / process.lag_seconds), "lag")
            if scheduled:
                due = clock.monotonic_ns() / SECOND + RESOLUTION
                while scheduled and scheduled[0][0] < due:
                    timer = heapq.heappop(scheduled)[2]
                    if timer._cancelled:
                        self._num_cancelled -= 1
                    else:
                        timer._is_due = True
                        ready.append(timer)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    try:
                        handle._context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as exc:
                        context = {"message": f"Exception in callback {handle._callback}", "exception": exc}
                        self.call_exception_handler({**context, "handle": handle})
            handle = None  # type: ignore[assignment]  # so that the objects of the last callback can be freed
            if self._stopping:
                return

    def _spread_last(self) -> None:
        self._arrived.append([self._ready.pop(), self.process.lags.choice(_SPREAD)])

    def _take_arrived(self) -> None:
        """Make callbacks in ``_arrived`` ready if they have waited long enough, or if no other callback is ready."""
        arrived, ready = self._arrived, self._ready
        if arrived and ready:
            arrived[0][1] -= 1
        while arrived and (not ready or arrived[0][1] < 0):
            ready.append(arrived.popleft()[0])

    def _remove_cancelled(self) -> None:
        self._scheduled[:] = [entry for entry in self._scheduled if not entry[2]._cancelled]
        heapq.heapify(self._scheduled)
        self._num_cancelled = 0

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Add a callback from outside of simulated threads, for an event that an operating system would report."""
        if not self._closed and self.process.is_alive:
            # A new context, because the current one is that of any thread.
            self._ready.append(_Handle(callback, args, self, contextvars.Context()))
            if self.process.spreads_over_turns:
                self._spread_last()
            if self._thread is not None:
                self.process.scheduler.wake(self._thread)

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
            if not self._closed:
                self.call_soon_threadsafe(lambda: None if future.done() else done(value))

        Thread(target=run, name=f"executor-{getattr(func, '__name__', 'call')}").start()
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        return None

    async def shutdown_asyncgens(self) -> None:
        return None

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


class _Handle(asyncio.Handle):
    """``asyncio.Handle`` without its debug mode."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], loop: Any, context: contextvars.Context | None
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback: Any = callback
        self._args: Any = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None


class _TimerHandle(_Handle):
    """``asyncio.TimerHandle``. If two are for the same moment, the one that was created first runs first."""

    __slots__ = ("_is_due", "_when")

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: Any,
        context: contextvars.Context | None,
        when: float,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = self._is_due = False
        self._repr = self._source_traceback = None
        self._when = when

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        if not self._cancelled:
            self._loop._num_cancelled += not self._is_due
            self._cancelled = True
            self._callback = self._args = None


def _number_of(task: Any) -> tuple[int, str]:
    name = task.get_name()
    head, _, number = name.rpartition("-")
    return (int(number), head) if number.isdigit() else (0, name)


def _report(loop: Any, context: dict[str, Any]) -> None:
    exc = context.get("exception")
    if isinstance(exc, Livelock):
        raise exc
    if not loop.process.is_alive:
        return  # unfinished work of a killed process is not a failure
    current().report(f"loop of {loop.process.name}: {context['message']}", exc)
