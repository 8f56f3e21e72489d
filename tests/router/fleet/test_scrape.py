"""The load that instances report in their metrics.

The names are those of FastDeploy (``fastdeploy/metrics/metrics.py``), vLLM (``vllm/v1/metrics/loggers.py``) and SGLang
(``python/sglang/srt/observability/metrics_collector.py``).
"""

from __future__ import annotations

import pytest

from router.fleet import scrape
from router.fleet.registry import Registry
from router.fleet.scrape import Scraper
from router.http.pool import ConnectionPool
from router.policies import POLICIES, InstanceLoad
from router.settings import RouterSettings
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Behaviour, StandIn, answers
from tests.support.waiting import wait_until

FASTDEPLOY = b"""# HELP fastdeploy:num_requests_running Number of requests currently running
# TYPE fastdeploy:num_requests_running gauge
fastdeploy:num_requests_running 3.0
fastdeploy:num_requests_waiting{model="a {1} b"} 4.0
"""
TWO_RANKS = b"""vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1e+01
vllm:num_requests_waiting_by_reason{engine="1"} 99.0
"""
SGLANG = b"""sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 5.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 6.0
"""


def load_of(router: RouterUnderTest, instance: StandIn) -> InstanceLoad:
    registered = router.app.registry.get(instance.key)
    assert registered is not None
    return registered.load


def test_figures_are_read_in_the_background_if_a_policy_needs_them(
    monkeypatch: pytest.MonkeyPatch, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    monkeypatch.setattr(scrape, "WANTED_BY", frozenset({"random"}))
    instance = stand_in("mixed", answers(200, FASTDEPLOY))
    router = make_router(instance, policy="random", stats_interval_secs=0.05)
    load = load_of(router, instance)
    wait_until(lambda: (load.running, load.waiting) == (3, 4), "the instance's figures")
    instance.behave = answers(500, b"no")
    wait_until(lambda: (load.running, load.waiting) == (None, None), "the figures to be unknown")


@pytest.mark.parametrize(
    ("behave", "read"),
    [
        (answers(200, FASTDEPLOY), (3, 4)),
        (answers(200, TWO_RANKS), (3, 10)),
        (answers(200, FASTDEPLOY + TWO_RANKS), (3, 4)),
        (answers(200, SGLANG), (5, 6)),
        (answers(200, b"fastdeploy:num_requests_running 3.0\n"), (None, None)),
        (answers(200, b"fastdeploy:num_requests_running NaN\nfastdeploy:num_requests_waiting 1\n"), (None, None)),
        (answers(200, b"fastdeploy:num_requests_running 1e999\nfastdeploy:num_requests_waiting 1\n"), (None, None)),
        (answers(200, b"fastdeploy:num_requests_running 1.1.1\nfastdeploy:num_requests_waiting 1\n"), (None, None)),
    ],
    ids=["fastdeploy", "vllm-two-ranks", "same-figures-twice", "sglang", "half", "nan", "infinite", "no-number"],
)
def test_figures_of_each_engine_are_read_and_invalid_figures_are_unknown(
    make_router: MakeRouter, stand_in: MakeStandIn, behave: Behaviour, read: tuple[int | None, int | None]
) -> None:
    instance = stand_in("mixed", behave)
    router = make_router(instance)
    router.thread.run(router.app.scraper.scrape_all())
    load = load_of(router, instance)
    assert (load.running, load.waiting) == read


def test_the_figures_of_an_unreachable_instance_are_unknown(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", answers(200, FASTDEPLOY))
    router = make_router(instance)
    load = load_of(router, instance)
    router.thread.run(router.app.scraper.scrape_all())
    instance.stop()
    router.thread.run(router.app.scraper.scrape_all())
    assert (load.running, load.waiting) == (None, None)


def test_figures_are_requested_at_the_metrics_port(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance, figures = stand_in(), stand_in("mixed", answers(200, FASTDEPLOY))
    router = make_router()
    instance.register(router.url, metrics_port=figures.port)
    router.thread.run(router.app.scraper.scrape_all())
    assert [request.target for request in figures.received] == ["/metrics"]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (RouterSettings(), False),
        (RouterSettings(policy="random"), True),
        (RouterSettings(policy="random", splitwise=True), False),
        (RouterSettings(prefill_policy="random", splitwise=True), True),
    ],
)
def test_only_a_policy_in_use_counts(monkeypatch: pytest.MonkeyPatch, settings: RouterSettings, wanted: bool) -> None:
    monkeypatch.setattr(scrape, "WANTED_BY", frozenset({"random"}))
    assert Scraper(settings, Registry(settings.splitwise), ConnectionPool()).wanted is wanted


def test_the_policies_that_need_figures_exist() -> None:
    assert set(POLICIES) >= scrape.WANTED_BY
