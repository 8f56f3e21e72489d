"""LoadSync: each process has the sum of all processes' requests."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import NamedTuple

import pytest

from router.fleet import Registry
from router.policies import InstanceLoad
from router.sharing import LoadSync
from router.sharing.load_sync import MAX_IDLE_REPORTS
from tests.router.fleet.registrations import registration
from tests.router.sharing.links import LinkedHub, run_linked, until


class Process(NamedTuple):
    registry: Registry
    sync: LoadSync

    def load(self, port: int = 8000) -> InstanceLoad:
        instance = self.registry.get(f"10.0.0.1:{port}")
        assert instance is not None
        return instance.load


def have_loads(processes: list[Process], port: int, expected: tuple[int, int, float]) -> bool:
    return {read(process.load(port)) for process in processes} == {expected}


async def join(hub: LinkedHub, name: str, *ports: int) -> Process:
    registry = Registry(splitwise=True)
    sync = LoadSync(await hub.join(name), registry)
    for port in ports:
        registry.register(registration(port=port), now=0.0)
    return Process(registry, sync)


def read(load: InstanceLoad) -> tuple[int, int, float]:
    return load.requests, load.tokens, round(load.queued, 6)


def test_each_process_counts_the_requests_of_all() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join(hub, "0", 8000), await join(hub, "1", 8000)
        first.load().add_request(100, 80.0)
        second.load().add_request(10, 10.0)
        await until(lambda: read(first.load()) == read(second.load()) == (2, 110, 90.0))
        first.load().remove_prefill(100, 80.0)
        await until(lambda: read(second.load()) == (2, 10, 10.0))
        first.load().remove_request(0, 0.0)
        second.load().remove_request(10, 10.0)
        await until(lambda: read(first.load()) == read(second.load()) == (0, 0, 0.0))

    run_linked(run)


def test_random_requests_give_the_same_sum_in_all_processes() -> None:
    async def run(hub: LinkedHub) -> None:
        rng = random.Random(14)
        processes = [await join(hub, str(number), 8000, 8001) for number in range(3)]
        running: list[tuple[InstanceLoad, int, float]] = []
        for step in range(600):
            if running and rng.random() < 0.5:
                load, tokens, work = running.pop(rng.randrange(len(running)))
                load.remove_request(tokens, work)
            else:
                load = rng.choice(processes).load(rng.choice([8000, 8001]))
                running.append((load, rng.randrange(1000), rng.random() * 100))
                load.add_request(*running[-1][1:])
            if step % 50 == 0:
                await asyncio.sleep(0.004)
        for port in (8000, 8001):
            key = f"10.0.0.1:{port}"
            at_port = [(tokens, work) for load, tokens, work in running if load.key == key]
            expected = (len(at_port), sum(t for t, _ in at_port), round(sum(w for _, w in at_port), 6))
            await until(partial(have_loads, processes, port, expected))

    run_linked(run)


def test_the_load_of_a_dead_process_is_removed() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join(hub, "0", 8000), await join(hub, "1", 8000)
        first.load().add_request(100, 80.0)
        second.load().add_request(10, 10.0)
        await until(lambda: read(second.load()) == (2, 110, 90.0))
        hub.hub.forget_worker("0")
        await until(lambda: read(second.load()) == (1, 10, 10.0))

    run_linked(run)


def test_an_instance_that_registers_later_has_the_load_of_other_processes() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join(hub, "0", 8000), await join(hub, "1")
        first.load().add_request(100, 80.0)
        await until(lambda: bool(second.sync._others))
        second.registry.register(registration(port=8000), now=0.0)
        assert read(second.load()) == (1, 100, 80.0)
        first.load().remove_request(100, 80.0)
        await until(lambda: read(second.load()) == (0, 0, 0.0))

    run_linked(run)


def test_a_partial_report_changes_one_instance_and_a_complete_one_replaces_all() -> None:
    async def run(hub: LinkedHub) -> None:
        sender, process = await hub.join("0"), await join(hub, "1", 8000, 8001)
        first, second = "10.0.0.1:8000", "10.0.0.1:8001"
        for is_complete, content, expected in (
            (False, {first: [1, 10, 5.0]}, [(1, 10, 5.0), (0, 0, 0.0)]),
            (False, {second: [2, 20, 9.0]}, [(1, 10, 5.0), (2, 20, 9.0)]),
            (True, {second: [3, 30, 8.0]}, [(0, 0, 0.0), (3, 30, 8.0)]),
        ):
            sender.publish_event("load", [is_complete, content])
            (key, load) = next(iter(content.items()))
            await until(lambda: process.sync._others.get("0", {}).get(key) == tuple(load))  # noqa: B023
            assert [read(process.load(port)) for port in (8000, 8001)] == expected

    run_linked(run)


def test_a_later_process_receives_the_load_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.load_sync.SEND_ALL_SECONDS", 0.01)

    async def run(hub: LinkedHub) -> None:
        first = await join(hub, "0", 8000)
        first.load().add_request(100, 80.0)
        sending = asyncio.ensure_future(first.sync.keep_sending())
        await asyncio.sleep(0.05)
        second = await join(hub, "1", 8000)
        await until(lambda: read(second.load()) == (1, 100, 80.0))
        sending.cancel()

    run_linked(run)


def test_an_idle_process_sends_a_few_empty_reports_and_then_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.load_sync.SEND_ALL_SECONDS", 0.005)

    async def run(hub: LinkedHub) -> None:
        busy, received, others = await join(hub, "0", 8000), [], await hub.join("1")
        others.subscribe_to_topic("load", lambda _, content: received.append(content))
        sending = asyncio.ensure_future(busy.sync.keep_sending())
        busy.load().add_request(100, 80.0)
        await until(lambda: received.count([True, {"10.0.0.1:8000": [1, 100, 80.0]}]) > MAX_IDLE_REPORTS)
        busy.load().remove_request(100, 80.0)
        await until(lambda: received.count([True, {}]) == MAX_IDLE_REPORTS)
        num_received = len(received)
        busy.load().add_request(10, 10.0)
        await until(lambda: [True, {"10.0.0.1:8000": [1, 10, 10.0]}] in received)
        assert [True, {}] not in received[num_received:]
        sending.cancel()

    run_linked(run)
