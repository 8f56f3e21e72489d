"""Request bodies: the error for a bad body is one sentence, and no body raises another error."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.apis.completion_response import CompletionResponse
from engine.apis.completions import Completions
from engine.apis.responses_body import ResponsesBody
from engine.generation import Generations, SharedParts
from engine.protocol import (
    AbortBody,
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
    check_body,
    error_body,
    parse_body,
    sampling_params,
)
from engine.scheduling.request import SamplingDefaults
from tests.engine.checkpoints import byte_fallback_tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
MAX_MODEL_LEN = 64
VOCAB_SIZE = 1500
DEEP = json.loads("[" * 400 + "]" * 400)
"""A list that is nested deeper than orjson supports."""


@pytest.fixture(scope="module")
def completions(word_tokenizer: Any, word_model: Path) -> Completions:
    """A ``Completions`` that checks requests, without an engine."""
    generations = Generations(SharedParts(None, word_tokenizer, "mixed", 16, None))  # type: ignore[arg-type]
    return Completions(generations, word_tokenizer, str(word_model), MAX_MODEL_LEN, VOCAB_SIZE)


def start(completions: Completions, path: str, body: Any) -> CompletionResponse:
    """Check a body as the server does before it responds."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    if path == "chat":
        return asyncio.run(completions.begin_chat(parse_body(ChatBody, raw)))
    return asyncio.run(completions.begin_completion(parse_body(CompletionBody, raw)))


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("chat", b"hello", None, "the body is not valid JSON"),
        ("chat", b"", None, "the body is not valid JSON"),
        ("chat", b'{"messages": "\xff"}', None, "is not valid JSON: it is not UTF-8: line 1 byte 15 (byte 14) is 0xff"),
        ("chat", b"\n\xff", None, "is not valid JSON: it is not UTF-8: line 2 byte 1 (byte 1) is 0xff"),
        ("chat", '{"user": "é",\n "messages": [}'.encode(), None, "Expecting value: line 2 column 15 (char 28)"),
        ("chat", b'{"temperature": NaN}', None, "the body is not valid JSON: "),
        ("chat", b"[" * 100_000, None, "the body is not valid JSON: "),
        ("chat", {"messages": MESSAGES, "request_id": "a" * 301}, "request_id", "at most 300 characters"),
        ("chat", [MESSAGES], None, "the body must be a JSON object, but it is [[{"),
        ("chat", None, None, "the body must be a JSON object, but it is null"),
        ("chat", {}, "messages", "messages: Field required"),
        ("chat", {"messages": []}, "messages", "at least 1 item"),
        ("chat", {"messages": "hello"}, "messages", 'valid list, but it is "hello"'),
        ("chat", {"messages": ["hello"]}, "messages.0", 'but it is "hello"'),
        ("chat", {"messages": [{"content": "hello"}]}, "messages", "messages.0.role: it is missing"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages", "messages.0.content: it is 5"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            'messages.0.content.0: a part of type "image_url"; only text is supported',
        ),
        ("chat", {"messages": MESSAGES, "n": 129}, "n", "should be less than or equal to 128, but it is 129"),
        *(
            ("text", {"prompt": "a", name: value}, param, "should")
            for name, value, param in [
                ("best_of", 3, "best_of"),
                ("presence_penalty", 2.0, "presence_penalty"),
                ("frequency_penalty", -0.5, "frequency_penalty"),
                ("repetition_penalty", 0, "repetition_penalty"),
                ("repetition_penalty", 1e9, "repetition_penalty"),
                ("min_p", 0.5, "min_p"),
                ("logit_bias", {"5": 100}, "logit_bias.5"),
                ("response_format", {"type": "json_object"}, "response_format.type"),
                ("suffix", "the end", "suffix"),
            ]
        ),
        *(
            (
                "chat",
                {"messages": MESSAGES, name: value},
                name,
                f"{name}: it is {json.dumps(value, separators=(',', ':'))}, but {message}",
            )
            for name, value, message in [
                ("tool_choice", "required", 'this engine cannot force a call; give "auto" or "none"'),
                ("tool_choice", {"type": "function"}, "this engine cannot force a call"),
                ("functions", [{"name": "f"}], "this engine does not support functions; give tools"),
                ("function_call", {"name": "f"}, "this engine cannot force a call"),
                ("modalities", ["text", "audio"], 'this engine answers in text only; give ["text"]'),
                ("audio", {"voice": "alloy"}, "this engine answers in text only"),
                ("prediction", {"content": "a"}, "this engine does not compare"),
                ("web_search_options", {}, "this engine does not support search"),
                ("reasoning_effort", "high", "it is a variable of some chat templates; give it in chat_template_kw"),
                ("enable_thinking", False, "it is a variable of chat templates; give it in chat_template_kwargs"),
                ("chat_template", "{{ 1 }}", "this engine renders messages by the checkpoint's own template"),
                (
                    "guided_json",
                    {"type": "object"},
                    "this engine does not support structured output; describe the format",
                ),
                ("guided_choice", ["a"], "this engine does not support structured output"),
                ("bad_words", ["river"], "this engine cannot ban words"),
                ("skip_special_tokens", False, "this engine always omits special tokens"),
                ("prompt_logprobs", 1, "this engine reports probabilities only for the answer"),
            ]
        ),
        (
            "text",
            {"prompt": "a", "guided_regex": "a+"},
            "guided_regex",
            "this engine does not support structured output",
        ),
        (
            "text",
            {"prompt": "a", "use_beam_search": True},
            "use_beam_search",
            "this engine does not support beam search",
        ),
        ("chat", {"messages": MESSAGES, "tools": [FUNCTION]}, "tools", "does not support tools"),
        ("chat", {"messages": MESSAGES, "tools": [{"name": "f"}]}, "tools.0.function", "Field required"),
        ("chat", {"messages": MESSAGES, "cache_salt": ""}, "cache_salt", "at least 1 character"),
        (
            "text",
            {"prompt": "a", "min_tokens": 4, "max_tokens": 3},
            "min_tokens",
            "it is 4, but the answer has at most 3 tokens",
        ),
        ("text", {"prompt": "a", "min_tokens": MAX_MODEL_LEN}, "min_tokens", "it is 64, but the answer has at most"),
        ("chat", {"messages": MESSAGES, "temperature": -1}, "temperature", "greater than or equal to 0, but it is -1"),
        ("chat", {"messages": MESSAGES, "temperature": "hot"}, "temperature", "valid number"),
        ("chat", {"messages": MESSAGES, "top_p": 1.5}, "top_p", "less than or equal to 1, but it is 1.5"),
        ("chat", {"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "greater than or equal to 1, but it is 0"),
        ("chat", {"messages": MESSAGES, "max_tokens": 1.5}, "max_tokens", "valid integer"),
        ("chat", {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens", "equal to 1"),
        ("chat", {"messages": MESSAGES, "stop": 5}, "stop", "valid string"),
        ("chat", {"messages": MESSAGES, "stop": ["a", 5]}, "stop.1", "valid string"),
        ("chat", DEEP, None, "the body must be a JSON object, but it is list"),
        ("chat", {"messages": MESSAGES, "stop": DEEP}, "stop.0", "valid string, but it is list"),
        ("chat", {"messages": [{"role": "user", "content": {"a": DEEP}}]}, "messages", "0.content: it is dict; give"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": DEEP}]}]}, "messages", "part of type list; only"),
        ("chat", {"messages": MESSAGES, "request_id": "a\nERROR forged"}, "request_id", "printable characters, but"),
        ("chat", {"messages": MESSAGES, "stop": ["a"] * 17}, "stop", "at most 16 strings, but it is"),
        ("chat", {"messages": MESSAGES, "stream": "perhaps"}, "stream", "valid boolean"),
        ("chat", {"messages": MESSAGES, "top_logprobs": 21}, "top_logprobs", "equal to 20"),
        (
            "chat",
            {"messages": MESSAGES, "top_logprobs": 3},
            "top_logprobs",
            "should come with logprobs: true, but it is 3",
        ),
        *(
            (
                path,
                {"messages": MESSAGES, "prompt": "a", "stream_options": options},
                "stream_options",
                "only be defined",
            )
            for path in ("chat", "text")
            for options in ({"include_usage": True}, {"continuous_usage_stats": False})
        ),
        (
            "chat",
            {"messages": MESSAGES, "stream_options": {"include_usage": 7}},
            "stream_options.include_usage",
            "valid boolean",
        ),
        (
            "chat",
            {"messages": MESSAGES, "disaggregate_info": {"decode_connector_port": "http"}},
            "disaggregate_info.decode_connector_port",
            "valid integer",
        ),
        (
            "chat",
            {"messages": MESSAGES, "disaggregate_info": {"decode_connector_port": "65536"}},
            "disaggregate_info.decode_connector_port",
            "less than or equal to 65535",
        ),
        *(
            (
                "chat",
                {"messages": MESSAGES, "chat_template_kwargs": {name: value}},
                "chat_template_kwargs",
                f"{name} is not a variable of the checkpoint's chat template; leave the variable out",
            )
            for name, value in [("chat_template", "{{ 'of a client' }}"), ("tokenize", True)]
        ),
        ("chat", {"messages": MESSAGES, "prompt_token_ids": [1, -1]}, "prompt_token_ids", "token id -1 is not in"),
        ("chat", {"messages": MESSAGES, "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "token id 1500 is not in"),
        ("chat", {"messages": MESSAGES, "stop_token_ids": [-1]}, "stop_token_ids", "token id -1 is not in"),
        ("text", {}, "prompt", "it is missing or empty"),
        ("text", {"prompt": ""}, "prompt", "it is missing or empty"),
        ("text", {"prompt": []}, "prompt", "it is missing or empty"),
        ("text", {"prompt": ["a", ""]}, "prompt.1", "prompt.1: it is missing or empty"),
        ("text", {"prompt": [[1], []]}, "prompt.1", "prompt.1: it is missing or empty"),
        ("text", {"prompt": [[1], [2, 1500]]}, "prompt.1", "prompt.1: token id 1500 is not in [0, 1500)"),
        (
            "text",
            {"prompt": ["a"] * 1024 + [0]},
            "prompt",
            "Input should be at most 1024 prompts",
        ),
        (
            "text",
            {"prompt": ["a"] * 9, "n": 128},
            "prompt",
            "9 prompts with n 128; at most 1024 answers per request are allowed",
        ),
        (
            "text",
            {"prompt": ["a", "b"], "completion_token_ids": [1]},
            "completion_token_ids",
            "there are 2 prompts; give",
        ),
        ("text", {"prompt": [""]}, "prompt", "it is missing or empty"),
        ("text", {"prompt": {"text": "a"}}, "prompt", "valid string"),
        ("text", {"prompt": [1, -2]}, "prompt", "token id -2 is not in [0, 1500)"),
        ("text", {"prompt": [1, 1500]}, "prompt", "token id 1500 is not in [0, 1500)"),
        ("text", {"prompt": "a", "echo": True}, "echo", "should be False"),
        ("text", {"prompt": "a", "logprobs": -1}, "logprobs", "greater than or equal to 0"),
    ],
)
def test_the_error_for_a_bad_body_is_one_sentence_with_the_field(
    completions: Completions, path: str, body: Any, param: str | None, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        start(completions, path, body)
    error = caught.value
    assert (error.status, error.param) == (400, param)
    assert message in str(error)
    assert "\n" not in str(error)
    assert error.body == {
        "error": {"message": str(error), "type": "invalid_request_error", "param": param, "code": error.code}
    }


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat", {"messages": [{"role": "user", "content": " the" * 100}]}, "messages"),
        ("text", {"prompt": " the" * 64}, "prompt"),
        ("text", {"prompt": [1] * 64}, "prompt"),
        ("text", {"prompt": [[1], [1] * 64]}, "prompt.1"),
        ("text", {"prompt": ["a", " the" * 64]}, "prompt.1"),
        ("text", {"prompt": ["a", "b" * 9999]}, "prompt.1"),
    ],
)
def test_the_error_for_a_long_prompt_has_its_length_and_the_limit(
    completions: Completions, path: str, body: Any, param: str
) -> None:
    with pytest.raises(ApiError, match=r"the prompt has (at least )?\d+ tokens; .* max_model_len of 64") as caught:
        start(completions, path, body)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", param)


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat", {"messages": [{"role": "user", "content": " the" * 10_000}]}), ("text", {"prompt": " the" * 10_000})],
)
def test_a_text_that_exceeds_the_limit_with_the_longest_tokens_is_not_tokenized(
    completions: Completions, word_tokenizer: Any, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(word_tokenizer), "__call__", None)  # it must not be called
    with pytest.raises(ApiError, match=r"the prompt has at least \d+ tokens; .* max_model_len of 64") as caught:
        start(completions, path, body)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_the_longest_prompt_leaves_space_for_one_token(completions: Completions) -> None:
    response = start(completions, "text", {"prompt": [1] * 63, "max_tokens": 500})
    assert response.request.params.max_tokens == 1


def test_a_client_sets_the_variables_of_the_chat_template() -> None:
    template = "{{ messages[0].content }}{{ ' river' if enable_thinking }}"
    tokenizer = byte_fallback_tokenizer(chat_template=template)
    completions = completions_of(tokenizer)
    lengths = [
        len(start(completions, "chat", {"messages": MESSAGES, **more}).request.prompt_token_ids)
        for more in ({}, {"chat_template_kwargs": {"enable_thinking": True}})
    ]
    assert lengths[1] == lengths[0] + 1


def test_the_prompt_contains_tools_only_if_the_model_may_call_them() -> None:
    tokenizer = byte_fallback_tokenizer(chat_template="{{ messages[0].content }}{{ ' river' if tools }}")
    completions = completions_of(tokenizer)
    tools = {"tools": [FUNCTION]}
    lengths = [
        len(start(completions, "chat", {"messages": MESSAGES, **more}).request.prompt_token_ids)
        for more in ({}, tools, {**tools, "tool_choice": "auto"}, {**tools, "tool_choice": "none"})
    ]
    assert lengths == [lengths[0], lengths[0] + 1, lengths[0] + 1, lengths[0]]


def render(template: str, *messages: dict[str, Any]) -> str:
    tokenizer = byte_fallback_tokenizer(chat_template=template)
    tokens = start(completions_of(tokenizer), "chat", {"messages": list(messages)}).request.prompt_token_ids
    text: str = tokenizer.decode(tokens)
    return text


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"a": "b"}', '{"a": "b"}'),
        ({"a": 1}, '{"a": 1}'),
        ('{"a": 123456789012345678901}', '{"a": 123456789012345678901}'),
        *((invalid, "{}") for invalid in ("", None, "[1]", '{"a', '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 5000)),
    ],
)
def test_a_template_gets_the_arguments_of_a_call_as_an_object(arguments: Any, rendered: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render(template, message) == rendered


@pytest.mark.parametrize("calls", [5, [5], [{"function": 5}]])
def test_invalid_calls_are_an_error_if_the_template_refuses_them(calls: Any) -> None:
    with pytest.raises(ApiError, match="the checkpoint's chat template refused the messages"):
        render("{{ messages[0].tool_calls[0].function.name + '' }}", {"role": "assistant", "tool_calls": calls})


@pytest.mark.parametrize("calls", [None, []])
def test_a_template_gets_no_calls_if_there_are_none(calls: Any) -> None:
    assert render("{{ 'tool_calls' in messages[0] }}", {"role": "assistant", "tool_calls": calls}) == "False"


def test_developer_messages_become_system_messages_if_the_template_has_no_developers() -> None:
    message = {"role": "developer", "content": "the river"}
    shown = "{{ messages[0].role }}: {{ messages[0].content }}"
    assert render(shown, message) == "system: the river"
    assert render(f"{shown}{{# for developers #}}", message) == "system: the river"
    assert render(f"{shown}{{# 'developer' #}}", message) == "developer: the river"


def test_developer_and_system_messages_become_one_at_the_beginning() -> None:
    messages = [{"role": role, "content": role} for role in ("user", "system", "developer", "user")]
    shown = "{% for each in messages %}{{ each.role }}: {{ each.content }}; {% endfor %}"
    assert render(shown, *messages) == "system: system\n\ndeveloper; user: user; user: user; "


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ],
)
def test_a_message_without_content_is_rendered_as_empty(message: dict[str, Any]) -> None:
    assert render("{{ messages[0].role + messages[0].content }}", message) == "assistant"


TEMPLATE = (
    "{{ messages[0].content }}{{ ' river' if tools }}{{ ' riv' if enable_thinking }}"
    "{% for message in messages[1:] %}{{ message.content }}</s>{% endfor %}{{ ' the' if add_generation_prompt }}"
)
TALK = [*MESSAGES, {"role": "assistant", "content": "it flows"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat", {"messages": TALK}),
        ("chat", {"messages": TALK, "add_generation_prompt": False}),
        ("chat", {"messages": TALK, "continue_final_message": True}),
        ("chat", {"messages": TALK, "tools": [FUNCTION]}),
        ("chat", {"messages": TALK, "tools": [FUNCTION], "tool_choice": "none"}),
        ("chat", {"messages": TALK, "chat_template_kwargs": {"enable_thinking": True}}),
        ("chat", {"messages": TALK, "add_special_tokens": True}),
        ("chat", {"messages": TALK, "prompt_token_ids": [5, 6, 7]}),
        ("text", {"prompt": "the river"}),
        ("text", {"prompt": "the river", "add_special_tokens": False}),
    ],
    ids=lambda value: str(list(value)[-1]) if isinstance(value, dict) else value,
)
def test_tokenize_returns_the_prompt_tokens_of_the_request_with_the_same_fields(
    path: str, fields: dict[str, Any]
) -> None:
    completions = completions_of(byte_fallback_tokenizer(chat_template=TEMPLATE))
    expected = list(start(completions, path, fields).request.prompt_token_ids)
    response = asyncio.run(completions.tokenize_prompt(parse_body(TokenizeBody, json.dumps(fields).encode())))
    assert (response["tokens"], response["count"], response["token_strs"]) == (expected, len(expected), None)
    plain = {name: fields[name] for name in ("prompt", "messages") if name in fields}
    if plain != fields and fields.get("tool_choice") != "none":
        assert response["tokens"] != list(start(completions, path, plain).request.prompt_token_ids)


def test_tokenize_returns_token_strings_if_requested() -> None:
    completions = completions_of(byte_fallback_tokenizer())
    response = asyncio.run(completions.tokenize_prompt(TokenizeBody(prompt="the river", return_token_strs=True)))
    assert response["token_strs"] == ["<s>", "\u2581the", "\u2581river"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": TALK, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": TALK, "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": "a", "messages": TALK}, "prompt"),
    ],
)
def test_tokenize_refuses_the_same_fields_as_the_request(fields: dict[str, Any], param: str) -> None:
    completions = completions_of(byte_fallback_tokenizer(chat_template=TEMPLATE))
    with pytest.raises(ApiError) as caught:
        asyncio.run(completions.tokenize_prompt(parse_body(TokenizeBody, json.dumps(fields).encode())))
    assert (caught.value.status, caught.value.param) == (400, param)


