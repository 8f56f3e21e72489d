"""ManyWorkers: a router with several processes: the real supervisor and the real workers, in simulated processes.

Functions of the operating system are replaced. Processes are started, not forked. Pairs of sockets belong to the
simulated network. If a connection is passed to another process, its socket gets another owner (``_send_connection``).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import router.launch.worker as worker_module
import router.sharing.supervisor as supervisor_module
from router.access import Admission, Auth
from router.app import RouterApp
from router.launch.server import RouterServer
from router.settings import RouterSettings
from router.sharing import Supervisor, WorkerTask
from simulation.actors.router import list_leftovers
from simulation.world import Process, World
from simulation.world.network import SimSocket
from simulation.world.patches import this_process

__all__ = ["ManyWorkers", "worker_seams"]


class ManyWorkers:
    """A router with several processes. ``start`` starts it, also again after its end."""

    def __init__(self, world: World, name: str, settings: RouterSettings) -> None:
        self.world, self.name, self.settings = world, name, settings
        self.process: Process
        self.workers: dict[str, _Worker] = {}
        self.clock: dict[str, float] = {}
        self.is_ending = False
        self._admission: Admission | None = None
        self._num_started = 0
        self._num_lives = 0

    def start(self, **clock: Any) -> None:
        """Start the supervisor's process."""
        self._num_lives += 1
        self.is_ending, self.workers = False, {}
        self.process = self.world.make_process(self.name, **clock)
        self.process.on_crash.append(lambda: None)
        _OWNERS[id(self.process)] = self
        self.process.start_loop(self._supervise)

    def stop(self) -> None:
        """Send SIGTERM to the supervisor."""
        if (handler := self.process.signal_handlers.get(signal.SIGTERM)) is not None:
            handler()

    def crash(self) -> None:
        """Kill the supervisor and all workers."""
        for process in (self.process, *(each.process for each in list(self.workers.values()))):
            process.crash()

    def list_processes(self) -> list[Process]:
        """Return the process of the supervisor, and those of running workers."""
        return [self.process, *(each.process for each in self.workers.values() if each.process.is_alive)]

    def list_apps(self) -> list[RouterApp]:
        """Return the applications of running workers."""
        return [each.app for each in self.workers.values() if each.app is not None and each.process.is_alive]

    def list_leftovers(self) -> list[str]:
        """Return a text for each count in the supervisor or a worker that is not 0, although no request is running."""
        counts = []
        if self._admission is not None and self.process.is_alive:
            counts += [(self._admission.running, "admitted requests"), (self._admission.waiting, "waiting requests")]
        return [f"{self.name}: {count} {name}" for count, name in counts if count] + [
            leftover
            for worker in self.workers.values()
            if worker.process.is_alive and worker.app is not None and worker.server is not None
            for leftover in list_leftovers(worker.process, worker.app, worker.server)
        ]

    async def _supervise(self) -> None:
        auth = Auth(self.settings)
        admission = self._admission = Admission(self.settings, auth.token_rates)
        listener: Any = self.process.network.open_listener(self.process, self.settings.port)
        supervisor = Supervisor(self.settings, listener, _run_worker, self.settings.graces, admission)
        await supervisor.run_until_signal(lambda: self.world.trace.add(self.name, "serves"))
        self.process.crash()

    def start_worker(self, task: WorkerTask) -> _Worker:
        """Start the process of a worker."""
        self._num_started += 1
        name = f"{self.name}-w{self._num_started}"
        process = self.world.make_process(name, host=self.name, machine=self.process.clock)
        worker = self.workers[name] = _Worker(process)
        _OWNERS[id(process)] = worker
        process.start_loop(lambda: worker.serve(task))
        return worker


class _Worker:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.app: RouterApp | None = None
        self.server: RouterServer | None = None

    async def serve(self, task: WorkerTask) -> None:
        await worker_module._serve(task)
        self.process.crash()


_OWNERS: dict[int, Any] = {}


def _run_worker(_: WorkerTask) -> None:
    raise AssertionError("processes start by ``_Process``")


class _Context:
    """Replaces the context of ``multiprocessing``."""

    @staticmethod
    def Process(*, target: Callable[..., None], args: tuple[WorkerTask], daemon: bool) -> _Process:
        return _Process(args[0])


class _Process:
    """Replaces the ``Process`` of ``multiprocessing``: a worker of a router."""

    def __init__(self, task: WorkerTask) -> None:
        self._task = task
        self.sentinel = _Sentinel()
        self.exitcode: int | None = None

    def start(self) -> None:
        """Start the worker process. The supervisor of a router calls this; the worker belongs to this router."""
        owner = _OWNERS[id(this_process())]
        task = self._task
        channels: list[Any] = []
        for sock in (task.channel, task.connections):
            channels.append(sock.move())  # type: ignore[attr-defined]
        worker = owner.start_worker(task._replace(channel=channels[0], connections=channels[1]))
        self._process = worker.process
        for sock in channels:
            sock.endpoint.process = worker.process
        self.pid = self._process.pid
        self._process.on_crash.append(self._on_end)

    def _on_end(self) -> None:
        self.exitcode = 0
        self.sentinel.fire()

    def join(self) -> None:
        """Return at once: the supervisor calls this only after the end of the process."""

    def kill(self) -> None:
        """Kill the worker."""
        self._process.trace.add(self._process.name, "is killed by its supervisor")
        self._process.crash()


class _Sentinel:
    """Replaces the sentinel of a process: it becomes readable when the process has ended."""

    def __init__(self) -> None:
        self._callback: Callable[[], None] | None = None
        self._is_over = False

    def watch(self, loop: Any, callback: Callable[[], None] | None) -> bool:
        had, self._callback = self._callback is not None, None
        if callback is not None:
            self._callback = lambda: loop.post(callback)
            if self._is_over:
                self._callback()
        return had

    def fire(self) -> None:
        self._is_over = True
        if self._callback is not None:
            self._callback()


def _send_connection(channel: Any, connection: Any) -> bool:
    other = channel.endpoint.peer
    if other.is_closed or not other.process.is_alive:
        return False
    moved = connection.move()
    moved.endpoint.process = other.process
    other.passed.append(moved)
    if other.reader is not None:
        other.reader()
    return True


def _receive_connections(channel: Any) -> tuple[int, list[Any]]:
    passed: deque[SimSocket] = channel.endpoint.passed
    taken = [passed.popleft() for _ in range(len(passed))]
    return len(taken), taken


@contextlib.contextmanager
def worker_seams(world: World) -> Iterator[None]:
    """Replace the functions of the operating system that supervisor and workers use, during the ``with`` block."""

    def socketpair(*_: Any, **__: Any) -> tuple[SimSocket, SimSocket]:
        process = this_process()
        assert process is not None
        return world.network.socket_pair(process, process)

    def make_app(settings: RouterSettings, link: Any) -> RouterApp:
        worker = _OWNERS[id(this_process())]
        worker.app = RouterApp(settings, link)
        app: RouterApp = worker.app
        return app

    def make_server(app: RouterApp) -> RouterServer:
        worker = _OWNERS[id(this_process())]
        worker.server = RouterServer(app)
        server: RouterServer = worker.server
        return server

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (multiprocessing, "get_context", lambda _: _Context),
            (socket, "socketpair", socketpair),
            (supervisor_module, "send_connection", _send_connection),
            (worker_module, "receive_connections", _receive_connections),
            (worker_module, "RouterApp", make_app),
            (worker_module, "RouterServer", make_server),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        stack.callback(_OWNERS.clear)
        yield
