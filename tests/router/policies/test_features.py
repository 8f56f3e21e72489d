"""Prefixes: prompts with the same start have the same hashes, others have different hashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies.base import TOKENS_PER_CHUNK, _clip_members, chunk_hashes, request_features
from router.serving.reading.sessions import SessionHeaders
from tests.router.calls import list_router_calls

_text = st.text(max_size=40).map(lambda text: text * 40)
_messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": _text}))
LONG = "A long prompt of which several chunks can be cut. " * 100


@given(turn=_messages.filter(len), appended=_messages)
def test_the_next_turn_has_all_chunks_of_the_previous_turn(turn: list[Any], appended: list[Any]) -> None:
    first = chunk_hashes({"model": "m", "messages": turn})
    assert chunk_hashes({"model": "m", "messages": turn + appended})[: len(first)] == first


@pytest.mark.parametrize("member", ["prompt", "prompt_token_ids"])
@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=50), appended=st.lists(st.integers(0, 10)))
def test_appended_token_ids_change_no_earlier_chunk(member: str, ids: list[int], appended: list[int]) -> None:
    first = chunk_hashes({member: ids * 20})
    assert len(first) == len(ids) * 20 // TOKENS_PER_CHUNK
    assert chunk_hashes({member: ids * 20 + appended})[: len(first)] == first


@pytest.mark.parametrize(("num_ids", "num_chunks"), [(-1, 0), (0, 1), (TOKENS_PER_CHUNK - 1, 1), (TOKENS_PER_CHUNK, 2)])
def test_a_prompt_has_only_complete_chunks(num_ids: int, num_chunks: int) -> None:
    assert len(chunk_hashes({"prompt_token_ids": [7] * (TOKENS_PER_CHUNK + num_ids)})) == num_chunks


@pytest.mark.parametrize("number", [-1, 2**32, 0.5, None])
def test_numbers_that_are_not_token_ids_are_hashed_like_other_prompts(number: float | None) -> None:
    first = chunk_hashes({"prompt": [1, number] * 400})
    assert len(first) > 1
    assert chunk_hashes({"prompt": [1, number] * 400 + [1]})[: len(first)] == first
    assert not set(first) & set(chunk_hashes({"prompt": [2, number] * 400}))


@given(prompt=_text, appended=_text)
def test_appended_text_changes_no_earlier_chunk(prompt: str, appended: str) -> None:
    first = chunk_hashes({"prompt": prompt})
    assert chunk_hashes({"prompt": prompt + appended})[: len(first)] == first


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"cache_salt": "tenant"},
        {"lora_path": "adapter"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG}]},
    ],
)
def test_prompts_with_different_kv_share_no_chunk(other: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    assert not set(chunk_hashes(body)) & set(chunk_hashes(body | other))


def test_members_that_are_not_part_of_the_prompt_change_no_chunk() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    assert chunk_hashes(body) == chunk_hashes(body | {"temperature": 0.5, "stream": True, "user": "u"})


def test_equal_text_after_a_difference_has_different_chunks() -> None:
    one, two = chunk_hashes({"prompt": "x" + LONG}), chunk_hashes({"prompt": "y" + LONG})
    assert not set(one) & set(two)


@given(
    st.dictionaries(
        st.sampled_from(["model", "messages", "prompt", "prompt_token_ids", "tools", "cache_salt"]),
        st.recursive(
            st.none() | st.integers() | st.floats() | st.text(st.characters(codec=None)) | st.just(LONG),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
    )
)
def test_any_body_can_be_hashed(members: dict[str, Any]) -> None:
    assert isinstance(chunk_hashes(members), list)


def test_a_body_that_is_nested_too_deeply_has_no_chunks() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert chunk_hashes({"messages": nested}) == []


def test_a_prompt_is_hashed_only_when_its_chunks_are_read() -> None:
    members: dict[str, Any] = {"prompt": LONG}
    features = request_features(members, 1250)
    members["prompt"] = ""
    assert features.chunks == []


@pytest.mark.parametrize(
    ("members", "headers", "key"),
    [
        ({"user": "ann"}, [], "ann"),
        ({"user": "ann", "session_id": "s"}, [], "s"),
        ({"user": "ann", "session_id": "s"}, [(b"x-session-id", b"h")], "h"),
        ({"user": "ann", "extra_body": {"session_id": "e"}}, [], "e"),
        ({"session_id": "s", "extra_body": {"session_id": "e"}}, [], "s"),
        ({"session_id": "", "extra_body": {"session_id": "e"}}, [], "e"),
        ({"user": "ann", "extra_body": {"session_id": 7}}, [], "ann"),
        ({"user": "ann", "extra_body": "e"}, [], "ann"),
        ({"user": 7}, [(b"x-other", b"h")], ""),
        # OpenAI: openai.types.chat.completion_create_params.CompletionCreateParamsBase.prompt_cache_key, "Replaces the
        # `user` field".
        ({"user": "ann", "prompt_cache_key": "k"}, [], "k"),
        ({"prompt_cache_key": "k", "session_id": "s"}, [], "s"),
        ({"prompt_cache_key": "k"}, [(b"session-id", b"h")], "h"),
        ({"user": "ann", "prompt_cache_key": None}, [], "ann"),
        ({"prompt_cache_key": ["k"]}, [], ""),
    ],
)
def test_the_key_is_the_session_or_else_the_user(
    members: dict[str, Any], headers: list[tuple[bytes, bytes]], key: str
) -> None:
    features = request_features(members, 2, SessionHeaders().find_session(headers).id)
    assert features.key == key


def test_a_short_prompt_takes_three_calls_and_no_hashing() -> None:
    members = {"model": "m", "prompt": "short", "user": "ann"}
    called = list_router_calls(lambda: request_features(members, 2).chunks)
    assert len(called) <= 3
    assert "chunk_hashes" not in called


def test_the_values_of_a_prompt_that_is_too_long_are_clipped() -> None:
    parts = {"messages": [{"role": "user", "content": "a" * 5_000_000}, {"role": "user", "content": "b"}], "n": 1}
    clipped = _clip_members(parts)
    assert clipped["messages"][0]["role"] == "user"
    assert set(clipped["messages"][0]["content"]) == {"a"}
    assert len(clipped["messages"]) == 1
    assert clipped["n"] == 1


@given(
    st.dictionaries(
        st.sampled_from(["tools", "documents", "messages", "input"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
    )
)
def test_a_prompt_that_is_not_too_long_is_not_clipped(members: dict[str, Any]) -> None:
    assert _clip_members(members) == members


def test_clipping_ends_at_values_that_are_nested_too_deeply() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    clipped = _clip_members({"messages": nested, "input": ["a"] * 100_000})
    assert clipped["messages"] is not nested
    assert len(clipped["input"]) < 100_000
