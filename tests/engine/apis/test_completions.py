"""OpenAI's APIs: faults and fields that the tests of the server cannot cover."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionMessage

from engine.apis.completions import Completions
from engine.disaggregation import HandoverReceiver
from engine.generation import Generations, SharedParts
from engine.model.checkpoint import load_tokenizer
from engine.protocol import ApiError, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from engine.serving.endpoints import create_app
from tests.engine.event_loop import eventually, in_event_loop
from tests.engine.running import Engine


@pytest.fixture
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine(tiny_checkpoint) as running:
        yield running


@pytest.fixture
def completions(engine: Engine, word_tokenizer: Any) -> Completions:
    return completions_of(engine, word_tokenizer, 200)


def completions_of(engine: Engine, tokenizer: Any, max_model_len: int) -> Completions:
    generations = Generations(SharedParts(engine.core, tokenizer, "mixed", engine.block_size, HandoverReceiver()))
    return Completions(generations, tokenizer, "tiny", max_model_len, engine.runner.vocab_size)


class HangingTokenizer:
    """A tokenizer that hangs until ``go_on`` is set."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.started, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.started.set()
        assert self.go_on.wait(30)
        return self._tokenizer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture
def broken_model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner, "run", fail)


def body_of(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, **fields})


async def events_of(completions: Completions, **fields: Any) -> list[Any]:
    """Return the JSON of the events, without the final ``[DONE]``."""
    *events, done = [
        event async for event in (await completions.begin_completion(body_of(stream=True, **fields))).stream_events()
    ]
    assert done == b"data: [DONE]\n\n"
    assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in events)
    return [json.loads(event[6:]) for event in events]


@pytest.mark.usefixtures("broken_model")
@in_event_loop
async def test_a_failure_of_the_engine_is_a_500(completions: Completions) -> None:
    with pytest.raises(ApiError, match="the engine failed while computing this request") as caught:
        await (await completions.begin_completion(body_of())).collect_whole()
    assert caught.value.status == 500
    assert caught.value.body["error"]["type"] == "internal_error"


@pytest.mark.usefixtures("broken_model")
@in_event_loop
async def test_a_failure_of_the_engine_ends_a_stream_with_an_error(completions: Completions) -> None:
    (event,) = await events_of(completions)
    assert event["error"]["message"].startswith("the engine failed while computing this request")


@in_event_loop
async def test_every_event_can_have_usage(completions: Completions) -> None:
    events = await events_of(completions, stream_options={"continuous_usage_stats": True}, logprobs=0)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4]


@in_event_loop
async def test_tokens_that_are_parts_of_characters_have_different_bytes(completions: Completions) -> None:
    body = ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "prompt_token_ids": [1, 2, 3], "max_tokens": 60, "seed": 1}
        | {"logprobs": True, "temperature": 9, "return_token_ids": True}
    )
    (choice,) = (await (await completions.begin_chat(body)).collect_whole())["choices"]
    found = {bytes(token["bytes"]) for token in choice["logprobs"]["content"]}
    assert len(found) == len(set(choice["message"]["completion_token_ids"])) > 20


@pytest.mark.parametrize("num_likeliest", [0, 1, 5])
@in_event_loop
async def test_the_top_logprobs_of_a_completion_always_contain_the_chosen_token(
    completions: Completions, num_likeliest: int
) -> None:
    fields: dict[str, Any] = {"logprobs": num_likeliest, "temperature": 9, "seed": 1, "max_tokens": 60}
    (choice,) = (await (await completions.begin_completion(body_of(**fields))).collect_whole())["choices"]
    logprobs = choice["logprobs"]
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value
        assert num_likeliest <= len(top) <= num_likeliest + 1  # so each token has its own name
    parts = [token for token in logprobs["tokens"] if token.startswith("bytes:\\x")]
    assert len(parts) > 5
    assert len(set(logprobs["tokens"])) > 20
    events = await events_of(completions, **fields)
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert {name: [value for piece in pieces for value in piece[name]] for name in logprobs} == logprobs


