"""vLLM's pairs with NixlConnector and MooncakeConnector in four APIs, and requests that no pair can share."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from router.http import Exchange
from tests.router.serving.dialects.pair_fleet import LIMIT, ClientResult, PairFleet, ask_all, make_body, read_answer
from tests.router.stand_in import Received, Responder
from tests.support.strict_vllm import StrictVllm
from tests.support.toy_model import PATHS, answer_text

StartPairs = Callable[..., PairFleet]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def count_transfers(fleet: PairFleet) -> tuple[list[str], int, int]:
    """Return the broken rules, and the numbers of transfers and of requests that decode computed alone."""
    assert isinstance(fleet.strict, StrictVllm)
    return fleet.strict.violations, fleet.strict.transfers, fleet.strict.alone


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_prefill_transfers_each_prompt(start_pairs: StartPairs, connector: str) -> None:
    fleet = start_pairs(connector)
    for path in PATHS:
        fleet.check(path, path)
        fleet.check(path, f"{path} stream", stream=True)
    # MooncakeConnector transfers nothing if a stop token ends prefill, so decode computes messages alone.
    alone = 2 if connector == "mooncake" else 0
    assert count_transfers(fleet) == ([], 2 * len(PATHS) - alone, alone)
    assert isinstance(fleet.strict, StrictVllm)
    assert fleet.strict.stranded == 0


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_members_for_streams_and_many_tokens_do_not_reach_prefill(start_pairs: StartPairs, connector: str) -> None:
    fleet = start_pairs(connector)
    usage = {"include_usage": True}
    fleet.check(CHAT, 1, max_completion_tokens=4, min_tokens=2, logprobs=True, tools=[{"type": "function"}])
    fleet.check(CHAT, 2, stream=True, stream_options=usage, max_tokens=None, max_completion_tokens=4)
    fleet.check(CHAT, 3, max_tokens=None, max_completion_tokens=None, n=1)
    fleet.check(COMPLETIONS, 4, prompt=[1, 2, 3], stop_token_ids=[7], ignore_eos=False)
    fleet.check("/v1/responses", 5, background=False, min_tokens=1)
    fleet.check(CHAT, 6, request_id="mine")
    assert count_transfers(fleet) == ([], 6, 0)


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_decode_alone_serves_several_sequences(start_pairs: StartPairs, connector: str) -> None:
    fleet = start_pairs(connector)
    fleet.check(CHAT, 1, n=2)
    fleet.check(COMPLETIONS, 2, prompt=["a b", "c d"])
    fleet.check(COMPLETIONS, 3, prompt=[[1, 2], [3]])
    fleet.check(COMPLETIONS, 4, prompt=["a b", "c d"], prompt_token_ids=[1])  # vLLM ignores prompt_token_ids
    fleet.check(COMPLETIONS, 5, prompt="a b", prompt_embeds="AAAA")  # counts as two prompts
    fleet.check(COMPLETIONS, 6, prompt="a b", prompt_embeds=["AAAA", "BBBB"])
    assert count_transfers(fleet) == ([], 0, 6)
    assert not fleet.of("prefill")[0].received


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_pairs_use_a_prefill_instance_after_its_restart(start_pairs: StartPairs, connector: str, stream: bool) -> None:
    fleet = start_pairs(connector)
    assert isinstance(fleet.strict, StrictVllm)
    for number, path in enumerate((CHAT, COMPLETIONS, CHAT)):
        fleet.check(path, f"{number}", stream=stream)
        fleet.strict.restart(fleet.of("prefill")[0])
    assert count_transfers(fleet) == ([], 3, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_that_prefill_has_lost_are_computed_again(start_pairs: StartPairs, stream: bool) -> None:
    fleet = start_pairs("nixl")
    strict, prefill = fleet.strict, fleet.of("prefill")[0]
    assert isinstance(strict, StrictVllm)
    normal = prefill.behave

    async def behave(request: Received, respond: Responder) -> None:
        await normal(request, respond)
        if len(prefill.received) % 2:
            strict.restart(prefill)

    prefill.behave = behave
    for path in PATHS:
        fleet.check(path, path, stream=stream)
    assert count_transfers(fleet) == ([], len(PATHS), 0)
    assert len(prefill.received) == 2 * len(PATHS)


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "kvstore"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_continues_at_another_pair_when_its_decode_instance_dies(
    start_pairs: StartPairs, connector: str, path: str
) -> None:
    """Prefill and the other decode instance get the tokens so far, in chat together with the transfer's parameters."""
    fleet = start_pairs(connector, decode=2)
    strict = fleet.strict
    assert isinstance(strict, StrictVllm)
    events = range(1, LIMIT + 1 + (path == CHAT))  # chat begins with an event that has no token
    for event in events:
        strict.breaks = [event]
        body = make_body(path, f"{path} {event}", stream=True)
        result = read_answer(path, fleet.router.client.post(path, json=body))
        assert result == ClientResult(200, answer_text(path, body), "", True), event
    # After the last token, no instance gets the request again.
    assert count_transfers(fleet) == ([], 2 * len(events) - 1, 0)
    assert strict.stranded == 0


def test_a_bootstrap_server_gets_one_query_for_all_requests(start_pairs: StartPairs) -> None:
    fleet = start_pairs("mooncake")
    assert isinstance(fleet.strict, StrictVllm)
    bootstrap = fleet.strict._bootstraps[fleet.of("prefill")[0].key]
    assert {one.error for one in ask_all(fleet, 16)} == {""}
    assert len(bootstrap.received) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_instance_without_its_bootstrap_server_is_not_used(start_pairs: StartPairs, stream: bool) -> None:
    fleet = start_pairs("mooncake", prefill=2)
    assert isinstance(fleet.strict, StrictVllm)
    fleet.strict._bootstraps[fleet.of("prefill")[0].key].stop()
    for number in range(4):
        fleet.check(CHAT, number, stream=stream)
    for bootstrap in fleet.strict._bootstraps.values():
        bootstrap.stop()
    fleet.router.app.proxy._services.pairs._known.clear()
    refused = fleet.ask(CHAT, 5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "prefill_failed")
    explanation = fleet.router.client.get(f"/admin/explain/{refused.headers['x-router-request-id']}")
    assert len(json.loads(explanation.text)["attempts"]) <= 2, explanation.text
    assert not fleet.left


def test_a_request_that_ends_when_prefill_answers_does_not_reach_decode(
    start_pairs: StartPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = start_pairs("nixl")
    prefill, decode = fleet.of("prefill")[0], fleet.of("decode")[0]
    on_read = Exchange.on_read

    def end_all_before_prefill(self: Exchange, data: bytes, is_end: bool) -> None:
        if is_end and self.address.port == prefill.port:
            fleet.router.app.proxy.stop()
        on_read(self, data, is_end)

    monkeypatch.setattr(Exchange, "on_read", end_all_before_prefill)
    response = fleet.router.client.post(COMPLETIONS, json=make_body(COMPLETIONS, 1))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "router_stopping")
    assert decode.received == []
