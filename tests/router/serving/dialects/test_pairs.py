"""Pairs of each dialect through the router: which are made, how alone ones are asked, and through all faults."""

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
    Ended,
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
# What an instance answers is judged alike in all dialects (test_fault_table.py). They differ in how the other leg of a
# request goes on without its partner, and in where requests go next.
PARTNER_LOST = ("closes before its headers", "breaks off in the middle", "has died")
# It takes seconds of waiting, and is tried on one dialect that asks prefill first, and one that asks both at once.
HANGS = "hangs, and its probes too"
ROWS = [
    (dialect, role, fault)
    for dialect in DIALECTS
    for role in ("prefill", "decode")
    for fault in (*PARTNER_LOST, *((HANGS,) if dialect in ("nixl", "sglang") else ()))
]
# The strict instances check much, on a machine that may be busy: a sound one must always answer its probes in time.
PROBES_OF_HANGING = {**PROBES, "health_check_timeout_secs": 3.0}


@pytest.mark.parametrize(("dialect", "role", "fault"), ROWS)
def test_one_of_two(start_pairs: StartPairs, dialect: str, role: str, fault: str) -> None:
    fleet = start_pairs(dialect, prefill=2, decode=2, **(PROBES_OF_HANGING if fault == HANGS else PROBES))
    failing = fleet.of(role)[0]
    with FAULTS[fault](failing):
        ended = ask_all(fleet, REQUESTS)
        with contextlib.suppress(TimeoutError, AssertionError):
            fleet.wait_for_end()
        row = Report(f"{dialect}, one of two {role}: {fault}", REQUESTS, 0, 0, 0, fleet.left)
        judge(row, ended, may_cut=(role, fault) in CUTS_STREAMS)
        row.violations = len(fleet.strict.violations)
        REPORTS.append(row)
    assert fleet.strict.violations == []
    assert (row.lost, row.wrong, row.left_running) == (0, 0, 0), [one for one in ended if one.error]
    assert failing.received or fault in (*UNREACHABLE, HANGS)
    if (role, fault) not in CUTS_STREAMS:
        assert row.served == REQUESTS


def judge(row: Report, ended: list[Ended], may_cut: bool) -> None:
    """Count what the clients got."""
    for number, one in enumerate(ended):
        path = path_of(number)
        if one.status == 200 and not one.error:
            right = one.text == answer_text(path, make_body(path, number))
            row.served += right
            row.wrong += not right
        elif may_cut and one.begun:
            row.wrong += (one.status, one.error) != (200, "decode_failed")
        else:
            row.lost += 1


def test_two_workers_learn_of_a_mooncake_prefill_each(start_pairs: StartPairs) -> None:
    fleet = start_pairs("mooncake", prefill=2, decode=2, workers=2, **PROBES)
    failing = fleet.of("prefill")[0]
    with FAULTS["closes before its headers"](failing):
        ended = ask_all(fleet, REQUESTS)
        fleet.wait_for_end()
        row = Report("mooncake, one of two prefill: closes before its headers, two workers", REQUESTS, 0, 0, 0, 0)
        judge(row, ended, may_cut=False)
        REPORTS.append(row)
    assert (fleet.strict.violations, row.served) == ([], REQUESTS)


@pytest.mark.parametrize("dialect", [*DIALECTS, "openai"])
def test_a_client_cannot_pair_instances_by_members_of_its_own(start_pairs: StartPairs, dialect: str) -> None:
    fleet = start_pairs(dialect)
    own = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "elsewhere", "remote_port": 1},
        "disaggregate_info": {"prefill_ip": "elsewhere"},
        "bootstrap_host": "elsewhere",
        "bootstrap_port": 1,
        "bootstrap_room": 7,
    }
    for number, path in enumerate(PATHS):
        # Not compared with what the client asked: these members do not arrive, on purpose.
        response = fleet.router.client.post(path, json=make_body(path, number, **own))
        assert read_answer(path, response).text == answer_text(path, make_body(path, number))
    alone = make_body("/v1/completions", 9, prompt=["a b", "c d"], **own)
    if dialect != "sglang":
        assert fleet.router.client.post("/v1/completions", json=alone).status_code == 200
    fleet.wait_for_end()
    assert fleet.strict.violations == []


@pytest.mark.parametrize("engine", ["fastdeploy", "vllm", "sglang", "openai"])
def test_a_mixed_instance_gets_no_clients_members_of_pairs(
    make_router: Callable[..., RouterUnderTest], stand_in: Callable[..., StandIn], engine: str
) -> None:
    instance = stand_in("mixed")
    instance.told["engine"] = engine
    own: dict[str, Any] = {"bootstrap_host": "elsewhere", "bootstrap_port": 1, "bootstrap_room": 7}
    for name in ("disaggregate_info", "kv_transfer_params", "ec_transfer_params"):
        own[name] = {"remote_host": "elsewhere"}
    router = make_router(instance)
    assert router.client.post("/v1/chat/completions", json={"messages": [], **own}).status_code == 200
    assert not own.keys() & instance.received[-1].json.keys()


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_members_of_pairs_within_vllm_xargs_are_refused_in_a_sentence(
    make_router: Callable[..., RouterUnderTest], stand_in: Callable[..., StandIn], name: str
) -> None:
    instance = stand_in("mixed")
    body = {"messages": [], "vllm_xargs": {name: {"remote_host": "elsewhere"}}}
    refused = make_router(instance).client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "vllm_xargs")
    assert not instance.received


