"""Answers that follow from the prompt: every response can be verified, wherever it was generated.

A prompt's ids are below ``FIRST_GENERATED``, generated ones are not: of a prompt that an instance gets as ids, the
generated ones at its end are those of segments before. Some tokens end within a character, which the next one ends.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

__all__ = ["FIRST_GENERATED", "answer_ids", "count_unfinished", "natural_length", "prompt_ids", "split_ids", "text_of"]

FIRST_GENERATED = 100_000
_WORDS = 50_000
# Tokens with the first two bytes of a character, and with its last one.
_FIRST_HALVES, _SECOND_HALVES, _HALVES = 200_000, 300_000, 10_000
_FIRST_CHARACTER = 0x4E00


def prompt_ids(text: str) -> list[int]:
    """The ids of a prompt: one for each word."""
    return [1 + zlib.crc32(word.encode()) % 90_000 for word in text.split()]


def natural_length(prompt: Sequence[int]) -> int:
    """How long the answer is, unless it is limited."""
    return 2 + _draw(prompt, -1) % 40


def answer_ids(prompt: Sequence[int], start: int, end: int) -> list[int]:
    """The tokens of the answer from ``start`` to ``end``."""
    seed = _seed(prompt)
    return [_choose(seed, position) for position in range(start, end)]


def _choose(seed: bytes, position: int) -> int:
    first = _draw_from(seed, position - position % 2)
    if first % 5 == 0:  # these two positions have one character
        return (_SECOND_HALVES if position % 2 else _FIRST_HALVES) + first % _HALVES
    return FIRST_GENERATED + _draw_from(seed, position) % _WORDS


def text_of(ids: Sequence[int]) -> str:
    """The text of generated tokens; half a character is a mark, as engines' tokenizers have it."""
    return b"".join(map(_bytes_of, ids)).decode(errors="replace")


def count_unfinished(ids: Sequence[int]) -> int:
    """How many of the last tokens have no text yet, because a character goes on behind them."""
    return int(bool(ids) and _FIRST_HALVES <= ids[-1] < _FIRST_HALVES + _HALVES)


def _bytes_of(token: int) -> bytes:
    for start, part in ((_FIRST_HALVES, slice(0, 2)), (_SECOND_HALVES, slice(2, 3))):
        if start <= token < start + _HALVES:
            return chr(_FIRST_CHARACTER + token - start).encode()[part]
    return f" w{token}".encode()


def split_ids(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """The prompt's own ids, and the generated ones behind them."""
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
