"""Events of streams: the router removes a usage that the client did not request, and finds an engine's failure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.serving.resume.events import find_engine_failure, strip_usage

USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
SEPARATORS = st.sampled_from([(", ", ": "), (",", ":")])


def event(chunk: dict[str, Any], separators: tuple[str, str] = (",", ":"), end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(chunk, separators=separators)}{end}".encode()


def content(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "1", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}


@given(
    texts=st.lists(st.text() | st.sampled_from(['"usage":null', ',"usage":{}', '"choices":[]']), max_size=4),
    separators=SEPARATORS,
    end=st.sampled_from(["\n\n", " \n\n", "\r\n\r\n"]),
    has_nulls=st.booleans(),
    at=st.integers(0, 4),
)
def test_a_stream_without_its_usage_equals_one_that_never_had_a_usage(
    texts: list[str], separators: tuple[str, str], end: str, has_nulls: bool, at: int
) -> None:
    without_usage = [event(content(text), separators, end) for text in texts]
    more = {"usage": None} if has_nulls else {}
    with_usage = [event(content(text, **more), separators, end) for text in texts]
    with_usage.insert(at, event({"id": "1", "choices": [], "usage": USAGE}, separators, end))
    assert strip_usage(b"".join(with_usage), has_nulls=has_nulls) == b"".join(without_usage)


@pytest.mark.parametrize(
    "chunk",
    [
        content("a", usage=USAGE),
        content("a", usage=None),
        {"choices": [], "usage": None},
        {"choices": [], "prompt_filter_results": []},
        {"type": "message_delta", "usage": {"output_tokens": 1}},
    ],
)
def test_other_events_with_a_usage_are_not_removed(chunk: dict[str, Any]) -> None:
    assert strip_usage(event(chunk), has_nulls=False) == event(chunk)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ({"error": {"message": "died", "code": 500}}, "died"),
        ({"error": {"message": "died", "code": "503"}, "choices": []}, "died"),
        ({"error": {"code": 500}}, ""),
        ({"error": {"message": "died\n2026 ERROR \x1b[31mforged", "code": 500}}, "died 2026 ERROR  [31mforged"),
        ({"error": {"message": "x" * 1000, "code": 500}}, "x" * 500),
        ({"error": {"message": "too long", "code": 400}}, None),
        ({"error": {"message": "too long", "code": 499}}, None),
        ({"error": {"message": "no code"}}, None),
        ({"error": "died"}, None),
        ({"error": {"message": "PD Error: preempted", "code": 500}}, None),
        ({"error": {"message": "died", "code": 500}, "choices": [{"index": 0}]}, None),
        (content('{"error": {"code": 500}}'), None),
    ],
)
def test_an_event_with_the_engines_own_error_is_an_engine_failure(chunk: dict[str, Any], message: str | None) -> None:
    before = event(content("a")) + event(content('"error"'))
    found = find_engine_failure(before + event(chunk) + b"data: [DONE]\n\n")
    assert found == (None if message is None else (len(before), message))
