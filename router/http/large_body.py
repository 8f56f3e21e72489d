"""Scan of large bodies before they are parsed.

Parsing blocks everything else in the router. Its time depends mainly on the number of values, then on the number of
bytes. So a large body is scanned in pieces, and other work can run between them. It is refused if it has too many
values. Most of any very long text, which the router does not need, is removed before parsing. Instances get the whole
body.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Generator, Iterator
from typing import Any

import orjson

__all__ = ["UNCHECKED_BYTES", "BadBody", "LargeBody", "hide_escapes", "show_escapes", "weigh_values"]

UNCHECKED_BYTES = 100_000
"""Bodies up to this size may be parsed directly."""

# Limit of the bytes to parse that remain of a larger body after removing its long texts.
MAX_PARSED_BYTES = 6 * 1024 * 1024
# Maximum size of a body in which escapes are hidden in one step.
_HIDDEN_AT_ONCE = 1024 * 1024
# Scanning this much takes a few milliseconds.
PIECE_BYTES = 128 * 1024
# In larger bodies, texts are removed beyond the first pieces; policies use four megabytes.
SHORTENED_BYTES = 5 * 1024 * 1024
KEPT_PIECES = 32
# orjson takes about 40 ns for a number, 4 times that for a member's name, and 6 times for an array or an object, which
# the garbage collector has to track, too.
QUOTE_WEIGHT, BRACKET_WEIGHT = 2, 6
MAX_WEIGHT = 1_050_000
# Up to this number, everything is parsed in one step.
FEW_VALUES = 250_000
TOO_FINE = (
    "the body is divided too finely to be parsed in time: of numbers alone it may have 1000000, of strings 200000, of "
    "arrays and objects 120000"
)
# Replacements for an escaped backslash and an escaped quote while these are hidden: bytes that never occur in UTF-8.
_BACKSLASH, _QUOTE = b"\xff\xfd", b"\xff\xfe"
# The longest escape, a surrogate pair: \ud83d\ude00.
_ESCAPE_BYTES = 12
_ESCAPE = 0x5C
_CHARACTER_BYTES = 4
# A complete escape that is not half of a surrogate pair.
_WHOLE_ESCAPE = re.compile(rb"[^\\]\\u[0-9a-cefA-CEF][0-9a-fA-F]{3}")
# The beginning of a prompt that may be token ids.
_PROMPT = re.compile(rb'"(prompt|prompt_token_ids)"[ \t\r\n]*:[ \t\r\n]*\[')
_PROMPT_BYTES = 64
# Beyond the retained pieces, the inner part of a text of at least this length is removed.
LONG_TEXT_BYTES = 4096
# Length of the range that is searched for a position at which a text may be cut.
_SEARCHED_BYTES = 512


class BadBody(ValueError):
    """The client's body cannot be served. The message is one sentence; ``param`` is the wrong member, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class LargeBody:
    """A body to scan with ``check_values``; then ``shorten`` returns the part to parse."""

    def __init__(self, data: bytes) -> None:
        self.numbers: dict[str, list[Any]] = {}
        """Long arrays that were parsed in pieces, by name. ``shorten`` leaves them empty."""
        self.prompt_tokens = 0
        """Estimated prompt tokens, set by the code that scanned it; 0 if there is no estimate."""
        self.hidden: bytes | None = None
        """The shortened body with its escapes hidden, if it is still long."""
        self._data = data
        self._cuts: list[tuple[int, int]] = []
        self._shortened: bytes | None = None
        # Start positions of the cuts that are white space between values.
        self._blank_cuts: set[int] = set()
        # For each cut, its position in the shortened body, and the number of bytes removed up to there.
        self._places: list[int] = []
        self._left_out: list[int] = []

    def check_values(self) -> Iterator[None]:
        """Scan the body; yield after each piece so that other work can run.

        Raises:
            BadBody: it has so many values that parsing it would block the router.
        """
        weight = yield from self._weigh_values()
        if weight > FEW_VALUES or len(self._data) > SHORTENED_BYTES:
            yield from self._parse_numbers()
        left = len(self._data) - sum(end - start for start, end in self._cuts)
        if left > MAX_PARSED_BYTES:
            raise BadBody(
                f"the body has {left} bytes that are no long texts and no token ids; it may have {MAX_PARSED_BYTES}"
            )

        if left > _HIDDEN_AT_ONCE:
            yield from self._hide_escapes()

    def _hide_escapes(self) -> Iterator[None]:
        """Compute ``hidden`` in pieces, because a text full of escapes takes long."""
        data, start = self.shorten(), 0
        pieces = []
        while start < len(data):
            yield
            end, _ = _find_end(data, start)
            pieces.append(hide_escapes(data[start:end]))
            start = end
        yield
        self.hidden = b"".join(pieces)

    def _weigh_values(self) -> Generator[None, None, int]:
        data, weight = self._data, 0
        if len(data) > SHORTENED_BYTES:
            return (yield from self._check_exactly())
        for start in range(0, len(data), PIECE_BYTES):
            weight += weigh_values(data, start, start + PIECE_BYTES)
            if weight > MAX_WEIGHT:
                return (yield from self._check_exactly())
            yield
        return weight

    def _parse_numbers(self) -> Iterator[None]:
        """Parse a long prompt of token ids in pieces, if there is one, and no other part of the body."""
        data = self._data
        for start in range(0, len(data), PIECE_BYTES):
            found = _PROMPT.search(data, start, start + PIECE_BYTES + _PROMPT_BYTES)
            yield
            if found is not None:
                break
        else:
            return
        first = start = found.end()
        end = data.find(b"]", first)
        if end < 0 or data.find(b'"', first, end) >= 0:
            return
        numbers: list[Any] = []
        while start < end:
            comma = data.find(b",", start + PIECE_BYTES, end)
            last = end if comma < 0 else comma
            try:
                parsed = orjson.loads(b"[%s]" % data[start:last])
            except orjson.JSONDecodeError:
                return
            if not parsed or last == end - 1:
                return  # there is a comma too many, or nothing at all: the parser will report it
            numbers += parsed
            start = last + 1
            yield
        self._cuts.append((first, end))
        self._cuts.sort()
        self.numbers[found[1].decode()] = numbers

    def shorten(self) -> bytes:
        """Return the body without the removed parts: the values are equal, but long texts lack their inner part."""
        if not self._cuts:
            return self._data
        if self._shortened is None:
            view, kept, end, place = memoryview(self._data), [], 0, 0
            for first, last in self._cuts:
                kept.append(view[end:first])
                place += first - end
                self._places.append(place)
                self._left_out.append(last - place)
                end = last
            self._shortened = b"".join((*kept, view[end:]))
        return self._shortened

    def find_place(self, place: int) -> int:
        """Convert a position in the shortened body, outside of texts, to the position in the body."""
        cuts_before = bisect_left(self._places, place)
        return place + self._left_out[cuts_before - 1] if cuts_before else place

    def list_cuts(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Yield start and end of each removed part between two positions, and whether it is white space."""
        for number in range(bisect_left(self._cuts, (start, start)), bisect_left(self._cuts, (end, end))):
            first, last = self._cuts[number]
            yield first, last, first in self._blank_cuts

    def _check_exactly(self) -> Generator[None, None, int]:
        """Count only commas, brackets and quotes outside of texts; and note which texts can be cut."""
        data, size = self._data, len(self._data)
        weight, start, in_text, is_clean = 0, 0, False, False
        while start < size:
            end, ends_clean = _find_end(data, start)
            piece = hide_escapes(data[start:end])
            if weight + QUOTE_WEIGHT * piece.count(b'"') > MAX_WEIGHT:
                raise BadBody(TOO_FINE)
            parts = piece.split(b'"')
            is_beyond = size > SHORTENED_BYTES and start >= KEPT_PIECES * PIECE_BYTES
            if in_text and len(parts) == 1:  # the whole piece is inside a text
                if is_beyond and is_clean and ends_clean:
                    self._cuts.append((start, end))
            else:
                outside = b"".join(parts[in_text::2])
                weight += QUOTE_WEIGHT * (len(parts) - 1) + weigh_values(outside, 0, len(outside))
                if is_beyond:
                    self._cut_within(start, parts, in_text)
                in_text ^= len(parts) % 2 == 0
            if weight > MAX_WEIGHT:
                raise BadBody(TOO_FINE)
            start, is_clean = end, ends_clean
            yield
        return weight

    def _cut_within(self, start: int, parts: list[bytes], is_text: bool) -> None:
        """Note the inner part of each long text and white space, in a piece that was split at its quotes."""
        data = self._data
        for part in parts:
            end = start + len(part)
            if len(part) >= LONG_TEXT_BYTES:
                if is_text:
                    first = _find_seam(data, start + _SEARCHED_BYTES, start + 2 * _SEARCHED_BYTES)
                    last = _find_seam(data, end - 2 * _SEARCHED_BYTES, end - _SEARCHED_BYTES)
                    if first and first < last:
                        self._cuts.append((first, last))
                elif not part.strip(b" \t\r\n"):
                    self._cuts.append((start + 1, end))
                    self._blank_cuts.add(start + 1)
            start, is_text = end + 1, not is_text


def weigh_values(data: bytes, start: int, end: int) -> int:
    """Estimate the time to parse a part of a body, in units of one number; too high if texts contain JSON."""
    brackets = data.count(b"[", start, end) + data.count(b"{", start, end)
    quotes = data.count(b'"', start, end)
    return data.count(b",", start, end) + QUOTE_WEIGHT * quotes + BRACKET_WEIGHT * brackets


def hide_escapes(data: bytes) -> bytes:
    """Replace escaped quotes and backslashes in JSON by as many bytes, so that each string matches ``"[^"]*"``.

    A pattern that handles the escapes itself needs 60 bytes of state for each: gigabytes for the longest bodies.
    """
    if b"\\" not in data:  # most bodies have none, and each replacement would scan them
        return data
    return data.replace(b"\\\\", _BACKSLASH).replace(b'\\"', _QUOTE)


def show_escapes(data: bytes) -> bytes:
    """Undo ``hide_escapes``."""
    if b"\xff" not in data:
        return data
    return data.replace(_QUOTE, b'\\"').replace(_BACKSLASH, b"\\\\")


def _find_end(data: bytes, start: int) -> tuple[int, bool]:
    """Return the end of a piece, outside of escapes; and whether it is outside of characters and pairs of escapes."""
    end = start + PIECE_BYTES
    if end >= len(data):
        return len(data), False
    piece = data[start:end]
    end += (len(piece) - len(piece.rstrip(b"\\"))) % 2
    for _ in range(_CHARACTER_BYTES):
        end += not _begins_character(data, end)
    if b"\\u" not in data[end - _ESCAPE_BYTES : end] and _begins_character(data, end):
        return end, True
    last = min(end + _SEARCHED_BYTES, len(data) - 1)
    seam = _find_seam(data, end, last)
    return (seam, True) if seam else (end, False)


def _find_seam(data: bytes, start: int, end: int) -> int:
    """Return a position in the range that is certainly not within a character or an escape; 0 if none is found."""
    found = _WHOLE_ESCAPE.search(data, start, end)
    if found is not None and _begins_character(data, found.end()):
        return found.end()
    for place in range(start, end):
        before = data[place - _ESCAPE_BYTES : place]
        if b"\\u" not in before and before[-1] != _ESCAPE and _begins_character(data, place):
            return place
    return 0


def _begins_character(data: bytes, place: int) -> bool:
    return place >= len(data) or data[place] & 0xC0 != 0x80
