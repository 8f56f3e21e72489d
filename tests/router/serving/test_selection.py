"""The choice of instances and pairs. The tests set the clock and the chance."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest

from router.fleet import Instance, Registration, Registry
from router.fleet.breaker import FAILURES, OPEN_SECONDS
from router.fleet.instance import SLOW_START_SECONDS
from router.policies import RequestFeatures
from router.policies.simple import RoundRobin
from router.serving.selection import RENEWAL_SECONDS, NoInstance, Selection, Selector
from router.settings import RouterSettings
from tests.router.instructions import count_instructions

REQUEST = RequestFeatures(100)
PREFILL, DECODE = ("prefill", "10.0.0.1:1"), ("decode", "10.0.0.2:1")


class Fleet:
    """A registry and a selector with a clock and a chance that a test sets; every policy is round_robin."""

    def __init__(self, splitwise: bool = True) -> None:
        self.now = 1000.0
        self.chance = 0.5
        self.registry = Registry(splitwise)
        settings = RouterSettings(
            splitwise=splitwise, policy="round_robin", prefill_policy="round_robin", decode_policy="round_robin"
        )
        self.selector = Selector(settings, self.registry, clock=lambda: self.now, chance=lambda: self.chance)

    def add(self, role: str, key: str, **fields: Any) -> Instance:
        host, _, port = key.partition(":")
        registration = Registration.from_fields({"role": role, "host_ip": host, "port": port, **fields})
        return self.registry.register(registration, self.now)

    def count_choices(self, requests: int = 24, excluded: tuple[str, ...] = ()) -> Counter[str]:
        """Count the choices of each instance or pair."""
        return Counter(_names(self.selector.choose(REQUEST, excluded)) for _ in range(requests))

    def refusal(self, excluded: tuple[str, ...] = ()) -> NoInstance:
        with pytest.raises(NoInstance) as refused:
            self.selector.choose(REQUEST, excluded)
        return refused.value

    def come_back(self, instance: Instance) -> None:
        instance.mark_unhealthy("it refused a connection")
        instance.mark_healthy(self.now)


def _names(selection: Selection) -> str:
    prefill = f"{selection.prefill.key}>" if selection.prefill else ""
    return f"{prefill}{selection.answering.key}"


def break_circuit(instance: Instance, now: float) -> None:
    for _ in range(FAILURES):
        instance.record_failure(now, "it answered with 500")


def test_instances_of_different_versions_are_never_paired() -> None:
    fleet = Fleet()
    for version in "ab":
        for role in ("prefill", "decode"):
            fleet.add(role, f"{role}.{version}:1", version=version)
    assert set(fleet.count_choices()) == {"prefill.a:1>decode.a:1", "prefill.b:1>decode.b:1"}


def test_instances_of_different_engines_are_never_paired() -> None:
    fleet = Fleet()
    for engine in ("fastdeploy", "vllm", "sglang"):
        for role in ("prefill", "decode"):
            fleet.add(role, f"{role}.{engine}:1", engine=engine)
    pairs = {f"prefill.{engine}:1>decode.{engine}:1" for engine in ("fastdeploy", "vllm", "sglang")}
    assert set(fleet.count_choices()) == pairs


def test_a_prefill_without_a_partner_is_not_chosen() -> None:
    fleet = Fleet()
    fleet.add("prefill", "p:1", version="new")
    fleet.add("prefill", "p:2", version="old")
    fleet.add("decode", "d:1", version="old")
    assert set(fleet.count_choices()) == {"p:2>d:1"}


def test_a_prefill_with_only_excluded_partners_is_not_chosen() -> None:
    fleet = Fleet()
    for version in "ab":
        fleet.add("prefill", f"p.{version}:1", version=version)
        fleet.add("decode", f"d.{version}:1", version=version)
    assert set(fleet.count_choices(excluded=("d.a:1",))) == {"p.b:1>d.b:1"}


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "message"),
    [
        ({"tp_size": 1}, {"tp_size": 4}, 400, "registered are prefill [1] and decode [4]"),
        ({"engine": "sglang"}, {}, 503, "must run the same engine"),
        ({"engine": "sglang", "tp_size": 1}, {"tp_size": 4}, 503, "prefill sglang and decode fastdeploy"),
        (
            {"engine": "vllm"},
            {"engine": "vllm", "kv_connector": "mooncake"},
            *(503, "with vLLM the same kv_connector; registered are prefill vllm (nixl) and decode vllm (mooncake)"),
        ),
        ({"version": "a"}, {}, 503, "registered are prefill 'a' and decode without a version"),
        ({"connected_decodes": ["d:2"]}, {}, 503, "connected to"),
    ],
)
def test_the_error_without_a_pair_has_the_reason_in_one_sentence(
    prefill: dict[str, Any], decode: dict[str, Any], status: int, message: str
) -> None:
    fleet = Fleet()
    fleet.add("prefill", "p:1", **prefill)
    fleet.add("decode", "d:1", **decode)
    error = fleet.refusal().error
    assert error.status == status
    assert message in error.message


def test_the_next_request_uses_the_changed_registration_of_an_instance() -> None:
    fleet = Fleet()
    fleet.add(*PREFILL, version="a")
    fleet.add(*DECODE, version="a")
    assert fleet.count_choices()
    fleet.add(*DECODE, version="b")
    assert "have the same version" in fleet.refusal().error.message
    fleet.add(*PREFILL, version="b")
    assert fleet.count_choices()
    fleet.add(*DECODE, version="b", is_paused=True)
    assert "10.0.0.2:1 is paused" in fleet.refusal().error.message


def test_a_draining_instance_is_not_chosen_after_its_next_heartbeat() -> None:
    fleet = Fleet(splitwise=False)
    fleet.add("mixed", "a:1")
    fleet.add("mixed", "b:1").set_draining(True)
    fleet.add("mixed", "b:1")
    assert set(fleet.count_choices()) == {"a:1"}
    fleet.add("mixed", "b:1").set_draining(False)
    assert set(fleet.count_choices()) == {"a:1", "b:1"}


def test_an_instance_with_an_open_breaker_is_not_chosen() -> None:
    fleet = Fleet(splitwise=False)
    fleet.add("mixed", "a:1")
    break_circuit(fleet.add("mixed", "b:1"), fleet.now)
    assert set(fleet.count_choices()) == {"a:1"}


def test_an_open_breaker_admits_one_request_after_a_time_and_closes_after_its_success() -> None:
    fleet = Fleet(splitwise=False)
    fleet.add("mixed", "a:1")
    broken = fleet.add("mixed", "b:1")
    break_circuit(broken, fleet.now)
    fleet.count_choices()
    fleet.now += OPEN_SECONDS
    assert fleet.count_choices()["b:1"] == 1
    broken.record_success(fleet.now)
    fleet.now += SLOW_START_SECONDS
    assert fleet.count_choices()["b:1"] == 12


@pytest.mark.parametrize("splitwise", [True, False])
def test_requests_continue_if_all_breakers_are_open(splitwise: bool) -> None:
    fleet = Fleet(splitwise)
    instances = [fleet.add(role, f"{role}:1") for role in (("prefill", "decode") if splitwise else ("mixed",))]
    for instance in instances:
        break_circuit(instance, fleet.now)
    assert fleet.count_choices(requests=3).total() == 3


def test_an_instance_with_an_open_breaker_is_used_if_no_other_makes_a_pair() -> None:
    fleet = Fleet()
    fleet.add("prefill", "p:1", version="a")
    break_circuit(fleet.add("decode", "d.a:1", version="a"), fleet.now)
    fleet.add("decode", "d.b:1", version="b")
    assert set(fleet.count_choices()) == {"p:1>d.a:1"}


def test_the_share_of_an_instance_that_returned_grows_slowly() -> None:
    fleet = Fleet(splitwise=False)
    fleet.add("mixed", "a:1")
    fleet.come_back(fleet.add("mixed", "b:1"))
    shares = []
    for part in (0.0, 0.4, 0.6):
        fleet.now += SLOW_START_SECONDS * part
        shares.append({chance: "b:1" in _draw(fleet, chance) for chance in (0.05, 0.3, 0.95)})
    assert shares == [
        {0.05: True, 0.3: False, 0.95: False},
        {0.05: True, 0.3: True, 0.95: False},
        {0.05: True, 0.3: True, 0.95: True},
    ]


def _draw(fleet: Fleet, chance: float) -> Counter[str]:
    fleet.chance = chance
    return fleet.count_choices()


def test_an_instance_that_returned_gets_all_requests_if_there_is_no_other() -> None:
    fleet = Fleet(splitwise=False)
    fleet.come_back(fleet.add("mixed", "a:1"))
    fleet.chance = 0.99
    assert fleet.count_choices() == {"a:1": 24}


def test_an_instance_that_registers_for_the_first_time_gets_its_whole_share_at_once() -> None:
    fleet = Fleet(splitwise=False)
    fleet.add("mixed", "a:1")
    fleet.add("mixed", "b:1")
    fleet.chance = 0.99
    assert fleet.count_choices() == {"a:1": 12, "b:1": 12}


def test_other_requests_go_to_decode_and_never_to_prefill() -> None:
    fleet = Fleet()
    fleet.add("prefill", "p:1", version="b")
    with pytest.raises(NoInstance, match="no decode instance is registered"):
        fleet.selector.choose_any(REQUEST)
    fleet.add("decode", "d:1", version="a")
    assert fleet.selector.choose_any(REQUEST).answering.key == "d:1"


def test_an_instance_that_returned_is_skipped_with_its_pairs_if_others_can_serve() -> None:
    fleet = Fleet()
    fleet.chance = 0.99
    fleet.add("prefill", "p.a:1", version="a")
    fleet.come_back(fleet.add("decode", "d.a:1", version="a"))
    assert set(fleet.count_choices()) == {"p.a:1>d.a:1"}
    fleet.add("prefill", "p.b:1", version="b")
    fleet.add("decode", "d.b:1", version="b")
    assert set(fleet.count_choices()) == {"p.b:1>d.b:1"}
    assert set(fleet.count_choices(excluded=("d.b:1",))) == {"p.a:1>d.a:1"}
    fleet.chance = 0.05
    assert set(fleet.count_choices()) == {"p.a:1>d.a:1", "p.b:1>d.b:1"}


def test_an_instance_without_a_share_gets_only_requests_that_no_other_can_serve() -> None:
    fleet = Fleet(splitwise=False)
    fleet.add("mixed", "a:1").set_share(0.0)
    assert fleet.count_choices() == {"a:1": 24}
    fleet.add("mixed", "b:1")
    fleet.chance = 0.0
    assert fleet.count_choices() == {"b:1": 24}
    assert fleet.count_choices(excluded=("b:1",)) == {"a:1": 24}
    fleet.come_back(fleet.add("mixed", "c:1"))
    fleet.chance = 0.99
    assert fleet.count_choices(excluded=("b:1",)) == {"c:1": 24}


def test_an_instance_is_chosen_as_usual_when_its_share_is_whole() -> None:
    fleet = Fleet(splitwise=False)
    fleet.add("mixed", "a:1")
    fleet.come_back(fleet.add("mixed", "b:1"))
    fleet.chance = 0.99
    assert fleet.count_choices() == {"a:1": 24}
    fleet.now += SLOW_START_SECONDS
    assert fleet.count_choices() == {"a:1": 12, "b:1": 12}


def test_candidates_are_not_prepared_for_each_request_if_all_breakers_are_open() -> None:
    fleet = Fleet(splitwise=False)
    for key in ("a:1", "b:1"):
        break_circuit(fleet.add("mixed", key), fleet.now)
    fleet.count_choices(1)
    generation = fleet.registry.events.generation
    fleet.count_choices()
    assert fleet.registry.events.generation == generation


def test_the_error_names_some_of_many_instances_that_cannot_serve_a_request() -> None:
    fleet = Fleet(splitwise=False)
    for number in range(1000):
        fleet.add("mixed", f"a{number}:1").set_draining(True)
    message = fleet.refusal().error.message
    assert message.startswith("no mixed instance can take the request (a0:1 is draining; ")
    assert message.endswith("; a9:1 is draining; and 990 others)")


class Case(NamedTuple):
    """A case in which the time of a choice could depend on the number of instances."""

    splitwise: bool
    num_returned: int = 0
    num_excluded: int = 0
    is_generated: bool = True

    def count(self, size: int) -> int:
        """Count the instructions of a choice in a fleet of this size."""
        fleet = Fleet(self.splitwise)
        for number in range(size):
            for role in ("prefill", "decode") if self.splitwise else ("mixed",):
                instance = fleet.add(role, f"{role}{number}:1")
                if number < self.num_returned:
                    fleet.come_back(instance)
        excluded = [
            f"{role}{number}:1" for number in range(self.num_excluded) for role in ("mixed", "prefill", "decode")
        ]
        choose = fleet.selector.choose if self.is_generated else fleet.selector.choose_any
        fleet.chance = 0.99
        choose(REQUEST)
        fleet.now += RENEWAL_SECONDS / 2
        return count_instructions(lambda: choose(REQUEST, excluded))


@pytest.mark.parametrize(
    "case",
    [
        Case(splitwise, returned, excluded, generated)
        for splitwise in (False, True)
        for returned in (0, 1, 3)
        for excluded in (0, 2)
        for generated in (True, False)
    ],
    ids=str,
)
def test_a_choice_among_many_instances_takes_no_longer_than_among_few(case: Case) -> None:
    assert case.count(300) <= case.count(10)


@pytest.mark.parametrize("splitwise", [False, True])
def test_the_error_without_an_instance_takes_no_longer_in_a_large_fleet(splitwise: bool) -> None:
    def count(size: int) -> int:
        fleet = Fleet(splitwise)
        for number in range(size):
            fleet.add("prefill" if splitwise else "mixed", f"a{number}:1").set_draining(True)
        fleet.refusal()
        return count_instructions(fleet.selector.find_obstacle)

    assert count(300) <= count(20)


class TestLostCaches:
    """The registry reports that an instance has lost its cache."""

    @pytest.fixture
    def fleet(self) -> Fleet:
        fleet = Fleet(splitwise=False)
        fleet.add("mixed", "a:1", version="v")
        self.lost: list[str] = []
        fleet.registry.events.lost_caches.subscribe(self.lost.append)
        return fleet

    def test_a_heartbeat_does_not_lose_the_cache(self, fleet: Fleet) -> None:
        fleet.add("mixed", "a:1", version="v", is_paused=True, connected_decodes=["d:1"], load=5)
        assert self.lost == []

    def test_an_instance_that_returns_has_lost_its_cache(self, fleet: Fleet) -> None:
        fleet.come_back(fleet.add("mixed", "a:1", version="v"))
        assert self.lost == ["a:1"]

    def test_an_instance_of_another_version_has_lost_its_cache(self, fleet: Fleet) -> None:
        fleet.add("mixed", "a:1", version="w")
        assert self.lost == ["a:1"]

    def test_a_removed_instance_has_lost_its_cache(self, fleet: Fleet) -> None:
        fleet.registry.forget_silent(fleet.now + 100, expiry=30)
        assert self.lost == ["a:1"]

    def test_the_policy_of_each_role_forgets_the_instance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forgotten: list[str] = []
        monkeypatch.setattr(RoundRobin, "forget_instance", lambda policy, key: forgotten.append(key))
        fleet = Fleet()
        fleet.come_back(fleet.add("decode", "d:1"))
        assert forgotten == ["d:1", "d:1"]
