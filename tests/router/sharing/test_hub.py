"""The counters of workers that die or hang remain in the router's sums."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

from router.sharing.hub import RetiredCounters
from router.telemetry.merge import dump_families, merge_families
from tests.router.sharing.links import LinkedHub, join_all, run_linked, until


def make_metrics(count: int) -> list[Any]:
    """Return the metrics of a worker that has counted ``count`` requests, and runs one."""
    requests = CounterMetricFamily("requests", "Requests", labels=["code"])
    requests.add_metric(["200"], count)
    durations = SummaryMetricFamily("seconds", "Durations", count_value=count, sum_value=0.5 * count)
    durations.add_sample("seconds", {"quantile": "0.95"}, 0.5)
    running = GaugeMetricFamily("router_running_requests", "Running", 1)
    return dump_families([requests, durations, running])


def sum_metrics(dumps: list[Any]) -> dict[str, float]:
    return {sample.name: sample.value for family in merge_families((), dumps) for sample in family.samples}


def test_counters_of_ended_workers_remain_but_their_gauges_do_not() -> None:
    counters = RetiredCounters()
    for worker, count in (("a", 5), ("b", 7), ("c", 9)):
        counters.note_figures(worker, make_metrics(count))
    assert sum_metrics(counters.list_others("a")) == {
        "requests_total": 16,
        "seconds": 0.5,
        "seconds_count": 16,
        "seconds_sum": 8,
        "router_running_requests": 2,
    }
    for gone in ("b", "c"):
        counters.remove_worker(gone)
    counters.remove_worker("unknown")
    counters.note_figures("d", make_metrics(1))
    assert sum_metrics(counters.list_others("d")) == {
        "requests_total": 21,
        "seconds": 0.5,  # of a only: quantiles of ended workers are not stored
        "seconds_count": 21,
        "seconds_sum": 10.5,
        "router_running_requests": 1,
    }


def test_sums_do_not_decrease_if_a_worker_dies_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.hub.ANSWER_SECONDS", 0.1)

    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)
        counts = {"1": 20, "2": 300}
        is_hanging = False

        def answer(name: str) -> list[Any]:
            return [name, make_metrics(counts[name])]

        async def answer_slowly(_: Any) -> Any:
            return await asyncio.Event().wait() if is_hanging else answer("2")

        second.answer_topic("figures", lambda _: answer("1"))
        third.answer_topic("figures", answer_slowly)

        async def read(count: int) -> float:
            own = make_metrics(count)
            return sum_metrics([own, *await first.ask_peers("figures", own)])["requests_total"]

        assert await read(1) == 321
        counts["1"] += 20
        is_hanging = True
        assert await read(2) == 342
        second.disconnect()
        await until(lambda: hub.hub.list_workers() == ["0", "2"])
        assert await read(3) == 343
        third.disconnect()
        await until(lambda: hub.hub.list_workers() == ["0"])
        assert await read(4) == 344
        late = await hub.join("3")
        first.answer_topic("figures", lambda _: ["0", make_metrics(5)])
        own = make_metrics(1000)
        assert sum_metrics([own, *await late.ask_peers("figures", own)])["requests_total"] == 1345

    run_linked(run)