def completions_of(tokenizer: Any) -> Completions:
    return Completions(Generations(SharedParts(None, tokenizer, "mixed", 16, None)), tokenizer, "m", 64, 300)  # type: ignore[arg-type]


def assert_at_most_one_sentence(check: Callable[[], object]) -> None:
    error = None
    try:
        check()
    except ApiError as caught:
        error = caught
    assert error is None or (error.status, str(error).count("\n")) == (400, 0)


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from([0, -1, 10**30])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


@given(raw=st.one_of(st.binary(), JSON.map(lambda value: json.dumps(value).encode())))
@settings(deadline=None)
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, AbortBody])
def test_no_body_raises_an_error_other_than_an_api_error(kind: type[Any], raw: bytes) -> None:
    assert_at_most_one_sentence(lambda: parse_body(kind, raw))


FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields})


@given(path=st.sampled_from(["chat", "text"]), fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
@settings(deadline=None, max_examples=300)
def test_no_value_of_a_field_raises_an_error_other_than_an_api_error(
    completions: Completions, path: str, fields: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, "prompt": "hello", **fields}
    assert_at_most_one_sentence(lambda: start(completions, path, body))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0},
        {"logit_bias": {"5": 0}, "response_format": {"type": "text"}, "suffix": "", "echo": False, "model": "any"},
        {name: None for name in FIELDS if name not in ("messages", "prompt")},
        {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "none", "modalities": ["text"]},
        {"tools": [FUNCTION], "tool_choice": "none", "parallel_tool_calls": True, "audio": None},
        {"skip_special_tokens": True, "bad_words": [], "use_beam_search": False, "guided_json": None},
        {"stream_options": {"include_usage": None}, "disaggregate_info": {"decode_ip": None}},
    ],
    ids=["numbers", "others", "null", "no call", "no tools", "FastDeploy's", "null within"],
)
@pytest.mark.parametrize("path", ["chat", "text"])
def test_fields_with_default_values_change_nothing(completions: Completions, path: str, fields: dict[str, Any]) -> None:
    plain = {"messages": MESSAGES, "prompt": "hello"}
    expected, request = (start(completions, path, {**plain, **more}).request for more in ({}, fields))
    assert request.prompt_token_ids == expected.prompt_token_ids
    assert dataclasses.replace(request.params, seed=0) == dataclasses.replace(expected.params, seed=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0.7, 0.8, 20, 1.05)),
        ({"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1}, (0.0, 1.0, 0, 1.0)),
        ({"temperature": 1.5, "top_k": -1}, (1.5, 0.8, 0, 1.05)),
        ({"repetition_penalty": None, "top_k": 5}, (0.7, 0.8, 5, 1.05)),
    ],
)
@pytest.mark.parametrize("path", ["chat", "text"])
def test_requests_without_sampling_fields_use_the_checkpoints_defaults(
    word_tokenizer: Any, path: str, fields: dict[str, Any], expected: tuple[float, ...]
) -> None:
    generations = Generations(SharedParts(None, word_tokenizer, "mixed", 16, None))  # type: ignore[arg-type]
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    completions = Completions(generations, word_tokenizer, "m", MAX_MODEL_LEN, VOCAB_SIZE, defaults)
    params = start(completions, path, {"messages": MESSAGES, "prompt": "a", **fields}).request.params
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == expected


