"""Limits of the store of responses: their number and their length."""

from __future__ import annotations

from engine.apis.response_store import MESSAGE_CHARACTERS, ResponseStore, StoredResponse


def make_response(text: str = "x") -> StoredResponse:
    return StoredResponse({"text": text}, [{"role": "user", "content": text}])


def test_the_least_recently_used_response_is_removed_first() -> None:
    store = ResponseStore(max_responses=2)
    store.store_response("a", make_response())
    store.store_response("b", make_response())
    assert store.find_response("a")
    store.store_response("c", make_response())
    assert [store.find_response(name) is not None for name in "abc"] == [True, False, True]


def test_long_conversations_replace_others() -> None:
    store = ResponseStore(max_characters=10 + 2 * MESSAGE_CHARACTERS)
    store.store_response("a", make_response("12345"))
    store.store_response("b", make_response("12345"))
    store.store_response("c", make_response("1"))
    assert [store.find_response(name) is not None for name in "abc"] == [False, True, True]
    store.store_response("d", make_response("x" * (MESSAGE_CHARACTERS + 11)))
    assert [store.find_response(name) is not None for name in "bcd"] == [False, False, False]


def test_a_removed_response_frees_its_space() -> None:
    store = ResponseStore(max_characters=10 + MESSAGE_CHARACTERS)
    store.store_response("a", make_response("1234567890"))
    assert store.remove_response("a")
    assert not store.remove_response("a")
    store.store_response("b", make_response("12345"))
    store.store_response("b", make_response("1234567890"))
    assert store.find_response("b")


def test_instructions_count_as_characters() -> None:
    store = ResponseStore(max_characters=10 + MESSAGE_CHARACTERS)
    store.store_response("a", StoredResponse({"instructions": "12345678901"}, [{"role": "user", "content": "1"}]))
    assert not store.find_response("a")


def test_messages_without_text_count_as_characters() -> None:
    store = ResponseStore(max_characters=2 * MESSAGE_CHARACTERS)
    store.store_response("a", StoredResponse({}, [{"role": "user", "content": ""}] * 2))
    assert store.find_response("a")
    store.store_response("a", StoredResponse({}, [{"role": "user", "content": ""}] * 3))
    assert not store.find_response("a")
