"""Pairs of each dialect behind a router: their creation, requests to single instances, and faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from router.fleet import Instance, Registration, Registry
from router.serving.plan import Pairs
from tests.router.conftest import RouterUnderTest
from tests.router.serving.dialects.pair_fleet import (
    DIALECTS,
    ClientResult,
    PairFleet,
    ask_all,
    make_body,
    path_of,
    read_answer,
)
from tests.router.serving.fault_report import REPORTS, Report
from tests.router.serving.test_fault_table import CUTS_STREAMS, FAULTS, PROBES, UNREACHABLE
from tests.router.stand_in import Behaviour, Received, Responder, StandIn
from tests.support.toy_model import PATHS, answer_text
from tests.support.waiting import wait_until

StartPairs = Callable[..., PairFleet]

REQUESTS = 16
# Responses with errors do not depend on the dialect (test_fault_table.py). Dialects differ in how the other leg of a
# request ends without its partner, and in the next attempt.
PARTNER_LOST = ("closes before its headers", "breaks off in the middle", "has died")
# This fault takes seconds: only with one dialect that sends to prefill first, and one that sends to both at once.
HANGS = "hangs, and its probes too"
ROWS = [
    (dialect, role, fault)
    for dialect in DIALECTS
    for role in ("prefill", "decode")
    for fault in (*PARTNER_LOST, *((HANGS,) if dialect in ("nixl", "sglang") else ()))
]
# Strict instances have many checks: also on a busy machine, those without a fault must answer their probes in time.
PROBES_OF_HANGING = {**PROBES, "health_check_timeout_secs": 3.0}


@pytest.mark.parametrize(("dialect", "role", "fault"), ROWS)
def test_a_failing_instance_loses_no_request(start_pairs: StartPairs, dialect: str, role: str, fault: str) -> None:
    fleet = start_pairs(dialect, prefill=2, decode=2, **(PROBES_OF_HANGING if fault == HANGS else PROBES))
    failing = fleet.of(role)[0]
    with FAULTS[fault](failing):
        results = ask_all(fleet, REQUESTS)
        with contextlib.suppress(TimeoutError, AssertionError):
            fleet.wait_for_end()
        row = Report(f"{dialect}, one of two {role}: {fault}", REQUESTS, 0, 0, 0, fleet.left)
        count_results(row, results, may_cut=(role, fault) in CUTS_STREAMS)
        row.violations = len(fleet.strict.violations)
        REPORTS.append(row)
    assert fleet.strict.violations == []
    assert (row.lost, row.wrong, row.left_running) == (0, 0, 0), [one for one in results if one.error]
    assert failing.received or fault in (*UNREACHABLE, HANGS)
    if (role, fault) not in CUTS_STREAMS:
        assert row.served == REQUESTS


def count_results(row: Report, results: list[ClientResult], may_cut: bool) -> None:
    """Count the results in ``row``."""
    for number, one in enumerate(results):
        path = path_of(number)
        if one.status == 200 and not one.error:
            right = one.text == answer_text(path, make_body(path, number))
            row.served += right
            row.wrong += not right
        elif may_cut and one.begun:
            row.wrong += (one.status, one.error) != (200, "decode_failed")
        else:
            row.lost += 1


def test_two_workers_serve_all_requests_though_a_mooncake_prefill_fails(start_pairs: StartPairs) -> None:
    fleet = start_pairs("mooncake", prefill=2, decode=2, workers=2, **PROBES)
    failing = fleet.of("prefill")[0]
    with FAULTS["closes before its headers"](failing):
        results = ask_all(fleet, REQUESTS)
        fleet.wait_for_end()
        row = Report("mooncake, one of two prefill: closes before its headers, two workers", REQUESTS, 0, 0, 0, 0)
        count_results(row, results, may_cut=False)
        REPORTS.append(row)
    assert (fleet.strict.violations, row.served) == ([], REQUESTS)


@pytest.mark.parametrize("dialect", [*DIALECTS, "openai"])
def test_a_client_cannot_pair_instances_with_members_of_its_body(start_pairs: StartPairs, dialect: str) -> None:
    fleet = start_pairs(dialect)
    own = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "elsewhere", "remote_port": 1},
        "disaggregate_info": {"prefill_ip": "elsewhere"},
        "bootstrap_host": "elsewhere",
        "bootstrap_port": 1,
        "bootstrap_room": 7,
    }
    for number, path in enumerate(PATHS):
        # Not fleet.check, because the router removes these members from the body.
        response = fleet.router.client.post(path, json=make_body(path, number, **own))
        assert read_answer(path, response).text == answer_text(path, make_body(path, number))
    alone = make_body("/v1/completions", 9, prompt=["a b", "c d"], **own)
    if dialect != "sglang":
        assert fleet.router.client.post("/v1/completions", json=alone).status_code == 200
    fleet.wait_for_end()
    assert fleet.strict.violations == []


@pytest.mark.parametrize("engine", ["fastdeploy", "vllm", "sglang", "openai"])
def test_a_mixed_instance_gets_no_members_for_pairs_from_a_client(
    make_router: Callable[..., RouterUnderTest], stand_in: Callable[..., StandIn], engine: str
) -> None:
    instance = stand_in("mixed")
    instance.extra_fields["engine"] = engine
    own: dict[str, Any] = {"bootstrap_host": "elsewhere", "bootstrap_port": 1, "bootstrap_room": 7}
    for name in ("disaggregate_info", "kv_transfer_params", "ec_transfer_params"):
        own[name] = {"remote_host": "elsewhere"}
    router = make_router(instance)
    assert router.client.post("/v1/chat/completions", json={"messages": [], **own}).status_code == 200
    assert not own.keys() & instance.received[-1].json.keys()


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_members_for_pairs_within_vllm_xargs_are_refused(
    make_router: Callable[..., RouterUnderTest], stand_in: Callable[..., StandIn], name: str
) -> None:
    instance = stand_in("mixed")
    body = {"messages": [], "vllm_xargs": {name: {"remote_host": "elsewhere"}}}
    refused = make_router(instance).client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "vllm_xargs")
    assert not instance.received


@pytest.mark.parametrize("dialect", [*DIALECTS, "openai"])
def test_a_mixed_instance_gets_requests_in_the_form_of_its_engine(start_pairs: StartPairs, dialect: str) -> None:
    fleet = start_pairs(dialect, prefill=0, decode=0, mixed=1)
    for number, path in enumerate(PATHS):
        fleet.check(path, f"{number}")
        fleet.check(path, f"{number}s", stream=True)
    n = {"n": 2} if dialect != "sglang" else {}
    fleet.check("/v1/completions", "list", prompt=["a b", "c d e"], **n)
    fleet.check("/v1/chat/completions", "id", request_id="mine")
    assert fleet.strict.violations == []


def test_a_pair_is_replaced_only_if_an_instance_has_changed(start_pairs: StartPairs) -> None:
    fleet, pairs = start_pairs("mooncake"), Pairs()
    prefill, decode = sorted(fleet.router.app.registry, key=lambda one: one.role.value, reverse=True)
    pair = pairs.find_pair(prefill, decode)
    for instance in fleet.instances:
        instance.register(fleet.router.url)
    assert pairs.find_pair(prefill, decode) is pair
    fleet.of("prefill")[0].register(fleet.router.url, bootstrap_port=1)
    changed = pairs.find_pair(prefill, decode)
    assert changed is not pair
    pairs.forget_prefill(prefill)
    assert pairs.find_pair(prefill, decode) is not changed


@pytest.mark.parametrize(
    ("dialect", "path"),
    [*((dialect, "/v1/chat/completions") for dialect in DIALECTS), ("sglang", "/v1/messages")],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_client_aborts_its_request_by_its_id(start_pairs: StartPairs, dialect: str, path: str, role: str) -> None:
    fleet = start_pairs(dialect)
    hanging = fleet.of(role)[0]
    hanging.behave = hang(hanging.behave)
    with ThreadPoolExecutor(1) as clients:
        headers = {"x-request-id": "mine"}
        answer = clients.submit(fleet.ask, path, "1", headers)
        wait_until(lambda: hanging.received or fleet.strict.waiting, "the leg that hangs")
        aborted = fleet.router.client.post("/v1/abort_requests", json={"req_ids": ["mine", "nobody's"]}).json()
        assert (aborted["status"], aborted["result"]["not_found"], aborted["errors"]) == ("success", ["nobody's"], [])
        assert read_answer(path, answer.result(20)).error == "aborted"
    fleet.wait_for_end()
    assert fleet.strict.violations == []


def test_instances_with_different_connectors_form_no_pair(start_pairs: StartPairs) -> None:
    fleet = start_pairs("nixl")
    fleet.of("decode")[0].register(fleet.router.url, kv_connector="mooncake")
    answer = fleet.ask("/v1/messages", 1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_pair")
    assert "prefill vllm (nixl) and decode vllm (mooncake)" in answer.json()["error"]["message"]
    assert not any(instance.received for instance in fleet.instances)


def hang(normal: Behaviour) -> Behaviour:
    """Return a behaviour that answers only aborts."""

    async def behave(request: Received, respond: Responder) -> None:
        if request.target == "/abort_request":
            await normal(request, respond)
        else:
            await respond.peer_left.wait()
            respond.keep_alive = False

    return behave


def register(registry: Registry, role: str, number: int, **fields: object) -> Instance:
    """Register an instance of vLLM with MooncakeConnector."""
    defaults = {"role": role, "host_ip": "127.0.0.1", "port": number, "engine": "vllm", "kv_connector": "mooncake"}
    return registry.register(Registration.from_fields({**defaults, "bootstrap_port": 9000, **fields}), 0.0)


def test_the_oldest_of_too_many_pairs_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.serving.plan.MAX_PAIRS", 3)
    registry, pairs = Registry(splitwise=True), Pairs()
    prefill = register(registry, "prefill", 1)
    decodes = [register(registry, "decode", number) for number in range(2, 6)]
    first_pairs = [pairs.find_pair(prefill, decode) for decode in decodes]
    assert [pairs.find_pair(prefill, decode) for decode in decodes[1:]] == first_pairs[1:]
    assert pairs.find_pair(prefill, decodes[0]) is not first_pairs[0]


def test_a_changed_registration_replaces_only_its_own_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.serving.plan.MAX_PAIRS", 2)
    registry, pairs = Registry(splitwise=True), Pairs()
    prefill, first, second = (
        register(registry, role, port) for role, port in (("prefill", 1), ("decode", 2), ("decode", 3))
    )
    unchanged, changed = pairs.find_pair(prefill, first), pairs.find_pair(prefill, second)
    register(registry, "decode", 3)
    assert pairs.find_pair(prefill, second) is changed
    register(registry, "decode", 3, version="2")
    assert pairs.find_pair(prefill, second) is not changed
    assert pairs.find_pair(prefill, first) is unchanged


def test_pairs_of_one_prefill_instance_share_its_bootstrap_query() -> None:
    registry, pairs = Registry(splitwise=True), Pairs()
    prefill = register(registry, "prefill", 1)
    decodes = [register(registry, "decode", number) for number in (2, 3)]
    first, second = (pairs.find_pair(prefill, decode)._bootstrap for decode in decodes)  # type: ignore[attr-defined]
    assert first is second
    register(registry, "prefill", 1, bootstrap_port=9001)
    moved = pairs.find_pair(prefill, decodes[0])._bootstrap  # type: ignore[attr-defined]
    assert (moved.address.port, first.address.port) == (9001, 9000)
    known = pairs.find_pair(prefill, decodes[1])
    pairs.forget_prefill(prefill)
    assert pairs.find_pair(prefill, decodes[1])._bootstrap is not known._bootstrap  # type: ignore[attr-defined]
