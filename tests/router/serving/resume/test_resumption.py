"""Streams of an instance that dies, breaks off or hangs, over HTTP: the client reads one uninterrupted stream.

Each token of the stand-ins' model depends on all tokens before it, so a wrong continuation has other tokens.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.scripted_engine import PROMPT_IDS, Engine
from tests.router.stand_in import Behaviour, Received, Responder, StandIn
from tests.support.toy_model import LIMITS, PATHS, Asked, answer_text
from tests.support.waiting import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOKENS = 6
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "what is a seam"}]},
    COMPLETIONS: {"prompt": "what is a seam"},
    RESPONSES: {"input": "what is a seam"},
    MESSAGES: {"messages": [{"role": "user", "content": "what is a seam"}]},
}


class Breaking:
    """Instances of one engine. Each leg breaks off after the number of events in ``breaks``; later legs do not."""

    def __init__(self, engine: str, breaks: list[int], *, half: bool = False, hang: bool = False) -> None:
        self.fields = {"engine": engine}
        self.breaks = breaks
        self.cached: list[int] = []
        """The number of cached prompt tokens of each leg; 0 for later legs."""
        self.reports_cache = False
        """Whether the first event of a stream with token ids has the number of cached tokens."""
        self.half = half
        self.hang = hang
        self.legs: list[dict[str, Any]] = []

    def serve(self, instance: StandIn) -> StandIn:
        instance.extra_fields, instance.behave = {**instance.extra_fields, **self.fields}, self._behave
        return instance

    async def _behave(self, request: Received, respond: Responder) -> None:
        asked = Asked.read(request.target, request.json)
        breaks_after = self.breaks[len(self.legs)] if len(self.legs) < len(self.breaks) else None
        cached = self.cached[len(self.legs)] if len(self.legs) < len(self.cached) else 0
        self.legs.append(request.json)
        if breaks_after == -1:
            respond.cut()
            return
        await respond.start_stream()
        for number, event in enumerate(asked.events(f"leg-{len(self.legs)}", cached, asked.generate())):
            if not number and self.reports_cache and request.json.get("return_token_ids"):
                event = add_cached_tokens(event, cached)
            if number == breaks_after:
                if self.half:
                    await respond.chunk(event.encode()[: len(event) // 2])
                if self.hang:
                    await respond.peer_left.wait()
                respond.cut()
                return
            await respond.chunk(event.encode())
        await respond.end_stream()


def add_cached_tokens(event: str, cached: int) -> str:
    """Add the cached tokens to a stream's first event, as our engine does if the request asks for token ids."""
    chunk = json.loads(event.removeprefix("data: "))
    (choice,) = chunk["choices"]
    choice.get("delta", choice)["prompt_cache"] = {"cached_tokens": cached, "own_cached_tokens": cached}
    return f"data: {json.dumps(chunk)}\n\n"


def find_usage(stream: str) -> dict[str, Any]:
    """Return the last usage in a stream."""
    assert "prompt_cache" not in stream
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    assert all("error" not in event for event in events), stream
    usages = [event.get("response", event).get("usage") for event in events]
    found: dict[str, Any] = [usage for usage in usages if usage][-1]
    return found


def read(stream: str) -> dict[str, Any]:
    """Return a client's view of a stream, after a check that the stream is whole."""
    *events, done, nothing = stream.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", ""), stream
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all("error" not in chunk for chunk in chunks), stream
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice.get("delta", choice) for choice in choices]
    assert not re.search(r'token_ids": *\[', stream)
    return {
        "text": "".join(part.get("content", part.get("text", "")) for part in deltas),
        "roles": [part["role"] for part in deltas if "role" in part],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [
            {name: chunk["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
            for chunk in chunks
            if chunk.get("usage")
        ],
        "identity": len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}),
    }


