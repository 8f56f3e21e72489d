"""Where two prompts part, and the kind of difference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_backend.why_miss.parting import (
    OTHER_TEXT,
    compare_texts,
    count_common,
    describe_parting,
    find_message,
    find_suspect,
    hide_words,
)

TOKENS = st.lists(st.integers(0, 3), max_size=30)


def encode(text: str) -> list[int]:
    """A token for each character."""
    return [ord(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


@settings(max_examples=60)
@given(TOKENS, TOKENS)
def test_common_tokens_are_counted(first: list[int], second: list[int]) -> None:
    common = count_common(first, second)
    assert first[:common] == second[:common]
    assert first[common : common + 1] != second[common : common + 1] or common == min(len(first), len(second))


@pytest.mark.parametrize(
    ("stored", "asked", "kind"),
    [
        ("It is 2026-11-22 15:04:05 now.", "It is 2026-11-22 15:04:09 now.", "a timestamp"),
        ("at 2026-11-22T15:04:05.123Z", "at 2026-11-23T09:00:00.001Z", "a timestamp"),
        ("epoch 1763823845 ms", "epoch 1763823999 ms", "a timestamp"),
        ("Today is 2026-11-22.", "Today is 2026-12-01.", "a date"),
        ("Today is November 22, 2026.", "Today is November 23, 2026.", "a date"),
        ("The time is 15:04.", "The time is 15:05.", "a time of day"),
        (
            "id 123e4567-e89b-12d3-a456-426614174000",
            "id 9b2c4567-e89b-12d3-a456-426614174999",
            "a UUID",
        ),
        ("session a8f3k2l9x0q7 of Ann", "session b7e2j1m8w9p6 of Ann", "a random id"),
        ("Turn 41 of many", "Turn 42 of many", "a counter"),
        ("It costs 1000000 euros", "It costs 9000000 euros", "a number"),
        ("You are  helpful.", "You are helpful.", "white space"),
        ("Be brief.\n\nNow:", "Be brief.\nNow:", "white space"),
        ("You are Helpful and kind.", "You are helpful and kind.", "upper and lower case"),
        ("Write about the sea.", "Write about mountains.", OTHER_TEXT),
    ],
)
def test_the_kind_of_a_difference_is_named(stored: str, asked: str, kind: str) -> None:
    assert compare_texts(stored, asked)[0] == kind
    parting = describe_parting(encode(stored), encode(asked), decode)
    assert parting.kind == kind
    assert stored[: parting.token] == asked[: parting.token]


def test_the_words_that_differ_are_told() -> None:
    parting = describe_parting(encode("Now: 15:04:05 UTC"), encode("Now: 15:04:09 UTC"), decode)
    assert (parting.token, parting.stored, parting.asked, parting.is_edit) == (12, "15:04:05", "15:04:09", True)


@pytest.mark.parametrize(
    ("asked", "is_edit"),
    [
        ("You are Ann's helper. Answer in two sentences, and be kind.", True),
        ("You sell shoes on a market in town; say what they cost.", False),
    ],
)
def test_an_edited_prompt_is_told_from_another_one(asked: str, is_edit: bool) -> None:
    stored = "You are Bob's helper. Answer in two sentences, and be kind."
    assert describe_parting(encode(stored), encode(asked), decode).is_edit == is_edit


def test_a_prompt_that_goes_on_where_the_stored_one_ends_is_told() -> None:
    parting = describe_parting(encode("Hello"), encode("Hello, again"), decode)
    assert (parting.token, parting.kind) == (5, "the stored prompt ends there")


def test_without_a_tokenizer_the_tokens_are_told() -> None:
    assert describe_parting([1, 2, 3], [1, 2, 4]).kind == "token 3 became 4"


MESSAGES = [("system", "Be brief."), ("user", "What is it?"), ("assistant", "It is."), ("user", "What is it?")]
RENDERED = "".join(f"<{role}>{text}</>" for role, text in MESSAGES)


@pytest.mark.parametrize(
    ("place", "found"),
    [
        (RENDERED.index("brief"), (1, "system")),
        (RENDERED.index("What"), (2, "user")),
        (RENDERED.index("It is."), (3, "assistant")),
        (RENDERED.rindex("What") + 3, (4, "user")),
        (2, None),
    ],
)
def test_the_message_at_a_place_is_found(place: int, found: tuple[int, str] | None) -> None:
    assert find_message(MESSAGES, RENDERED, place) == found


def test_a_message_that_the_template_changed_is_passed_over() -> None:
    assert find_message([("system", "gone"), *MESSAGES], RENDERED, RENDERED.index("What")) == (3, "user")


@pytest.mark.parametrize(
    ("text", "suspect"),
    [
        ("Today is 2026-11-22, and it is 15:04.", ("a date", "2026-11-22")),
        ("Now 2026-11-22 15:04:05 UTC", ("a timestamp", "2026-11-22 15:04:05")),
        ("You are kind, and 2 of 3 like you.", None),
    ],
)
def test_what_is_new_each_time_is_suspected(text: str, suspect: tuple[str, str] | None) -> None:
    assert find_suspect(text) == suspect


@given(st.text())
@settings(max_examples=60)
def test_no_word_of_another_is_shown(text: str) -> None:
    hidden = hide_words(text)
    assert len(hidden) == len(text)
    assert not any(each.isalpha() and each not in "aA" for each in hidden)
    assert not any(each.isdigit() and each != "0" for each in hidden)
