"""Preempted requests over HTTP: decode preempts a request after any token, and the client reads one response."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.scripted_engine import PROMPT_IDS, Engine
from tests.router.stand_in import Behaviour, Received, Responder, StandIn, answers
from tests.support.waiting import wait_until

# A character of four bytes is split over two tokens.
PIECES = [b"Hello", b" w", b"or", b"ld ", b"\xf0\x9f", b"\x99\x82", b"! And", b" so on"]
LIMIT = 50


class Preempting:
    """A decode instance that preempts each leg after the number of tokens in ``preemptions``."""

    def __init__(self, preemptions: list[int], is_chat: bool = True, form: str = "error") -> None:
        self.engine = Engine(PIECES, is_chat)
        self.preemptions = preemptions
        self.form = form
        self.detokenizes = True
        self.legs: list[dict[str, Any]] = []

    async def __call__(self, request: Received, respond: Responder) -> None:
        """Answer a request at a stand-in."""
        members = request.json
        if request.target == "/detokenize":
            text = json.dumps({"prompt": self.engine.text(members["tokens"])}).encode()
            await respond.answer(*((200, text) if self.detokenizes else (404, b"")))
            return
        leg = len(self.legs)
        self.legs.append(members)
        preempted_after = self.preemptions[leg] if leg < len(self.preemptions) else None
        if not members.get("stream"):
            await respond.answer(200, self.engine.answer(members, leg, preempted_after))
            return
        await respond.start_stream()
        for event in self.engine.stream(members, leg, preempted_after, self.form):
            await respond.chunk(event)
        await respond.end_stream()


def ask(router: RouterUnderTest, stream: bool, is_chat: bool = True, **more: Any) -> dict[str, Any]:
    """Send a request; return the text, the finish reasons and the usage, after a check that it is one response."""
    path, prompt = ("/v1/chat/completions", "messages") if is_chat else ("/v1/completions", "prompt")
    body = {prompt: [], "request_id": "r", "max_tokens": LIMIT, **more}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = router.client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        answer = response.json()
        choice = answer["choices"][0]
        return {
            "text": choice.get("message", choice).get("content", choice.get("text")),
            "finish": [choice["finish_reason"]],
            "usage": [answer["usage"]],
        }
    *events, done, nothing = response.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice.get("delta", choice) for choice in choices]
    assert not any("completion_token_ids" in part for part in deltas)
    return {
        "text": "".join(part.get("content", part.get("text", "")) for part in deltas),
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")],
    }


@pytest.fixture
def router(make_router: MakeRouter, stand_in: MakeStandIn) -> tuple[RouterUnderTest, StandIn]:
    """Start a router with one pair; return the router and the decode instance."""
    decode = stand_in("decode")
    return make_router(stand_in("prefill"), decode, splitwise=True, preempt_retry_count=10), decode


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    preemptions=st.lists(st.integers(0, len(PIECES) - 1), max_size=4),
    stream=st.booleans(),
    is_chat=st.booleans(),
    form=st.sampled_from(["error", "finish"]),
    limit=st.sampled_from([3, 6, LIMIT]),
    detokenizes=st.booleans(),
)
def test_a_response_preempted_anywhere_equals_one_without_preemptions(
    router: tuple[RouterUnderTest, StandIn],
    preemptions: list[int],
    stream: bool,
    is_chat: bool,
    form: str,
    limit: int,
    detokenizes: bool,
) -> None:
    running, decode = router
    decode.behave = Preempting([], is_chat)
    expected = ask(running, stream, is_chat, max_tokens=limit)
    # A leg generates at most the remaining tokens: it is preempted before its end, or not at all.
    decode.behave = preempting = Preempting(preemptions, is_chat, form)
    preempting.detokenizes = detokenizes
    preempting.preemptions = _select_possible(preemptions, limit)
    assert ask(running, stream, is_chat, max_tokens=limit) == expected


def _select_possible(preemptions: list[int], limit: int) -> list[int]:
    """Select the preemptions before the end of the response, even if no leg begins again."""
    possible: list[int] = []
    for count in preemptions:
        if sum(possible) + count <= min(limit, len(PIECES) - 1):
            possible.append(count)
    return possible


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("token", range(len(PIECES)))
def test_each_retry_has_its_own_id_the_tokens_so_far_and_the_rest_of_max_tokens(
    router: tuple[RouterUnderTest, StandIn], token: int, stream: bool
) -> None:
    running, decode = router
    decode.behave = preempting = Preempting([token, 1] if token < len(PIECES) - 1 else [token])
    assert ask(running, stream)["text"] == "Hello world 🙂! And so on"
    assert [leg["request_id"] for leg in preempting.legs] == ["r", "r-retry1", "r-retry2"][: len(preempting.legs)]
    for leg in preempting.legs:
        resent = leg.get("completion_token_ids", [])
        assert resent == [100 + i for i in range(len(resent))]
        assert leg["max_tokens"] == LIMIT - len(resent)
    assert all("disaggregate_info" in leg for leg in preempting.legs)
    assert all(leg.get("return_token_ids", False) == stream for leg in preempting.legs)


def test_prefill_gets_the_tokens_so_far_too(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode", Preempting([2]))
    ask(make_router(prefill, decode, splitwise=True), stream=True)
    wait_until(lambda: len(prefill.received) == 2, "both requests at prefill")
    assert prefill.received[1].body == decode.received[1].body
    assert prefill.received[1].json["completion_token_ids"] == [100, 101]


@pytest.mark.parametrize("stream", [True, False])
def test_another_pair_serves_a_request_that_fails_after_a_preemption(
    make_router: MakeRouter, stand_in: MakeStandIn, stream: bool
) -> None:
    preempting = Preempting([3])
    decodes = [stand_in("decode", _fail_first_retry(preempting)) for _ in range(2)]
    router = make_router(stand_in("prefill"), *decodes, splitwise=True)
    assert ask(router, stream)["text"] == "Hello world 🙂! And so on"
    assert preempting.legs[-1]["request_id"] == "r-retry2"


def _fail_first_retry(preempting: Preempting) -> Behaviour:
    """Answer the first retry with 500."""

    async def behave(request: Received, respond: Responder) -> None:
        fails = request.target != "/detokenize" and request.json["request_id"] == "r-retry1"
        await (answers(500, b"")(request, respond) if fails else preempting(request, respond))

    return behave


def test_a_response_preempted_too_often_is_one_clear_error(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    decode = stand_in("decode", preempting := Preempting([1] * 9))
    router = make_router(stand_in("prefill"), decode, splitwise=True, preempt_retry_count=2)
    response = router.chat(max_tokens=LIMIT)
    error = response.json()["error"]
    assert (response.status_code, error["code"], len(preempting.legs)) == (503, "preempted", 3)
    assert f"preempted the request 3 times; the last was {decode.key}" in error["message"]


def test_a_stream_preempted_too_often_ends_with_one_clear_error(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    decode = stand_in("decode", preempting := Preempting([1] * 9))
    router = make_router(stand_in("prefill"), decode, splitwise=True, preempt_retry_count=2)
    with router.stream(max_tokens=LIMIT) as response:
        events = response.read().decode().split("\n\n")
    errors = [json.loads(event.removeprefix("data: "))["error"]["code"] for event in events if '"error"' in event]
    assert (errors, events[-2:], len(preempting.legs)) == (["preempted"], ["data: [DONE]", ""], 3)


@pytest.mark.parametrize(("detokenizes", "ends"), [(True, ["preempted"]), (False, [])])
def test_a_client_that_reads_ids_gets_no_broken_character_after_a_preemption(
    make_router: MakeRouter, stand_in: MakeStandIn, detokenizes: bool, ends: list[str]
) -> None:
    """The client has the id of a part of a character. Only /detokenize shows the router that the part is incomplete."""
    preempting = Preempting([5])
    preempting.detokenizes = detokenizes

    async def merge_tokens(request: Received, respond: Responder) -> None:
        if request.target == "/detokenize" or preempting.legs:
            await preempting(request, respond)
            return
        preempting.legs.append(request.json)
        delta = {"content": "Hello world ", "completion_token_ids": [100, 101, 102, 103, 104]}
        await respond.start_stream()
        for choice in ({"delta": delta}, {"delta": {}, "finish_reason": "pd_reschedule"}):
            await respond.event(json.dumps({"id": "1", "choices": [{"index": 0, **choice}]}))
        await respond.end_stream()

    router = make_router(stand_in("prefill"), stand_in("decode", merge_tokens), splitwise=True)
    with router.stream(max_tokens=LIMIT, return_token_ids=True) as response:
        events = response.read().decode().split("\n\n")
    errors = [json.loads(event.removeprefix("data: "))["error"] for event in events if '"error"' in event]
    assert [error["code"] for error in errors] == ends
    assert len(preempting.legs) == 2 - len(ends)
    assert all("the client has the id of a token" in error["message"] for error in errors)


def test_a_failed_detokenize_does_not_make_a_character_count_as_complete(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    preempting, queries = Preempting([5]), list[Received]()

    async def fail_first(request: Received, respond: Responder) -> None:
        if request.target == "/detokenize":
            queries.append(request)
            if len(queries) == 1:
                await respond.answer(503, b"")
                return
        if request.target == "/detokenize" or preempting.legs:
            await preempting(request, respond)
            return
        preempting.legs.append(request.json)
        delta = {"content": "Hello world ", "completion_token_ids": [100, 101, 102, 103, 104]}
        await respond.start_stream()
        for choice in ({"delta": delta}, {"delta": {}, "finish_reason": "pd_reschedule"}):
            await respond.event(json.dumps({"id": "1", "choices": [{"index": 0, **choice}]}))
        await respond.end_stream()

    router = make_router(stand_in("prefill"), stand_in("decode", fail_first), splitwise=True)
    with router.stream(max_tokens=LIMIT) as response:
        events = [json.loads(each.removeprefix("data: ")) for each in response.read().decode().split("\n\n")[:-2]]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == "Hello world \N{SLIGHTLY SMILING FACE}! And so on"


@pytest.mark.parametrize("stream", [True, False])
def test_with_exclude_decode_another_instance_continues(
    make_router: MakeRouter, stand_in: MakeStandIn, stream: bool
) -> None:
    preempting = Preempting([2])
    decodes = [stand_in("decode", preempting) for _ in range(2)]
    router = make_router(stand_in("prefill"), *decodes, splitwise=True, preempt_retry_exclude_decode=True)
    assert ask(router, stream)["text"] == "Hello world 🙂! And so on"
    completions = [[got for got in each.received if got.target != "/detokenize"] for each in decodes]
    assert [len(each) for each in completions] == [1, 1]


def test_with_exclude_decode_the_only_instance_still_continues(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    decode = stand_in("decode", Preempting([2]))
    router = make_router(stand_in("prefill"), decode, splitwise=True, preempt_retry_exclude_decode=True)
    assert ask(router, stream=True)["text"] == "Hello world 🙂! And so on"


def test_no_load_and_no_leg_remains_after_preemptions(router: tuple[RouterUnderTest, StandIn]) -> None:
    running, decode = router
    decode.behave = Preempting([1, 2, 1])
    ask(running, stream=True)
    loads = [(i.load.requests, i.load.tokens) for i in running.app.registry]
    assert (loads, decode.running) == ([(0, 0), (0, 0)], 0)


def test_a_large_response_is_merged(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    preempting = Preempting([3])

    async def answer_with_large_logprobs(request: Received, respond: Responder) -> None:
        leg = len(preempting.legs)
        preempting.legs.append(request.json)
        answer = json.loads(preempting.engine.answer(request.json, leg, 3 if leg == 0 else None))
        answer["choices"][0]["logprobs"] = "x" * 1_500_000
        await respond.answer(200, json.dumps(answer).encode())

    async def decode(request: Received, respond: Responder) -> None:
        behave = preempting if request.target == "/detokenize" else answer_with_large_logprobs
        await behave(request, respond)

    router = make_router(stand_in("prefill"), stand_in("decode", decode), splitwise=True)
    assert ask(router, stream=False)["text"] == b"".join(PIECES).decode()


def test_a_leg_that_does_not_continue_the_stream_ends_it_with_one_clear_error(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    preempting = Preempting([3])

    async def stream_only_once(request: Received, respond: Responder) -> None:
        behave = answers() if preempting.legs else preempting
        await behave(request, respond)

    router = make_router(stand_in("prefill"), stand_in("decode", stream_only_once), splitwise=True)
    *_, error, done, nothing = router.chat(stream=True).text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "cannot_continue"
    assert (done, nothing) == ("data: [DONE]", "")


@pytest.mark.parametrize("stream", [True, False])
def test_the_record_counts_the_tokens_of_all_legs(router: tuple[RouterUnderTest, StandIn], stream: bool) -> None:
    routed, decode = router
    decode.behave = Preempting([3, 2])
    ask(routed, stream)
    record = wait_until(lambda: routed.app.audit.explain_request("r"), "the record")  # made after the last byte
    assert record is not None
    assert (record["prompt_tokens"], record["completion_tokens"]) == (len(PROMPT_IDS), len(PIECES))
