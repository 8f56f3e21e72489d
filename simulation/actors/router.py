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

__all__ = ["RouterActor"]

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

    def list_leftovers(self) -> list[str]:
        """What is not back to zero although nothing runs, one sentence each."""
        app, server = self.app, self.server
        if app is None or server is None or not self.process.is_alive:
            return []
        left: list[str] = []

        def note(what: str, value: Any, allowed: float = 0) -> None:
            if abs(value) > allowed:
                left.append(f"{self.name}: {value:g} {what}")

        note("live requests", app.proxy.num_requests)
        for instance in app.registry:
            note(f"requests counted at {instance.key}", instance.load.requests)
            note(f"tokens counted at {instance.key}", instance.load.tokens)
            note(f"work counted at {instance.key}", instance.load.queued, 1e-3)
        note("requests that were let in", getattr(app.admission, "running", 0))
        note("requests in line", getattr(app.admission, "waiting", 0))
        note("connections of clients", len(server.server_state.connections))
        note("tasks of the control plane", len(server.server_state.tasks))
        probes = len(list(app.registry)) + 1
        note("connections to instances", len(app.upstream._open), probes)
        note("background tasks", len(app.tasks._running), probes)
        note("tasks", len(asyncio.all_tasks(self.process.loops[0])), 20 + 3 * probes)
        sockets = [each for each in self.process.network.endpoints.values() if each.process is self.process]
        note("sockets", len(sockets), 2 * probes)
        return left
