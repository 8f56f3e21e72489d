"""Preempted requests: after any number of preemptions at any token, the client reads the same response."""

from __future__ import annotations

import json
import tracemalloc
from itertools import accumulate, pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.body import InferenceBody, parse_inference
from router.serving.resume import ResponseMerger, StreamMerger
from router.serving.resume.events import strip_token_ids
from tests.router.scripted_engine import Engine

ADDED_NAMES = {"prompt_token_ids", "completion_token_ids", "token_ids", "prompt_tokens", "completion_tokens"}


def _body(**members: Any) -> InferenceBody:
    return parse_inference(orjson.dumps({"model": "m", **members}))


def _stream(engine: Engine, body: InferenceBody, preemptions: list[int], form: str, at_once: int) -> bytes:
    """Return the client's stream if legs are preempted after so many tokens; feed ``at_once`` events a call."""
    merger = StreamMerger(body)
    members = {**body.members, "return_token_ids": True}
    given = b""
    for leg, preempted_after in enumerate([*preemptions, None]):
        if leg:
            merger.begin_segment()
        events = list(engine.stream(members, leg, preempted_after, form))
        for i in range(0, len(events), at_once):
            given += merger.feed(b"".join(events[i : i + at_once]))
        assert merger.preempted == (preempted_after is not None)
        if not merger.preempted:
            break
        if merger.complete:
            return given + merger.make_end()
        added = merger.resume_members()
        assert added is not None
        members = {**body.members, "return_token_ids": True, **added}
    return given


