"""Responses are kept until there are too many of them, or too long ones."""

from __future__ import annotations

from engine.apis.response_store import ResponseStore, StoredResponse


def kept(text: str = "x") -> StoredResponse:
    return StoredResponse({"text": text}, [{"role": "user", "content": text}])


def test_the_response_that_was_used_the_longest_ago_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    store.store_response("a", kept())
    store.store_response("b", kept())
    assert store.find_response("a")
    store.store_response("c", kept())
    assert [store.find_response(name) is not None for name in "abc"] == [True, False, True]


def test_long_conversations_drive_others_out() -> None:
    store = ResponseStore(max_characters=10)
    store.store_response("a", kept("12345"))
    store.store_response("b", kept("12345"))
    store.store_response("c", kept("1"))
    assert [store.find_response(name) is not None for name in "abc"] == [False, True, True]
    store.store_response("d", kept("12345678901"))
    assert [store.find_response(name) is not None for name in "bcd"] == [False, False, False]


def test_a_response_that_was_removed_makes_room() -> None:
    store = ResponseStore(max_characters=10)
    store.store_response("a", kept("1234567890"))
    assert store.remove_response("a")
    assert not store.remove_response("a")
    store.store_response("b", kept("12345"))
    store.store_response("b", kept("1234567890"))
    assert store.find_response("b")


def test_instructions_count_as_characters() -> None:
    store = ResponseStore(max_characters=10)
    store.store_response("a", StoredResponse({"instructions": "12345678901"}, [{"role": "user", "content": "1"}]))
    assert not store.find_response("a")
