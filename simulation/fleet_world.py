"""The world ``fleet``: two routers of two workers each, on machines whose clocks differ, over one Redis."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import redis.asyncio
import redis.asyncio.connection

from router.settings import RouterSettings
from simulation.actors.client import Client
from simulation.actors.fleet import ManyWorkers, worker_seams
from simulation.actors.redis import RedisActor
from simulation.router_world import API_KEYS, QUEUE_TIMEOUT, REQUEST_TIMEOUT, RouterWorld
from simulation.world import Outcome, Plan

__all__ = ["FleetWorld"]

FAULTS = (
    *(
        "mood",
        "mood",
        "mood",
        "mood",
        "kill",
        "power_loss",
        "pause",
        "link_down",
        "link_slow",
        "reset_connections",
        "clock_step",
    ),
    *("router_kill", "router_stop", "router_pause", "worker_kill", "worker_pause", "redis_kill"),
    *("redis_pause", "redis_cut"),
)
# Between routers, an order that was given while Redis was there reaches the other router within this.
ROUTERS = ("routerA", "routerB")


class FleetWorld(RouterWorld):
    """See the module."""

    name: ClassVar[str] = "fleet"
    faults = FAULTS
    num_requests: ClassVar[tuple[int, int]] = (20, 64)
    has_idle_clients: ClassVar[bool] = False  # which the world of one router has, where they cost less
    begin_seconds: ClassVar[float] = 8.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.redis = RedisActor(self)

    def run(self, plan: Plan | None = None) -> Outcome:
        with worker_seams(self):
            return super().run(plan)

    def draw_plan(self, draw: random.Random) -> Plan:
        plan = super().draw_plan(draw)
        is_skewed = draw.random() < 0.7
        plan.settings["offsets"] = [draw.choice((0.0, 20.0, -45.0, 86400.0)) if is_skewed else 0.0 for _ in ROUTERS]
        plan.settings["workers"] = 2
        return plan

    def draw_roles(self, draw: random.Random, *, splitwise: bool) -> list[str]:
        if splitwise:
            return ["prefill"] * draw.randint(1, 4) + ["decode"] * draw.randint(1, 4)
        return ["mixed"] * draw.randint(2, 8)

    def make_routers(self) -> None:
        self.redis.start()
        for name, offset in zip(ROUTERS, self.plan.settings["offsets"], strict=True):
            settings = RouterSettings(
                host=name,
                port=9000,
                workers=self.plan.settings["workers"],
                shared_state="redis://redis:6379/0",
                splitwise=self.plan.settings["splitwise"],
                access_log="off",
                request_timeout_secs=REQUEST_TIMEOUT,
                queue_timeout_secs=QUEUE_TIMEOUT,
                api_keys_file=API_KEYS if self.plan.settings["has_keys"] else "",
                **self.plan.settings["router"],
            )
            router = ManyWorkers(self, name, settings)
            router.clock = {"offset": offset}
            self.routers.append(router)
            router.start(**router.clock)

    def make_clients(self) -> None:
        for name in ROUTERS:
            self.clients.append(Client(self, self.make_process(f"clients-{name}"), (name, 9000)))
        self.operator = Client(self, self.make_process("operator"), (ROUTERS[0], 9000))

    def list_routers_of(self, number: int) -> tuple[tuple[str, int], ...]:
        return ((ROUTERS[number % 2], 9000),)

    def break_down(self, kind: str, target: str, seconds: float, details: dict[str, Any]) -> None:
        router = self.routers[hash_of(target) % 2] if target else self.routers[0]
        if kind.startswith("redis_"):
            self._break_redis(kind, seconds)
        elif kind in ("worker_kill", "worker_pause"):
            self._break_worker(router, kind, min(seconds, 12.0))
        else:
            super().break_down(kind, target, seconds, details)

    def _break_redis(self, kind: str, seconds: float) -> None:
        self.orders.forget()
        self.troubles.add(self.now, self.now + seconds + 10.0, kind)
        process = self.redis.process
        if not process.is_alive:
            return
        if kind == "redis_kill":
            process.crash()
            self.scheduler.call_later(seconds, self.redis.start)
        elif kind == "redis_pause":
            process.pause()
            self.scheduler.call_later(seconds, process.resume)
        else:
            links = self.network.links_of("redis")
            self.network.set_down(links, True)
            self.scheduler.call_later(seconds, lambda: self.network.set_down(links, False))

    def _break_worker(self, router: Any, kind: str, seconds: float) -> None:
        alive = [worker.process for worker in router.workers.values() if worker.process.is_alive]
        if not alive:
            return
        process = alive[int(seconds * 1000) % len(alive)]
        self.orders.forget()
        if kind == "worker_kill":
            self.troubles.add(self.now, self.now + 5.0, "router")
            process.crash()
        else:
            process.pause()
            self.scheduler.call_later(seconds, process.resume)


def hash_of(name: str) -> int:
    """A number of a name, the same in all runs."""
    return sum(name.encode())


_ = redis  # loaded before a world is, or its classes would be made of simulated locks
