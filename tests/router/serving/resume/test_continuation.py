"""The request by which another instance goes on with a stream, in its engine's form."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.fleet import EngineKind
from router.http.body import parse_inference
from router.serving.resume import CannotContinue, StreamMerger, continue_stream, find_obstacle


def merge(deltas: list[dict[str, Any]], **members: Any) -> StreamMerger:
    """A merger that was fed these deltas of a chat, and then lost its instance."""
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


def test_a_stream_cut_within_its_reasoning_may_reason_for_what_is_left() -> None:
    merger = merge([reasoning(1, 2), reasoning(3)], reasoning_max_tokens=10, max_tokens=50, response_max_tokens=5)
    assert continue_at_fastdeploy(merger) == {
        "completion_token_ids": [1, 2, 3],
        "max_tokens": 47,
        "reasoning_max_tokens": 7,
    }


def test_a_stream_cut_at_the_very_end_of_its_reasoning_does_not_go_on() -> None:
    with pytest.raises(CannotContinue, match="the reasoning reached its limit"):
        continue_at_fastdeploy(merge([reasoning(1, 2)], reasoning_max_tokens=2))
    assert continue_at_fastdeploy(merge([reasoning(1, 2)], reasoning_max_tokens=3))["reasoning_max_tokens"] == 1


def test_a_stream_cut_behind_its_reasoning_keeps_the_limit_that_is_past() -> None:
    added = continue_at_fastdeploy(merge([reasoning(1, 2), content(3)], reasoning_max_tokens=2))
    assert added == {"completion_token_ids": [1, 2, 3]}


def test_a_limit_of_the_answer_behind_reasoning_is_not_guessed() -> None:
    with pytest.raises(CannotContinue, match="the request limits the tokens after the reasoning"):
        continue_at_fastdeploy(merge([reasoning(1, 2), content(3)], response_max_tokens=9))


def test_a_limit_of_an_answer_without_reasoning_is_lessened() -> None:
    assert continue_at_fastdeploy(merge([content(3, 4)], response_max_tokens=9))["response_max_tokens"] == 7


def test_a_stream_that_has_shown_nothing_begins_again_with_all_its_limits() -> None:
    assert continue_at_fastdeploy(merge([], reasoning_max_tokens=2, response_max_tokens=3)) == {}


@pytest.mark.parametrize(("event", "is_more"), [(b": ping\n\n", False), (b"data: no JSON\n\n", True), (b": cut", True)])
def test_a_comment_among_the_events_shows_the_client_nothing_that_ids_do_not_tell(event: bytes, is_more: bool) -> None:
    merger = StreamMerger(parse_inference(b'{"stream": true, "messages": []}'))
    merger.feed(b'data: {"choices":[{"delta":{"content":"a","completion_token_ids":[1]}}]}\n\n')
    merger.feed(event)
    assert merger.has_content_without_ids is is_more


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
def test_the_answers_to_several_prompts_are_not_resumed(
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
def test_a_chat_of_vllms_goes_on_only_where_ids_say_all_of_its_prompt(members: dict[str, Any], obstacle: str) -> None:
    assert find_obstacle(parse_inference(orjson.dumps(members)), EngineKind.VLLM, is_chat=True) == obstacle
