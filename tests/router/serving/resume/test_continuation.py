"""The request with which another instance continues a stream, in the form of its engine."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.fleet import EngineKind
from router.http.body import parse_inference
from router.serving.resume import CannotContinue, StreamMerger, continue_stream, find_obstacle


def merge(deltas: list[dict[str, Any]], **members: Any) -> StreamMerger:
    """Make a merger that has read these deltas of a chat before its instance failed."""
    merger = StreamMerger(parse_inference(orjson.dumps({"stream": True, "messages": [], **members})))
    for delta in deltas:
        chunk = {"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        merger.feed(b"data: " + orjson.dumps(chunk) + b"\n\n")
    merger.begin_segment()
    return merger


def reasoning(*ids: int) -> dict[str, Any]:
    return {"reasoning_content": "hm", "completion_token_ids": ids}


def content(*ids: int) -> dict[str, Any]:
    return {"content": "ah", "completion_token_ids": ids}


def continue_at_fastdeploy(merger: StreamMerger) -> dict[str, Any]:
    return continue_stream(merger, EngineKind.FASTDEPLOY, is_chat=True)


def test_a_stream_cut_within_its_reasoning_has_the_remaining_limit_of_reasoning() -> None:
    merger = merge([reasoning(1, 2), reasoning(3)], reasoning_max_tokens=10, max_tokens=50, response_max_tokens=5)
    assert continue_at_fastdeploy(merger) == {
        "completion_token_ids": [1, 2, 3],
        "max_tokens": 47,
        "reasoning_max_tokens": 7,
    }


def test_a_stream_cut_at_the_limit_of_its_reasoning_is_not_continued() -> None:
    with pytest.raises(CannotContinue, match="the reasoning reached its limit"):
        continue_at_fastdeploy(merge([reasoning(1, 2)], reasoning_max_tokens=2))
    assert continue_at_fastdeploy(merge([reasoning(1, 2)], reasoning_max_tokens=3))["reasoning_max_tokens"] == 1


def test_a_stream_cut_after_its_reasoning_does_not_change_its_limit() -> None:
    added = continue_at_fastdeploy(merge([reasoning(1, 2), content(3)], reasoning_max_tokens=2))
    assert added == {"completion_token_ids": [1, 2, 3]}


def test_a_limit_of_the_tokens_after_the_reasoning_prevents_a_continuation() -> None:
    with pytest.raises(CannotContinue, match="the request limits the tokens after the reasoning"):
        continue_at_fastdeploy(merge([reasoning(1, 2), content(3)], response_max_tokens=9))


def test_a_limit_of_a_response_without_reasoning_is_reduced() -> None:
    assert continue_at_fastdeploy(merge([content(3, 4)], response_max_tokens=9))["response_max_tokens"] == 7


def test_a_stream_without_content_begins_again_with_all_its_limits() -> None:
    assert continue_at_fastdeploy(merge([], reasoning_max_tokens=2, response_max_tokens=3)) == {}


@pytest.mark.parametrize(("event", "is_text"), [(b": ping\n\n", False), (b"data: no JSON\n\n", True), (b": cut", True)])
def test_a_comment_between_events_is_no_content_without_ids(event: bytes, is_text: bool) -> None:
    merger = StreamMerger(parse_inference(b'{"stream": true, "messages": []}'))
    merger.feed(b'data: {"choices":[{"delta":{"content":"a","completion_token_ids":[1]}}]}\n\n')
    merger.feed(event)
    assert merger.has_content_without_ids is is_text


@pytest.mark.parametrize("engine", [EngineKind.FASTDEPLOY, EngineKind.VLLM])
@pytest.mark.parametrize(
    ("members", "obstacle"),
    [
        ({"prompt": ["a", "b"]}, "the request generates several answers at once"),
        ({"prompt": [[1, 2], [3]]}, "the request generates several answers at once"),
        ({"prompt_token_ids": [[1, 2], [3]]}, "the request generates several answers at once"),
        ({"prompt": [[1, 2]]}, ""),
        ({"prompt": ["a"]}, ""),
        ({"prompt": [1, 2]}, ""),
    ],
)
def test_responses_to_several_prompts_are_not_resumed(
    members: dict[str, Any], obstacle: str, engine: EngineKind
) -> None:
    assert find_obstacle(parse_inference(orjson.dumps(members)), engine, is_chat=False) == obstacle


IMAGE = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://a/b.png"}}]


@pytest.mark.parametrize(
    ("members", "obstacle"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}]}, "the messages of the request contain more than text"),
        ({"messages": ["a"]}, "the messages of the request contain more than text"),
        ({"messages": [{"role": "user", "content": IMAGE[:1]}, {"role": "user", "content": "a"}]}, ""),
        ({"messages": [{"role": "assistant", "content": None}]}, ""),
        ({"messages": [], "echo": True}, "the response echoes the prompt"),
        ({"messages": [], "tools": [{}]}, "the request may call tools, and the tool parser would start again"),
        ({"messages": [], "tools": [{}], "tool_choice": "none"}, ""),
    ],
)
def test_a_chat_of_vllm_is_resumed_only_if_ids_replace_its_prompt(members: dict[str, Any], obstacle: str) -> None:
    assert find_obstacle(parse_inference(orjson.dumps(members)), EngineKind.VLLM, is_chat=True) == obstacle
