"""RouterActor: a real router in a simulated process."""

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

# Modules that FastAPI imports at its first use. They are imported here, before a world runs: within a world the first
# one would create a simulated lock, and the import of the second one would take a quarter of a second in each run.
for _name in ("fastapi.telemetry._runtime", "pydantic.v1"):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)


class RouterActor:
    """A router with one process. ``start`` starts it, also again after its end.

    Attributes:
        app: the application of the current process; None until it was created.
        is_ending: whether the router is being stopped and will be started again.
    """

    def __init__(self, world: World, name: str, settings: RouterSettings) -> None:
        self.world, self.name, self.settings = world, name, settings
        self.process: Process
        self.app: RouterApp | None = None
        self.server: RouterServer | None = None
        self.clock: dict[str, float] = {}
        self.is_ending = False

    def start(self, **clock: Any) -> None:
        """Start the router's process."""
        self.app = self.server = None
        self.is_ending = False
        self.process = self.world.make_process(self.name, **clock)
        self.process.start_loop(self._main)

    def stop(self) -> None:
        """Send SIGTERM to the router."""
        if self.server is not None and self.process.is_alive:
            self.process.loops[0].post(self.server.handle_exit, signal.SIGTERM, None)

    async def _main(self) -> None:
        self.app = RouterApp(self.settings)
        self.server = RouterServer(self.app)
        listener: Any = self.process.network.open_listener(self.process, self.settings.port)
        await self.server.serve(sockets=[listener])

    def crash(self) -> None:
        """Kill the router's process."""
        self.process.crash()

    def list_processes(self) -> list[Process]:
        """Return the processes of the router: a single one."""
        return [self.process]

    def list_apps(self) -> list[RouterApp]:
        """Return the running applications: one, or none."""
        return [self.app] if self.app is not None and self.process.is_alive else []

    def list_leftovers(self) -> list[str]:
        """Return a text for each count in the router that is not 0, although no request is running."""
        if self.app is None or self.server is None or not self.process.is_alive:
            return []
        return list_leftovers(self.process, self.app, self.server)


def list_leftovers(process: Process, app: RouterApp, server: RouterServer) -> list[str]:
    """Return a text for each count in a router's process that is not 0, although no request is running."""
    left: list[str] = []

    def note(name: str, value: Any, allowed: float = 0) -> None:
        if abs(value) > allowed:
            left.append(f"{process.name}: {value:g} {name}")

    note("live requests", app.proxy.num_requests)
    for instance in app.registry:
        note(f"requests counted at {instance.key}", instance.load.requests)
        note(f"tokens counted at {instance.key}", instance.load.tokens)
        note(f"work counted at {instance.key}", instance.load.queued, 1e-3)
    note("admitted requests", getattr(app.admission, "running", 0))
    note("waiting requests", getattr(app.admission, "waiting", 0))
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
