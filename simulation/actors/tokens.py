"""Answers that follow from the prompt: every response can be verified, wherever it was generated.

A prompt's ids are below ``FIRST_GENERATED``, generated ones are not: of a prompt that an instance gets as ids, the
generated ones at its end are those of segments before.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

__all__ = ["FIRST_GENERATED", "answer_ids", "natural_length", "prompt_ids", "split_ids", "text_of"]

FIRST_GENERATED = 100_000
_WORDS = 50_000


def prompt_ids(text: str) -> list[int]:
    """The ids of a prompt: one for each word."""
    return [1 + zlib.crc32(word.encode()) % 90_000 for word in text.split()]


def natural_length(prompt: Sequence[int]) -> int:
    """How long the answer is, unless it is limited."""
    return 2 + _draw(prompt, -1) % 40


def answer_ids(prompt: Sequence[int], start: int, end: int) -> list[int]:
    """The tokens of the answer from ``start`` to ``end``."""
    seed = _seed(prompt)
    return [FIRST_GENERATED + _draw_from(seed, position) % _WORDS for position in range(start, end)]


def text_of(ids: Sequence[int]) -> str:
    """The text of generated tokens."""
    return "".join(f" w{token}" for token in ids)


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
