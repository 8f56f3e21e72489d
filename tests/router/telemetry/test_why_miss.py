"""Why a request was a miss: the router asks the instance that had it, and others where they may know better."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import Behaviour, Received, Responder, StandIn, answers, chat_answer

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

INQUIRY = {"token_ids": [1, 2, 3]}
NEW = {"reason": "new", "sentence": "it is new", "details": {}, "inquiry": INQUIRY}
SLOW = {"reason": "slow", "sentence": "computing was quicker", "details": {"blocks": 3}}
PARTS = {"reason": "parts", "sentence": "it parts at token 40", "details": {"token": 40}}
PARTS_EARLIER = {"reason": "parts", "sentence": "it parts at token 3", "details": {"token": 3}}


def tells(own: object, kin: object = None, status: int = 200) -> Behaviour:
    """Answers requests, and tells this of one of its own, and that of another instance's."""

    async def behave(request: Received, respond: Responder) -> None:
        if request.target.startswith("/kvcache"):
            told = own if "why_miss" in request.target else kin
            await respond.answer(status if told else 404, json.dumps(told).encode())
        else:
            await respond.answer(200, chat_answer(), ("content-type", "application/json"))

    return behave


def why(router: RouterUnderTest, request_id: str = "r") -> Any:
    router.chat(request_id=request_id)
    return router.client.get(f"/admin/why_miss/{request_id}").json()


def test_the_instance_that_had_it_tells(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in(behave=tells(SLOW))
    assert why(make_router(instance)) == {
        "request_id": "r",
        "instance": instance.key,
        "reason": "slow",
        "why_miss": "computing was quicker",
        "details": {"blocks": 3},
    }


def test_of_a_pair_prefill_tells(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill", tells(SLOW)), stand_in("decode", tells(NEW))
    assert why(make_router(prefill, decode, splitwise=True))["instance"] == prefill.key


@pytest.mark.parametrize(("kin", "teller"), [([PARTS_EARLIER, PARTS], 1), ([PARTS, None], 0), ([PARTS, SLOW], 1)])
def test_another_instance_is_asked_that_may_know_better(
    make_router: MakeRouter, stand_in: MakeStandIn, kin: list[Any], teller: int
) -> None:
    prefill = stand_in("prefill", tells(NEW))
    others = [stand_in("decode", tells(None, told)) for told in kin]
    told = why(make_router(prefill, *others, splitwise=True))
    assert (told["instance"], told["told_by"]) == (prefill.key, others[teller].key)
    assert told["why_miss"] == kin[teller]["sentence"]
    assert [got.json for got in others[teller].received if got.target == "/kvcache/kin"] == [INQUIRY]


def test_an_engine_that_tells_nothing_is_one_sentence(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    told = why(make_router(stand_in(behave=tells(None))))
    assert (told["reason"], "tells nothing of misses (it answered 404)" in told["why_miss"]) == ("unknown", True)


def test_an_instance_that_is_gone_is_one_sentence(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in(behave=tells(SLOW))
    router = make_router(instance)
    router.chat(request_id="r")
    instance.stop()
    told = router.client.get("/admin/why_miss/r").json()
    assert (told["reason"], instance.key in told["why_miss"]) == ("unknown", True)


def test_a_request_that_no_instance_had_and_one_that_nobody_knows(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router = make_router()
    assert "no instance was asked" in why(router)["why_miss"]
    unknown = router.client.get("/admin/why_miss/z")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_request")


def test_a_request_that_another_request_answers_is_not_held_up(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in(behave=answers())
    make_router(instance).chat(request_id="r")
    assert [got.target for got in instance.received] == ["/v1/chat/completions"]
