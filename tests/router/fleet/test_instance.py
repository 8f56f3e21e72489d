"""Instance: when it can be chosen, and its state and text for an operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from router.fleet.breaker import FAILURES
from router.fleet.instance import FIRST_WEIGHT, SLOW_START_SECONDS
from router.fleet.registry import Registry
from tests.router.fleet.registrations import registration


def test_a_paused_instance_is_not_available() -> None:
    registry = Registry(splitwise=True)
    registry.register(registration(is_paused=True), now=0.0)
    assert not registry.register(registration(is_paused=True), now=1.0).is_available


def test_each_order_changes_whether_an_instance_is_available_and_is_reported_once() -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    reported: list[tuple[str, bool, float]] = []
    generations = []
    registry.events.new_orders.subscribe(
        lambda: reported.append((instance.state, instance.is_available, instance.share))
    )
    orders: list[Callable[[], None]] = [
        *(partial(instance.set_pause, True), partial(instance.set_pause, False)),
        *(partial(instance.set_draining, True), partial(instance.set_draining, False)),
        partial(instance.set_share, 0.5),
    ]
    for order in orders:
        before = registry.events.generation
        order()
        order()  # has no further effect
        generations.append(registry.events.generation - before)
    assert reported == [
        *(("paused", False, 1.0), ("healthy", True, 1.0)),
        *(("draining", False, 1.0), ("healthy", True, 1.0)),
        ("healthy", True, 0.5),
    ]
    assert generations == [1] * 5


@pytest.mark.parametrize(
    ("before", "threshold", "passed", "after"),
    [
        ("healthy", 1, (False, False, True, False, False, False), "unhealthy"),
        ("unhealthy", 2, (True, False, True, True), "healthy"),
    ],
)
def test_an_instance_changes_after_the_threshold_of_probes_in_a_row(
    before: str, threshold: int, passed: tuple[bool, ...], after: str
) -> None:
    instance = Registry(splitwise=True).register(registration(), now=0.0)
    if before == "unhealthy":
        instance.mark_unhealthy("refused")
    states = []
    for has_passed in passed:
        if has_passed:
            instance.record_passed_probe(1.0, threshold)
        else:
            instance.record_failed_probe("no answer", threshold=3)
        states.append(instance.state)
    assert states == [before] * (len(passed) - 1) + [after]


def test_a_passed_probe_resets_the_count_of_failed_ones_for_any_threshold() -> None:
    instance = Registry(splitwise=True).register(registration(), now=0.0)
    for _ in range(3):
        instance.record_failed_probe("no answer", threshold=2)
        instance.record_passed_probe(1.0, threshold=2)
    assert instance.state == "healthy"


def test_an_instance_that_returns_has_a_new_breaker() -> None:
    instance = Registry(splitwise=True).register(registration(), now=0.0)
    for _ in range(FAILURES):
        instance.record_failure(1.0, "it answered with 500")
    assert "breaker=open" in repr(instance)
    instance.mark_unhealthy("it refused a connection")
    instance.mark_healthy(2.0)
    assert instance.breaker.state == "closed"


def test_the_weight_is_small_after_the_breaker_closes_and_grows_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    caplog.clear()
    before = registry.events.generation
    instance.record_success(50.0)
    instance.record_failure(50.0, "it answered with 500")  # one failure does not open the breaker
    instance.record_success(50.0)
    assert (instance.weight(50.0), registry.events.generation, caplog.text) == (1.0, before, "")
    for _ in range(FAILURES):
        instance.record_failure(60.0, "it answered with 500")
    instance.record_success(70.0)
    assert registry.events.generation == before + 2
    assert "responds to requests again" in caplog.text
    assert instance.weight(70.0) == FIRST_WEIGHT
    assert instance.weight(70.0 + SLOW_START_SECONDS / 2) == 0.5
    assert instance.weight(70.0 + SLOW_START_SECONDS) == 1.0


def test_repr_has_role_address_state_and_load() -> None:
    instance = Registry(splitwise=True).register(registration(), now=0.0)
    instance.load.requests, instance.load.tokens = 1, 10
    assert repr(instance) == "<Instance decode 10.0.0.1:52500 healthy requests=1 tokens=10>"


def test_a_drain_survives_a_restart_unless_the_order_ends_it_there() -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(start_id="a"), now=0.0)
    instance.set_draining(True)
    registry.register(registration(start_id="b"), now=1.0)
    assert instance.state == "draining"
    instance.set_draining(True, until_restart=True)
    registry.register(registration(start_id="b"), now=2.0)
    assert instance.state == "draining"
    registry.register(registration(start_id="c"), now=3.0)
    assert (instance.state, instance.drains_until_restart) == ("healthy", False)


def test_another_start_id_means_an_empty_cache() -> None:
    registry = Registry(splitwise=True)
    lost: list[str] = []
    registry.events.lost_caches.subscribe(lost.append)
    for start_id in ("a", "a", "b"):
        registry.register(registration(start_id=start_id), now=0.0)
    assert lost == ["10.0.0.1:52500"]


@pytest.mark.parametrize("refuses", [True, False])
@pytest.mark.parametrize("comes_back", ["probe", "registration"])
def test_a_process_that_refused_connections_counts_as_restarted(refuses: bool, comes_back: str) -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    instance.set_draining(True, until_restart=True)
    for _ in range(3):
        instance.record_failed_probe("it does not answer", threshold=3, may_finish=refuses)
    if comes_back == "probe":
        instance.record_passed_probe(1.0, threshold=1)
    else:
        registry.register(registration(), now=1.0)
    assert instance.state == ("healthy" if refuses else "draining")


def test_refusals_do_not_end_the_drain_of_a_process_with_a_start_id() -> None:
    instance = Registry(splitwise=True).register(registration(start_id="a"), now=0.0)
    instance.set_draining(True, until_restart=True)
    instance.record_failed_probe("a firewall refused", threshold=3, may_finish=True)
    instance.record_passed_probe(1.0, threshold=1)
    assert instance.state == "draining"


def test_refusals_before_the_order_do_not_end_the_drain() -> None:
    instance = Registry(splitwise=True).register(registration(), now=0.0)
    instance.record_failed_probe("it refused", threshold=3, may_finish=True)
    instance.set_draining(True, until_restart=True)
    instance.record_passed_probe(1.0, threshold=1)
    assert instance.state == "draining"
