"""Scans a large body before it is parsed.

While a body is parsed, the router does nothing else. The time for parsing depends mainly on the number of values, less
on the number of bytes. So the router first scans a large body in pieces, and does other work between the pieces. It
refuses a body with too many values. It does not parse the middle of a very long text, which it does not need. Instances
still get the whole body.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Generator, Iterator
from typing import Any

import orjson

__all__ = ["UNCHECKED_BYTES", "BadBody", "LargeBody", "hide_escapes", "show_escapes", "weigh_values"]

UNCHECKED_BYTES = 100_000
"""Size up to which a body may be parsed without a scan."""

# Limit of the bytes that may remain for the parser after long texts were removed.
MAX_PARSED_BYTES = 6 * 1024 * 1024
# Size up to which escapes of a body are hidden in one step.
_HIDDEN_AT_ONCE = 1024 * 1024
# Size of a piece; scanning it takes a few milliseconds.
PIECE_BYTES = 128 * 1024
# In a body larger than this, long texts after the first KEPT_PIECES pieces are removed. Policies use four megabytes.
SHORTENED_BYTES = 5 * 1024 * 1024
KEPT_PIECES = 32
# Weights are times for parsing, in units of one number (orjson: about 40 ns). A member's name takes 4 units. An array
# or an object takes 6, because the garbage collector has to track it, too.
QUOTE_WEIGHT, BRACKET_WEIGHT = 2, 6
MAX_WEIGHT = 1_050_000
# Weight up to which a body is parsed in one step.
FEW_VALUES = 250_000
TOO_FINE = (
    "the body has too many values to be parsed in time; at most 1000000 numbers, 200000 strings or 120000 arrays and "
    "objects are allowed"
)
# Replacements of ``hide_escapes`` for an escaped backslash and an escaped quote: bytes that never occur in UTF-8.
_BACKSLASH, _QUOTE = b"\xff\xfd", b"\xff\xfe"
# Length of the longest escape, a surrogate pair such as \ud83d\ude00.
_ESCAPE_BYTES = 12
_ESCAPE = 0x5C
_CHARACTER_BYTES = 4
# A complete escape that is not half of a surrogate pair.
_WHOLE_ESCAPE = re.compile(rb"[^\\]\\u[0-9a-cefA-CEF][0-9a-fA-F]{3}")
# The beginning of a prompt that is an array, perhaps of token ids.
_PROMPT = re.compile(rb'"(prompt|prompt_token_ids)"[ \t\r\n]*:[ \t\r\n]*\[')
_PROMPT_BYTES = 64
# After the first KEPT_PIECES pieces, the inner part of a text of at least this length is removed.
LONG_TEXT_BYTES = 4096
# Length of the range that is searched for a position at which a text may be cut.
_SEARCHED_BYTES = 512


class BadBody(ValueError):
    """The client's body cannot be accepted. The message is one sentence; ``param`` is the wrong member, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class LargeBody:
    """A large body. ``check_values`` scans it; after that, ``shorten`` returns the bytes to parse."""

    def __init__(self, data: bytes) -> None:
        self.numbers: dict[str, list[Any]] = {}
        """Long arrays of token ids that were parsed in pieces, by member name. In the shortened body they are empty."""
        self.prompt_tokens = 0
        """Estimated number of prompt tokens, set by the caller of ``check_values``; 0 if there is no estimate."""
        self.hidden: bytes | None = None
        """The shortened body after ``hide_escapes``; None if it is so short that hiding escapes takes little time."""
        self._data = data
        # Start and end of each part to remove.
        self._cuts: list[tuple[int, int]] = []
        self._shortened: bytes | None = None
        # Start positions of the removed parts that are white space between values.
        self._blank_cuts: set[int] = set()
        # For each removed part, its position in the shortened body, and the number of bytes removed up to its end.
        self._places: list[int] = []
        self._left_out: list[int] = []

    def check_values(self) -> Iterator[None]:
        """Scan the body. Yield after each piece, so that other work can run.

        Raises:
            BadBody: the body has so many values, or so many bytes, that parsing it would block the router.
        """
        weight = yield from self._weigh_values()
        if weight > FEW_VALUES or len(self._data) > SHORTENED_BYTES:
            yield from self._parse_numbers()
        left = len(self._data) - sum(end - start for start, end in self._cuts)
        if left > MAX_PARSED_BYTES:
            raise BadBody(
                f"the body has {left} bytes outside long texts and token ids; at most {MAX_PARSED_BYTES} are allowed"
            )

        if left > _HIDDEN_AT_ONCE:
            yield from self._hide_escapes()

    def _hide_escapes(self) -> Iterator[None]:
        """Set ``self.hidden`` piece by piece, because ``hide_escapes`` takes long for a text with many escapes."""
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
        """Parse a long prompt of token ids in pieces, if the body has one. No other part of the body is parsed."""
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
                return  # an empty array, or an extra comma, which the parser will report
            numbers += parsed
            start = last + 1
            yield
        self._cuts.append((first, end))
        self._cuts.sort()
        self.numbers[found[1].decode()] = numbers

    def shorten(self) -> bytes:
        """Return the body without the removed parts: long texts have no middle, and arrays in ``numbers`` are empty."""
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
        """Convert a position in the shortened body, outside of texts, to the position in the whole body."""
        cuts_before = bisect_left(self._places, place)
        return place + self._left_out[cuts_before - 1] if cuts_before else place

    def list_cuts(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Yield start and end of each removed part between ``start`` and ``end``, and whether it is white space."""
        for number in range(bisect_left(self._cuts, (start, start)), bisect_left(self._cuts, (end, end))):
            first, last = self._cuts[number]
            yield first, last, first in self._blank_cuts

    def _check_exactly(self) -> Generator[None, None, int]:
        """Scan the body like ``weigh_values``, but only outside of texts. Store which parts of texts can be removed."""
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
        """Store which parts to remove: the middle of each long text, and most of a long white space.

        Args:
            start: position of the first of ``parts`` in the body.
            parts: a piece of the body, split at its quotes.
            is_text: whether the first of ``parts`` is inside a text.
        """
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
    """Estimate the time to parse a part of a body; 1 is the time for a number. JSON within a text counts, too."""
    brackets = data.count(b"[", start, end) + data.count(b"{", start, end)
    quotes = data.count(b'"', start, end)
    return data.count(b",", start, end) + QUOTE_WEIGHT * quotes + BRACKET_WEIGHT * brackets


def hide_escapes(data: bytes) -> bytes:
    """Replace escaped quotes and backslashes in JSON by other bytes of the same length. ``show_escapes`` undoes it.

    After that, the pattern ``"[^"]*"`` matches each string. A pattern that handles escapes itself needs 60 bytes of
    state for each escape: gigabytes for the longest bodies.
    """
    if b"\\" not in data:  # most bodies have no escape, and each replacement would scan the body
        return data
    return data.replace(b"\\\\", _BACKSLASH).replace(b'\\"', _QUOTE)


def show_escapes(data: bytes) -> bytes:
    """Undo ``hide_escapes``."""
    if b"\xff" not in data:
        return data
    return data.replace(_QUOTE, b'\\"').replace(_BACKSLASH, b"\\\\")


def _find_end(data: bytes, start: int) -> tuple[int, bool]:
    """Return the end of the piece that begins at ``start``, and whether a text may be cut there.

    The end is never within an escape. A text may be cut there if the end is also not within a character of several
    bytes, and not between the two escapes of a surrogate pair.
    """
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
    """Return a position in the range that is certainly not within a character or an escape; 0 if there is none."""
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