def _read(stream: bytes) -> dict[str, Any]:
    """Return a client's view of a stream."""
    events = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n")]
    assert events[-2:] == [b"[DONE]", b""]
    assert events.count(b"[DONE]") == 1
    chunks = [json.loads(event) for event in events[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice.get("delta", choice) for choice in choices]
    return {
        "text": "".join(part.get("content", part.get("text", "")) for part in deltas),
        "ids": [token for part in deltas for token in part.get("completion_token_ids", [])],
        "prompt_ids": [part["prompt_token_ids"] for part in deltas if "prompt_token_ids" in part],
        "roles": [part["role"] for part in deltas if "role" in part],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")],
        "identity": {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks},
    }


@st.composite
def _pieces(draw: st.DrawFn) -> list[bytes]:
    """Draw the tokens of a text; a character of several bytes may be split over tokens."""
    pool = 'ab "é中🙂\\\n{},' + 'pd_reschedule "error" "token_ids":[1]'
    data = "".join(draw(st.lists(st.sampled_from(list(pool)), min_size=1, max_size=12))).encode()
    cuts = sorted(draw(st.sets(st.integers(1, len(data)), max_size=10)) | {0, len(data)})
    return [data[a:b] for a, b in pairwise(cuts)]


_preemptions = st.lists(st.integers(0, 4), max_size=4)
_limits = st.none() | st.integers(1, 14)


def _select_possible(engine: Engine, body: InferenceBody, preemptions: list[int]) -> list[int]:
    """Select the preemptions that can happen: not after the last token of a text, when the engine has finished."""
    generated, at_limit = engine.generate(dict(body.members), None)
    last = len(generated) if at_limit else len(generated) - 1
    return [count for count, total in zip(preemptions, accumulate(preemptions), strict=True) if total <= last]


@given(
    pieces=_pieces(),
    preemptions=_preemptions,
    limit=_limits,
    is_chat=st.booleans(),
    asks_ids=st.booleans(),
    form=st.sampled_from(["error", "finish"]),
    at_once=st.integers(1, 5),
)
def test_a_stream_preempted_anywhere_reads_like_one_without_preemptions(
    pieces: list[bytes],
    preemptions: list[int],
    limit: int | None,
    is_chat: bool,
    asks_ids: bool,
    form: str,
    at_once: int,
) -> None:
    engine = Engine(pieces, is_chat)
    wanted = {"max_tokens": limit} if limit else {}
    asked = {"return_token_ids": True} if asks_ids else {}
    body = _body(stream=True, stream_options={"include_usage": True}, **wanted, **asked)
    preemptions = _select_possible(engine, body, preemptions)
    seen = _read(_stream(engine, body, preemptions, form, at_once))
    expected = _read(_stream(engine, body, [], form, 1))
    assert seen == expected


@pytest.mark.parametrize("form", ["error", "finish"])
@pytest.mark.parametrize("token", range(7))
def test_a_stream_is_resumed_after_each_token(token: int, form: str) -> None:
    engine = Engine([b"Hello", b" w", b"or", b"ld ", b"\xf0\x9f", b"\x99\x82", b"!"])
    body = _body(stream=True, max_tokens=50, stream_options={"include_usage": True})
    seen = _read(_stream(engine, body, [token], form, 1))
    assert seen["text"] == "Hello world 🙂!"
    assert seen["usage"] == [{"prompt_tokens": 4, "completion_tokens": 7, "total_tokens": 11}]


_PREEMPTION = b'data: {"error":{"message":"PD Error"}}\n\n'


def _event(**choice: Any) -> bytes:
    """Make an event with one choice."""
    return b"data: " + orjson.dumps({"choices": [{"index": 0, **choice}]}) + b"\n\n"


def _preempt(body: InferenceBody, engine: Engine, after: int) -> StreamMerger:
    merger = StreamMerger(body)
    for event in engine.stream({**body.members, "return_token_ids": True}, 0, after, "error"):
        merger.feed(event)
    return merger


def test_a_resumption_counts_every_limit_once() -> None:
    body = _body(stream=True, max_tokens=10, max_completion_tokens=8, min_tokens=2, echo=True)
    merger = _preempt(body, Engine([b"a", b"b", b"c", b"d"]), 3)
    assert merger.resume_members() == {
        "completion_token_ids": [100, 101, 102],
        "max_tokens": 7,
        "max_completion_tokens": 5,
        "min_tokens": 0,
        "echo": False,
    }


def _preempt_with_limit(limit: float | str) -> StreamMerger:
    """Preempt a stream with this limit after three tokens."""
    merger = StreamMerger(_body(stream=True, max_tokens=limit))
    for event in Engine([b"a", b"b", b"c", b"d"]).stream({"return_token_ids": True}, 0, 3, "error"):
        merger.feed(event)
    return merger


@pytest.mark.parametrize("limit", [10.0, "10", "10.0"])
def test_a_limit_is_counted_in_every_notation(limit: float | str) -> None:
    assert _preempt_with_limit(limit).resume_members() == {"completion_token_ids": [100, 101, 102], "max_tokens": 7}


@pytest.mark.parametrize("limit", [3.0, "3"])
def test_a_stream_is_complete_at_its_limit_in_every_notation(limit: float | str) -> None:
    assert _preempt_with_limit(limit).complete


def test_a_resumption_starts_before_an_incomplete_character() -> None:
    merger = _preempt(_body(stream=True), Engine([b"a", b"\xe4", b"\xb8", b"\xad"]), 3)
    assert merger.resume_members() == {"completion_token_ids": [100]}


def test_a_stream_without_content_begins_again() -> None:
    assert _preempt(_body(stream=True, n=2), Engine([b"a"]), 0).resume_members() == {}


@pytest.mark.parametrize("members", [{"n": 2}, {"response_format": {"type": "json_object"}}])
def test_a_stream_that_cannot_continue_exactly_is_not_resumed(members: dict[str, Any]) -> None:
    assert _preempt(_body(stream=True, **members), Engine([b"a", b"b"]), 1).resume_members() is None


def test_text_without_ids_cannot_be_resumed() -> None:
    merger = StreamMerger(_body(stream=True))
    merger.feed(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
    merger.feed(b'data: {"error":{"message":"PD Error"}}\n\ndata: [DONE]\n\n')
    assert merger.preempted
    assert merger.resume_members() is None


def test_a_long_stream_stores_its_ids_and_not_its_events() -> None:
    count = 2000
    engine = Engine([b"x" * 500] * (count + 1))
    tracemalloc.start()
    try:
        merger = _preempt(_body(stream=True), engine, count)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert merger.resume_members() == {"completion_token_ids": list(range(100, 100 + count))}
    assert peak < count * 500 / 2


def test_the_id_zero_is_a_token_and_negative_ones_are_not() -> None:
    merger = StreamMerger(_body(stream=True))
    merger.feed(_event(delta={"content": "a", "completion_token_ids": [0, -1, 1]}) + _PREEMPTION)
    assert merger.resume_members() == {"completion_token_ids": [0, 1]}


def test_reasoning_with_an_empty_content_is_text_that_was_shown() -> None:
    merger = StreamMerger(_body(stream=True))
    delta = {"content": "", "reasoning_content": "hm", "completion_token_ids": [1, 2]}
    merger.feed(_event(delta=delta) + _PREEMPTION)
    assert merger.resume_members() == {"completion_token_ids": [1, 2]}


def test_a_stream_that_has_shown_a_tool_call_is_not_resumed() -> None:
    merger = StreamMerger(_body(stream=True))
    merger.feed(_event(delta={"tool_calls": [{"index": 0}], "completion_token_ids": [1]}) + _PREEMPTION)
    assert merger.resume_members() is None


def test_a_stream_that_is_not_preempted_passes_byte_for_byte() -> None:
    events = b'data: { "choices": [ {"delta": {"role": "assistant"}} ] }\n\n' * 2 + b": a comment\n\n"
    assert StreamMerger(_body(stream=True)).feed(events) == events


@pytest.mark.parametrize(("is_chat", "member"), [(True, {"delta": {}}), (False, {"text": ""})])
def test_the_end_of_a_complete_stream_has_the_form_of_its_chunks(is_chat: bool, member: dict[str, Any]) -> None:
    merger = _preempt(_body(stream=True, max_tokens=1), Engine([b"a", b"b"], is_chat), 1)
    assert merger.complete
    end = json.loads(merger.make_end().removeprefix(b"data: ").removesuffix(b"data: [DONE]\n\n"))
    assert end["choices"] == [{"index": 0, **member, "finish_reason": "length"}]


def test_text_offsets_continue_after_the_shown_text() -> None:
    merger = StreamMerger(_body(stream=True))
    merger.feed(_event(text="abc", completion_token_ids=[1]) + _PREEMPTION)
    merger.begin_segment()
    given = merger.feed(_event(text="de", completion_token_ids=[2], logprobs={"text_offset": [0, 1]}))
    assert json.loads(given.removeprefix(b"data: "))["choices"][0]["logprobs"] == {"text_offset": [3, 4]}


def test_a_stream_without_ids_stores_no_events_after_the_first_ones() -> None:
    merger = StreamMerger(_body(stream=True))
    for _ in range(9):
        merger.feed(_event(delta={"content": "a"}))
    assert merger._kept == []


def test_a_usage_in_an_event_of_tokens_does_not_replace_the_one_at_the_end() -> None:
    merger = StreamMerger(_body(stream=True, max_tokens=1, stream_options={"include_usage": True}))
    delta = {"content": "a", "prompt_token_ids": [7, 8], "completion_token_ids": [1]}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    merger.feed(b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}], "usage": usage}) + b"\n\n")
    merger.feed(_PREEMPTION)
    assert merger.complete
    assert orjson.dumps(usage) in merger.make_end()


