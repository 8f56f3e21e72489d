"""Leases that prefill lost, requests that no pair can share, and clients that leave, checked by strict stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from tests.router.serving.dialects.pair_fleet import DIALECTS, PairFleet, ask_all, make_body, path_of
from tests.router.stand_in import Received, Responder, never_answers
from tests.support.strict_vllm import StrictVllm
from tests.support.toy_model import PATHS, answer_text

StartPairs = Callable[..., PairFleet]

REQUESTS = 32


def ask_and_check(fleet: PairFleet) -> None:
    """Check that each client gets the whole correct response, no rule is broken and no leg is left."""
    for number, one in enumerate(ask_all(fleet, REQUESTS)):
        path = path_of(number)
        assert (one.status, one.error, one.text) == (200, "", answer_text(path, make_body(path, number))), path
    fleet.wait_for_end()
    assert fleet.strict.violations == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_pair_shares_every_request_that_it_can_share(start_pairs: StartPairs, dialect: str) -> None:
    fleet = start_pairs(dialect, prefill=2, decode=2)
    ask_and_check(fleet)
    # MooncakeConnector transfers nothing if a stop token ends prefill, and /v1/messages cannot disable stop tokens.
    alone = sum(path_of(number) == "/v1/messages" for number in range(REQUESTS)) if dialect == "mooncake" else 0
    assert fleet.strict.transfers == REQUESTS - alone
    if isinstance(fleet.strict, StrictVllm):
        assert (fleet.strict.alone, fleet.strict.stranded) == (alone, 0)


@pytest.mark.parametrize("dialect", ["nixl", "mooncake"])
def test_a_restart_of_prefill_fails_no_request(start_pairs: StartPairs, dialect: str) -> None:
    fleet = start_pairs(dialect, prefill=2, decode=2)
    strict, failing = fleet.strict, fleet.of("prefill")[0]
    assert isinstance(strict, StrictVllm)
    ask_and_check(fleet)
    strict.prefill_cached.clear()
    strict.restart(failing)
    ask_and_check(fleet)


@pytest.mark.parametrize("dialect", ["nixl", "mooncake"])
def test_leases_that_prefill_loses_fail_no_request(start_pairs: StartPairs, dialect: str) -> None:
    fleet = start_pairs(dialect, prefill=2, decode=2)
    strict, failing = fleet.strict, fleet.of("prefill")[0]
    assert isinstance(strict, StrictVllm)
    normal, count = failing.behave, 0

    async def lose_every_other_lease(request: Received, respond: Responder) -> None:
        nonlocal count
        await normal(request, respond)
        count += 1
        if count % 2:
            strict.restart(failing)

    failing.behave = lose_every_other_lease
    ask_and_check(fleet)
    assert count


@pytest.mark.parametrize("dialect", DIALECTS)
def test_several_prompts_and_several_choices_are_served_or_refused(start_pairs: StartPairs, dialect: str) -> None:
    fleet = start_pairs(dialect)
    prompts = ["one two three", "four five six"]
    answer = fleet.ask("/v1/completions", 1, prompt=prompts).json()
    texts = [answer_text("/v1/completions", make_body("/v1/completions", 1, prompt=prompt)) for prompt in prompts]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert bool(fleet.of("prefill")[0].received) == (dialect not in ("nixl", "mooncake"))  # there, decode serves alone
    several = fleet.ask("/v1/completions", 2, n=2, temperature=1)
    if dialect == "sglang":  # all choices would share one bootstrap room, and no instance of a pair serves alone
        assert (several.status_code, several.json()["error"]["code"]) == (400, "not_as_pair")
    else:
        assert len(several.json()["choices"]) == 2
    fleet.wait_for_end()
    assert fleet.strict.violations == []


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_legs_end_when_clients_leave(start_pairs: StartPairs, dialect: str, role: str) -> None:
    fleet = start_pairs(dialect)
    (hanging,) = fleet.of(role)
    hanging.behave = never_answers
    # With MooncakeConnector, /v1/messages goes to decode alone.
    paths = [path for path in PATHS if path != "/v1/messages" or dialect != "mooncake"]

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60, verify=False) as client:
            posts = [
                asyncio.ensure_future(client.post(fleet.router.url + path, json=make_body(path, number, stream=stream)))
                for number, (path, stream) in enumerate((path, stream) for path in paths for stream in (False, True))
            ]
            while hanging.running < len(posts):
                await asyncio.sleep(0.01)
            for post in posts:
                post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)

    fleet.router.thread.run(ask_and_leave(), deadline_s=60)
    fleet.wait_for_end()
    assert fleet.strict.violations == []
