"""Detokenizer: the pieces contain the whole text, no incomplete character, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.generation.detokenizer import Detokenizer
from tests.engine.checkpoints import byte_fallback_tokenizer

BROKEN = "\ufffd"
# Whole words (one token each), parts of words, and characters of one to four bytes (one token for each byte).
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
    """Return the new text after each token, and the new text at the end."""
    detokenizer = Detokenizer(tokenizer, prompt, stop, min_tokens=min_tokens)
    return [*(detokenizer.add_token(token) for token in tokens), detokenizer.flush_text()]


@given(text=TEXT, prompt=TEXT)
@settings(deadline=None)
def test_pieces_are_the_whole_text_after_any_prompt(word_tokenizer: Any, text: str, prompt: str) -> None:
    tokens = tokens_of(word_tokenizer, text)
    output = pieces(word_tokenizer, tokens, prompt=tokens_of(word_tokenizer, prompt))
    assert "".join(output) == word_tokenizer.decode(tokens)


@given(text=TEXT)
@settings(deadline=None)
def test_no_piece_has_a_replacement_character(word_tokenizer: Any, text: str) -> None:
    assert not any(BROKEN in piece for piece in pieces(word_tokenizer, tokens_of(word_tokenizer, text)))


@given(tokens=st.lists(st.one_of(st.integers(0, 255), st.integers(0, 1500)), max_size=40))
@settings(deadline=None, max_examples=300)
def test_pieces_of_any_tokens_are_equal_to_their_decoded_text(word_tokenizer: Any, tokens: list[int]) -> None:
    whole = word_tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(word_tokenizer, tokens)) == whole


@given(text=TEXT, cut=st.integers(0, 40))
@settings(deadline=None)
def test_the_response_contains_a_character_that_begins_in_the_prompt(word_tokenizer: Any, text: str, cut: int) -> None:
    tokens = tokens_of(word_tokenizer, text)
    before = word_tokenizer.decode(tokens[:cut]).rstrip(BROKEN)
    assert before + "".join(pieces(word_tokenizer, tokens[cut:], prompt=tokens[:cut])) == word_tokenizer.decode(tokens)


@pytest.mark.parametrize("tokenizer", ["words", "byte fallback"])
def test_the_response_contains_the_character_if_the_prompt_is_only_a_part_of_it(
    word_tokenizer: Any, tokenizer: str
) -> None:
    found = word_tokenizer if tokenizer == "words" else byte_fallback_tokenizer()
    euro = tokens_of(found, "€")[-3:]
    assert "".join(pieces(found, [*euro[1:], *euro], prompt=euro[:1])) == "€€"


def test_the_replacement_character_in_a_prompt_is_a_complete_character(word_tokenizer: Any) -> None:
    prompt, answer = tokens_of(word_tokenizer, f" river{BROKEN}"), tokens_of(word_tokenizer, " the")
    assert "".join(pieces(word_tokenizer, answer, prompt=prompt)) == " the"


@given(tokens=st.lists(st.one_of(st.integers(0, 255), st.integers(0, 1500)), max_size=20), cut=st.integers(0, 20))
@settings(deadline=None)
def test_text_continues_after_the_tokens_of_another_instance(word_tokenizer: Any, tokens: list[int], cut: int) -> None:
    stops = ["ab", "riv"]
    assume(not any(stop in "".join(pieces(word_tokenizer, tokens[:cut])[:-1]) for stop in stops))
    whole = pieces(word_tokenizer, tokens, stop=stops)
    rest = Detokenizer(word_tokenizer, (), stops, tokens[:cut])
    assert [rest.add_token(token) for token in tokens[cut:]] == whole[cut:-1]
    assert rest.flush_text() == whole[-1]


def test_a_character_after_many_invalid_bytes_is_complete(word_tokenizer: Any) -> None:
    euro = tokens_of(word_tokenizer, "€")
    stray = euro[-1]  # no character begins with this byte
    for count in range(1, 30):
        tokens = [*[stray] * count, *euro, *tokens_of(word_tokenizer, " the")]
        assert "".join(pieces(word_tokenizer, tokens)) == BROKEN * count + "€ the"


def test_many_invalid_bytes_do_not_delay_the_text(word_tokenizer: Any) -> None:
    stray = tokens_of(word_tokenizer, "€")[-1]
    detokenizer = Detokenizer(word_tokenizer, ())
    assert "".join(detokenizer.add_token(stray) for _ in range(100)).count(BROKEN) > 80


def test_a_word_is_output_with_its_token(word_tokenizer: Any) -> None:
    assert pieces(word_tokenizer, tokens_of(word_tokenizer, " the river")) == [" the", " river", ""]


def test_a_character_is_output_with_its_last_byte(word_tokenizer: Any) -> None:
    assert pieces(word_tokenizer, tokens_of(word_tokenizer, "😀é")) == ["", "", "", "😀", "", "é", ""]


def test_an_incomplete_character_at_the_end_is_output_as_the_replacement_character(word_tokenizer: Any) -> None:
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
def test_the_text_contains_none_of_several_stop_strings(word_tokenizer: Any, text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(word_tokenizer, (), stop)
    output = (
        "".join(detokenizer.add_token(token) for token in tokens_of(word_tokenizer, text)) + detokenizer.flush_text()
    )
    assert detokenizer.stopped == any(one in text for one in stop)
    assert not any(one in output for one in stop)
    endings = [output + one for one in stop] if detokenizer.stopped else [text]
    assert any(text.startswith(ending) for ending in endings)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (" the river flows", " river", " the"),  # one whole token
        (" the river flows", "e riv", " th"),  # from the middle of one token to the middle of the next
        (" the 😀 river", "😀", " the "),  # a token for each byte
        ("aaab", "aab", "a"),  # a second beginning before the first one ends
        (" the river", " river", " the"),  # the very end
        ("the river", "t", ""),  # the very beginning
    ],
)
def test_stop_strings_are_found_at_any_token_boundaries(
    word_tokenizer: Any, text: str, stop: str, expected: str
) -> None:
    assert "".join(pieces(word_tokenizer, tokens_of(word_tokenizer, text), stop=[stop])) == expected


def test_the_beginning_of_a_stop_string_is_output_if_other_text_follows(word_tokenizer: Any) -> None:
    tokens = tokens_of(word_tokenizer, " the river road")
    output = pieces(word_tokenizer, tokens, stop=[" river rock"])
    assert output == [" the", "", " river road", ""]


def test_stop_strings_as_long_as_the_text_do_not_slow_each_token(word_tokenizer: Any) -> None:
    """If all text that may be the beginning of a stop string was searched for each token, this would take minutes."""
    [token] = word_tokenizer(" river")["input_ids"]
    text = " river" * 4000
    stops = [text + "#", "#" + text, *["a" + text[:8000]] * 14]
    detokenizer = Detokenizer(word_tokenizer, [1], stops)
    pieces = [detokenizer.add_token(token) for _ in range(4000)]
    assert not any(pieces)
    assert detokenizer.flush_text() == text


def test_the_beginning_of_a_stop_string_is_output_at_the_end(word_tokenizer: Any) -> None:
    output = pieces(word_tokenizer, tokens_of(word_tokenizer, " the river"), stop=[" river rock"])
    assert output == [" the", "", " river"]


def test_there_is_no_text_after_a_stop_string(word_tokenizer: Any) -> None:
    detokenizer = Detokenizer(word_tokenizer, (), [" river"])
    output = [detokenizer.add_token(token) for token in tokens_of(word_tokenizer, " the river rock road")]
    assert [*output, detokenizer.flush_text()] == [" the", "", "", "", ""]
    assert detokenizer.stopped


@given(text=FEW_LETTERS, stop=st.text("ab€ ", min_size=1, max_size=4), min_tokens=st.integers(0, 12))
@settings(deadline=None)
def test_a_stop_string_that_ends_within_min_tokens_ends_no_text(
    word_tokenizer: Any, text: str, stop: str, min_tokens: int
) -> None:
    tokens = tokens_of(word_tokenizer, text)
    num_skipped = len("".join(pieces(word_tokenizer, tokens)[:min_tokens]))
    at = text.find(stop, max(0, num_skipped - len(stop) + 1))
    expected = text if at < 0 else text[:at]
    output = pieces(word_tokenizer, tokens, stop=[stop], min_tokens=min_tokens)
    assert "".join(output) == expected


def test_a_stop_string_that_begins_within_min_tokens_and_ends_after_them_ends_the_text(word_tokenizer: Any) -> None:
    tokens = tokens_of(word_tokenizer, " the river the river rock")
    assert pieces(word_tokenizer, tokens, stop=["e riv"], min_tokens=3) == [" th", "e river", " th", "", "", ""]


def test_a_stop_string_within_the_tokens_of_another_instance_does_not_end_the_text(
    word_tokenizer: Any,
) -> None:
    earlier, rest = (tokens_of(word_tokenizer, text) for text in (" the river", " road river rock"))
    detokenizer = Detokenizer(word_tokenizer, (), [" river"], earlier)
    assert [detokenizer.add_token(token) for token in rest] == [" road", "", ""]


@pytest.fixture(scope="module")
def fallback_tokenizer() -> Any:
    """A tokenizer with few words and with bytes for the rest. Successive bytes are decoded only together."""
    return byte_fallback_tokenizer()


@given(text=TEXT, prompt=TEXT)
@settings(deadline=None)
def test_pieces_with_byte_fallback_are_the_whole_text_without_replacement_characters(
    fallback_tokenizer: Any, text: str, prompt: str
) -> None:
    before, both = (tokens_of(fallback_tokenizer, part) for part in (prompt, prompt + text))
    output = pieces(fallback_tokenizer, both[len(before) :], prompt=before)
    assert not any(BROKEN in piece for piece in output)
    if both[: len(before)] == before:
        assert fallback_tokenizer.decode(before) + "".join(output) == fallback_tokenizer.decode(both)


def test_byte_fallback_outputs_each_character_with_its_last_byte(fallback_tokenizer: Any) -> None:
    tokens = tokens_of(fallback_tokenizer, "深圳é😀€")[1:]  # without the space that the tokenizer adds before a text
    expected = ["", "", "深", "", "", "圳", "", "é", "", "", "", "😀", "", "", "€", ""]
    assert pieces(fallback_tokenizer, tokens, prompt=tokens * 3) == expected


def test_byte_fallback_continues_after_invalid_bytes(fallback_tokenizer: Any) -> None:
    euro, the = (tokens_of(fallback_tokenizer, text)[1:] for text in ("€", "  the"))
    for count in range(1, 30):
        output = "".join(pieces(fallback_tokenizer, [*euro, *euro[-1:] * count, *the, *euro]))
        assert output.startswith("€")
        assert output.endswith(" the€")
        assert output.count(BROKEN) >= count
