"""RouterActor: the real router, in a simulated process: application, server and client of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
from typing import Any

from router.app import RouterApp
from router.launch.server import RouterServer
from router.settings import RouterSettings
from simulation.world import Process, World

__all__ = ["RouterActor", "list_leftovers"]

with contextlib.suppress(ImportError):
    importlib.import_module("fastapi.telemetry._runtime")  # loaded within a world, it would keep a simulated lock


class RouterActor:
    """One router of one process; ``start`` begins a life.

    Attributes:
        app: of this life; None until it has begun.
        is_ending: whether this life is to end, and another to follow.
    """

    def __init__(self, world: World, name: str, settings: RouterSettings) -> None:
        self.world, self.name, self.settings = world, name, settings
        self.process: Process
        self.app: RouterApp | None = None
        self.server: RouterServer | None = None
        self.clock: dict[str, float] = {}
        self.is_ending = False

    def start(self, **clock: Any) -> None:
        """Begin a life."""
        self.app = self.server = None
        self.is_ending = False
        self.process = self.world.make_process(self.name, **clock)
        self.process.start_loop(self._main)

    def stop(self) -> None:
        """Tell it to end, as SIGTERM does."""
        if self.server is not None and self.process.is_alive:
            self.process.loops[0].post(self.server.handle_exit, signal.SIGTERM, None)

    async def _main(self) -> None:
        self.app = RouterApp(self.settings)
        self.server = RouterServer(self.app)
        listener: Any = self.process.network.open_listener(self.process, self.settings.port)
        await self.server.serve(sockets=[listener])

    def crash(self) -> None:
        """Kill it."""
        self.process.crash()

    def list_processes(self) -> list[Process]:
        """Its process."""
        return [self.process]

    def list_apps(self) -> list[RouterApp]:
        """The application that runs, if one does."""
        return [self.app] if self.app is not None and self.process.is_alive else []

    def list_leftovers(self) -> list[str]:
        """What is not back to zero although nothing runs, one sentence each."""
        if self.app is None or self.server is None or not self.process.is_alive:
            return []
        return list_leftovers(self.process, self.app, self.server)


def list_leftovers(process: Process, app: RouterApp, server: RouterServer) -> list[str]:
    """What a process of a router has not back to zero although nothing runs, one sentence each."""
    left: list[str] = []

    def note(what: str, value: Any, allowed: float = 0) -> None:
        if abs(value) > allowed:
            left.append(f"{process.name}: {value:g} {what}")

    note("live requests", app.proxy.num_requests)
    for instance in app.registry:
        note(f"requests counted at {instance.key}", instance.load.requests)
        note(f"tokens counted at {instance.key}", instance.load.tokens)
        note(f"work counted at {instance.key}", instance.load.queued, 1e-3)
    note("requests that were let in", getattr(app.admission, "running", 0))
    note("requests in line", getattr(app.admission, "waiting", 0))
    protocols: Any = server.server_state.connections
    peers = [protocol.client[0] for protocol in protocols if protocol.client]
    note("connections of clients", sum(not peer.startswith(("prefill", "decode", "mixed")) for peer in peers))
    note("tasks of the control plane", len(server.server_state.tasks))
    probes = len(list(app.registry)) + 1
    note("connections to instances", len(app.upstream._open), probes)
    note("background tasks", len(app.tasks._running), probes)
    note("tasks", len(asyncio.all_tasks(process.loops[0])), 20 + 3 * probes)
    sockets = [each for each in process.network.endpoints.values() if each.process is process]
    note("sockets", len(sockets), 2 * probes + 4)
    return left
