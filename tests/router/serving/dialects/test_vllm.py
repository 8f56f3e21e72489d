"""vLLM's pairs by NixlConnector and by MooncakeConnector, in four APIs; and what cannot be handed over."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from router.http import Exchange
from tests.router.serving.dialects.pair_fleet import LIMIT, Ended, PairFleet, ask_all, make_body, read_answer
from tests.router.stand_in import Received, Responder
from tests.support.strict_vllm import StrictVllm
from tests.support.toy_model import PATHS, answer_text

StartPairs = Callable[..., PairFleet]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def figures(fleet: PairFleet) -> tuple[list[str], int, int]:
    """Rules that were broken, hand-overs, and requests that decode computed."""
    assert isinstance(fleet.strict, StrictVllm)
    return fleet.strict.violations, fleet.strict.transfers, fleet.strict.alone


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_prefill_hands_each_prompt_over(start_pairs: StartPairs, connector: str) -> None:
    fleet = start_pairs(connector)
    for path in PATHS:
        fleet.check(path, path)
        fleet.check(path, f"{path} stream", stream=True)
    # Prefill by MooncakeConnector may end a message early, and then hands nothing over: decode computes it.
    alone = 2 if connector == "mooncake" else 0
    assert figures(fleet) == ([], 2 * len(PATHS) - alone, alone)
    assert isinstance(fleet.strict, StrictVllm)
    assert fleet.strict.stranded == 0


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_what_is_of_a_stream_or_of_many_tokens_does_not_reach_prefill(start_pairs: StartPairs, connector: str) -> None:
    fleet = start_pairs(connector)
    usage = {"include_usage": True}
    fleet.check(CHAT, 1, max_completion_tokens=4, min_tokens=2, logprobs=True, tools=[{"type": "function"}])
    fleet.check(CHAT, 2, stream=True, stream_options=usage, max_tokens=None, max_completion_tokens=4)
    fleet.check(CHAT, 3, max_tokens=None, max_completion_tokens=None, n=1)
    fleet.check(COMPLETIONS, 4, prompt=[1, 2, 3], stop_token_ids=[7], ignore_eos=False)
    fleet.check("/v1/responses", 5, background=False, min_tokens=1)
    fleet.check(CHAT, 6, request_id="mine")
    assert figures(fleet) == ([], 6, 0)


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_decode_alone_serves_several_sequences(start_pairs: StartPairs, connector: str) -> None:
    fleet = start_pairs(connector)
    fleet.check(CHAT, 1, n=2)
    fleet.check(COMPLETIONS, 2, prompt=["a b", "c d"])
    fleet.check(COMPLETIONS, 3, prompt=[[1, 2], [3]])
    fleet.check(COMPLETIONS, 4, prompt=["a b", "c d"], prompt_token_ids=[1])  # which vLLM does not know
    fleet.check(COMPLETIONS, 5, prompt="a b", prompt_embeds="AAAA")  # two prompts, too
    fleet.check(COMPLETIONS, 6, prompt="a b", prompt_embeds=["AAAA", "BBBB"])
    assert figures(fleet) == ([], 0, 6)
    assert not fleet.of("prefill")[0].received


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_a_prefill_instance_that_was_started_again_is_asked_anew(
    start_pairs: StartPairs, connector: str, stream: bool
) -> None:
    fleet = start_pairs(connector)
    assert isinstance(fleet.strict, StrictVllm)
    for number, path in enumerate((CHAT, COMPLETIONS, CHAT)):
        fleet.check(path, f"{number}", stream=stream)
        fleet.strict.restart(fleet.of("prefill")[0])
    assert figures(fleet) == ([], 3, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_that_are_gone_are_computed_anew(start_pairs: StartPairs, stream: bool) -> None:
    fleet = start_pairs("nixl")
    strict, prefill = fleet.strict, fleet.of("prefill")[0]
    assert isinstance(strict, StrictVllm)
    sound = prefill.behave

    async def behave(request: Received, respond: Responder) -> None:
        await sound(request, respond)
        if len(prefill.received) % 2:
            strict.restart(prefill)

    prefill.behave = behave
    for path in PATHS:
        fleet.check(path, path, stream=stream)
    assert figures(fleet) == ([], len(PATHS), 0)
    assert len(prefill.received) == 2 * len(PATHS)


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "kvstore"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_whose_decode_instance_dies_goes_on_at_another_pair(
    start_pairs: StartPairs, connector: str, path: str
) -> None:
    """Prefill and the other decode instance get the tokens so far, in chat beside the parameters of the hand-over."""
    fleet = start_pairs(connector, decode=2)
    strict = fleet.strict
    assert isinstance(strict, StrictVllm)
    events = range(1, LIMIT + 1 + (path == CHAT))  # chat begins with an event that has no token
    for event in events:
        strict.breaks = [event]
        body = make_body(path, f"{path} {event}", stream=True)
        ended = read_answer(path, fleet.router.client.post(path, json=body))
        assert ended == Ended(200, answer_text(path, body), "", True), event
    # Where the last token had been said, nobody is asked again.
    assert figures(fleet) == ([], 2 * len(events) - 1, 0)
    assert strict.stranded == 0


def test_the_engines_of_a_prefill_instance_are_asked_for_once(start_pairs: StartPairs) -> None:
    fleet = start_pairs("mooncake")
    assert isinstance(fleet.strict, StrictVllm)
    bootstrap = fleet.strict._bootstraps[fleet.of("prefill")[0].key]
    assert {one.error for one in ask_all(fleet, 16)} == {""}
    assert len(bootstrap.received) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_instance_without_its_bootstrap_server_is_no_partner(start_pairs: StartPairs, stream: bool) -> None:
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
    story = fleet.router.client.get(f"/admin/explain/{refused.headers['x-router-request-id']}")
    assert len(json.loads(story.text)["attempts"]) <= 2, story.text
    assert not fleet.left


def test_a_request_that_ends_as_prefill_answers_does_not_reach_decode(
    start_pairs: StartPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = start_pairs("nixl")
    prefill, decode = fleet.of("prefill")[0], fleet.of("decode")[0]
    take_in = Exchange.on_read

    def end_all_before_prefill(self: Exchange, data: bytes, is_end: bool) -> None:
        if is_end and self.address.port == prefill.port:
            fleet.router.app.proxy.stop()
        take_in(self, data, is_end)

    monkeypatch.setattr(Exchange, "on_read", end_all_before_prefill)
    response = fleet.router.client.post(COMPLETIONS, json=make_body(COMPLETIONS, 1))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "router_stopping")
    assert decode.received == []
