"""Text in pieces: nothing lost, nothing broken, nothing of a stop string or behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.generation.detokenizer import Detokenizer
from tests.engine.checkpoints import byte_fallback_tokenizer

BROKEN = "\ufffd"
# Whole words (one token each), parts of words, and characters of one to four bytes (a token for each byte).
TEXT = st.lists(
    st.one_of(
        st.sampled_from([" the", " river", " riv", "\n", "é", "深圳", "€", "😀", "👩‍🚀", "\u0301"]),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BROKEN), max_size=3),
    ),
    max_size=12,
).map("".join)
FEW_LETTERS = st.text("ab€ ", max_size=20)


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def pieces(
    tokenizer: Any, tokens: Sequence[int], *, prompt: Sequence[int] = (), stop: Sequence[str] = (), min_tokens: int = 0
) -> list[str]:
    """What each token made certain, and last what the end did."""
    detokenizer = Detokenizer(tokenizer, prompt, stop, min_tokens=min_tokens)
    return [*(detokenizer.add_token(token) for token in tokens), detokenizer.flush_text()]


@given(text=TEXT, prompt=TEXT)
@settings(deadline=None)
def test_pieces_make_up_the_whole_text_after_any_prompt(word_tokenizer: Any, text: str, prompt: str) -> None:
    tokens = tokens_of(word_tokenizer, text)
    given_out = pieces(word_tokenizer, tokens, prompt=tokens_of(word_tokenizer, prompt))
    assert "".join(given_out) == word_tokenizer.decode(tokens)


@given(text=TEXT)
@settings(deadline=None)
def test_no_piece_has_a_broken_character(word_tokenizer: Any, text: str) -> None:
    assert not any(BROKEN in piece for piece in pieces(word_tokenizer, tokens_of(word_tokenizer, text)))


@given(tokens=st.lists(st.one_of(st.integers(0, 255), st.integers(0, 1500)), max_size=40))
@settings(deadline=None, max_examples=300)
def test_pieces_of_any_tokens_make_up_what_they_decode_to(word_tokenizer: Any, tokens: list[int]) -> None:
    whole = word_tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(word_tokenizer, tokens)) == whole


@given(text=TEXT, cut=st.integers(0, 40))
@settings(deadline=None)
def test_a_prompt_that_ends_within_a_character_leaves_it_to_the_answer(
    word_tokenizer: Any, text: str, cut: int
) -> None:
    tokens = tokens_of(word_tokenizer, text)
    before = word_tokenizer.decode(tokens[:cut]).rstrip(BROKEN)
    assert before + "".join(pieces(word_tokenizer, tokens[cut:], prompt=tokens[:cut])) == word_tokenizer.decode(tokens)


@pytest.mark.parametrize("tokenizer", ["words", "byte fallback"])
def test_a_prompt_that_is_a_part_of_a_character_leaves_it_to_the_answer(word_tokenizer: Any, tokenizer: str) -> None:
    found = word_tokenizer if tokenizer == "words" else byte_fallback_tokenizer()
    euro = tokens_of(found, "€")[-3:]
    assert "".join(pieces(found, [*euro[1:], *euro], prompt=euro[:1])) == "€€"


def test_the_character_that_stands_for_broken_ones_is_whole_itself(word_tokenizer: Any) -> None:
    prompt, answer = tokens_of(word_tokenizer, f" river{BROKEN}"), tokens_of(word_tokenizer, " the")
    assert "".join(pieces(word_tokenizer, answer, prompt=prompt)) == " the"


@given(tokens=st.lists(st.one_of(st.integers(0, 255), st.integers(0, 1500)), max_size=20), cut=st.integers(0, 20))
@settings(deadline=None)
def test_tokens_begun_elsewhere_go_on_where_their_text_ended(word_tokenizer: Any, tokens: list[int], cut: int) -> None:
    stops = ["ab", "riv"]
    assume(not any(stop in "".join(pieces(word_tokenizer, tokens[:cut])[:-1]) for stop in stops))
    whole = pieces(word_tokenizer, tokens, stop=stops)
    rest = Detokenizer(word_tokenizer, (), stops, tokens[:cut])
    assert [rest.add_token(token) for token in tokens[cut:]] == whole[cut:-1]
    assert rest.flush_text() == whole[-1]


def test_a_character_that_completes_after_a_long_run_of_broken_ones_is_whole(word_tokenizer: Any) -> None:
    euro = tokens_of(word_tokenizer, "€")
    stray = euro[-1]  # a byte that no character begins with
    for count in range(1, 30):
        tokens = [*[stray] * count, *euro, *tokens_of(word_tokenizer, " the")]
        assert "".join(pieces(word_tokenizer, tokens)) == BROKEN * count + "€ the"


def test_a_long_run_of_broken_characters_does_not_hold_up_the_text(word_tokenizer: Any) -> None:
    stray = tokens_of(word_tokenizer, "€")[-1]
    detokenizer = Detokenizer(word_tokenizer, ())
    assert "".join(detokenizer.add_token(stray) for _ in range(100)).count(BROKEN) > 80


def test_a_word_is_given_out_as_soon_as_its_token_is_there(word_tokenizer: Any) -> None:
    assert pieces(word_tokenizer, tokens_of(word_tokenizer, " the river")) == [" the", " river", ""]


def test_a_character_is_given_out_with_its_last_byte(word_tokenizer: Any) -> None:
    assert pieces(word_tokenizer, tokens_of(word_tokenizer, "😀é")) == ["", "", "", "😀", "", "é", ""]


def test_an_unfinished_character_at_the_end_is_given_out_as_broken(word_tokenizer: Any) -> None:
    assert pieces(word_tokenizer, tokens_of(word_tokenizer, " the€")[:-1]) == [" the", "", "", BROKEN]


def test_special_tokens_have_no_text(word_tokenizer: Any) -> None:
    tokens = tokens_of(word_tokenizer, " the<|im_end|> river")
    assert pieces(word_tokenizer, tokens) == [" the", "", " river", ""]


@given(text=FEW_LETTERS, stop=st.text("ab€ ", min_size=1, max_size=4))
@settings(deadline=None)
def test_text_ends_before_the_first_stop_string(word_tokenizer: Any, text: str, stop: str) -> None:
    assert "".join(pieces(word_tokenizer, tokens_of(word_tokenizer, text), stop=[stop])) == text.partition(stop)[0]


@given(text=FEW_LETTERS, stop=st.lists(st.text("ab€ ", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(deadline=None)
def test_of_several_stop_strings_none_is_ever_in_the_text(word_tokenizer: Any, text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(word_tokenizer, (), stop)
    given_out = (
        "".join(detokenizer.add_token(token) for token in tokens_of(word_tokenizer, text)) + detokenizer.flush_text()
    )
    assert detokenizer.stopped == any(one in text for one in stop)
    assert not any(one in given_out for one in stop)
    endings = [given_out + one for one in stop] if detokenizer.stopped else [text]
    assert any(text.startswith(ending) for ending in endings)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (" the river flows", " river", " the"),  # one whole token
        (" the river flows", "e riv", " th"),  # from the middle of one token to the middle of the next
        (" the 😀 river", "😀", " the "),  # a token for each byte
        ("aaab", "aab", "a"),  # begins again before it ended
        (" the river", " river", " the"),  # the very end
        ("the river", "t", ""),  # the very beginning
    ],
)
def test_stop_strings_are_found_wherever_token_borders_lie(
    word_tokenizer: Any, text: str, stop: str, expected: str
) -> None:
    assert "".join(pieces(word_tokenizer, tokens_of(word_tokenizer, text), stop=[stop])) == expected


def test_what_might_have_become_a_stop_string_is_given_out_when_it_did_not(word_tokenizer: Any) -> None:
    tokens = tokens_of(word_tokenizer, " the river road")
    given_out = pieces(word_tokenizer, tokens, stop=[" river rock"])
    assert given_out == [" the", "", " river road", ""]


def test_what_might_still_become_a_stop_string_is_given_out_at_the_end(word_tokenizer: Any) -> None:
    given_out = pieces(word_tokenizer, tokens_of(word_tokenizer, " the river"), stop=[" river rock"])
    assert given_out == [" the", "", " river"]


def test_after_a_stop_string_nothing_more_comes(word_tokenizer: Any) -> None:
    detokenizer = Detokenizer(word_tokenizer, (), [" river"])
    given_out = [detokenizer.add_token(token) for token in tokens_of(word_tokenizer, " the river rock road")]
    assert [*given_out, detokenizer.flush_text()] == [" the", "", "", "", ""]
    assert detokenizer.stopped


@given(text=FEW_LETTERS, stop=st.text("ab€ ", min_size=1, max_size=4), min_tokens=st.integers(0, 12))
@settings(deadline=None)
def test_a_stop_string_that_ends_within_min_tokens_ends_no_text(
    word_tokenizer: Any, text: str, stop: str, min_tokens: int
) -> None:
    tokens = tokens_of(word_tokenizer, text)
    passed_over = len("".join(pieces(word_tokenizer, tokens)[:min_tokens]))
    at = text.find(stop, max(0, passed_over - len(stop) + 1))
    expected = text if at < 0 else text[:at]
    given_out = pieces(word_tokenizer, tokens, stop=[stop], min_tokens=min_tokens)
    assert "".join(given_out) == expected


def test_a_stop_string_that_begins_within_min_tokens_and_ends_behind_them_ends_the_text(word_tokenizer: Any) -> None:
    tokens = tokens_of(word_tokenizer, " the river the river rock")
    assert pieces(word_tokenizer, tokens, stop=["e riv"], min_tokens=3) == [" th", "e river", " th", "", "", ""]


def test_a_stop_string_within_tokens_begun_elsewhere_ended_nothing_there_and_ends_nothing_here(
    word_tokenizer: Any,
) -> None:
    begun, rest = (tokens_of(word_tokenizer, text) for text in (" the river", " road river rock"))
    detokenizer = Detokenizer(word_tokenizer, (), [" river"], begun)
    assert [detokenizer.add_token(token) for token in rest] == [" road", "", ""]


@pytest.fixture(scope="module")
def fallback_tokenizer() -> Any:
    """One that knows few words and spells all else in bytes, a run of which decodes as a whole or not at all."""
    return byte_fallback_tokenizer()


@given(text=TEXT, prompt=TEXT)
@settings(deadline=None)
def test_byte_fallback_makes_up_the_whole_text_without_broken_characters(
    fallback_tokenizer: Any, text: str, prompt: str
) -> None:
    before, both = (tokens_of(fallback_tokenizer, part) for part in (prompt, prompt + text))
    given_out = pieces(fallback_tokenizer, both[len(before) :], prompt=before)
    assert not any(BROKEN in piece for piece in given_out)
    if both[: len(before)] == before:
        assert fallback_tokenizer.decode(before) + "".join(given_out) == fallback_tokenizer.decode(both)


def test_byte_fallback_gives_each_character_out_with_its_last_byte(fallback_tokenizer: Any) -> None:
    tokens = tokens_of(fallback_tokenizer, "深圳é😀€")[1:]  # without the space that it puts before a text
    expected = ["", "", "深", "", "", "圳", "", "é", "", "", "", "😀", "", "", "€", ""]
    assert pieces(fallback_tokenizer, tokens, prompt=tokens * 3) == expected


def test_byte_fallback_goes_on_after_bytes_that_are_no_character(fallback_tokenizer: Any) -> None:
    euro, the = (tokens_of(fallback_tokenizer, text)[1:] for text in ("€", "  the"))
    for count in range(1, 30):
        given_out = "".join(pieces(fallback_tokenizer, [*euro, *euro[-1:] * count, *the, *euro]))
        assert given_out.startswith("€")
        assert given_out.endswith(" the€")
        assert given_out.count(BROKEN) >= count
