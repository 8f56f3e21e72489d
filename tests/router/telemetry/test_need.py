"""The number of instances that the traffic needs: the formula, its bounds, and a simulated fleet."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet import Registration, Registry, Role
from router.settings import RouterSettings
from router.telemetry.need import InstancesNeeded
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import StandIn

TOKEN_SECONDS = 0.001


def make_fleet(role: Role, count: int, **fields: object) -> Registry:
    registry = Registry(splitwise=role is not Role.MIXED)
    for port in range(1, count + 1):
        registered = Registration.from_fields({"role": role.value, "host_ip": "h", "port": port, **fields})
        registry.register(registered, now=0.0)
    return registry


def make_need(registry: Registry, **settings: float) -> InstancesNeeded:
    return InstancesNeeded(RouterSettings(**settings), registry, lambda _: TOKEN_SECONDS)  # type: ignore[arg-type]


def compute_need(registry: Registry, role: Role, waiting: float = 0.0, **settings: float) -> int:
    need = make_need(registry, **settings)
    need.take_sample()
    return need.compute(waiting)[role]


def test_a_fleet_without_load_needs_one_instance_of_each_role() -> None:
    need = make_need(make_fleet(Role.PREFILL, 4))
    assert need.compute() == {Role.PREFILL: 1, Role.DECODE: 1}
    need.take_sample()
    assert need.compute() == {Role.PREFILL: 1, Role.DECODE: 1}


def test_the_need_of_prefill_counts_the_instances_that_compute() -> None:
    registry = make_fleet(Role.PREFILL, 4)
    for instance in list(registry)[:3]:
        instance.load.add_request(1000, 1000.0)
    assert compute_need(registry, Role.PREFILL) == 5  # 3 / 0.7
    assert compute_need(registry, Role.PREFILL, target_utilization=1.0) == 3


def test_the_need_of_decode_depends_on_the_requests_that_an_instance_runs_at_once() -> None:
    registry = make_fleet(Role.DECODE, 2)
    for instance in registry:
        instance.load.requests = 32
    assert compute_need(registry, Role.DECODE) == 3  # 64 / 32 / 0.7
    assert compute_need(registry, Role.DECODE, requests_per_instance=8) == 12
    assert compute_need(registry, Role.DECODE, waiting=64) == 6
    limited = make_fleet(Role.DECODE, 2, max_num_seqs=8)
    for instance in limited:
        instance.load.requests = 32
    assert compute_need(limited, Role.DECODE) == 12


def test_the_need_grows_with_a_queue_of_more_than_ten_seconds() -> None:
    registry = make_fleet(Role.PREFILL, 1)
    (instance,) = registry
    counts = []
    for seconds in (1, 10, 20, 40):
        instance.load.queued = seconds / TOKEN_SECONDS
        counts.append(compute_need(registry, Role.PREFILL))
    assert counts == [2, 2, 3, 6]


def test_the_need_is_a_mean_of_the_last_half_minute() -> None:
    registry = make_fleet(Role.MIXED, 1)
    (instance,) = registry
    need = make_need(registry)
    for requests, expected in ((0, 1), (320, 8), (320, 15)):
        instance.load.requests = requests
        for _ in range(30 if not requests else 15):
            need.take_sample()
        assert need.compute()[Role.MIXED] == expected


loads = st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1e6)), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(loads=loads, more=st.integers(0, 500), queue=st.floats(0, 1e6), waiting=st.integers(0, 100))
def test_the_need_is_at_least_one_and_more_load_never_lowers_it(
    loads: list[tuple[int, float]], more: int, queue: float, waiting: int
) -> None:
    for role in Role:
        registry = make_fleet(role, len(loads))
        for instance, (requests, queued) in zip(registry, loads, strict=True):
            instance.load.requests, instance.load.queued = requests, queued
        before = compute_need(registry, role)
        first = next(iter(registry))
        first.load.requests += more
        first.load.queued += queue
        assert 1 <= before <= compute_need(registry, role, waiting)


@settings(max_examples=25, deadline=None)
@given(loads=loads)
def test_the_need_does_not_depend_on_the_distribution_of_the_load(loads: list[tuple[int, float]]) -> None:
    counts = set()
    for order in (loads, loads[::-1]):
        registry = make_fleet(Role.DECODE, len(loads))
        for instance, (requests, _) in zip(registry, order, strict=True):
            instance.load.requests = requests
        counts.add(compute_need(registry, Role.DECODE))
    assert len(counts) == 1


def simulate(instances: int, work: float, seconds: float = 240.0) -> int:
    """Simulate prompts that occupy ``work`` instances fully, and compute the need at the end."""
    chance = random.Random(1)
    registry = make_fleet(Role.PREFILL, instances)
    need = make_need(registry)
    loads = [instance.load for instance in registry]
    free_at = [0.0] * instances
    ending: list[tuple[float, int, float]] = []
    now, next_sample, tokens = 0.0, 0.0, 1000.0
    while now < seconds:
        now += chance.expovariate(work / (tokens * TOKEN_SECONDS))
        while next_sample < now or (ending and ending[0][0] < now):
            if ending and ending[0][0] < next_sample:
                _, index, done = heapq.heappop(ending)
                loads[index].remove_request(0, done)
            else:
                need.take_sample()
                next_sample += 1.0
        index = min(range(instances), key=lambda i: loads[i].queued)
        size = tokens * chance.uniform(0.5, 1.5)
        free_at[index] = max(now, free_at[index]) + size * TOKEN_SECONDS
        loads[index].add_request(0, size)
        heapq.heappush(ending, (free_at[index], index, size))
    return need.compute()[Role.PREFILL]


def test_the_need_of_a_simulated_fleet_follows_its_work() -> None:
    ample, right, small = (simulate(instances, work=3.5) for instances in (12, 5, 3))
    assert 4 <= right <= 6  # 3.5 / 0.7
    assert abs(ample - right) <= 1  # its idle instances do not count
    assert small > 5  # its queues grow


def test_a_router_reports_the_need_of_all_its_workers(
    make_router: Callable[..., RouterUnderTest], stand_in: Callable[..., StandIn]
) -> None:
    router = make_router(stand_in(), workers=2)
    for worker in router.workers:
        for instance in worker.app.registry:
            instance.load.requests = 64
        worker.app.need._samples[Role.MIXED].clear()
        worker.app.need.take_sample()
        text = worker.client.get("/metrics").text
        assert 'router_instances_needed{role="mixed"} 3.0' in text
        assert text.count("# TYPE router_instances_needed gauge") == 1
