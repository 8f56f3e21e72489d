"""An engine's token figures, read from its response, or set in it, without parsing it.

In OpenAI's names for chat and completions and for responses, and in Anthropic's for messages, whose ``input_tokens``
are those that were neither read from a cache nor written to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Usage", "read_cached_figures", "read_usage", "set_figures"]

_MARK = b'"usage"'
_FIGURE = re.compile(
    rb'"((?:prompt|completion|input|output|cached|own_cached|cache_read_input|cache_creation_input)_tokens)"'
    rb"\s*:\s*(\d{1,15})\b"
)
# Figures of how much of the prompt was cached where it was computed, by all engines and APIs.
_CACHED_NAME = (
    rb"(?:own_|pool_)?cached_tokens|created_cache_tokens|cache_write_tokens|cache_(?:read|creation)_input_tokens"
)
_CACHED_FIGURE = re.compile(rb'"(' + _CACHED_NAME + rb')"\s*:\s*(\d{1,15})\b')
_INPUT_FIGURE = re.compile(rb'"(input_tokens)"\s*:\s*(\d{1,15})\b')


class Usage(NamedTuple):
    """The figures of an answer's ``usage``, as far as it has them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    own_cached_tokens: int | None = None
    """Of the cached ones, those that the instance had itself; our engine says so."""


def read_usage(data: bytes) -> Usage | None:
    """The usage that stands last in ``data``, an answer or the end of an event stream; None where there is none.

    The figures are for measuring only: text that imitates a usage could mislead them, and nothing else.
    """
    start = data.rfind(_MARK)
    if start < 0:
        return None
    found: dict[bytes, int] = {}
    for name, figure in _FIGURE.findall(data, start):
        found[name] = int(figure)
    if not found:
        return None
    prompt, cached = found.get(b"prompt_tokens"), found.get(b"cached_tokens")
    if prompt is None and b"input_tokens" in found:
        read, written = found.get(b"cache_read_input_tokens"), found.get(b"cache_creation_input_tokens")
        prompt = found[b"input_tokens"] + (read or 0) + (written or 0)
        cached = read if cached is None else cached
    completion = found.get(b"completion_tokens", found.get(b"output_tokens"))
    return Usage(prompt, completion, cached, found.get(b"own_cached_tokens"))


def read_cached_figures(data: bytes) -> Mapping[bytes, bytes]:
    """By their names, the figures of an answer's usage that say how much of its prompt was cached."""
    start = data.rfind(_MARK)
    if start < 0:
        return {}
    figures = dict(_CACHED_FIGURE.findall(data, start))
    if b"cache_read_input_tokens" in figures:
        figures.update(_INPUT_FIGURE.findall(data, start))
    return figures


def set_figures(data: bytes, figures: Mapping[bytes, bytes]) -> bytes:
    """An answer, or events of one, with those ``figures`` that its usage has set to these values."""
    start = data.find(_MARK)
    if start < 0 or not figures:
        return data
    pattern = rb'("(' + b"|".join(figures) + rb')"\s*:\s*)\d{1,15}\b'
    return data[:start] + re.sub(pattern, lambda found: found[1] + figures[found[2]], data[start:])