def test_a_resumed_stream_with_its_done_event_needs_no_further_end() -> None:
    merger = StreamMerger(_body(stream=True, max_tokens=2))
    merger.feed(_event(delta={"content": "a", "completion_token_ids": [1]}) + _PREEMPTION)
    merger.begin_segment()
    last = _event(delta={"content": "b", "completion_token_ids": [2]}, finish_reason="length")
    assert merger.feed(last + b"data: [DONE]\n\n").endswith(b"data: [DONE]\n\n")
    assert merger.complete
    assert merger.make_end() == b""


def test_an_error_that_is_no_preemption_reaches_the_client() -> None:
    event = b'data: {"error":{"message":"out of memory"}}\n\ndata: [DONE]\n\n'
    merger = StreamMerger(_body(stream=True))
    assert merger.feed(event) == event
    assert not merger.preempted


def test_reasoning_before_a_preemption_counts_as_reasoning() -> None:
    merger = StreamMerger(_body(stream=True))
    delta = b'{"reasoning_content":"hm","completion_token_ids":[1,2]}'
    merger.feed(b'data: {"choices":[{"index":0,"delta":' + delta + b"}]}\n\n")
    merger.feed(_PREEMPTION)
    merger.begin_segment()
    details = {"completion_tokens_details": {"reasoning_tokens": 3}, "prompt_tokens_details": {"cached_tokens": 6}}
    usage = {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11, **details}
    given = merger.feed(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n")
    assert json.loads(given.removeprefix(b"data: "))["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 7,
        "total_tokens": 11,
        "completion_tokens_details": {"reasoning_tokens": 5},
        "prompt_tokens_details": {},  # the first instance has reported no cached tokens
    }


# The added members are removed as bytes.

_words = st.sampled_from(
    [
        '"token_ids":[1]',
        ',"completion_token_ids":[1,2]',
        '{"prompt_tokens":"a"',
        "\\",
        '"',
        ",",
        "{",
        'x,"token_ids"',
        "中",
    ]
)
_texts = st.lists(_words, max_size=5).map("".join) | st.text(max_size=8)
_added_values = {
    "token_ids": st.none() | st.lists(st.integers(-9, 10**6), max_size=3),
    "text": st.none() | _texts,
}


@st.composite
def _chunks(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a chunk without the added members, and the same chunk with them at any position."""

    def with_added(plain: dict[str, Any], *names: str) -> dict[str, Any]:
        members = list(plain.items())
        for name in draw(st.lists(st.sampled_from(names), unique=True)):
            value = draw(_added_values["token_ids" if name.endswith("token_ids") else "text"])
            members.insert(draw(st.integers(0, len(members))), (name, value))
        return dict(members)

    delta = draw(st.dictionaries(st.sampled_from(["role", "content", "refusal"]), _texts, max_size=3))
    choice = {"index": 0, "finish_reason": None, "logprobs": draw(_texts)}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    top = draw(st.sampled_from([{}, {"id": "x", "usage": usage}]))
    plain = {**top, "choices": [{**choice, "delta": delta}]}
    edited_delta = with_added(delta, "prompt_token_ids", "completion_token_ids", "prompt_tokens", "completion_tokens")
    edited_choice = with_added({**choice, "delta": edited_delta}, "token_ids", "completion_token_ids")
    return plain, with_added({**top, "choices": [edited_choice]}, "prompt_token_ids")


@given(_chunks(), st.booleans(), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_stripping_removes_the_added_members_and_no_other_byte(
    chunks: tuple[dict[str, Any], dict[str, Any]], ascii_only: bool, separators: tuple[str, str]
) -> None:
    plain, edited = (
        b"data: " + json.dumps(chunk, ensure_ascii=ascii_only, separators=separators).encode() + b"\n\n"
        for chunk in chunks
    )
    assert strip_token_ids(edited) == plain


def test_stripping_a_long_text_of_escapes_costs_no_memory_beyond_copies() -> None:
    event = b'data: {"choices":[{"delta":{"content":"a","prompt_tokens":"%s"}}]}\n\n' % (rb"\n" * 500_000)
    tracemalloc.start()
    try:
        assert strip_token_ids(event) == b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * len(event)


def test_tokens_withheld_at_the_end_of_a_segment_come_only_from_the_next_one() -> None:
    merger = StreamMerger(_body(stream=True, return_token_ids=True))
    without_text = b'data: {"choices":[{"index":0,"delta":{"content":"","completion_token_ids":[1]}}]}\n\n'
    assert merger.feed(without_text) == b""
    merger.begin_segment()  # its instance has died
    assert merger.feed(without_text) == b""
    given = merger.feed(b'data: {"choices":[{"index":0,"delta":{"content":"a","completion_token_ids":[2]}}]}\n\n')
    assert _read_ids(given) == [1, 2]


@pytest.mark.parametrize("first", ["a", ""], ids=["sent", "withheld"])
def test_the_beginning_of_a_response_is_sent_once(first: str) -> None:
    beginning = {"role": "assistant", "prompt_token_ids": [7]}
    merger = StreamMerger(_body(stream=True, return_token_ids=True))
    given = merger.feed(_event(delta={**beginning, "content": first, "completion_token_ids": [1]}))
    merger.begin_segment()  # its instance has died
    given += merger.feed(_event(delta={**beginning, "content": "b", "completion_token_ids": [2]}))
    deltas = [json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"] for event in given.split(b"\n\n")[:-1]]
    assert "".join(delta["content"] for delta in deltas) == first + "b"
    assert [{name: delta.get(name) for name in beginning} for delta in deltas] == [
        beginning,
        *[dict.fromkeys(beginning)] * (len(deltas) - 1),
    ]


def test_the_later_events_of_a_resumed_completion_of_vllm_have_null_for_the_ids_of_the_prompt() -> None:
    merger = StreamMerger(_body(stream=True, return_token_ids=True))
    given = merger.feed(_event(text="a", prompt_token_ids=[7], token_ids=[1]))
    given += merger.feed(_event(text="b", prompt_token_ids=None, token_ids=[2]))
    merger.begin_segment()  # its instance has died
    given += merger.feed(_event(text="c", prompt_token_ids=[7, 1, 2], token_ids=[3]))
    given += merger.feed(_event(text="d", prompt_token_ids=None, token_ids=[4]))
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in given.split(b"\n\n")[:-1]]
    assert [choice["prompt_token_ids"] for choice in choices] == [[7], None, None, None]


def _read_ids(events: bytes) -> list[int]:
    """Return the token ids in the chunks of a chat."""
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events.split(b"\n\n") if event]
    return [token for chunk in chunks for token in chunk["choices"][0]["delta"]["completion_token_ids"]]


def test_a_client_that_requests_ids_gets_them() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a","completion_token_ids":[1]}}]}\n\n'
    assert StreamMerger(_body(stream=True, return_token_ids=True)).feed(event) == event
    assert b"token_ids" not in StreamMerger(_body(stream=True)).feed(event)


def test_a_client_that_did_not_request_ids_gets_no_vllm_events_with_only_ids() -> None:
    head = (
        b'data: {"id":"1","choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s,"token_ids":[%d]}]}\n\n'
    )
    alone, last = head % (b"{}", b"null", 5), head % (b"{}", b'"stop"', 9)
    text = head % (rb'{"content":"\"delta\":{},\"logprobs\":null,\"finish_reason\":null,"}', b"null", 6)
    merger, with_ids = StreamMerger(_body(stream=True)), StreamMerger(_body(stream=True, return_token_ids=True))
    merger.nulls_ids = with_ids.nulls_ids = True
    assert merger.feed(alone) == b""
    assert merger.feed(alone + text) == text.replace(b"[6]", b"null")
    assert merger.feed(alone + last) == last.replace(b"[9]", b"null")
    assert merger.shown_ids == [5, 5, 6]
    assert with_ids.feed(text) == text


# Whole responses.


def _answer(engine: Engine, body: InferenceBody, preemptions: list[int], detokenizes: bool = True) -> dict[str, Any]:
    """Return the client's whole response if legs are preempted after these numbers of tokens."""
    merger = ResponseMerger(body)
    members = dict(body.members)
    for leg, preempted_after in enumerate([*preemptions, None]):
        given = merger.feed(200, engine.answer(members, leg, preempted_after))
        assert (given is None) == (preempted_after is not None)
        while (ids := merger.ids_to_detokenize) is not None:
            merger.take_text(engine.text(ids) if detokenizes else None)
        if merger.complete:
            given = merger.make_end()
        if given is not None:
            break
        members = {**body.members, **merger.resume_members()}
    answer: dict[str, Any] = json.loads(given or b"")
    return {"choices": answer["choices"], "usage": answer["usage"]}


@given(
    pieces=_pieces(),
    preemptions=_preemptions,
    limit=_limits,
    is_chat=st.booleans(),
    reports_text=st.booleans(),
    detokenizes=st.booleans(),
    members=st.sampled_from([{}, {"return_token_ids": True}, {"logprobs": True}, {"stop": ["ab", "中"]}]),
)
def test_a_whole_response_preempted_anywhere_equals_one_without_preemptions(
    pieces: list[bytes],
    preemptions: list[int],
    limit: int | None,
    is_chat: bool,
    reports_text: bool,
    detokenizes: bool,
    members: dict[str, Any],
) -> None:
    engine = Engine(pieces, is_chat, reports_text)
    body = _body(**members, **({"max_tokens": limit} if limit else {}))
    preemptions = _select_possible(engine, body, preemptions)
    assert _answer(engine, body, preemptions, detokenizes) == _answer(engine, body, [])


def test_a_response_that_was_not_preempted_is_not_changed() -> None:
    body = b'{"choices": [{"message": {"content": "what is pd_reschedule, what a PD Error?"}}]}'
    assert ResponseMerger(_body()).feed(200, body) == body


def test_an_error_of_the_pair_is_a_preemption() -> None:
    merger = ResponseMerger(_body())
    assert merger.feed(500, b'{"error":{"message":"PD Error: decode is out of blocks"}}') is None
    assert merger.resume_members() == {}


def test_a_response_begins_again_if_a_stop_string_may_have_begun() -> None:
    engine = Engine([b"x", b"a", b"b"], returns_text=True)
    merger = ResponseMerger(_body(stop="ab"))
    merger.feed(200, engine.answer({}, 0, 2))
    assert merger.resume_members() == {}


@pytest.mark.parametrize("member", [{"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm"}])
def test_a_response_with_more_than_text_begins_again(member: dict[str, Any]) -> None:
    merger = ResponseMerger(_body())
    merger.feed(200, Engine([b"a", b"b"], returns_text=True).answer({}, 0, 1))
    last = {"choices": [{"index": 0, "message": {"content": "b", **member}, "finish_reason": "stop"}]}
    assert merger.feed(200, orjson.dumps(last)) is None
    assert merger.resume_members() == {}
    assert merger.feed(200, orjson.dumps(last)) == orjson.dumps(last)


@pytest.mark.parametrize(
    "members",
    [
        *({"n": 2}, {"logprobs": 0}, {"tools": [{}]}, {"functions": [{}]}, {"echo": True}),
        {"response_format": {"type": "json_object"}},
    ],
)
def test_a_response_that_cannot_be_merged_exactly_begins_again(members: dict[str, Any]) -> None:
    merger = ResponseMerger(_body(**members))
    merger.feed(200, Engine([b"a", b"b"], returns_text=True).answer({}, 0, 1))
    assert merger.resume_members() == {}


@pytest.mark.parametrize("status", [300, 500])
def test_an_error_after_a_preemption_is_not_changed(status: int) -> None:
    engine = Engine([b"a", b"b"], returns_text=True)
    merger = ResponseMerger(_body())
    merger.feed(200, engine.answer({}, 0, 1))
    last = engine.answer(merger.resume_members(), 1, None)
    assert merger.feed(status, last) == last
    assert merger.feed(299, last) != last


def test_a_response_continues_before_an_incomplete_character_that_was_detokenized() -> None:
    engine = Engine([b"a", b"\xe4", b"\xb8", b"\xad", b"b"])
    merger = ResponseMerger(_body())
    merger.feed(200, engine.answer({}, 0, 3))
    asked = []
    while (ids := merger.ids_to_detokenize) is not None:
        asked.append(ids)
        merger.take_text(engine.text(ids))
    assert asked == [[100, 101, 102], [100, 101], [100]]
    assert merger.resume_members() == {"completion_token_ids": [100]}


def test_a_response_of_only_an_incomplete_character_begins_again_without_detokenize() -> None:
    merger = ResponseMerger(_body())
    merger.feed(200, Engine([b"\xe4", b"\xb8", b"\xad"], returns_text=True).answer({}, 0, 1))
    assert merger.ids_to_detokenize is None
    assert merger.resume_members() == {}


def test_a_merged_response_has_the_reasoning_tokens_that_the_engine_counted() -> None:
    merger = ResponseMerger(_body())
    merger.feed(200, Engine([b"a", b"b"], returns_text=True).answer({}, 0, 1))
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 0}}
    last = merger.feed(200, orjson.dumps({"choices": [{"message": {"content": "b"}}], "usage": usage}))
    assert json.loads(last or b"")["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


_odd = st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(["a", "PD Error", "pd_reschedule"])
_names = st.sampled_from(
    [
        *("choices", "delta", "message", "content", "text", "usage", "prompt_tokens", "completion_tokens", "stop"),
        *("completion_token_ids", "token_ids", "finish_reason", "error", "max_tokens", "prompt_tokens_details"),
        *("cached_tokens", "completion_tokens_details", "stream_options", "logprobs", "text_offset"),
    ]
)
_odd_objects = st.dictionaries(
    _names,
    st.recursive(_odd, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_names, inner, max_size=3)),
    max_size=4,
)


@given(_odd_objects, st.lists(_odd_objects, max_size=3))
def test_odd_responses_to_odd_requests_raise_no_error(members: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    body = _body(**members)
    streamed, whole = StreamMerger(body), ResponseMerger(body)
    for answer in answers:
        streamed.feed(b"data: " + orjson.dumps(answer) + b"\n\n")
        streamed.resume_members()
        streamed.make_end()
        streamed.begin_segment()
        whole.feed(200, orjson.dumps(answer))
        whole.take_text("a" if whole.ids_to_detokenize else None)
        whole.resume_members()
        if whole.complete:
            whole.make_end()