def ask(router: RouterUnderTest, path: str, **more: Any) -> str:
    body = {"model": "m", **PROMPTS[path], **limit_of(path), "stream": True, **more}
    options = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    response = router.client.post(path, json={**options, **body})
    assert response.status_code == 200, response.text
    return response.text


def limit_of(path: str) -> dict[str, int]:
    return {LIMITS[path]: TOKENS}


def answer_as_prefill(*cached: int) -> Behaviour:
    """Return a behaviour that answers with one token and reports these numbers of cached tokens in turn."""
    left = iter(cached)

    async def behave(request: Received, respond: Responder) -> None:
        asked = Asked.read(request.target, request.json)
        body = asked.whole("p", next(left), [ids[:1] for ids in asked.generate()])
        await respond.answer(200, body, ("content-type", "application/json"))

    return behave


def read_error(stream: str) -> dict[str, Any]:
    """Return the only error event of a stream, which is at its end."""
    *_, error, done, nothing = stream.split("\n\n")
    assert (done, nothing, stream.count('"error"')) == ("data: [DONE]", "", 1)
    found: dict[str, Any] = json.loads(error.removeprefix("data: "))["error"]
    return found


def make_expected(path: str) -> dict[str, Any]:
    asked = Asked.read(path, {**PROMPTS[path], "max_tokens": TOKENS})
    return {
        "text": answer_text(path, asked.body),
        "roles": ["assistant"] * (path == CHAT),
        "finish": ["length"],
        "usage": [{"prompt_tokens": asked.prompt_tokens, "completion_tokens": TOKENS}],
        "identity": 1,
    }


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        ("fastdeploy", CHAT),
        ("fastdeploy", COMPLETIONS),
        ("vllm", CHAT),
        ("vllm", COMPLETIONS),
        ("sglang", COMPLETIONS),
    ],
)
def test_a_stream_reads_like_an_uninterrupted_one_if_its_instance_dies_after_any_event(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, engine: str, path: str
) -> None:
    monkeypatch.setattr("router.serving.retry_loop.find_limit", lambda *_: 9)  # for two continuations
    breaking = Breaking(engine, [])
    router = make_router(*(breaking.serve(stand_in("mixed")) for _ in range(2)))
    for half in (False, True):
        for event in range(TOKENS + (path == CHAT) + 2):
            breaking.half, breaking.breaks, breaking.legs = half, [event, 1 + event % 3], []
            assert read(ask(router, path)) == make_expected(path), (event, half)


@pytest.mark.parametrize(("path", "engine"), [(CHAT, "fastdeploy"), (COMPLETIONS, "fastdeploy")])
def test_another_decode_instance_continues_a_stream_of_a_pair(
    make_router: MakeRouter, stand_in: MakeStandIn, path: str, engine: str
) -> None:
    breaking = Breaking(engine, [3])
    decodes = [breaking.serve(stand_in("decode")) for _ in range(2)]
    router = make_router(stand_in("prefill"), *decodes, splitwise=True)
    assert read(ask(router, path)) == make_expected(path)
    assert [len(each.received) for each in decodes] == [1, 1]
    key = next(each.key for each in decodes if each.received[0].json == breaking.legs[0])
    assert f'router_resumptions_total{{instance="{key}"}} 1.0' in router.client.get("/metrics").text
    (record,) = wait_until(lambda: router.app.audit.records, "the record")
    broken, answered = record.attempts
    assert broken.ended.startswith(f"broke off: {key} closed the connection")
    assert answered.ended == "answered"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("event", [2, TOKENS + 1])
def test_usage_of_a_resumed_stream_has_the_cached_tokens_of_its_first_instance(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, path: str, event: int
) -> None:
    monkeypatch.setattr("router.serving.retry_loop.find_limit", lambda *_: 9)  # for two continuations
    breaking = Breaking("fastdeploy", [event, 2])
    breaking.cached, breaking.reports_cache = [2, 3, 4], True
    router = make_router(*(breaking.serve(stand_in("mixed")) for _ in range(2)))
    stream = ask(router, path)
    assert read(stream) == make_expected(path)
    details = find_usage(stream)["prompt_tokens_details"]
    assert details.pop("own_cached_tokens", 2) == 2
    assert details == {"cached_tokens": 2}
    (record,) = wait_until(lambda: router.app.audit.records, "the record")
    assert record.cached_tokens == 2