@in_event_loop
async def test_the_offset_of_a_token_is_its_position_in_the_text(characters_in_parts: Path) -> None:
    tokenizer = load_tokenizer(str(characters_in_parts))
    with Engine(characters_in_parts) as engine:
        fields: dict[str, Any] = {"prompt": " the river", "logprobs": 0, "max_tokens": 64, "return_token_ids": True}
        response = await completions_of(engine, tokenizer, 200).begin_completion(body_of(**fields))
        (choice,) = (await response.collect_whole())["choices"]
    ids, offsets = choice["completion_token_ids"], choice["logprobs"]["text_offset"]
    for number, offset in enumerate(offsets):
        assert offset == len(tokenizer.decode(ids[:number]).rstrip("\ufffd")), number
    assert len(set(offsets)) < len(offsets)  # there are characters of several tokens


@in_event_loop
async def test_refusals_of_openais_format_are_always_null(completions: Completions) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt_token_ids": [1, 2],
        "max_tokens": 2,
        "logprobs": True,
    }
    (choice,) = (await (await completions.begin_chat(ChatBody.model_validate(body))).collect_whole())["choices"]
    assert (choice["message"]["refusal"], choice["logprobs"]["refusal"]) == (None, None)
    ChatCompletionMessage.model_validate(choice["message"], strict=True)
    assert {"content", "refusal"} == choice["logprobs"].keys()


@in_event_loop
async def test_only_the_last_event_has_usage_and_it_is_null_in_the_others(completions: Completions) -> None:
    *others, last = await events_of(completions, stream_options={"include_usage": True})
    assert [event["usage"] for event in others] == [None] * 4
    assert last["usage"]["completion_tokens"] == 4
    assert all("usage" not in event for event in await events_of(completions))


@in_event_loop
async def test_responses_contain_token_ids_if_requested(completions: Completions) -> None:
    response = await completions.begin_completion(body_of(return_token_ids=True))
    (choice,) = (await response.collect_whole())["choices"]
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert len(choice["completion_token_ids"]) == 4
    first, *others = [
        choice for event in await events_of(completions, return_token_ids=True) for choice in event["choices"]
    ]
    assert first["prompt_token_ids"] == [1, 2, 3]
    assert all("prompt_token_ids" not in other for other in others)
    streamed = [token for each in (first, *others) for token in each["completion_token_ids"]]
    assert streamed == choice["completion_token_ids"]


@in_event_loop
async def test_a_stream_with_token_ids_begins_with_the_cached_tokens_of_its_prompt(completions: Completions) -> None:
    options = {"stream_options": {"include_usage": True}}
    first, *others, last = await events_of(completions, return_token_ids=True, **options)
    assert first["choices"][0]["prompt_cache"] == last["usage"]["prompt_tokens_details"]
    assert "prompt_cache" not in json.dumps(others)
    assert "prompt_cache" not in json.dumps(await events_of(completions))


@in_event_loop
async def test_responses_contain_no_token_ids_by_default(completions: Completions) -> None:
    (choice,) = (await (await completions.begin_completion(body_of())).collect_whole())["choices"]
    assert not choice.keys() & {"prompt_token_ids", "completion_token_ids"}


@pytest.mark.parametrize("params", [{}, {"temperature": 2.0, "seed": 5}], ids=["greedy", "seeded"])
@in_event_loop
async def test_a_response_continues_from_earlier_tokens(completions: Completions, params: dict[str, Any]) -> None:
    async def ids(**fields: Any) -> tuple[list[int], Any]:
        answer = await (
            await completions.begin_completion(body_of(return_token_ids=True, **params, **fields))
        ).collect_whole()
        return answer["choices"][0]["completion_token_ids"], answer["usage"]

    whole, _ = await ids(max_tokens=8)
    rest, usage = await ids(max_tokens=5, completion_token_ids=whole[:3])
    assert rest == whole[3:]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 5)


@in_event_loop
async def test_the_error_for_an_invalid_token_id_names_its_field(completions: Completions) -> None:
    with pytest.raises(ApiError, match=r"completion_token_ids: token id 300 is not in \[0, 300\)"):
        await completions.begin_completion(body_of(completion_token_ids=[300]))
    with pytest.raises(ApiError, match=r"tokens: token id -1 is not in \[0, 300\)"):
        completions.detokenize_tokens(DetokenizeBody(tokens=[-1]))


@in_event_loop
async def test_detokenize_reverses_tokenize(completions: Completions, word_tokenizer: Any) -> None:
    tokenized = await completions.tokenize_prompt(TokenizeBody(prompt="ab river"))
    assert tokenized["count"] == len(tokenized["tokens"])
    assert word_tokenizer.decode(tokenized["tokens"]) == "ab river"
    small = [token for token in tokenized["tokens"] if token < 300]
    assert completions.detokenize_tokens(DetokenizeBody(tokens=small)) == {"prompt": word_tokenizer.decode(small)}


