"""What workers have counted stays in the router's sums when they die or hang."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

from router.sharing.hub import RetiredCounters
from router.telemetry.merge import dump_families, merge_families
from tests.router.sharing.links import LinkedHub, join_all, run_linked, until


def figures(count: int) -> list[Any]:
    """As a worker tells them that has counted so many requests, and runs one."""
    requests = CounterMetricFamily("requests", "Requests", labels=["code"])
    requests.add_metric(["200"], count)
    durations = SummaryMetricFamily("seconds", "Durations", count_value=count, sum_value=0.5 * count)
    durations.add_sample("seconds", {"quantile": "0.95"}, 0.5)
    running = GaugeMetricFamily("router_running_requests", "Running", 1)
    return dump_families([requests, durations, running])


def added(dumps: list[Any]) -> dict[str, float]:
    return {sample.name: sample.value for family in merge_families((), dumps) for sample in family.samples}


def test_counts_of_those_that_are_gone_stay_and_their_gauges_go() -> None:
    kept = RetiredCounters()
    for worker, count in (("a", 5), ("b", 7), ("c", 9)):
        kept.note_figures(worker, figures(count))
    assert added(kept.list_others("a")) == {
        "requests_total": 16,
        "seconds": 0.5,
        "seconds_count": 16,
        "seconds_sum": 8,
        "router_running_requests": 2,
    }
    for gone in ("b", "c"):
        kept.remove_worker(gone)
    kept.remove_worker("unheard of")
    kept.note_figures("d", figures(1))
    assert added(kept.list_others("d")) == {
        "requests_total": 21,
        "seconds": 0.5,  # a's: of quantiles nothing is kept
        "seconds_count": 21,
        "seconds_sum": 10.5,
        "router_running_requests": 1,
    }


def test_sums_do_not_fall_where_a_worker_dies_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.hub.ANSWER_SECONDS", 0.1)

    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)
        counts = {"1": 20, "2": 300}
        is_hanging = False

        def answer(name: str) -> list[Any]:
            return [name, figures(counts[name])]

        async def answer_slowly(_: Any) -> Any:
            return await asyncio.Event().wait() if is_hanging else answer("2")

        second.answer_topic("figures", lambda _: answer("1"))
        third.answer_topic("figures", answer_slowly)

        async def read(count: int) -> float:
            own = figures(count)
            return added([own, *await first.ask_peers("figures", own)])["requests_total"]

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
        first.answer_topic("figures", lambda _: ["0", figures(5)])
        own = figures(1000)
        assert added([own, *await late.ask_peers("figures", own)])["requests_total"] == 1345

    run_linked(run)
