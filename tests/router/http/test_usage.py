"""The router finds usage figures in responses without parsing the responses.

The names are those of ``openai.types.CompletionUsage``, ``openai.types.responses.ResponseUsage`` and
``anthropic.types.Usage``, and of FastDeploy (``created_cache_tokens``).
"""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.body import TokenCount, Usage, read_cached_figures, read_usage, set_figures

_figures = st.none() | st.integers(0, 10**8)


@given(_figures, _figures, _figures, _figures, st.sampled_from([None, 2]))
def test_the_usage_of_an_engine_is_read(
    prompt: int | None, completion: int | None, cached: int | None, own: int | None, indent: int | None
) -> None:
    details = {"cached_tokens": cached, "own_cached_tokens": own}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    found = read_usage(json.dumps({"choices": [{"message": {"content": "x"}}], "usage": usage}, indent=indent).encode())
    assert (found or Usage()) == Usage(prompt, completion, cached, own)


def test_a_response_without_usage_has_no_figures() -> None:
    assert read_usage(b'{"choices": [], "usage": null}') is None
    assert read_usage(b"") is None


def test_an_invalid_usage_has_no_figures() -> None:
    usages: tuple[object, ...] = (
        *({"prompt_tokens": "9"}, {"prompt_tokens": -1}, {"prompt_tokens": 9.5}, {"input_tokens": None}, {}, [], 9),
        {"input_tokens": None, "cache_read_input_tokens": 4},
        {"input_tokens": "9", "cache_read_input_tokens": 4},
        {"prompt_tokens": 1, "completion_tokens": 10**18},
        {"input_tokens": 2**64 - 1, "cache_read_input_tokens": 2**64 - 1},
    )
    for usage in usages:
        assert read_usage(json.dumps({"usage": usage}).encode()) is None
    cut = (b'"usage"', b'"usage": {', b'{"usage": {"prompt_tokens": 9', b'{"usage":' + b"{" * 100_000, b'"usage"{}')
    for text in cut:
        assert read_usage(text) is None


@pytest.mark.parametrize(
    "echoed",
    [
        '"user":"usage"',
        '"metadata":{"usage":{"input_tokens":0,"output_tokens":0}}',
        '"metadata":{"usage":{"input_tokens":-1}}',
        '"metadata":{"usage":null}',
        '"tools":[{"parameters":{"properties":{"usage":{"type":"string"}}}}]',
        '"decoded_token":"usage"},"x":{"decoded_token":"usage"',
    ],
)
@pytest.mark.parametrize("form", ['{{"id":"x",{usage},{echoed}}}', '{{"id":"x",{echoed},{usage}}}'])
def test_a_repeated_part_of_the_request_does_not_lower_the_usage(echoed: str, form: str) -> None:
    usage = '"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":0},"output_tokens":4}'
    found = read_usage(form.format(usage=usage, echoed=echoed).encode())
    assert found is not None
    assert found[:2] == (9, 4)


@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": 9, "output_tokens": 4},
        {"prompt_tokens": 9, "completion_tokens": 4},
        {"input_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3, "output_tokens": 4},
    ],
)
def test_repeated_parts_before_and_after_the_usage_do_not_lower_it(usage: dict[str, int]) -> None:
    repeated = b'"usage":{"input_tokens":1,"prompt_tokens":0,"output_tokens":0}'
    found = read_usage(b'{"a":{%s},"usage":%s,"b":{%s}}' % (repeated, json.dumps(usage).encode(), repeated))
    assert found is not None
    assert found[:2] == (9, 4)


def test_the_counts_of_a_messages_stream_are_in_two_events() -> None:
    begin = {"usage": {"input_tokens": 100, "output_tokens": 1}}
    end = {"usage": {"input_tokens": 0, "output_tokens": 5}}
    assert read_usage(b"%s\n\n%s" % (json.dumps(begin).encode(), json.dumps(end).encode())) == Usage(100, 5)


def test_the_last_usage_of_a_stream_counts() -> None:
    early = b'data: {"usage": {"prompt_tokens": 1}}\n\n'
    assert read_usage(early + b'data: {"usage": {"prompt_tokens": 2}}\n\ndata: [DONE]\n\n') == Usage(2)


def test_the_figures_of_responses_and_messages_are_read() -> None:
    responses = {"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 2}}
    assert read_usage(json.dumps(responses).encode()) == Usage(9, 2, 4)
    messages = {"usage": {"input_tokens": 3, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 4}}
    assert read_usage(json.dumps(messages).encode()) == Usage(9, None, 4)


def test_prefills_cached_tokens_are_set_in_the_response_of_decode() -> None:
    prefill = b'{"usage": {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}}'
    decode = b'data: {"usage":{"prompt_tokens":9,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":8}}}'
    assert set_figures(decode, read_cached_figures(prefill)) == decode.replace(b":8", b":4")


def test_prefills_cache_writes_are_set_in_the_response_of_decode() -> None:
    """OpenAI: ``usage.prompt_tokens_details.cache_write_tokens``, "prompt tokens written to cache"."""
    assert "cache_write_tokens" in openai.types.completion_usage.PromptTokensDetails.model_fields
    prefill = b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 5}}}'
    decode = b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0}}}'
    assert set_figures(decode, read_cached_figures(prefill)) == prefill


def test_the_counts_of_anthropics_client_are_read() -> None:
    counts = {"input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"}
    assert counts <= anthropic.types.Usage.model_fields.keys()
    for count in counts:
        assert read_usage(json.dumps({"usage": dict.fromkeys(counts, 0) | {count: 5}}).encode()) == Usage(
            5, None, 5 if count == "cache_read_input_tokens" else 0
        )


def test_all_input_counts_of_prefill_are_set_in_a_messages_response() -> None:
    prefill = b'{"usage": {"input_tokens": 2, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4}}'
    decode = b'{"usage":{"input_tokens":9,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}}'
    spliced = set_figures(decode, read_cached_figures(prefill))
    assert json.loads(spliced) == json.loads(prefill)


def test_text_that_looks_like_a_figure_is_not_changed() -> None:
    text = json.dumps({"text": 'say {"usage": {"cached_tokens": 8}}', "usage": {"cached_tokens": 8}}).encode()
    assert json.loads(set_figures(text, {b"cached_tokens": b"4"})) == {
        "text": 'say {"usage": {"cached_tokens": 8}}',
        "usage": {"cached_tokens": 4},
    }


def test_figures_that_the_response_does_not_have_are_not_added() -> None:
    assert (
        set_figures(b'{"usage": {"prompt_tokens": 9}}', {b"cached_tokens": b"4"}) == b'{"usage": {"prompt_tokens": 9}}'
    )
    assert set_figures(b'{"cached_tokens": 9}', {b"cached_tokens": b"4"}) == b'{"cached_tokens": 9}'


@pytest.mark.parametrize(("has_ids", "tokens"), [(True, 1), (False, 8)])
def test_token_ids_count_only_if_the_engine_sends_them(has_ids: bool, tokens: int) -> None:
    """Engines repeat the tools of a request in the Responses API, and schemas of tools may have any names."""
    count = TokenCount(has_ids=has_ids)
    count.add(b'data: {"response":{"tools":[{"parameters":{"token_ids":[1]}}]}}\n\n')
    count.add(b'data: {"delta":"%s"}\n\n' % (b"word" * 7))
    assert count.tokens == tokens