def test_detokenize_shows_special_tokens_as_vllm_does(completions: Completions, word_tokenizer: Any) -> None:
    special = min(word_tokenizer.all_special_ids)
    assert completions.detokenize_tokens(DetokenizeBody(tokens=[special])) == {"prompt": word_tokenizer.decode(special)}


@in_event_loop
async def test_tokenize_accepts_a_text_or_messages(completions: Completions) -> None:
    with pytest.raises(ApiError, match="messages; this body has neither"):
        await completions.tokenize_prompt(TokenizeBody())
    messages = [{"role": "user", "content": "river"}]
    rendered = (await completions.tokenize_prompt(TokenizeBody(messages=messages)))["tokens"]
    assert len(rendered) > (await completions.tokenize_prompt(TokenizeBody(prompt="river")))["count"]


@in_event_loop
async def test_other_requests_are_served_while_a_long_text_is_encoded(engine: Engine, word_tokenizer: Any) -> None:
    tokenizer = HangingTokenizer(word_tokenizer)
    completions = completions_of(engine, tokenizer, 2000)
    tokenizing = asyncio.create_task(completions.tokenize_prompt(TokenizeBody(prompt=" river" * 1000)))
    await eventually(tokenizer.started.is_set, "the text to be encoded")
    assert completions.list_models()["data"]
    tokenizer.go_on.set()
    assert (await tokenizing)["count"] == 1000


@in_event_loop
async def test_a_fault_of_the_server_is_an_error_in_openais_format() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    completions = SimpleNamespace(list_models=fail)
    instance: Any = SimpleNamespace(run_lifespan=None, completions=completions)
    transport = httpx.ASGITransport(create_app(instance), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://instance") as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "this instance failed (ZeroDivisionError); its log says why"


HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture
def word_completions(few_words: Path, word_tokenizer: Any) -> Iterator[Completions]:
    """A ``Completions`` of a model with all words of the tokenizer."""
    with Engine(few_words) as running:
        yield completions_of(running, word_tokenizer, 200)


def hints_of(completions: Completions, **fields: Any) -> list[tuple[int, float]]:
    """Return the hints of a chat request: tokens and seconds."""

    async def begin() -> list[tuple[int, float]]:
        response = await completions.begin_chat(ChatBody(max_tokens=1, **fields))
        return [(hint.num_tokens, hint.seconds) for hint in response.request.hints]

    return asyncio.run(begin())


def test_a_hint_at_a_message_or_a_part_is_counted_in_tokens(word_completions: Completions) -> None:
    part = {"type": "text", "text": "where is", "cache_control": HOUR}
    rest = {"type": "text", "text": " the river"}
    plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "where is the river"}]
    marked = [{**plain[0], "cache_control": HOUR}, {"role": "user", "content": [part, rest]}]
    assert hints_of(word_completions, messages=plain) == []
    (system, one), (until_part, other) = hints_of(word_completions, messages=marked)
    [(whole, minutes)] = hints_of(word_completions, messages=plain, cache_control={"type": "ephemeral"})
    assert 0 < system < until_part < whole
    assert (one, other, minutes) == (3600, 3600, 300)


def test_the_error_for_an_invalid_hint_has_its_field(word_completions: Completions) -> None:
    message = {"role": "user", "content": "hi", "cache_control": {"type": "ephemeral", "ttl": "9d"}}
    with pytest.raises(ApiError, match=r"messages\.0\.cache_control\.ttl: Input should be a time such as 5m or 1h"):
        hints_of(word_completions, messages=[message])
    with pytest.raises(ApiError, match=r"messages: 5 messages or parts have a hint .*; at most 4 may have one"):
        hints_of(word_completions, messages=[{**message, "cache_control": HOUR}] * 5)


def test_a_hint_is_ignored_if_the_template_cannot_render_the_messages_before_it(
    word_completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = word_completions._render_chat

    def render_with_question(body: Any, messages: list[dict[str, Any]], **more: Any) -> str:
        if messages[-1]["role"] == "system":
            raise ApiError(400, "there is no question")
        return render(body, messages, **more)

    monkeypatch.setattr(word_completions, "_render_chat", render_with_question)
    messages = [{"role": "system", "content": "be kind", "cache_control": HOUR}, {"role": "user", "content": "hi"}]
    assert hints_of(word_completions, messages=messages) == []
