"""A supervisor with stand-ins for workers: the test sends their messages, and ends them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import msgpack

from router.access import Admission
from router.settings import RouterSettings
from router.sharing.channels import pack, receive_connections
from router.sharing.supervisor import Supervisor, WorkerTask
from tests.router.sharing.links import until

__all__ = ["GRACES", "SetClock", "Supervised", "WorkerStandIn", "run_supervised"]

GRACES = {signal.SIGTERM: 7.0, signal.SIGINT: 3.0}


class SetClock:
    """A clock that only the test advances."""

    seconds = 100.0

    def now(self) -> float:
        return self.seconds

    async def keep_ticking(self) -> None:
        await asyncio.Event().wait()


class WorkerStandIn:
    """A stand-in for a worker's process: its ends of two sockets, its sentinel, its exit code."""

    pid = 0  # no process has this id, so the kernel reports no CPU time
    exitcode: int | None = None

    def __init__(self, target: object, args: tuple[WorkerTask], daemon: bool) -> None:
        (self.task,) = args
        self.is_daemon = daemon
        self.num_joins = 0
        self.is_killed = False
        self.messages: list[list[Any]] = []
        self._unpacker = msgpack.Unpacker()

    def start(self) -> None:
        self.channel, self.connections = self.task.channel.dup(), self.task.connections.dup()
        self.channel.setblocking(False)
        self.connections.setblocking(False)
        self.sentinel, self._life = os.pipe()

    def join(self) -> None:
        self.num_joins += 1
        os.close(self.sentinel)

    def kill(self) -> None:
        if not self.is_killed:
            self.is_killed = True
            self.end(-signal.SIGKILL)

    def end(self, exitcode: int = 0) -> None:
        self.exitcode = exitcode
        self.channel.close()
        self.connections.close()
        os.close(self._life)

    def send(self, *message: Any) -> None:
        self.channel.sendall(pack(message))

    def send_count(self, connections: int, taken: int) -> None:
        self.send("count", connections, taken)

    def read(self, kind: str) -> list[list[Any]]:
        """Return the contents of all messages of this kind so far. A query gets an empty answer."""
        try:
            while data := self.channel.recv(65536):
                self._unpacker.feed(data)
        except BlockingIOError:
            pass
        for message in self._unpacker:
            self.messages.append(message)
            if message[0] == "ask":
                self.send("answers", message[1], message[2], self.task.name, [])
        return [message[1:] for message in self.messages if message[0] == kind]

    def take_connections(self) -> list[socket.socket]:
        """Return the clients' connections that have arrived since the last call."""
        return receive_connections(self.connections)[1]


class Supervised:
    """A supervisor, and all workers that it has started."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.clock = SetClock()
        self.workers: list[WorkerStandIn] = []
        self.num_readies = 0
        self.failures: list[Exception] = []
        """The exceptions of the next starts of processes."""
        self.supervisor = cast(Any, Supervisor(settings, self.listener, print, GRACES, Admission(settings)))
        self.supervisor._context = SimpleNamespace(Process=self._make_process)
        self.supervisor._clock = self.clock
        self._clients: list[socket.socket] = []

    def _make_process(self, target: object, args: tuple[WorkerTask], daemon: bool) -> WorkerStandIn:
        if self.failures:
            raise self.failures.pop()
        worker = WorkerStandIn(target, args, daemon)
        self.workers.append(worker)
        return worker

    async def start(self) -> None:
        """Run the supervisor until it has started its first workers."""
        self.run = asyncio.ensure_future(self.supervisor.run_until_signal(self._on_ready))
        hub = self.supervisor._hub
        await until(lambda: self.run.done() or len(hub.list_workers()) == self.settings.num_workers)

    def _on_ready(self) -> None:
        self.num_readies += 1

    async def start_ready(self) -> None:
        """Run the supervisor until it accepts connections."""
        await self.start()
        for worker in self.workers:
            worker.send("ready")
        await until(lambda: self.num_readies == 1)

    async def wait_for_worker(self, number: int) -> WorkerStandIn:
        """Wait until the supervisor has added worker ``number``, counted from 0, and return the worker."""
        await until(lambda: len(self.workers) > number)
        worker = self.workers[number]
        await until(lambda: worker.task.name in self.supervisor._hub.list_workers())
        return worker

    def connect(self) -> socket.socket:
        """Open a connection as a client."""
        client = socket.create_connection(self.listener.getsockname(), 30)
        self._clients.append(client)
        return client

    async def report(self, worker: WorkerStandIn, connections: int, taken: int = 0) -> None:
        """Let a worker report its connections."""
        worker.send_count(connections, taken)
        known = self.supervisor._workers[worker.task.name]
        await until(lambda: (known.num_connections, known.num_taken) == (connections, taken))

    async def end(self, grace: float = 0.0) -> str:
        """Stop the supervisor as a signal does, and return its result."""
        if not self.run.done():
            self.supervisor._stop_workers(grace)
            for worker in self.workers:
                if worker.exitcode is None:
                    worker.end()
        return await asyncio.wait_for(self.run, 30)

    def close(self) -> None:
        self.listener.close()
        for client in self._clients:
            client.close()
        for worker in self.workers:
            if worker.exitcode is None:  # the test failed
                worker.end()


def run_supervised(work: Callable[[Supervised], Awaitable[None]], num_workers: int = 2, **settings: Any) -> None:
    """Run ``work`` with a new supervisor, stop the supervisor, and assert that nothing of it remains."""

    async def run() -> None:
        supervised = Supervised(RouterSettings(workers=num_workers, **settings))
        try:
            await work(supervised)
            await supervised.end()
            await asyncio.sleep(0.001)  # transports are closed a moment later
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert not supervised.supervisor._hub.list_workers()
            assert all(worker.num_joins == 1 for worker in supervised.workers)
        finally:
            supervised.close()

    asyncio.run(run())