@pytest.mark.parametrize(("engine", "path"), [("fastdeploy", CHAT), ("vllm", CHAT), ("sglang", COMPLETIONS)])
def test_usage_of_a_resumed_stream_has_no_cached_tokens_if_its_first_instance_reports_none(
    make_router: MakeRouter, stand_in: MakeStandIn, engine: str, path: str
) -> None:
    breaking = Breaking(engine, [3])
    breaking.cached = [2, 3]
    router = make_router(*(breaking.serve(stand_in("mixed")) for _ in range(2)))
    stream = ask(router, path)
    assert read(stream) == make_expected(path)
    assert find_usage(stream)["prompt_tokens_details"] == {}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("event", [2, TOKENS + 1])
def test_usage_of_a_resumed_stream_of_a_pair_has_the_cached_tokens_of_its_first_prefill(
    make_router: MakeRouter, stand_in: MakeStandIn, path: str, event: int
) -> None:
    breaking = Breaking("fastdeploy", [event])
    breaking.cached = [3, 4]  # for decode, all tokens from prefill are cached
    decodes = [breaking.serve(stand_in("decode")) for _ in range(2)]
    prefill = stand_in("prefill", answer_as_prefill(2, 4))
    router = make_router(prefill, *decodes, splitwise=True)
    stream = ask(router, path)
    assert read(stream) == make_expected(path)
    assert find_usage(stream)["prompt_tokens_details"] == {"cached_tokens": 2}
    (record,) = wait_until(lambda: router.app.audit.records, "the record")
    assert record.cached_tokens == 2


@pytest.mark.parametrize("splitwise", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_usage_of_a_stream_that_begins_again_is_that_of_the_second_instance(
    make_router: MakeRouter, stand_in: MakeStandIn, path: str, splitwise: bool
) -> None:
    breaking = Breaking("fastdeploy", [-1])
    breaking.cached, breaking.reports_cache = [1, 2], path in (CHAT, COMPLETIONS)
    instances = [breaking.serve(stand_in("decode" if splitwise else "mixed")) for _ in range(2)]
    if splitwise:
        instances.append(stand_in("prefill", answer_as_prefill(1, 2)))
    router = make_router(*instances, splitwise=splitwise)
    usage = find_usage(ask(router, path))
    asked = Asked.read(path, {**PROMPTS[path], **limit_of(path)})
    generated = usage.get("completion_tokens", usage.get("output_tokens"))
    if path == MESSAGES:
        counts = (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"])
    elif path == RESPONSES:
        counts = (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])
    else:
        counts = (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
    assert (*counts, generated) == (asked.prompt_tokens, 2, TOKENS)
    assert len(breaking.legs) == 2


def test_a_stalled_stream_is_aborted_and_continues_elsewhere(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    breaking = Breaking("fastdeploy", [3], hang=True)
    instances = [breaking.serve(stand_in("mixed")) for _ in range(2)]
    router = make_router(*instances, stream_stall_secs=0.2)
    assert read(ask(router, CHAT)) == make_expected(CHAT)
    wait_until(lambda: sum(len(each.aborted) for each in instances) == 1, "the abort")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"seed": 1}, "seed"),
        ({"n": 2}, "several answers"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "grammar"),
        ({"stop": ["x"]}, "stop string"),
        ({"presence_penalty": 0.5}, "penalty"),
    ],
)
@pytest.mark.parametrize("engine", ["fastdeploy", "vllm"])
def test_a_stream_that_cannot_continue_exactly_ends_with_the_reason(
    make_router: MakeRouter, stand_in: MakeStandIn, engine: str, more: dict[str, Any], why: str
) -> None:
    breaking = Breaking(engine, [4])
    router = make_router(*(breaking.serve(stand_in("mixed")) for _ in range(2)))
    error = read_error(ask(router, CHAT, **more))
    assert error["code"] == "mixed_failed"
    assert "failed in the middle of its response" in error["message"]
    assert why in error["message"].partition("the stream was not resumed: ")[2]
    assert "token_ids" not in breaking.legs[0]


