"""Anthropic's Messages API, tested with Anthropic's client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.waiting import wait_until

MODEL = "words"
QUESTION: Any = [{"role": "user", "content": "Where is the river?"}]


@pytest.fixture(scope="module")
def client(instance: SimpleNamespace) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=instance.url, api_key="none", max_retries=0, timeout=60) as found:
        yield found


def ask(client: anthropic.Anthropic, messages: Any = QUESTION, **more: Any) -> Any:
    # The client has no argument for the temperature.
    extra_body = {"temperature": 0, **more.pop("extra_body", {})}
    fields = {"max_tokens": 8, "extra_body": extra_body, **more}
    return client.messages.create(model=MODEL, messages=messages, **fields)


def chat(instance: SimpleNamespace, messages: Any, **more: Any) -> Any:
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, **more}
    return httpx.post(f"{instance.url}/v1/chat/completions", json=body, timeout=60, trust_env=False).json()


def count_prompt(usage: anthropic.types.Usage) -> int:
    """Return the sum of Anthropic's three counts: "total input tokens in a request is the summation of" these
    (``anthropic.types.Usage``)."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def test_a_message_has_the_text_and_the_usage_of_chat(instance: SimpleNamespace, client: anthropic.Anthropic) -> None:
    message = ask(client, system="be kind")
    again = ask(client, system=[{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}])
    chat_response = chat(instance, [{"role": "system", "content": "be kind"}, *QUESTION])
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert message.id.startswith("msg_")
    assert message.content[0].text == again.content[0].text == chat_response["choices"][0]["message"]["content"] != ""
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage, prompt = again.usage, chat_response["usage"]["prompt_tokens"]
    assert usage.cache_read_input_tokens == chat_response["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert (count_prompt(usage), usage.output_tokens) == (prompt, 8)


def test_both_apis_count_newly_cached_tokens(instance: SimpleNamespace, client: anthropic.Anthropic) -> None:
    """OpenAI: ``openai.types.completion_usage.PromptTokensDetails.cache_write_tokens``."""
    texts = [f"{number} a new prompt of this test, which has some blocks " * 4 for number in (1, 2)]
    messages: list[list[Any]] = [[{"role": "user", "content": text}] for text in texts]
    first, again = (ask(client, messages[0]).usage for _ in range(2))
    chats = [openai.types.CompletionUsage.model_validate(chat(instance, messages[1])["usage"]) for _ in range(2)]
    details = [usage.prompt_tokens_details for usage in chats]
    assert first.cache_creation_input_tokens == again.cache_read_input_tokens > 0
    assert (first.cache_read_input_tokens, again.cache_creation_input_tokens) == (0, 0)
    assert [count_prompt(usage) for usage in (first, again)] == [usage.prompt_tokens for usage in chats]
    assert [each.cache_write_tokens for each in details if each] == [first.cache_creation_input_tokens, 0]


def test_a_response_reports_its_stop_sequence(client: anthropic.Anthropic) -> None:
    word = ask(client).content[0].text.split()[2]
    message = ask(client, stop_sequences=["never generated", f" {word}"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", f" {word}")
    assert len(message.content[0].text.split()) == 2


def test_a_stream_has_the_typed_events_of_the_api_in_order(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    kinds = ["message_start", "content_block_start", *["content_block_delta"] * 8, "content_block_stop"]
    assert [event.type for event in events] == [*kinds, "message_delta", "message_stop"]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == whole.content[0].text
    assert events[-2].delta.stop_reason == "max_tokens"
    assert events[-2].usage.output_tokens == 8
    start, whole_usage = events[0].message.usage, ask(client).usage
    assert start.input_tokens == whole_usage.input_tokens
    assert start.cache_read_input_tokens == whole_usage.cache_read_input_tokens


def test_the_stream_helper_of_the_client_returns_the_whole_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=8, extra_body={"temperature": 0}) as stream:
        message: Any = stream.get_final_message()
    whole = ask(client)
    assert message.content[0].text == whole.content[0].text
    assert message.usage.output_tokens == 8


def test_a_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic) -> None:
    whole = ask(client).content[0].text
    beginning = " ".join(whole.split(" ")[:4])
    rest = ask(client, [*QUESTION, {"role": "assistant", "content": beginning}], max_tokens=5)
    assert beginning + rest.content[0].text == whole


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1, but it is 0"),
        ({"tools": [{"name": "x"}]}, "tools: it is"),
        ({"thinking": {"type": "enabled"}}, "this engine does not separate reasoning from the answer"),
        ({"max_token": 1}, "max_token: this API has no such field; did you mean max_tokens?"),
        ({"messages": [{"role": "system", "content": "x"}]}, 'messages.0.role: it is "system"; give user or assistant'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            'messages.0.content.0: a part of type "image"; only text is supported',
        ),
        ({"system": 5}, "system: Input should be"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: List should have at most 16 items"),
        ({"messages": [{"role": "user", "content": "x" * 9999}]}, "the prompt has at least"),
    ],
)
def test_the_error_says_why_a_request_cannot_be_served(
    instance: SimpleNamespace, fields: dict[str, Any], sentence: str
) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 5, **fields}
    answer = httpx.post(f"{instance.url}/v1/messages", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert sentence in answer.json()["error"]["message"]


def test_an_id_with_the_prefix_of_responses_gets_no_second_prefix(
    instance: SimpleNamespace, client: anthropic.Anthropic
) -> None:
    assert ask(client, extra_body={"request_id": "msg_a"}).id == "msg_a"
    assert chat(instance, QUESTION, request_id="chatcmpl-a")["id"] == "chatcmpl-a"
    assert chat(instance, QUESTION, request_id="msg_a")["id"] == "chatcmpl-msg_a"


@pytest.mark.parametrize("more", [{}, {"system": "be kind"}, {"system": [{"type": "text", "text": "be brief"}]}])
def test_count_tokens_counts_the_tokens_of_a_prompt(client: anthropic.Anthropic, more: dict[str, Any]) -> None:
    usage = ask(client, **more).usage
    count = client.messages.count_tokens(model=MODEL, messages=QUESTION, **more)
    assert count.input_tokens == count_prompt(usage) > 0


def test_count_tokens_returns_errors_in_the_format_of_the_api(client: anthropic.Anthropic) -> None:
    with pytest.raises(
        anthropic.BadRequestError, match=r"tools: it is .* this engine does not support " r"tools"
    ) as caught:
        client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=[{"name": "x", "input_schema": {}}])
    assert caught.value.body["type"] == "error"  # type: ignore[index]