@pytest.mark.parametrize("dialect", [*DIALECTS, "openai"])
def test_an_instance_alone_is_asked_as_its_engine_is(start_pairs: StartPairs, dialect: str) -> None:
    fleet = start_pairs(dialect, prefill=0, decode=0, mixed=1)
    for number, path in enumerate(PATHS):
        fleet.check(path, f"{number}")
        fleet.check(path, f"{number}s", stream=True)
    n = {"n": 2} if dialect != "sglang" else {}
    fleet.check("/v1/completions", "list", prompt=["a b", "c d e"], **n)
    fleet.check("/v1/chat/completions", "id", request_id="mine")
    assert fleet.strict.violations == []


def test_a_pair_is_made_anew_only_where_an_instance_has_changed(start_pairs: StartPairs) -> None:
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
def test_a_client_ends_its_request_by_its_id(start_pairs: StartPairs, dialect: str, path: str, role: str) -> None:
    fleet = start_pairs(dialect)
    hanging = fleet.of(role)[0]
    hanging.behave = hang(hanging.behave)
    with ThreadPoolExecutor(1) as clients:
        headers = {"x-request-id": "mine"}
        answer = clients.submit(fleet.ask, path, "1", headers)
        wait_until(lambda: hanging.received or fleet.strict.waiting, "the leg that hangs")
        told = fleet.router.client.post("/v1/abort_requests", json={"req_ids": ["mine", "nobody's"]}).json()
        assert (told["status"], told["result"]["not_found"], told["errors"]) == ("success", ["nobody's"], [])
        assert read_answer(path, answer.result(20)).error == "aborted"
    fleet.wait_for_end()
    assert fleet.strict.violations == []


def test_instances_of_two_connectors_are_no_pair(start_pairs: StartPairs) -> None:
    fleet = start_pairs("nixl")
    fleet.of("decode")[0].register(fleet.router.url, kv_connector="mooncake")
    answered = fleet.ask("/v1/messages", 1)
    assert (answered.status_code, answered.json()["error"]["code"]) == (503, "no_pair")
    assert "prefill vllm (nixl) and decode vllm (mooncake)" in answered.json()["error"]["message"]
    assert not any(instance.received for instance in fleet.instances)


def hang(sound: Behaviour) -> Behaviour:
    """Answer nothing but aborts."""

    async def behave(request: Received, respond: Responder) -> None:
        if request.target == "/abort_request":
            await sound(request, respond)
        else:
            await respond.peer_left.wait()
            respond.keep_alive = False

    return behave


def register(registry: Registry, role: str, number: int, **fields: object) -> Instance:
    """An instance of vLLM with MooncakeConnector."""
    made = {"role": role, "host_ip": "127.0.0.1", "port": number, "engine": "vllm", "kv_connector": "mooncake"}
    return registry.register(Registration.from_fields({**made, "bootstrap_port": 9000, **fields}), 0.0)


def test_of_too_many_pairs_those_made_first_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.serving.plan.MAX_PAIRS", 3)
    registry, pairs = Registry(splitwise=True), Pairs()
    prefill = register(registry, "prefill", 1)
    decodes = [register(registry, "decode", number) for number in range(2, 6)]
    made = [pairs.find_pair(prefill, decode) for decode in decodes]
    assert [pairs.find_pair(prefill, decode) for decode in decodes[1:]] == made[1:]
    assert pairs.find_pair(prefill, decodes[0]) is not made[0]


def test_a_changed_registration_makes_another_pair_in_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.serving.plan.MAX_PAIRS", 2)
    registry, pairs = Registry(splitwise=True), Pairs()
    prefill, first, second = (
        register(registry, role, port) for role, port in (("prefill", 1), ("decode", 2), ("decode", 3))
    )
    kept, changed = pairs.find_pair(prefill, first), pairs.find_pair(prefill, second)
    register(registry, "decode", 3)
    assert pairs.find_pair(prefill, second) is changed
    register(registry, "decode", 3, version="2")
    assert pairs.find_pair(prefill, second) is not changed
    assert pairs.find_pair(prefill, first) is kept


def test_pairs_of_one_prefill_learn_the_ids_of_its_engines_once() -> None:
    registry, pairs = Registry(splitwise=True), Pairs()
    prefill = register(registry, "prefill", 1)
    decodes = [register(registry, "decode", number) for number in (2, 3)]
    first, second = (pairs.find_pair(prefill, decode)._bootstrap for decode in decodes)  # type: ignore[attr-defined]
    assert first is second
    register(registry, "prefill", 1, bootstrap_port=9001)
    moved = pairs.find_pair(prefill, decodes[0])._bootstrap  # type: ignore[attr-defined]
    assert (moved.address.port, first.address.port) == (9001, 9000)
    kept = pairs.find_pair(prefill, decodes[1])
    pairs.forget_prefill(prefill)
    assert pairs.find_pair(prefill, decodes[1])._bootstrap is not kept._bootstrap  # type: ignore[attr-defined]
