"""The world ``fleet``: two routers with two workers each, which share a Redis. Their machines' clocks may differ."""

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
from simulation.world import Event, Outcome, Plan

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
    *("redis_pause", "redis_cut", "redis_part", "redis_reset"),
)
# Time after which routers exchange messages again when Redis is back.
RECONNECT_SECONDS = 10.0
ROUTERS = ("routerA", "routerB")


class FleetWorld(RouterWorld):
    """The world ``fleet``: two routers with two workers each, which share a Redis."""

    name: ClassVar[str] = "fleet"
    faults = FAULTS
    usual_faults: ClassVar[tuple[str, ...]] = ("mood", "mood", "worker_kill", "redis_part", "redis_reset")
    num_requests: ClassVar[tuple[int, int]] = (20, 64)
    has_idle_clients: ClassVar[bool] = False  # the world with one router has them; there they cost less
    begin_seconds: ClassVar[float] = 8.0
    limited: ClassVar[float] = 0.5

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

    def draw_coincidence(self, draw: random.Random, fault: Event) -> Event | None:
        if fault.kind not in ("redis_part", "redis_reset", "worker_kill") or draw.random() < 0.3:
            return super().draw_coincidence(draw, fault)
        # A worker ends while other routers do not get this message, because its router has lost Redis.
        kind = draw.choice(("redis_part", "redis_reset")) if fault.kind == "worker_kill" else "worker_kill"
        at = round(fault.at + draw.uniform(-1.0, 1.0) * draw.choice((0.003, 0.03, 0.3)), 4)
        return Event(at, kind, fault.target, {"seconds": round(draw.uniform(0.0, 4.0), 3)})

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
        if kind == "redis_part":
            self._part_from_redis(router, seconds)
        elif kind == "redis_reset":
            self._reset_to_redis(router)
        elif kind.startswith("redis_"):
            self._break_redis(kind, seconds)
        elif kind in ("worker_kill", "worker_pause"):
            self._break_worker(router, kind, min(seconds, 12.0))
        else:
            super().break_down(kind, target, seconds, details)

    def _break_redis(self, kind: str, seconds: float) -> None:
        self.orders.part(seconds + RECONNECT_SECONDS)
        self.troubles.add(self.now, self.now + seconds + RECONNECT_SECONDS, kind)
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

    def _part_from_redis(self, router: Any, seconds: float) -> None:
        """Set the links between one router and Redis down for ``seconds``."""
        self.orders.part(seconds + RECONNECT_SECONDS)
        self.troubles.add(self.now, self.now + seconds + RECONNECT_SECONDS, "redis_part")
        links = [self.network.link(*ends) for ends in ((router.name, "redis"), ("redis", router.name))]
        self.network.set_down(links, True)
        self.scheduler.call_later(seconds, lambda: self.network.set_down(links, False))

    def _reset_to_redis(self, router: Any) -> None:
        """Reset the connections of one router to Redis, so that data on its way is lost."""
        self.orders.part(RECONNECT_SECONDS)
        self.troubles.add(self.now, self.now + RECONNECT_SECONDS, "redis_reset")
        for endpoint in list(self.network.endpoints.values()):
            if endpoint.process is router.process and endpoint.peer.host == "redis":
                endpoint.reset()

    def _break_worker(self, router: Any, kind: str, seconds: float) -> None:
        alive = [worker.process for worker in router.workers.values() if worker.process.is_alive]
        if not alive:
            return
        process = alive[int(seconds * 1000) % len(alive)]
        self.orders.part(seconds + 1.0 if kind == "worker_pause" else 1.0)
        if kind == "worker_kill":
            self.troubles.add(self.now, self.now + 5.0, "router")
            process.crash()
        else:
            process.pause()
            self.scheduler.call_later(seconds, process.resume)


def hash_of(name: str) -> int:
    """Return a number for a name, which is the same in all runs."""
    return sum(name.encode())


_ = redis  # imported before a world runs; otherwise its classes would have simulated locks
