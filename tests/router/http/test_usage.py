"""Usage figures are found in answers without parsing these."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from router.http.usage import Usage, read_usage

_figures = st.none() | st.integers(0, 10**9)


@given(_figures, _figures, _figures, _figures, st.sampled_from([None, 2]))
def test_what_an_engine_says_is_read(
    prompt: int | None, completion: int | None, cached: int | None, own: int | None, indent: int | None
) -> None:
    details = {"cached_tokens": cached, "own_cached_tokens": own}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    found = read_usage(json.dumps({"choices": [{"message": {"content": "x"}}], "usage": usage}, indent=indent).encode())
    assert (found or Usage()) == Usage(prompt, completion, cached, own)


def test_an_answer_without_usage_says_nothing() -> None:
    assert read_usage(b'{"choices": [], "usage": null}') is None
    assert read_usage(b"") is None


def test_of_a_streams_end_the_last_usage_counts() -> None:
    early = b'data: {"usage": {"prompt_tokens": 1}}\n\n'
    assert read_usage(early + b'data: {"usage": {"prompt_tokens": 2}}\n\ndata: [DONE]\n\n') == Usage(2)
