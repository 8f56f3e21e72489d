"""Cache hints: the time for which a request asks to cache its prompt, in the fields of Anthropic and of OpenAI.

Sources: the types of their clients (``anthropic.types.CacheControlEphemeralParam``; ``prompt_cache_...`` in
``openai.types.chat.completion_create_params``), and their guides to prompt caching
(https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching,
https://developers.openai.com/api/docs/guides/prompt-caching).
"""

from __future__ import annotations

import typing
from typing import Any

import anthropic
import openai.types.chat.completion_create_params as chat_params
import pytest
from openai.types.chat import chat_completion_content_part_text_param as part_params

from engine.protocol import CompletionBody
from engine.scheduling.cache_hints import CacheControl, CacheHint, CacheMark, find_marks, seconds_kept


@pytest.mark.parametrize(("ttl", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("24h", 86400)])
def test_times_in_anthropics_format_are_parsed(ttl: str, seconds: float) -> None:
    assert CacheControl(type="ephemeral", ttl=ttl).seconds == seconds
    assert CacheControl(type="ephemeral").seconds == 300


@pytest.mark.parametrize(
    ("control", "sentence"),
    [
        ({"type": "ephemeral", "ttl": "25h"}, "messages.1.cache_control.ttl: Input should be a time such as 5m or 1h"),
        ({"type": "ephemeral", "ttl": "0s"}, "messages.1.cache_control.ttl: Input should be a time"),
        ({"type": "forever"}, "messages.1.cache_control.type: Input should be 'ephemeral'"),
        ("yes", "messages.1.cache_control: Input should be a valid dictionary"),
    ],
)
def test_the_error_for_an_invalid_hint_has_its_path(control: Any, sentence: str) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b", "cache_control": control}]
    with pytest.raises(ValueError, match=sentence[:40]) as caught:
        list(find_marks(messages, 1800))
    assert str(caught.value).startswith(sentence)


def test_parts_and_messages_can_have_marks() -> None:
    hour = {"type": "ephemeral", "ttl": "1h"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": hour}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "b"},
                {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "d"},
            ],
        },
        {"role": "user", "content": "e", "cache_control": hour},
    ]
    assert list(find_marks(messages, 1800)) == [
        CacheMark(0, "a", 3600),
        CacheMark(1, "bc", 300),
        CacheMark(2, None, 3600),
    ]


def test_the_longest_hint_of_a_token_sets_its_time() -> None:
    hints = [CacheHint(8, 3600), CacheHint(20, 300)]
    assert [seconds_kept(hints, end) for end in (4, 8, 12, 20, 24)] == [3600, 3600, 300, 300, 0]


def test_a_breakpoint_of_openai_marks_the_prompt_up_to_its_part() -> None:
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "b"}]}]
    assert list(find_marks(messages, 600)) == [CacheMark(0, "a", 600)]


def test_a_wrong_breakpoint_is_refused_in_one_sentence() -> None:
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "never"}}
    with pytest.raises(ValueError, match=r"messages\.0\.content\.0\.prompt_cache_breakpoint\.mode: Input should be"):
        list(find_marks([{"role": "user", "content": [part]}], 600))


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "24h"}, 86400),
        ({"prompt_cache_options": {}}, 1800),
        ({"prompt_cache_options": {"ttl": "1h"}, "prompt_cache_retention": "24h"}, 3600),
        ({"prompt_cache_options": {"mode": "explicit"}}, 0),
        ({"cache_control": {"type": "ephemeral"}, "prompt_cache_retention": "24h"}, 300),
    ],
)
def test_openais_fields_set_the_time_of_the_whole_prompt(fields: dict[str, Any], seconds: float) -> None:
    assert CompletionBody.model_validate({"prompt": "a", **fields}).cache_seconds == seconds


def test_a_breakpoint_can_have_its_own_time() -> None:
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    assert list(find_marks([{"role": "user", "content": [part]}], 600)) == [CacheMark(0, "a", 12 * 3600)]


def list_values(of: Any, name: str) -> list[Any]:
    """Return the values that a client's type allows for a member."""
    hint = typing.get_type_hints(of)[name]
    kinds = [hint, *typing.get_args(hint)]
    return [value for kind in kinds if typing.get_origin(kind) is typing.Literal for value in typing.get_args(kind)]


def test_all_values_of_the_clients_of_openai_and_anthropic_are_accepted() -> None:
    retentions = list_values(chat_params.CompletionCreateParamsBase, "prompt_cache_retention")
    ttls, modes = (list_values(chat_params.PromptCacheOptions, name) for name in ("ttl", "mode"))
    times = list_values(anthropic.types.CacheControlEphemeralParam, "ttl")
    marks = list_values(part_params.PromptCacheBreakpoint, "ttl")
    assert [len(each) > 0 for each in (retentions, ttls, modes, times, marks)] == [True] * 5
    for retention in retentions:
        CompletionBody.model_validate({"prompt": "a", "prompt_cache_retention": retention, "prompt_cache_key": "k"})
    for ttl in ttls:
        for mode in modes:
            CompletionBody.model_validate({"prompt": "a", "prompt_cache_options": {"ttl": ttl, "mode": mode}})
    for ttl in times:
        CompletionBody.model_validate({"prompt": "a", "cache_control": {"type": "ephemeral", "ttl": ttl}})
    for ttl in marks:
        part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": ttl}}
        assert list(find_marks([{"role": "user", "content": [part]}], 600))
