"""FastDeploy's tests of its Go router's scheduler: policies, and the counts of requests and tokens that they go by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from router.fleet import Instance, Registration, Registry
from router.http import estimate_tokens
from router.policies import POLICIES, InstanceLoad, RequestFeatures
from router.policies.simple import ProcessTokens, Random, RequestNum
from router.serving.selection import NoInstance, Selector
from router.settings import RouterSettings, load_settings
from tests.router.conftest import RouterUnderTest
from tests.router.fastdeploy.origins import translates
from tests.router.stand_in import StandIn, stalls
from tests.support.waiting import wait_until

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

HANDLER = "golang_router/internal/scheduler/handler/handler_test.go"
LOAD = "golang_router/internal/scheduler/handler/load_strategy_test.go"
TOKENIZER = "golang_router/internal/scheduler/handler/tokenizer_test.go"

EXPIRY = 30.0


def make_registry(*workers: str, role: str = "mixed") -> Registry:
    """A registry with these instances, each at port 80."""
    registry = Registry(splitwise=role != "mixed")
    for worker in workers:
        add(registry, worker, role)
    return registry


def add(registry: Registry, worker: str, role: str = "mixed", now: float = 0.0) -> Instance:
    return registry.register(Registration.from_fields({"role": role, "host_ip": worker, "port": 80}), now)


class TestPolicies:
    """Which policy chooses, and whom."""

    @translates(HANDLER, "TestSchedulerInit")
    def test_each_role_has_the_policy_that_the_file_names(self, tmp_path: Path) -> None:
        path = tmp_path / "config.yaml"
        path.write_text("scheduler: {policy: random, prefill-policy: process_tokens, decode-policy: request_num}")
        flags = ["--config_path", str(path), "--port", "9000"]
        alone = Selector(load_settings(flags, {}), Registry(splitwise=False))
        pairs = Selector(load_settings([*flags, "--splitwise"], {}), Registry(splitwise=True))
        policies = {role.value: policy for each in (alone, pairs) for role, policy in each.policies.items()}
        assert isinstance(policies["mixed"], Random)
        assert isinstance(policies["prefill"], ProcessTokens)
        assert isinstance(policies["decode"], RequestNum)

    @translates(HANDLER, "TestSelectWorker")
    def test_prefill_goes_by_tokens_and_decode_by_requests(self) -> None:
        registry = Registry(splitwise=True)
        for worker, tokens in (("worker1", 100), ("worker2", 50), ("worker3", 200)):
            add(registry, worker, "prefill").load.tokens = tokens
        for worker, requests in (("worker4", 2), ("worker5", 0), ("worker6", 1)):
            add(registry, worker, "decode").load.requests = requests
        settings = RouterSettings(splitwise=True, prefill_policy="process_tokens", decode_policy="request_num")
        selection = Selector(settings, registry).choose(RequestFeatures(1))
        assert selection.prefill is not None
        assert selection.prefill.address.url == "http://worker2:80"
        assert selection.answering.address.url == "http://worker5:80"

    @translates(LOAD, "TestProcessTokensSelectWorker")
    def test_process_tokens_takes_the_fewest_tokens(self) -> None:
        loads = [InstanceLoad(f"worker{number}", tokens=tokens) for number, tokens in ((1, 100), (2, 50), (3, 200))]
        assert ProcessTokens().choose_instance(RequestFeatures(1), loads).key == "worker2"

    @translates(LOAD, "TestRequestNumSelectWorker")
    def test_request_num_takes_the_fewest_requests(self) -> None:
        loads = [InstanceLoad(f"worker{number}", requests=requests) for number, requests in ((1, 2), (2, 0), (3, 1))]
        assert RequestNum().choose_instance(RequestFeatures(1), loads).key == "worker2"

    @pytest.mark.parametrize("policy", sorted(POLICIES))
    @translates(LOAD, "TestProcessTokensSelectWorker", "TestRequestNumSelectWorker")
    def test_without_instances_no_policy_is_asked(self, policy: str) -> None:
        selector = Selector(RouterSettings(policy=policy), Registry(splitwise=False))
        with pytest.raises(NoInstance) as none:
            selector.choose(RequestFeatures(1))
        assert none.value.error.status == 503


class TestCounts:
    """The load of an instance."""

    @translates(HANDLER, "TestCounterOperations")
    def test_a_request_and_its_tokens_are_counted_until_they_end(self) -> None:
        load = InstanceLoad("test")
        assert (load.requests, load.tokens) == (0, 0)
        load.add_request(tokens=100, work=100.0)
        assert (load.requests, load.tokens) == (1, 100)
        load.remove_prefill(tokens=50, work=50.0)
        assert (load.requests, load.tokens) == (1, 50)
        load.remove_request(tokens=50, work=50.0)
        assert (load.requests, load.tokens, load.queued) == (0, 0, 0.0)

    @translates(HANDLER, "TestReleasePrefillTokens")
    def test_the_tokens_of_one_prefill_are_taken_from_those_of_all(self) -> None:
        load = InstanceLoad("worker1", tokens=100)
        load.remove_prefill(tokens=10, work=0.0)
        assert load.tokens == 90
        load.remove_prefill(tokens=0, work=0.0)
        assert load.tokens == 90

    @translates(HANDLER, "TestCounterOperations", "TestCounterLifecycle_UnhealthyAndReregister")
    def test_a_request_is_counted_off_once_however_often_it_is_ended(
        self, go_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        router = go_router(stand_in("mixed", stalls("1")))
        (instance,) = router.app.registry
        with router.stream() as response:
            pieces = response.iter_raw()  # kept, as the client would leave without it
            next(pieces)
            (serving,) = router.app.proxy._live
            attempt = serving.attempt
            assert attempt is not None
            assert instance.load.requests == 1

            async def finish_twice() -> tuple[int, int]:
                attempt.answering.finish()
                once = instance.load.requests
                attempt.answering.finish()
                return once, instance.load.requests

            assert router.thread.run(finish_twice()) == (0, 0)

    @pytest.mark.parametrize(("text", "tokens"), [("", 0), ("hello", 1), ("你好", 1), ("x" * 400, 100)])
    @translates(HANDLER, "TestEstimateTokens")
    def test_tokens_are_about_a_quarter_of_the_bytes(self, text: str, tokens: int) -> None:
        assert estimate_tokens(text.encode()) == tokens


class TestInstancesThatGo:
    """Counts of an instance that is unhealthy, gone, or back."""

    @translates(HANDLER, "TestCleanupUnhealthyCounter", "TestCounterLifecycle_UnhealthyAndReregister")
    def test_an_unhealthy_instance_keeps_the_count_of_what_it_runs(self) -> None:
        registry = make_registry("worker1")
        (instance,) = registry
        instance.load.add_request(tokens=100, work=0.0)
        instance.mark_unhealthy("it refused a connection")
        assert (instance.load.requests, instance.load.tokens) == (1, 100)
        again = add(registry, "worker1", now=5.0)
        assert again.load is instance.load
        assert (again.state, again.load.requests) == ("healthy", 1)
        for _ in range(3):
            again.load.add_request(tokens=0, work=0.0)
        for _ in range(3):
            again.load.remove_request(tokens=0, work=0.0)
        again.load.remove_request(tokens=100, work=0.0)
        assert (again.load.requests, again.load.tokens) == (0, 0)

    @translates(HANDLER, "TestCleanupUnhealthyCounter", "TestCleanupInvalidCounters")
    def test_an_instance_that_is_gone_takes_its_count_with_it_and_the_others_stay(self) -> None:
        registry = make_registry("worker1", "invalid-worker")
        known, gone = registry
        known.load.add_request(tokens=100, work=0.0)
        known.record_passed_probe(2 * EXPIRY, threshold=1)
        assert registry.forget_silent(2 * EXPIRY, EXPIRY) == [gone]
        assert [(each.key, each.load.requests, each.load.tokens) for each in registry] == [("worker1:80", 1, 100)]

    @translates(HANDLER, "TestCleanupInvalidCounters", "TestCounterLifecycle_CleanupBeforeRelease")
    def test_a_request_that_outlives_its_instances_entry_makes_no_new_one(self) -> None:
        registry = make_registry("worker1")
        (gone,) = registry
        gone.load.add_request(tokens=50, work=0.0)
        registry.remove(gone)
        assert (gone.load.requests, gone.load.tokens) == (1, 50)
        gone.load.remove_request(tokens=50, work=0.0)
        assert (gone.load.requests, list(registry)) == (0, [])

    @translates(HANDLER, "TestCounterLifecycle_CleanupBeforeRelease")
    def test_an_instance_that_comes_anew_begins_with_0(self) -> None:
        registry = make_registry("worker1")
        (gone,) = registry
        gone.load.add_request(tokens=50, work=0.0)
        registry.remove(gone)
        assert add(registry, "worker1", now=5.0).load.requests == 0

    @translates(HANDLER, "TestStartBackupCleanupTask")
    def test_what_is_gone_is_forgotten_in_the_background(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        instance = stand_in()
        router = go_router(instance, health_check_interval_secs=0.05, heartbeat_expiry_secs=0.1)
        instance.stop()
        wait_until(lambda: list(router.app.registry) == [], "the instance to be forgotten")


class TestTokenizer:
    """The router asks no tokenizer."""

    @translates(
        TOKENIZER,
        "TestNewHTTPTokenizer",
        "TestNewHTTPTokenizer_URLParsing",
        "TestNewHTTPTokenizer_ImplementsInterface",
        "TestHTTPTokenizer_Tokenize",
        "TestParseTokensFromBody",
    )
    def test_a_tokenizer_in_the_file_is_named_as_having_no_effect(self, tmp_path: Path) -> None:
        path = tmp_path / "config.yaml"
        path.write_text("scheduler: {tokenizer-url: 'http://example.com', tokenizer-timeout-secs: 2}")
        sentences = load_settings(["--config_path", str(path), "--port", "9000"], {}).without_effect
        for name, sentence in zip(("tokenizer-url", "tokenizer-timeout-secs"), sentences, strict=True):
            assert f"scheduler.{name} has no effect: prompts are compared as text" in sentence
