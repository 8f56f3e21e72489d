"""Registry: the accepted roles, updates and removals of instances, and events for subscribers."""

from __future__ import annotations

import pytest

from router.fleet.instance import Instance
from router.fleet.registration import RegistrationError, Role
from router.fleet.registry import Registry
from tests.router.fleet.registrations import registration


@pytest.mark.parametrize(
    ("splitwise", "role", "is_accepted"),
    [
        (True, "prefill", True),
        (True, "decode", True),
        (True, "mixed", False),
        (False, "mixed", True),
        (False, "prefill", False),
        (False, "decode", False),
    ],
)
def test_each_mode_accepts_its_roles(splitwise: bool, role: str, is_accepted: bool) -> None:
    registry = Registry(splitwise)
    if is_accepted:
        registry.check_role(Role(role))
    else:
        with pytest.raises(RegistrationError, match=f"role is '{role}'"):
            registry.check_role(Role(role))


def test_a_second_registration_updates_the_instance_and_retains_its_load() -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    instance.load.requests, instance.load.tokens = 1, 10
    again = registry.register(registration(version="v2", role="prefill"), now=5.0)
    assert again is instance
    assert (again.role, again.registration.version, again.load.requests) == (Role.PREFILL, "v2", 1)


def test_an_instance_without_heartbeats_is_removed() -> None:
    registry = Registry(splitwise=True)
    for now in (0.0, 5.0, 10.0):
        instance = registry.register(registration(), now)
    instance.record_passed_probe(41.0, threshold=1)
    assert registry.forget_silent(now=40.0, expiry=30.0) == []
    assert registry.forget_silent(now=41.0, expiry=30.0) == [instance]
    assert list(registry) == []


def test_an_instance_that_registered_once_stays_while_it_is_healthy() -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    instance.record_passed_probe(100.0, threshold=1)
    assert registry.forget_silent(now=120.0, expiry=30.0) == []
    assert registry.forget_silent(now=131.0, expiry=30.0) == [instance]


def test_a_known_instance_is_healthy_after_its_first_passed_probe() -> None:
    instance = Registry(splitwise=True).add_known_instance(registration(), now=0.0, permanent=False)
    assert (instance.state, instance.is_available) == ("unhealthy", False)
    instance.record_passed_probe(1.0, threshold=3)
    assert (instance.state, instance.is_available) == ("healthy", True)


def test_a_known_instance_needs_the_usual_passed_probes_after_its_first_answer() -> None:
    instance = Registry(splitwise=True).add_known_instance(registration(), now=0.0, permanent=False)
    instance.record_passed_probe(1.0, threshold=2)
    instance.mark_unhealthy("it refused a connection")
    instance.record_passed_probe(2.0, threshold=2)
    assert not instance.healthy
    instance.record_passed_probe(3.0, threshold=2)
    assert instance.healthy


def test_a_permanent_instance_is_never_removed() -> None:
    registry = Registry(splitwise=True)
    instance = registry.add_known_instance(registration(), now=0.0, permanent=True)
    registry.register(registration(), now=1.0)
    assert registry.forget_silent(now=1e9, expiry=30.0) == []
    assert list(registry) == [instance]


def test_a_heartbeat_without_changes_has_no_effect() -> None:
    registry = Registry(splitwise=True)
    registry.register(registration(), now=0.0)
    before = registry.events.generation
    registry.register(registration(), now=5.0)
    assert registry.events.generation == before


def test_subscribers_get_lost_caches_and_failures() -> None:
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


def test_subscribers_get_an_unhealthy_instance_once() -> None:
    registry = Registry(splitwise=True)
    unhealthy: list[Instance] = []
    registry.events.troubles.subscribe(unhealthy.append)
    instance = registry.register(registration(), now=0.0)
    for _ in range(2):
        instance.mark_unhealthy("it refused a connection")
    assert unhealthy == [instance]


def test_excused_seconds_do_not_count_as_silence() -> None:
    registry = Registry(splitwise=True)
    instance = registry.register(registration(), now=0.0)
    registry.excuse_silence(10.0)
    assert registry.forget_silent(now=40.0, expiry=30.0) == []
    registry.register(registration(), now=0.0)
    registry.excuse_silence(10.0)
    assert registry.forget_silent(now=40.0, expiry=30.0) == []
    assert registry.forget_silent(now=41.0, expiry=30.0) == [instance]


def test_a_change_is_logged_once_and_not_if_another_process_logged_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    registry = Registry(splitwise=True)
    logged: list[Instance] = []
    registry.events.logged.subscribe(logged.append)
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
    assert logged == [instance] * 3


def test_adding_or_removing_an_instance_changes_the_generation() -> None:
    registry = Registry(splitwise=True)
    before = registry.events.generation
    instance = registry.register(registration(), now=0.0)
    added = registry.events.generation
    registry.remove(instance)
    assert before < added < registry.events.generation
    instance.load.requests = 1
    assert registry.register(registration(), now=1.0).load.requests == 0
