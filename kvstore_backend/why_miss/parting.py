"""First difference of two prompts, and the kind of text there: a timestamp, a counter, white space, or other text.

A block's hash covers all tokens before it, so everything after the first token that differs is a miss. That token alone
seldom explains the difference: a clock in the system prompt changes one digit. So this module looks at the text around
it, and names its kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "OTHER_TEXT",
    "Parting",
    "compare_texts",
    "count_common",
    "describe_parting",
    "find_message",
    "find_suspect",
    "hide_words",
]

OTHER_TEXT = "other text"
"""Kind of a difference that is none of the usual ones."""

_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_PATTERNS = {
    "a UUID": re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"),
    "a timestamp": re.compile(
        r"\d{4}-\d\d-\d\d[T ]+\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z| ?[+-]\d\d:?\d\d)?"
        r"|(?<![\w.])1\d{9}(?:\.\d+|\d{3})?(?![\w])"
    ),
    "a date": re.compile(
        rf"\d{{4}}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{{2,4}}"
        rf"|(?:{_MONTHS})[a-z]*\.? \d\d?(?:(?:st|nd|rd|th)?,? \d{{4}})?|\d\d? (?:{_MONTHS})[a-z]*(?: \d{{4}})?"
    ),
    "a time of day": re.compile(r"(?<!\d)\d\d?:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp][Mm])?"),
    "a random id": re.compile(r"(?<![\w-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{10,}(?![\w-])"),
}
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\S+")
_WORD_OR_SPACE = re.compile(r"\S+|\s+")
# Two numbers with at most this difference are taken for a counter's.
_COUNTER_STEP = 1000
_SHOWN_CHARACTERS = 48
# Enough tokens to the left for the longest pattern, even if every character is one token.
_TOKENS_BEFORE, _TOKENS_BEHIND = 96, 64
_SAME_AGAIN = 12


@dataclass(frozen=True)
class Parting:
    """First difference of a prompt from a stored one.

    Attributes:
        token: index of the first token that differs.
        kind: kind of the difference, such as ``a timestamp``; ``OTHER_TEXT`` if it is none of the usual ones.
        stored: the word there in the stored prompt, shortened; empty: it ends there.
        asked: the word there in the new prompt.
        is_edit: whether the prompts are equal again after it, or its kind is a usual one; otherwise only their
            beginnings are equal.
    """

    token: int
    kind: str
    stored: str
    asked: str
    is_edit: bool


def count_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens two prompts have in common."""
    length = min(len(first), len(second))
    differs = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(differs.argmax()) if differs.any() else length


def describe_parting(
    stored: Sequence[int], asked: Sequence[int], decode: Callable[[Sequence[int]], str] | None = None
) -> Parting:
    """Describe where and how two prompts differ first.

    Args:
        stored: the tokens of an earlier prompt.
        asked: the tokens of the prompt that was a miss.
        decode: tokens -> text, special ones too; None: there is no tokenizer.
    """
    token = count_common(stored, asked)
    if token == min(len(stored), len(asked)):
        ended = "the stored prompt ends there" if len(stored) <= len(asked) else "the asked prompt ends there"
        return Parting(token, ended, "", "", is_edit=True)
    if decode is None:
        return Parting(token, f"token {stored[token]} became {asked[token]}", "", "", is_edit=token > 0)
    first, end = max(0, token - _TOKENS_BEFORE), token + _TOKENS_BEHIND
    kind, was, now, is_edit = compare_texts(decode(stored[first:end]), decode(asked[first:end]))
    return Parting(token, kind, _shorten(was), _shorten(now), is_edit)


def compare_texts(stored: str, asked: str) -> tuple[str, str, str, bool]:
    """Return the kind of the first difference of two texts, the words there in each, and whether it is an edit.

    The two texts usually have equal beginnings.
    """
    place = next((i for i, pair in enumerate(zip(stored, asked, strict=False)) if pair[0] != pair[1]), None)
    if place is None:  # tokens may differ where texts are equal
        return "other tokens of the same text", "", "", True
    for kind, pattern in _PATTERNS.items():
        was, now = _match_at(pattern, stored, place), _match_at(pattern, asked, place)
        if was and now:
            return kind, was, now, True
    was, now = _match_at(_NUMBER, stored, place), _match_at(_NUMBER, asked, place)
    if was and now and len(was) < 19 and len(now) < 19:
        is_counter = abs(int(was) - int(now)) <= _COUNTER_STEP
        return "a counter" if is_counter else "a number", was, now, True
    words = _word_at(stored, place), _word_at(asked, place)
    if "".join(stored[place:].split())[:_SAME_AGAIN] == "".join(asked[place:].split())[:_SAME_AGAIN]:
        return "white space", *words, True
    if stored[place:].casefold()[:_SAME_AGAIN] == asked[place:].casefold()[:_SAME_AGAIN]:
        return "upper and lower case", *words, True
    return OTHER_TEXT, *words, _agrees_again(stored[place:], asked[place:])


def find_suspect(text: str, start: int = 0, end: int | None = None) -> tuple[str, str] | None:
    """Find the first part of a text that is probably new in every request: its kind and text; None: there is none.

    Args:
        start: the part must reach into the characters from here on ...
        end: ... and begin before here; None: anywhere.
    """
    found = [
        (match.start(), order, kind, match[0])
        for order, (kind, pattern) in enumerate(_PATTERNS.items())
        for match in pattern.finditer(text)
        if match.end() > start and (end is None or match.start() < end)
    ]
    return min(found)[2:] if found else None


def find_message(messages: Sequence[tuple[str, str]], text: str, place: int) -> tuple[int, str] | None:
    """Return the number, from 1 on, and the role of the message at ``place`` of a rendered prompt.

    Args:
        messages: role and text of each.
        text: the prompt, as a chat template rendered it.
        place: index of a character.

    Returns:
        None if the template has put its own text before the first message that was found.
    """
    found, begin = None, 0
    for number, (role, content) in enumerate(messages, 1):
        start = text.find(content.strip(), begin)
        if start < 0:
            continue
        if start > place:
            break
        found, begin = (number, role), start + len(content.strip())
    return found


def hide_words(text: str) -> str:
    """Return the shape of a text that not every reader may see: ``2026-11-22 Ann`` becomes ``0000-00-00 Aaa``."""
    return "".join(_shapes(text))


def _shapes(text: str) -> Iterator[str]:
    for character in text:
        if character.isdigit():
            yield "0"
        elif character.isalpha():
            yield "A" if character.isupper() else "a"
        else:
            yield character if character.isascii() and character.isprintable() else "?"


def _match_at(pattern: re.Pattern[str], text: str, place: int) -> str:
    """Return the longest match of the pattern around ``place``; empty: none."""
    found = (match[0] for match in pattern.finditer(text) if match.start() <= place < match.end() + 1)
    return max(found, key=len, default="")


def _word_at(text: str, place: int) -> str:
    """Return the word, or the white space, at ``place``."""
    return next((match[0] for match in _WORD_OR_SPACE.finditer(text) if match.start() <= place < match.end()), "")


def _agrees_again(stored: str, asked: str) -> bool:
    """Return whether the texts are equal again after a word or two that differ."""
    rest = " ".join(asked.split())
    ends = [match.end() for match in list(_WORD.finditer(stored))[:4]]
    tails = (" ".join(stored[end:].split())[: 2 * _SAME_AGAIN] for end in ends)
    return any(len(tail) >= _SAME_AGAIN and tail in rest for tail in tails)


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