def test_other_errors_have_the_format_of_the_api(instance: SimpleNamespace, client: anthropic.Anthropic) -> None:
    answer = httpx.get(f"{instance.url}/v1/messages", timeout=60, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.batches.list()


def test_an_aborted_message_ends_with_an_error(instance: SimpleNamespace, client: anthropic.Anthropic) -> None:
    found: list[BaseException] = []

    def ask_long(is_stream: bool) -> None:
        extra = {"request_id": "long", "ignore_eos": True}
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(ask(client, max_tokens=450, stream=is_stream, extra_body=extra))
        found.append(caught.value)

    for is_stream in (True, False):
        thread = threading.Thread(target=ask_long, args=(is_stream,))
        thread.start()
        wait_until(lambda: instance.generations.num_live, "the request to run")
        aborted = httpx.post(f"{instance.url}/v1/abort_requests", json={"req_ids": ["msg_long"]}, trust_env=False)
        assert aborted.json()["aborted"] == ["long"]
        thread.join()
    assert len(found) == 2
    assert all("the request was aborted before its response ended" in str(error) for error in found)


def test_a_failure_of_the_engine_is_an_error(
    instance: SimpleNamespace, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(instance.engine.runner, "run", fail)
    with pytest.raises(anthropic.InternalServerError, match="the engine failed while computing"):
        ask(client)
    with pytest.raises(anthropic.APIStatusError, match="the engine failed while computing"):
        list(ask(client, stream=True))


def test_cache_control_reaches_the_engine_and_changes_no_response(
    instance: SimpleNamespace, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints: list[Any] = []
    submit = instance.engine.core.submit

    def watch(sequence: Any, *rest: Any) -> None:
        hints.append(sequence.request.hints)
        submit(sequence, *rest)

    monkeypatch.setattr(instance.engine.core, "submit", watch)
    hour: Any = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": "be kind", "cache_control": hour}]
    hinted = ask(client, system=system, extra_body={"cache_control": {"type": "ephemeral"}})
    plain = ask(client, system="be kind")
    assert hinted.content[0].text == plain.content[0].text
    assert [hint.seconds for hint in hints[0]] == [3600, 300]
    assert 0 < hints[0][0].num_tokens < hints[0][1].num_tokens
    assert hints[1] == ()
