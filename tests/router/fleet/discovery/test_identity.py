"""Which engine answers at an address. Engines are stand-ins that answer as the real ones do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from router.fleet.discovery.identity import ask_identity
from router.fleet.registration import RegistrationError
from router.http import Address, ConnectionPool
from tests.router.stand_in import Received, Responder, StandIn

SGLANG = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8999}


@pytest.mark.parametrize(
    ("owner", "answers", "told"),
    [
        ("fastdeploy-kvstore", {}, {"engine": "fastdeploy", "cache_salt": True}),
        ("vllm", {"/version": {"version": "0.20"}}, {"engine": "vllm"}),
        ("sglang", {"/server_info": SGLANG}, {"engine": "sglang", "role": "prefill", "bootstrap_port": 8999}),
        ("sglang", {"/get_server_info": {"disaggregation_mode": "null"}}, {"engine": "sglang", "role": "mixed"}),
        ("llamacpp", {}, {"engine": "openai"}),
        ("", {}, {"engine": "openai"}),
    ],
)
def test_an_engine_tells_what_it_is(
    stand_in: Callable[..., StandIn], owner: str, answers: dict[str, Any], told: dict[str, Any]
) -> None:
    async def behave(request: Received, respond: Responder) -> None:
        known = answers.get(request.target)
        await respond.answer(404 if known is None else 200, json.dumps(known or {}).encode())

    instance = stand_in(behave=behave)
    instance.owner = owner
    assert ask(instance) == told


def test_one_that_wants_a_key_does_not_tell(stand_in: Callable[..., StandIn]) -> None:
    async def refuse(request: Received, respond: Responder) -> None:
        await respond.answer(401, b"{}")

    instance = stand_in(behave=refuse)
    instance.models_status = 401
    with pytest.raises(RegistrationError, match="set the label kvrouter/engine"):
        ask(instance)


def test_one_that_does_not_answer_does_not_tell(stand_in: Callable[..., StandIn]) -> None:
    instance = stand_in()
    instance.stop()
    with pytest.raises(RegistrationError, match="its server does not report its engine: cannot connect"):
        ask(instance)


def ask(instance: StandIn) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        return await ask_identity(ConnectionPool(), Address("127.0.0.1", instance.port))

    return instance.thread.run(ask())
