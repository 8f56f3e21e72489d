"""FastDeploy's tests of its Python router (``tests/router/test_router.py``), as calls of this router."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.fleet import RegistrationError
from router.policies import RequestFeatures
from router.serving.selection import NoInstance, Selection
from router.settings import load_settings
from tests.router.conftest import RouterUnderTest
from tests.router.fastdeploy.origins import translates
from tests.router.fleet.registrations import registration
from tests.router.stand_in import StandIn

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

ROUTER = "tests/router/test_router.py"


def numbers(router: RouterUnderTest) -> dict[str, int]:
    """The healthy instances of each role."""
    found: dict[str, int] = router.client.get("/registered_number").json()
    return found


def choose(router: RouterUnderTest) -> Selection:
    return router.app.selector.choose(RequestFeatures(1))


@translates(ROUTER, "TestRouterArgs::test_defaults")
def test_defaults_of_the_flags() -> None:
    settings = load_settings([], {})
    assert (settings.host, settings.port) == ("0.0.0.0", 9000)
    assert settings.splitwise is False
    assert settings.request_timeout_secs == 1800


@translates(ROUTER, "TestRouterInit::test_init")
def test_a_router_begins_with_its_flags_and_no_instance(make_router: MakeRouter) -> None:
    flags = ["--host", "0.0.0.0", "--port", "9000", "--request-timeout-secs", "30", "--preempt-retry-count", "3"]
    settings = load_settings(flags, {})
    assert (settings.host, settings.port, settings.splitwise) == ("0.0.0.0", 9000, False)
    listed = make_router().client.get("/registered").json()
    assert (listed["mixed"], listed["prefill"], listed["decode"]) == ([], [], [])


class TestRegistration:
    """Instances that register."""

    @translates(
        ROUTER,
        "TestRouterRegistration::test_register_mixed_instance",
        "TestRouterRegisteredNumber::test_registered_number",
    )
    def test_a_mixed_instance_is_counted(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        assert numbers(make_router(stand_in("mixed"), splitwise=False)) == {"mixed": 1, "prefill": 0, "decode": 0}

    @translates(ROUTER, "TestRouterRegistration::test_register_splitwise_instances")
    def test_both_halves_of_a_pair_are_counted(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        router = make_router(stand_in("prefill"), stand_in("decode"), splitwise=True)
        assert numbers(router) == {"mixed": 0, "prefill": 1, "decode": 1}

    @translates(ROUTER, "TestRouterRegistration::test_register_invalid_role_raises")
    def test_a_mixed_instance_is_refused_by_a_router_of_pairs(self, make_router: MakeRouter) -> None:
        router = make_router(splitwise=True)
        with pytest.raises(ValueError, match="role is 'mixed'"):
            router.thread.run(router.app.health.probe_and_register(registration(role="mixed")))
        assert numbers(router)["mixed"] == 0

    @translates(ROUTER, "TestRouterRegistration::test_register_unhealthy_instance_raises")
    def test_an_unhealthy_instance_is_refused(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        router, instance = make_router(splitwise=False), stand_in("mixed")
        instance.health = 500
        told = registration(role="mixed", host_ip="127.0.0.1", port=instance.port)
        with pytest.raises(RegistrationError, match="is not healthy"):
            router.thread.run(router.app.health.probe_and_register(told))
        assert list(router.app.registry) == []


class TestSelection:
    """Whom the router chooses, without and with instances."""

    @pytest.mark.parametrize(
        ("splitwise", "registered", "missing"),
        [
            pytest.param(False, [], "no mixed instance", id="no mixed"),
            pytest.param(True, [], "no prefill instance", id="no prefill"),
            pytest.param(True, ["prefill"], "no decode instance", id="no decode"),
        ],
    )
    @translates(
        ROUTER,
        "TestRouterSelection::test_select_mixed_no_servers_raises",
        "TestRouterSelection::test_select_pd_no_prefill_raises",
        "TestRouterSelection::test_select_pd_no_decode_raises",
    )
    def test_the_role_that_is_missing_is_named(
        self, make_router: MakeRouter, stand_in: MakeStandIn, splitwise: bool, registered: list[str], missing: str
    ) -> None:
        router = make_router(*map(stand_in, registered), splitwise=splitwise)
        with pytest.raises(NoInstance, match=missing):
            choose(router)

    @translates(ROUTER, "TestRouterSelection::test_select_mixed_returns_instance")
    def test_the_mixed_instance_is_chosen(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        instance = stand_in("mixed")
        selection = choose(make_router(instance, splitwise=False))
        assert (selection.answering.key, selection.prefill) == (instance.key, None)

    @translates(ROUTER, "TestRouterSelection::test_select_pd_returns_pair")
    def test_the_pair_is_chosen(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        prefill, decode = stand_in("prefill"), stand_in("decode")
        selection = choose(make_router(prefill, decode, splitwise=True))
        assert selection.prefill is not None
        assert (selection.prefill.key, selection.answering.key) == (prefill.key, decode.key)


class TestAborts:
    """``POST /v1/abort_requests`` at a router with a pair."""

    @translates(ROUTER, "TestRouterAbortRequests::test_abort_broadcasts_to_all_but_returns_decode_only")
    def test_an_abort_reaches_prefill_and_decode(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        prefill, decode = stand_in("prefill"), stand_in("decode")
        router = make_router(prefill, decode, splitwise=True)
        answer = router.client.post("/v1/abort_requests", json={"req_ids": ["req-1"]})
        assert answer.status_code == 200
        assert prefill.aborted == decode.aborted == [{"req_ids": ["req-1"]}]

    @pytest.mark.parametrize("fails", ["by answering 500", "by refusing connections"])
    @translates(
        ROUTER,
        "TestRouterAbortRequests::test_abort_returns_200_even_when_decode_errors",
        "TestRouterAbortRequests::test_abort_returns_200_when_decode_raises",
    )
    def test_an_abort_is_a_200_even_if_decode_fails_it(
        self, make_router: MakeRouter, stand_in: MakeStandIn, fails: str
    ) -> None:
        prefill, decode = stand_in("prefill"), stand_in("decode")
        router = make_router(prefill, decode, splitwise=True)
        if fails == "by answering 500":
            decode.abort_status = 500
        else:
            decode.stop()
        answer = router.client.post("/v1/abort_requests", json={"abort_all": True})
        assert answer.status_code == 200
        assert prefill.aborted == [{"abort_all": True}]
