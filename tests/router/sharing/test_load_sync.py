"""LoadSync: the sum of all processes' requests, in each of them."""

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


def all_show(processes: list[Process], port: int, right: tuple[int, int, float]) -> bool:
    return {figures(process.load(port)) for process in processes} == {right}


async def join(hub: LinkedHub, name: str, *ports: int) -> Process:
    registry = Registry(splitwise=True)
    sync = LoadSync(await hub.join(name), registry)
    for port in ports:
        registry.register(registration(port=port), now=0.0)
    return Process(registry, sync)


def figures(load: InstanceLoad) -> tuple[int, int, float]:
    return load.requests, load.tokens, round(load.queued, 6)


def test_each_counts_the_requests_of_all() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join(hub, "0", 8000), await join(hub, "1", 8000)
        first.load().add_request(100, 80.0)
        second.load().add_request(10, 10.0)
        await until(lambda: figures(first.load()) == figures(second.load()) == (2, 110, 90.0))
        first.load().remove_prefill(100, 80.0)
        await until(lambda: figures(second.load()) == (2, 10, 10.0))
        first.load().remove_request(0, 0.0)
        second.load().remove_request(10, 10.0)
        await until(lambda: figures(first.load()) == figures(second.load()) == (0, 0, 0.0))

    run_linked(run)


def test_any_order_of_requests_ends_in_the_same_sum_everywhere() -> None:
    async def run(hub: LinkedHub) -> None:
        chance = random.Random(14)
        processes = [await join(hub, str(number), 8000, 8001) for number in range(3)]
        running: list[tuple[InstanceLoad, int, float]] = []
        for step in range(600):
            if running and chance.random() < 0.5:
                load, tokens, work = running.pop(chance.randrange(len(running)))
                load.remove_request(tokens, work)
            else:
                load = chance.choice(processes).load(chance.choice([8000, 8001]))
                running.append((load, chance.randrange(1000), chance.random() * 100))
                load.add_request(*running[-1][1:])
            if step % 50 == 0:
                await asyncio.sleep(0.004)
        for port in (8000, 8001):
            key = f"10.0.0.1:{port}"
            mine = [(tokens, work) for load, tokens, work in running if load.key == key]
            right = (len(mine), sum(t for t, _ in mine), round(sum(w for _, w in mine), 6))
            await until(partial(all_show, processes, port, right))

    run_linked(run)


def test_the_load_of_a_process_that_dies_is_forgotten() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join(hub, "0", 8000), await join(hub, "1", 8000)
        first.load().add_request(100, 80.0)
        second.load().add_request(10, 10.0)
        await until(lambda: figures(second.load()) == (2, 110, 90.0))
        hub.hub.forget_worker("0")
        await until(lambda: figures(second.load()) == (1, 10, 10.0))

    run_linked(run)


def test_an_instance_that_one_knows_later_has_the_load_of_the_others() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join(hub, "0", 8000), await join(hub, "1")
        first.load().add_request(100, 80.0)
        await until(lambda: bool(second.sync._others))
        second.registry.register(registration(port=8000), now=0.0)
        assert figures(second.load()) == (1, 100, 80.0)
        first.load().remove_request(100, 80.0)
        await until(lambda: figures(second.load()) == (0, 0, 0.0))

    run_linked(run)


def test_what_is_told_of_one_instance_leaves_the_others_and_what_is_told_of_all_replaces_all() -> None:
    async def run(hub: LinkedHub) -> None:
        told, process = await hub.join("0"), await join(hub, "1", 8000, 8001)
        first, second = "10.0.0.1:8000", "10.0.0.1:8001"
        for is_whole, content, expected in (
            (False, {first: [1, 10, 5.0]}, [(1, 10, 5.0), (0, 0, 0.0)]),
            (False, {second: [2, 20, 9.0]}, [(1, 10, 5.0), (2, 20, 9.0)]),
            (True, {second: [3, 30, 8.0]}, [(0, 0, 0.0), (3, 30, 8.0)]),
        ):
            told.publish_event("load", [is_whole, content])
            (key, figures_of_key) = next(iter(content.items()))
            await until(lambda: process.sync._others.get("0", {}).get(key) == tuple(figures_of_key))  # noqa: B023
            assert [figures(process.load(port)) for port in (8000, 8001)] == expected

    run_linked(run)


def test_one_that_comes_later_learns_the_load_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.load_sync.SEND_ALL_SECONDS", 0.01)

    async def run(hub: LinkedHub) -> None:
        first = await join(hub, "0", 8000)
        first.load().add_request(100, 80.0)
        telling = asyncio.ensure_future(first.sync.keep_sending())
        await asyncio.sleep(0.05)
        second = await join(hub, "1", 8000)
        await until(lambda: figures(second.load()) == (1, 100, 80.0))
        telling.cancel()

    run_linked(run)


def test_a_process_without_requests_says_so_a_few_times_and_is_silent_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.load_sync.SEND_ALL_SECONDS", 0.005)

    async def run(hub: LinkedHub) -> None:
        busy, heard, others = await join(hub, "0", 8000), [], await hub.join("1")
        others.subscribe_to_topic("load", lambda _, content: heard.append(content))
        telling = asyncio.ensure_future(busy.sync.keep_sending())
        busy.load().add_request(100, 80.0)
        await until(lambda: heard.count([True, {"10.0.0.1:8000": [1, 100, 80.0]}]) > MAX_IDLE_REPORTS)
        busy.load().remove_request(100, 80.0)
        await until(lambda: heard.count([True, {}]) == MAX_IDLE_REPORTS)
        num_heard = len(heard)
        busy.load().add_request(10, 10.0)
        await until(lambda: [True, {"10.0.0.1:8000": [1, 10, 10.0]}] in heard)
        assert [True, {}] not in heard[num_heard:]
        telling.cancel()

    run_linked(run)
