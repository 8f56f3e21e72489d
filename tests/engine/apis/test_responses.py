"""OpenAI's Responses API, tested with OpenAI's client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from engine.apis.responses import Responses
from engine.protocol import ApiError
from tests.support.waiting import wait_until

MODEL = "words"
QUESTION = "Where is the river?"


@pytest.fixture(scope="module")
def client(instance: SimpleNamespace) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def respond(client: openai.OpenAI, input_items: Any = QUESTION, **more: Any) -> Any:
    return client.responses.create(model=MODEL, input=input_items, **{"temperature": 0, "max_output_tokens": 8, **more})


def chat(client: openai.OpenAI, messages: Any, **more: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 8, **more}
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def test_a_response_has_the_text_and_the_usage_of_chat(client: openai.OpenAI) -> None:
    response = respond(client)
    chat_response = chat(client, [{"role": "user", "content": QUESTION}])
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.status) == ("response", MODEL, "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == chat_response.choices[0].message.content != ""
    assert response.usage.input_tokens == chat_response.usage.prompt_tokens
    assert response.usage.output_tokens == 8
    assert response.usage.total_tokens == chat_response.usage.total_tokens
    assert response.usage.input_tokens_details.cached_tokens <= chat_response.usage.prompt_tokens_details.cached_tokens


def test_a_response_with_a_stop_string_is_completed(client: openai.OpenAI) -> None:
    word = respond(client).output_text.split()[2]
    response = respond(client, extra_body={"stop": [f" {word}"]})
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert word not in response.output_text.split()


def test_instructions_and_text_parts_become_chat_messages(client: openai.OpenAI) -> None:
    input_items = [
        {"role": "developer", "content": "be short"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "where is "}] * 2},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "here"}]},
        {"role": "user", "content": QUESTION},
    ]
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "where is where is "},
        {"role": "assistant", "content": "here"},
        {"role": "user", "content": QUESTION},
    ]
    response = respond(client, input_items, instructions="be kind")
    assert response.output_text == chat(client, messages).choices[0].message.content
    assert response.instructions == "be kind"


def test_a_stream_has_the_typed_events_of_the_api_in_order(client: openai.OpenAI) -> None:
    whole = respond(client)
    events = list(respond(client, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 8,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 8
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {events[-1].response.output[0].id}
    assert client.responses.retrieve(events[-1].response.id).output_text == whole.output_text


def test_the_stream_helper_of_the_client_reads_the_whole_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete"


def test_a_response_continues_from_a_previous_one(client: openai.OpenAI) -> None:
    first = respond(client, instructions="be kind")
    second = respond(client, "And the sea?", previous_response_id=first.id)
    third = respond(client, "And the sky?", previous_response_id=second.id)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And the sea?"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "And the sky?"},
    ]
    assert third.output_text == chat(client, messages).choices[0].message.content
    assert third.previous_response_id == second.id


def test_a_stored_response_is_not_streamed_again(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="stream: this engine streams a response only when it is created"):
        client.responses.retrieve(respond(client).id, stream=True)


def test_a_breakpoint_applies_only_to_its_own_request(client: openai.OpenAI) -> None:
    part = {"type": "input_text", "text": "and then?", "prompt_cache_breakpoint": {"mode": "explicit"}}
    response = respond(client)
    for _ in range(5):  # a request may have at most 4 breakpoints
        items = [{"role": "user", "content": [part]}]
        response = respond(client, items, previous_response_id=response.id, max_output_tokens=1)
    assert response.status == "incomplete"


def test_responses_are_stored_by_default(client: openai.OpenAI) -> None:
    stored, other = respond(client), respond(client, store=False)
    assert client.responses.retrieve(stored.id).output_text == stored.output_text
    with pytest.raises(openai.NotFoundError, match=f'this instance has stored no response "{other.id}'):
        client.responses.retrieve(other.id)
    client.responses.delete(stored.id)
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, previous_response_id=stored.id)
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(stored.id)


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        (
            {"tools": [{"type": "web_search"}]},
            "tools",
            "this engine does not support tools in this API; leave the field out",
        ),
        ({"reasoning": {"effort": "high"}}, "reasoning", "this engine does not separate reasoning from the answer"),
        ({"max_output": 5}, "max_output", "this API has no such field; did you mean max_output_tokens?"),
        ({"xyz": 5}, "xyz", "this API has no such field; leave the field out"),
        ({"temperature": -1}, "temperature", "should be greater than or equal to 0, but it is -1"),
        ({"input": []}, "input", "it is empty"),
        ({"input": "x" * 9999}, "input", "the prompt has at least"),
        ({"text": {"verbosity": "low"}}, "text", "this engine supports neither structured output nor verbosity"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input",
            'the item has the type "item_reference"; give only',
        ),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", 'input.0.role: it is "tool"; give one of user'),
        ({"input": [{"role": "user"}]}, "input", "input.0.content: it is null; give a text, or a list of text parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            'input.0.content.0: a part of type "input_image"; only text is supported',
        ),
    ],
)
def test_the_error_says_why_a_request_cannot_be_served(
    instance: SimpleNamespace, fields: dict[str, Any], param: str, sentence: str
) -> None:
    body = {"model": MODEL, "input": QUESTION, **fields}
    answer = httpx.post(f"{instance.url}/v1/responses", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert sentence in error["message"]


def test_fields_without_an_effect_are_accepted(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "tools": [],
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "metadata": {"a": "b"},
    }
    text: Any = {"format": {"type": "text"}, "verbosity": "medium"}
    response = respond(client, **fields, prompt_cache_key="k", text=text, user="u")
    assert response.metadata == {"a": "b"}


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_aborted_response_fails_with_a_reason(
    instance: SimpleNamespace, client: openai.OpenAI, is_stream: bool
) -> None:
    found: list[Any] = []

    def ask() -> None:
        extra = {"request_id": "long", "ignore_eos": True}
        try:
            found.extend(respond(client, max_output_tokens=450, stream=is_stream, extra_body=extra))
        except openai.APIStatusError as exc:
            found.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: instance.generations.num_live, "the request to run")
    aborted = httpx.post(f"{instance.url}/v1/abort_requests", json={"req_ids": ["resp_long"]}, trust_env=False)
    assert aborted.json()["aborted"] == ["long"]
    thread.join()
    last = found[-1]
    if is_stream:
        assert (last.type, last.response.status, last.response.error.code) == (
            "response.failed",
            "failed",
            "server_error",
        )
        assert last.response.error.message == "the request was aborted before its response ended"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(last.response.id)
    else:
        assert last.status_code == 503
        assert "the request was aborted before its response ended" in str(last)


def test_a_failure_of_the_engine_ends_a_stream_with_a_failed_response(
    instance: SimpleNamespace, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(instance.engine.runner, "run", fail)
    *_, last = list(respond(client, stream=True))
    assert last.type == "response.failed"
    assert last.response.error.message.startswith("the engine failed while computing this request")
    with pytest.raises(openai.InternalServerError):
        respond(client)


def test_prefill_instances_store_no_responses(instance: SimpleNamespace) -> None:
    with pytest.raises(ApiError, match="stored no response"):
        Responses(instance.completions, None).retrieve_response("resp_x")
