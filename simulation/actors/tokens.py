"""Computes the answer to a prompt. The answer depends only on the prompt, so every response can be verified.

The token ids of prompts are below ``FIRST_GENERATED``, and those of answers are not. So if an instance gets a prompt as
token ids, the generated tokens at its end are those of earlier response segments. Some tokens are only a part of a
character; the next token has the rest.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

__all__ = ["FIRST_GENERATED", "answer_ids", "count_unfinished", "natural_length", "prompt_ids", "split_ids", "text_of"]

FIRST_GENERATED = 100_000
_WORDS = 50_000
# First ids of tokens with the first two bytes of a character and of tokens with its last byte, and their number.
_FIRST_HALVES, _SECOND_HALVES, _HALVES = 200_000, 300_000, 10_000
_FIRST_CHARACTER = 0x4E00


def prompt_ids(text: str) -> list[int]:
    """Return the token ids of a prompt: one for each word."""
    return [1 + zlib.crc32(word.encode()) % 90_000 for word in text.split()]


def natural_length(prompt: Sequence[int]) -> int:
    """Return the number of tokens of the answer without a limit."""
    return 2 + _draw(prompt, -1) % 40


def answer_ids(prompt: Sequence[int], start: int, end: int) -> list[int]:
    """Return the tokens of the answer from index ``start`` to before ``end``."""
    seed = _seed(prompt)
    return [_choose(seed, position) for position in range(start, end)]


def _choose(seed: bytes, position: int) -> int:
    first = _draw_from(seed, position - position % 2)
    if first % 5 == 0:  # the tokens at these two positions are one character
        return (_SECOND_HALVES if position % 2 else _FIRST_HALVES) + first % _HALVES
    return FIRST_GENERATED + _draw_from(seed, position) % _WORDS


def text_of(ids: Sequence[int]) -> str:
    """Return the text of generated tokens. For an incomplete character it has U+FFFD, as with engines' tokenizers."""
    return b"".join(map(_bytes_of, ids)).decode(errors="replace")


def count_unfinished(ids: Sequence[int]) -> int:
    """Return the number of last tokens that are an incomplete character: 0 or 1."""
    return int(bool(ids) and _FIRST_HALVES <= ids[-1] < _FIRST_HALVES + _HALVES)


def _bytes_of(token: int) -> bytes:
    for start, part in ((_FIRST_HALVES, slice(0, 2)), (_SECOND_HALVES, slice(2, 3))):
        if start <= token < start + _HALVES:
            return chr(_FIRST_CHARACTER + token - start).encode()[part]
    return f" w{token}".encode()


def split_ids(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt itself, and those of the generated tokens after it."""
    for position, token in enumerate(ids):
        if token >= FIRST_GENERATED:
            return list(ids[:position]), list(ids[position:])
    return list(ids), []


def _seed(prompt: Sequence[int]) -> bytes:
    return hashlib.blake2b(repr(list(prompt)).encode(), digest_size=16).digest()


def _draw(prompt: Sequence[int], position: int) -> int:
    return _draw_from(_seed(prompt), position)


def _draw_from(seed: bytes, position: int) -> int:
    return int.from_bytes(hashlib.blake2b(seed + str(position).encode(), digest_size=6).digest(), "big")