@pytest.mark.parametrize(("engine", "path"), [("openai", COMPLETIONS), ("sglang", CHAT)])
def test_an_engine_that_reports_no_ids_gets_no_request_for_ids(
    make_router: MakeRouter, stand_in: MakeStandIn, engine: str, path: str
) -> None:
    breaking = Breaking(engine, [3])
    router = make_router(*(breaking.serve(stand_in("mixed")) for _ in range(2)))
    assert f"the engine {engine} reports no token ids" in read_error(ask(router, path))["message"]
    assert "return_token_ids" not in breaking.legs[0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ids_that_a_client_of_vllm_did_not_request_are_null(
    make_router: MakeRouter, stand_in: MakeStandIn, path: str
) -> None:
    breaking = Breaking("vllm", [])
    stream = ask(make_router(breaking.serve(stand_in("mixed"))), path)
    assert breaking.legs[0]["return_token_ids"] is True
    assert len(re.findall(r'"token_ids": *null', stream)) == TOKENS
    assert read(stream) == make_expected(path)


def test_a_stream_is_resumed_up_to_the_limit(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    breaking = Breaking("fastdeploy", [3] * 9)
    router = make_router(*(breaking.serve(stand_in("mixed")) for _ in range(2)), stream_resume_count=1)
    message = read_error(ask(router, CHAT))["message"]
    assert (
        len(breaking.legs),
        message.endswith("the limit of resumptions (1, see server.stream-resume-count) is reached"),
    ) == (2, True)


def test_with_the_setting_at_0_a_stream_that_breaks_off_ends(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    breaking = Breaking("fastdeploy", [3])
    router = make_router(*(breaking.serve(stand_in("mixed")) for _ in range(2)), stream_resume_count=0)
    assert "resumed" not in read_error(ask(router, CHAT))["message"]
    assert "return_token_ids" not in breaking.legs[0]


def test_a_prompt_that_is_tokenized_differently_is_detected(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    """The stand-ins act as a vLLM that ignores token ids in place of messages and tokenizes messages differently."""
    breaking = Breaking("vllm", [4])
    instances = [breaking.serve(stand_in("mixed")) for _ in range(2)]

    def ignore_ids(behave: Behaviour) -> Behaviour:
        async def ignore(request: Received, respond: Responder) -> None:
            members = request.json
            if members.pop("kv_transfer_params", None):
                members["messages"].append({"role": "system", "content": "another"})
            await behave(Received(request.method, request.target, [], json.dumps(members).encode()), respond)

        return ignore

    for instance in instances:
        instance.behave = ignore_ids(instance.behave)
    message = read_error(ask(make_router(*instances), CHAT))["message"]
    assert "tokenized the prompt differently" in message
    assert "the client has text whose token ids are not known" in message
    assert len(breaking.legs) == 2


class Merging:
    """Instances that send several tokens in one event, and detokenize. The first leg breaks off within a character."""

    def __init__(
        self, engine: Engine, first: list[int], *, name: str | None = "prompt", finish: str | None = None
    ) -> None:
        self.engine = engine
        self.first = first
        self.name = name  # of the text in a response of /detokenize; None: that path answers 404
        self.finish = finish  # of the first leg, which then lacks only the end of the stream
        self.legs: list[dict[str, Any]] = []

    async def __call__(self, request: Received, respond: Responder) -> None:
        if request.target == "/detokenize":
            text = self.engine.text(request.json["tokens"])
            await respond.answer(*((404, b"") if self.name is None else (200, json.dumps({self.name: text}).encode())))
            return
        self.legs.append(request.json)
        await respond.start_stream()
        if len(self.legs) == 1:
            text = self.engine.text(self.first)
            text = text if self.finish else text.rstrip("\N{REPLACEMENT CHARACTER}")
            delta = {"content": text, "completion_token_ids": self.first, "prompt_token_ids": PROMPT_IDS}
            choice = {"index": 0, "delta": delta, "finish_reason": self.finish}
            await respond.event(json.dumps({"id": "1", "choices": [choice]}))
            respond.cut()
            return
        for event in self.engine.stream(request.json, 1, None, "error"):
            await respond.chunk(event)
        await respond.end_stream()


SMILE = [b"Hello", b" w", b"\xf0", b"\x9f", b"\x99\x82", b"!"]


@pytest.mark.parametrize("name", ["prompt", "text"])
@pytest.mark.parametrize("count", range(2, len(SMILE) + 1))
def test_a_character_that_is_split_after_several_tokens_is_whole_in_a_resumed_stream(
    make_router: MakeRouter, stand_in: MakeStandIn, count: int, name: str
) -> None:
    merging = Merging(Engine(SMILE), [100 + i for i in range(count)], name=name)
    router = make_router(*(stand_in("mixed", merging) for _ in range(2)))
    events = [
        json.loads(each[6:]) for each in ask(router, CHAT, max_tokens=9).split("\n\n") if each.startswith("data: {")
    ]
    shown = "".join(c["delta"].get("content") or "" for each in events for c in each["choices"])
    assert shown == b"".join(SMILE).decode()
    whole = count if count in (2, 5, 6) else 2
    assert merging.legs[1]["completion_token_ids"] == [100 + i for i in range(whole)]
    assert events[-1]["usage"]["completion_tokens"] == len(SMILE)


@pytest.mark.parametrize(("finish", "num_legs"), [("length", 1), (None, 2)])
def test_a_response_that_ends_within_a_character_has_all_its_tokens_after_a_broken_connection(
    make_router: MakeRouter, stand_in: MakeStandIn, finish: str | None, num_legs: int
) -> None:
    """An engine shows an incomplete character at the end of a text; before, the text of its token may be missing."""
    merging = Merging(Engine(SMILE), [100, 101, 102], finish=finish)
    router = make_router(*(stand_in("mixed", merging) for _ in range(2)))
    events = ask(router, CHAT, max_tokens=3).split("\n\n")
    chunks = [json.loads(each[6:]) for each in events if each.startswith("data: {")]
    choices = [choice for each in chunks for choice in each["choices"]]
    assert "".join(c["delta"].get("content") or "" for c in choices) == "Hello w\N{REPLACEMENT CHARACTER}"
    assert [c["finish_reason"] for c in choices if c.get("finish_reason")] == ["length"]
    assert {each["id"] for each in chunks} == {"1"}
    assert [each["usage"]["completion_tokens"] for each in chunks if each.get("usage")] == [3]
    assert len(merging.legs) == num_legs


@pytest.mark.parametrize(
    ("name", "asked", "why"),
    [
        (None, {}, "does not report whether they end with a complete character"),
        (
            "prompt",
            {"return_token_ids": True},
            "the client has the id of a token that ends with an incomplete character",
        ),
    ],
)
def test_a_stream_with_a_possibly_incomplete_last_character_is_not_resumed(
    make_router: MakeRouter, stand_in: MakeStandIn, name: str | None, asked: dict[str, Any], why: str
) -> None:
    merging = Merging(Engine(SMILE), [100, 101, 102], name=name)
    router = make_router(*(stand_in("mixed", merging) for _ in range(2)))
    message = read_error(ask(router, CHAT, **asked))["message"]
    assert message.partition("the stream was not resumed: ")[2].endswith(why)
