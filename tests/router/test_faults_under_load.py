"""Many requests at once over instances that fail in every way. Instances are stand-ins."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import httpx
import pytest

from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import Behaviour, Received, Responder, StandIn, chat_answer
from tests.support.waiting import wait_until

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

REQUESTS = 64


def fails_in_turn() -> Behaviour:
    """Fail each request in another way."""
    ways = itertools.cycle(["500", "503", "garbage", "cut", "half"])

    async def behave(request: Received, respond: Responder) -> None:
        way = next(ways)
        await asyncio.sleep(0.01)
        if way in ("500", "503"):
            await respond.answer(int(way), b"")
            return
        if way != "cut":
            await respond.raw({"garbage": b"???\r\n", "half": b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"}[way])
        respond.cut()

    return behave


def works_for_those(prefills: list[StandIn]) -> Behaviour:
    """Decode: answer once a prefill has answered the same request, as FastDeploy's waits for its KV."""

    async def behave(request: Received, respond: Responder) -> None:
        while not any(request.body in prefill.answered for prefill in prefills):
            if respond.peer_left.is_set():
                respond.keep_alive = False
                return
            await asyncio.sleep(0.01)
        await respond.answer(200, chat_answer(request.json["n_asked"]))

    return behave


def works() -> Behaviour:
    async def behave(request: Received, respond: Responder) -> None:
        await asyncio.sleep(0.01)
        await respond.answer(200, b"{}")

    return behave


async def ask_all(url: str) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(trust_env=False, timeout=30, limits=limits) as client:
        bodies = [{"n_asked": str(i), "request_id": f"r{i}"} for i in range(REQUESTS)]
        asked = (client.post(f"{url}/v1/chat/completions", json=body) for body in bodies)
        return list(await asyncio.gather(*asked))


def nothing_is_left(router: RouterUnderTest, instances: list[StandIn]) -> bool:
    loads = {(i.candidate.requests, i.candidate.tokens) for i in router.app.registry}
    return loads == {(0, 0)} and all(instance.running == 0 for instance in instances)


@pytest.mark.parametrize("failing", ["prefill", "decode", "both"])
def test_no_request_is_lost_that_another_pair_could_serve(
    make_router: MakeRouter, stand_in: MakeStandIn, failing: str
) -> None:
    prefills = [stand_in("prefill", works()) for _ in range(2)]
    decodes = [stand_in("decode", works_for_those(prefills)) for _ in range(2)]
    if failing in ("prefill", "both"):
        prefills[0].behave = fails_in_turn()
    if failing in ("decode", "both"):
        decodes[0].behave = fails_in_turn()
    router = make_router(*prefills, *decodes, splitwise=True, health_failure_threshold=1000)
    responses = router.thread.run(ask_all(router.url), deadline_s=60)
    contents = [response.json()["choices"][0]["message"]["content"] for response in responses]
    assert contents == [str(i) for i in range(REQUESTS)]
    wait_until(lambda: nothing_is_left(router, [*prefills, *decodes]), "all legs to end")


def test_every_request_gets_one_clear_error_where_nothing_works(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefills = [stand_in("prefill", fails_in_turn()) for _ in range(2)]
    decodes = [stand_in("decode", works_for_those(prefills)) for _ in range(2)]
    router = make_router(*prefills, *decodes, splitwise=True, health_failure_threshold=1000)
    responses = router.thread.run(ask_all(router.url), deadline_s=60)
    assert {(response.status_code, response.json()["error"]["code"]) for response in responses} == {
        (502, "prefill_failed")
    }
    wait_until(lambda: nothing_is_left(router, [*prefills, *decodes]), "all legs to end")
