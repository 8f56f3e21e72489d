"""Registry: whom it takes, how it updates and forgets instances, and whom it tells."""

from __future__ import annotations

import pytest

from router.fleet.instance import Instance
from router.fleet.registration import RegistrationError, Role
from router.fleet.registry import Registry
from tests.router.fleet.registrations import registration


@pytest.mark.parametrize(
    ("splitwise", "role", "taken"),
    [
        (True, "prefill", True),
        (True, "decode", True),
        (True, "mixed", False),
        (False, "mixed", True),
        (False, "prefill", False),
        (False, "decode", False),
    ],
)
def test_each_mode_takes_its_roles(splitwise: bool, role: str, taken: bool) -> None:
    registry = Registry(splitwise)
    if taken:
        registry.check_role(Role(role))
    else:
        with pytest.raises(RegistrationError, match=f"role is '{role}'"):
            registry.check_role(Role(role))


def test_registering_again_updates_in_place_and_keeps_the_load() -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    instance.load.requests, instance.load.tokens = 1, 10
    again = registry.register(registration(version="v2", role="prefill"), now=5.0)
    assert again is instance
    assert (again.role, again.registration.version, again.load.requests) == (Role.PREFILL, "v2", 1)


def test_an_instance_whose_heartbeat_stops_is_forgotten() -> None:
    registry = Registry(splitwise=True)
    for now in (0.0, 5.0, 10.0):
        instance = registry.register(registration(), now)
    instance.record_passed_probe(41.0, threshold=1)
    assert registry.forget_silent(now=40.0, expiry=30.0) == []
    assert registry.forget_silent(now=41.0, expiry=30.0) == [instance]
    assert list(registry) == []


def test_an_instance_that_registered_once_stays_as_long_as_it_is_healthy() -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    instance.record_passed_probe(100.0, threshold=1)
    assert registry.forget_silent(now=120.0, expiry=30.0) == []
    assert registry.forget_silent(now=131.0, expiry=30.0) == [instance]


def test_one_that_is_expected_is_healthy_after_its_first_good_probe() -> None:
    instance = Registry(splitwise=True).add_known_instance(registration(), now=0.0, permanent=False)
    assert (instance.state, instance.is_available) == ("unhealthy", False)
    instance.record_passed_probe(1.0, threshold=3)
    assert (instance.state, instance.is_available) == ("healthy", True)


def test_one_that_has_answered_once_needs_as_many_good_probes_as_any_other() -> None:
    instance = Registry(splitwise=True).add_known_instance(registration(), now=0.0, permanent=False)
    instance.record_passed_probe(1.0, threshold=2)
    instance.mark_unhealthy("it refused a connection")
    instance.record_passed_probe(2.0, threshold=2)
    assert not instance.healthy
    instance.record_passed_probe(3.0, threshold=2)
    assert instance.healthy


def test_a_permanent_instance_is_never_forgotten() -> None:
    registry = Registry(splitwise=True)
    instance = registry.add_known_instance(registration(), now=0.0, permanent=True)
    registry.register(registration(), now=1.0)
    assert registry.forget_silent(now=1e9, expiry=30.0) == []
    assert list(registry) == [instance]


def test_a_heartbeat_that_says_nothing_new_changes_nothing() -> None:
    registry = Registry(splitwise=True)
    registry.register(registration(), now=0.0)
    before = registry.events.generation
    registry.register(registration(), now=5.0)
    assert registry.events.generation == before


def test_subscribers_are_told_of_lost_caches_and_of_failures() -> None:
    registry = Registry(splitwise=True)
    lost: list[str] = []
    failed: list[Instance] = []
    registry.events.lost_caches.subscribe(lost.append)
    registry.events.failures.subscribe(failed.append)
    instance = registry.register(registration(), now=0.0)
    instance.record_failed_probe("it ends", threshold=1, may_finish=True)
    assert (lost, failed) == ([], [])
    instance.record_failed_probe("no answer", threshold=1)
    assert (lost, failed) == ([], [instance])
    instance.record_passed_probe(1.0, threshold=1)
    assert (lost, failed) == ([instance.key], [instance])


def test_subscribers_are_told_once_that_an_instance_has_trouble() -> None:
    registry = Registry(splitwise=True)
    troubled: list[Instance] = []
    registry.events.troubles.subscribe(troubled.append)
    instance = registry.register(registration(), now=0.0)
    for _ in range(2):
        instance.mark_unhealthy("it refused a connection")
    assert troubled == [instance]


def test_seconds_that_are_excused_are_nobodys_silence() -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    registry.excuse_silence(10.0)
    assert registry.forget_silent(now=40.0, expiry=30.0) == []
    registry.register(registration(), now=0.0)
    registry.excuse_silence(10.0)
    assert registry.forget_silent(now=40.0, expiry=30.0) == []
    assert registry.forget_silent(now=41.0, expiry=30.0) == [instance]


def test_a_change_is_said_once_by_whoever_says_it_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    registry = Registry(splitwise=True)
    said: list[Instance] = []
    registry.events.logged.subscribe(said.append)
    instance = registry.register(registration(), now=0.0)
    instance.log_change("health", 30, "is unhealthy", "why")
    instance.log_change("health", 30, "is unhealthy", "why else")
    instance.log_change("drain", 20, "drains", is_remote=True)
    instance.log_change("health", 20, "is healthy again")
    instance.log_change("health", 30, "is unhealthy")
    assert [(record.levelno, record.getMessage()) for record in caplog.records[1:]] == [
        (30, f"decode instance {instance.key} is unhealthy: why"),
        (20, f"decode instance {instance.key} is healthy again"),
        (30, f"decode instance {instance.key} is unhealthy"),
    ]
    assert said == [instance] * 3


def test_with_an_instance_that_is_added_or_removed_others_may_be_chosen() -> None:
    registry = Registry(splitwise=True)
    before = registry.events.generation
    instance = registry.register(registration(), now=0.0)
    added = registry.events.generation
    registry.remove(instance)
    assert before < added < registry.events.generation
    instance.load.requests = 1
    assert registry.register(registration(), now=1.0).load.requests == 0
