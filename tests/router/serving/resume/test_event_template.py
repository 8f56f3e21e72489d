"""A merger recognises usual events by a template, and reads them like parsed ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.body import parse_inference
from router.serving.resume import StreamMerger
from router.serving.resume.event_template import learn_template
from router.serving.resume.events import strip_token_ids, undo_token_ids
from tests.router.calls import list_router_calls

HEAD: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def event(form: str, text: str, ids: list[int], *, spaces: bool = False, **choice: Any) -> bytes:
    """Make an event in the form of one of these engines."""
    members: dict[str, Any]
    delta: dict[str, Any]
    if form == "ours":
        members = {"index": 0, "delta": {"content": text, "completion_token_ids": ids}, "finish_reason": None}
    elif form == "fastdeploy":
        delta = {"content": text, "reasoning_content": "", "tool_calls": None, "prompt_token_ids": None}
        delta |= {"completion_token_ids": ids, "completion_tokens": text + "!"}
        members = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "arrival_time": 0.5 + len(text)}
    elif form == "reasoning":
        delta = {"content": None, "reasoning_content": text, "completion_token_ids": ids}
        members = {"index": 0, "delta": delta, "finish_reason": None}
    elif form == "vllm":
        members = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, "token_ids": ids}
    else:
        members = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "prompt_token_ids": None}
        members["token_ids"] = ids
    chunk = json.dumps({**HEAD, "choices": [{**members, **choice}]}, separators=None if spaces else (",", ":"))
    return f"data: {chunk}\n\n".encode()


FORMS = ["ours", "fastdeploy", "reasoning", "vllm", "completions"]


def make_merger() -> StreamMerger:
    return StreamMerger(parse_inference(b'{"messages":[],"stream":true,"max_tokens":99}'), keeps_prompt=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spaces", [False, True])
def test_usual_events_are_stripped_like_parsed_ones(form: str, spaces: bool) -> None:
    template = learn_template(event(form, " first", [7], spaces=spaces))
    assert template is not None
    merger = make_merger()
    merger.feed(event(form, " first", [7], spaces=spaces))
    for text, ids in [("two", [1, 2]), ('"token_ids":[3]', [4]), ('\n\\"}]', [5]), ("é🙂", [6]), ("a", [70_000])]:
        usual = event(form, text, ids, spaces=spaces)
        assert merger.feed_usual(usual) == strip_token_ids(usual)
    assert merger.shown_ids == [7, 1, 2, 4, 5, 6, 70_000]
    assert merger.text == ' firsttwo"token_ids":[3]\n\\"}]é🙂a'
    assert bool(merger.num_reasoning) == (form == "reasoning")


@pytest.mark.parametrize("form", ["vllm", "completions"])
def test_a_client_of_vllm_gets_null_for_ids_that_it_did_not_request(form: str) -> None:
    body = parse_inference(b'{"messages":[],"stream":true,"max_tokens":99}')
    merger = StreamMerger(body, keeps_prompt=True)
    merger.nulls_ids = True
    texts = [(" first", [7]), ('"token_ids":[3]', [4, 5]), ("\n", [6])]
    wanted = [
        event(form, text, ids).replace(
            b'"token_ids":%s' % json.dumps(ids, separators=(",", ":")).encode(), b'"token_ids":null'
        )
        for text, ids in texts
    ]
    assert merger.feed(event(form, *texts[0])) == wanted[0]
    for (text, ids), expected in zip(texts, wanted, strict=True):
        assert merger.feed_usual(event(form, text, ids)) == expected == undo_token_ids(event(form, text, ids))
    assert merger.shown_ids == [7, 7, 4, 5, 6]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": "length"},
        {"finish_reason": "pd_reschedule"},
        {"index": 1},
        {"text": ""},
        {"ids": []},
        {"ids": [-1]},
        {"logprobs": {"content": []}},
        {"tool_calls": [{}]},
    ],
    ids=str,
)
def test_an_event_with_more_or_fewer_members_is_not_usual(form: str, changes: dict[str, Any]) -> None:
    merger = make_merger()
    merger.feed(event(form, "a", [1]))
    more = dict(changes)
    other = event(form, more.pop("text", "b"), more.pop("ids", [2]), **more)
    assert merger.feed_usual(event(form, "b", [2])) is not None
    assert merger.feed_usual(other) is None


@pytest.mark.parametrize(
    "other",
    [
        event("ours", "a", [1], finish_reason="stop"),
        event("ours", "", [1]),
        event("ours", "a", []),
        event("ours", "a", [1], logprobs={"content": []}),
        event("ours", "a", [1]) * 2,
        b'data: {"error":{"message":"x"}}\n\n',
        b"data: [DONE]\n\n",
        b": comment\n\n",
        event("vllm", "a", [1]).replace(b'"model"', b'"prompt_token_ids":null,"model"'),
    ],
)
def test_no_template_is_learned_from_an_event_that_is_not_usual(other: bytes) -> None:
    assert learn_template(other) is None


@given(
    contents=st.lists(
        st.tuples(
            st.sampled_from(["ours", "ours", "reasoning", "vllm"]),
            st.text(max_size=3),
            st.lists(st.integers(0, 9), max_size=2),
        ),
        max_size=40,
    ),
    events_per_read=st.integers(1, 3),
    split=st.integers(0, 40),
)
def test_a_merger_with_templates_reads_a_stream_like_one_without(
    contents: list[tuple[str, str, list[int]]], events_per_read: int, split: int
) -> None:
    """One merger gets the events of each read and may use templates; the other parses each event."""
    quick, thorough = make_merger(), make_merger()
    thorough._templates_left = 0
    events = [event(*each) for each in contents]
    given_quick, given_thorough = b"", b""
    for start in range(0, len(events), events_per_read):
        read = b"".join(events[start : start + events_per_read])
        usual = quick.feed_usual(read)
        given_quick += quick.feed(read) if usual is None else usual
        given_thorough += thorough.feed(read)
        if start == split:
            assert quick.shown_ids == thorough.shown_ids
    assert given_quick == given_thorough
    assert quick.has_content_without_ids == thorough.has_content_without_ids
    if not quick.has_content_without_ids:
        assert (quick.shown_ids, quick.text) == (thorough.shown_ids, thorough.text)
        assert quick.num_reasoning == thorough.num_reasoning


def test_a_usual_event_takes_one_call() -> None:
    merger = make_merger()
    merger.feed(event("ours", "a", [1]))
    usual = event("ours", "b", [2])
    assert list_router_calls(lambda: merger.feed_usual(usual)) == ["feed_usual"]