def test_min_tokens_is_refused_if_every_token_ends_the_response(word_tokenizer: Any) -> None:
    generations = Generations(SharedParts(None, word_tokenizer, "mixed", 16, None))  # type: ignore[arg-type]
    ends = frozenset({0, 2})
    completions = Completions(generations, word_tokenizer, "m", MAX_MODEL_LEN, VOCAB_SIZE, eos_token_ids=ends)
    fields = {"prompt": "a", "stop_token_ids": list(range(1, VOCAB_SIZE)), "min_tokens": 1}
    with pytest.raises(ApiError, match="every token would end the answer") as caught:
        start(completions, "text", fields)
    assert (caught.value.status, caught.value.param) == (400, "stop_token_ids")
    for harmless in ({"min_tokens": 0}, {"stop_token_ids": list(range(2, VOCAB_SIZE))}):
        start(completions, "text", fields | harmless)


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, 20),
        ({"max_tokens": 50}, 50),
        ({"completion_token_ids": [1, 2, 3]}, 17),
        ({"completion_token_ids": [1] * 30}, 1),
    ],
    ids=["no limit", "the client's limit", "preempted", "preempted beyond it"],
)
def test_a_request_without_max_tokens_uses_the_checkpoints_limit(
    word_tokenizer: Any, fields: dict[str, Any], max_tokens: int
) -> None:
    generations = Generations(SharedParts(None, word_tokenizer, "mixed", 16, None))  # type: ignore[arg-type]
    completions = Completions(generations, word_tokenizer, "m", MAX_MODEL_LEN, VOCAB_SIZE, SamplingDefaults(20))
    request = start(completions, "text", {"prompt": "a", **fields}).request
    assert request.params.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [{}] * 50}),
        (CompletionBody, {"prompt": [[1, "x"]] * 50}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(50)}}),
        (ChatBody, {"messages": [1] * 50}),
        (TokenizeBody, {"messages": [1] * 50}),
        (AbortBody, {"req_ids": [1] * 50}),
    ],
)
def test_a_list_is_checked_up_to_its_first_wrong_element(kind: type[Body], fields: dict[str, Any]) -> None:
    """An error for each element of a large body would take minutes, and all of the memory."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() <= 4  # one for each type of the field


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": "a", "logit_bias": {"x" * 9999: 1}}),
        (ResponsesBody, {"input": "a", "x" * 9999: 1}),
        (ResponsesBody, {"input": "a", "metadata": {"x" * 9999: "1"}}),
        (ResponsesBody, {"input": "a", "metadata": {"x": "1" * 9999}}),
        (ResponsesBody, {"input": "a", "metadata": {str(i): "1" for i in range(17)}}),
    ],
)
def test_an_error_contains_no_long_name(kind: type[Body], fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        check_body(kind, fields)
    assert len(str(caught.value)) < 300
    assert len(str(caught.value.param)) < 100


def test_more_messages_than_the_context_has_tokens_are_not_rendered(
    completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(completions, "tokenizer")
    with pytest.raises(ApiError, match=f"the prompt has at least {MAX_MODEL_LEN} tokens") as caught:
        start(completions, "chat", {"messages": MESSAGES * MAX_MODEL_LEN})
    assert caught.value.code == "context_length_exceeded"


def test_no_garbage_is_collected_while_a_body_is_parsed() -> None:
    """The collector would visit the values of a large body again and again."""
    phases: list[str] = []

    def note(phase: str, _: object) -> None:
        phases.append(phase)

    raw = b'{"messages": [%s]}' % b",".join([b"{}"] * 50_000)
    gc.collect()
    gc.callbacks.append(note)
    try:
        parse_body(ChatBody, raw)
    finally:
        gc.callbacks.remove(note)
    assert phases == []


def test_unknown_fields_are_accepted() -> None:
    body = parse_body(ChatBody, json.dumps({"messages": MESSAGES, "metadata": {"a": 1}, "store": True}).encode())
    assert body.messages == MESSAGES


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (ChatBody, {}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 100, "logprobs": None}),
        (ChatBody, {"max_tokens": 5, "max_completion_tokens": 7}, {"max_tokens": 7}),
        (ChatBody, {"max_tokens": 500}, {"max_tokens": 100}),
        (ChatBody, {"temperature": 0, "top_p": 0, "top_k": -1}, {"temperature": 0.0, "top_p": 0.0, "top_k": 0}),
        (ChatBody, {"stop": "a"}, {"stop": ("a",)}),
        (ChatBody, {"stop": ["a", "", "b"]}, {"stop": ("a", "b")}),
        (ChatBody, {"seed": 5}, {"seed": 5}),
        (ChatBody, {"logprobs": True}, {"logprobs": 0}),
        (ChatBody, {"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        (ChatBody, {"top_logprobs": 0}, {"logprobs": None}),
        (CompletionBody, {"logprobs": 2}, {"logprobs": 2}),
        (CompletionBody, {"stop_token_ids": [4, 5], "ignore_eos": True, "min_tokens": 2}, {"min_tokens": 2}),
    ],
)
def test_sampling_fields_have_openais_meaning(
    kind: type[GenerationBody], body: dict[str, Any], expected: dict[str, Any]
) -> None:
    raw = json.dumps({"messages": MESSAGES, "prompt": "a", **body}).encode()
    params = sampling_params(parse_body(kind, raw), max_tokens=100)
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a"}], "temperature": -1}, "invalid_value"),
        ("chat", {"messages": 3}, "invalid_value"),
        ("chat", {}, "missing_required_parameter"),
        ("text", {}, "invalid_value"),
        ("text", {"prompt": " the" * 5000}, "context_length_exceeded"),
    ],
)
def test_an_error_has_the_same_code_as_in_fastdeploy(completions: Completions, path: str, body: Any, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        start(completions, path, body)
    assert (caught.value.code, caught.value.body["error"]["code"]) == (code, code)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *(
            (399, "internal_error"),
            (400, "invalid_request_error"),
            (407, "invalid_request_error"),
            (408, "timeout_error"),
        ),
        *((409, "invalid_request_error"), (499, "invalid_request_error"), (500, "internal_error")),
    ],
)
def test_the_type_of_an_error_depends_on_its_status(status: int, kind: str) -> None:
    assert error_body(status, "so", param="p", code="c") == {
        "error": {"message": "so", "type": kind, "param": "p", "code": "c"}
    }
