"""An engine's token usage, read from its response or replaced in it, without parsing the whole response.

It uses OpenAI's names for chat, completions and responses, and Anthropic's for messages, in which ``input_tokens`` are
only those that were neither read from a cache nor written to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

__all__ = ["TokenCount", "Usage", "read_cached_figures", "read_usage", "set_figures"]

_MARK = b'"usage"'
# Limit of the bytes to read; no engine has a longer usage.
_USAGE_BYTES = 2048
# Names, in all engines and APIs, of the numbers of prompt tokens that were cached.
_CACHED_NAME = (
    rb"(?:own_|pool_)?cached_tokens|created_cache_tokens|cache_write_tokens|cache_(?:read|creation)_input_tokens"
)
_CACHED_FIGURE = re.compile(rb'"(' + _CACHED_NAME + rb')"\s*:\s*(\d{1,15})\b')
_INPUT_FIGURE = re.compile(rb'"(input_tokens)"\s*:\s*(\d{1,15})\b')
# The ids of generated tokens, and their text, in an event of any API.
_GENERATED_IDS = re.compile(rb'(?<!prompt_)token_ids"\s*:\s*\[\s*(\d[\d,\s]*)\]')
_TEXT = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|thinking|arguments|partial_json|delta)"\s*:\s*"'
    rb'([^"\\]*(?:\\.[^"\\]*)*)"'
)
# For text without token ids. English has about four bytes per token.
_BYTES_PER_TOKEN = 4


class Usage(NamedTuple):
    """Token counts of an answer's ``usage``, as far as it has them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    own_cached_tokens: int | None = None
    """Cached tokens from the instance's own cache (the rest came from the pool). Reported by our engine only."""


_NO_FIGURES = Usage()


def read_usage(data: bytes) -> Usage | None:
    """Return the last usage in ``data``, an answer or the end of an event stream; None if there is none.

    Use the counts for statistics only: generated text that imitates a usage can falsify them.
    """
    mark = data.rfind(_MARK)
    if mark < 0:
        return None
    start = data.find(b"{", mark)
    if start < 0 or data[mark + len(_MARK) : start].strip() != b":":
        return None
    end = data.find(b"}", start) + 1
    is_flat = data.find(b"{", start + 1, end) < 0
    try:
        found = orjson.loads(data[start : end if is_flat else _find_end(data, start, end)])
    except orjson.JSONDecodeError:
        return None
    if not is_flat:
        found = _add_details(found)
    prompt, completion, cached = found.get("prompt_tokens"), found.get("completion_tokens"), found.get("cached_tokens")
    if prompt is None and "input_tokens" in found:
        read, written = found.get("cache_read_input_tokens"), found.get("cache_creation_input_tokens")
        completion, cached = found.get("output_tokens"), read if cached is None else cached
        try:
            prompt = found["input_tokens"] + (read or 0) + (written or 0)
        except TypeError:
            return None
    usage = Usage(prompt, completion, cached, found.get("own_cached_tokens"))
    for figure in usage:
        if figure is not None and (type(figure) is not int or figure < 0):
            return None
    return None if usage == _NO_FIGURES else usage


def _find_end(data: bytes, start: int, end: int) -> int:
    """Return the end of the object at ``start``, with its first nested object before ``end``; 0 if it is too far."""
    limit = start + _USAGE_BYTES
    while end and data.count(b"{", start, end) > data.count(b"}", start, end):
        end = data.find(b"}", end, limit) + 1
    return end


def _add_details(members: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a usage and those of its nested objects."""
    found = members
    for details in members.values():
        if type(details) is dict:
            found = {**found, **details}
    return found


def read_cached_figures(data: bytes) -> Mapping[bytes, bytes]:
    """Return the cached-token counts of an answer's usage, by name."""
    start = data.rfind(_MARK)
    if start < 0:
        return {}
    figures = dict(_CACHED_FIGURE.findall(data, start))
    if b"cache_read_input_tokens" in figures:
        figures.update(_INPUT_FIGURE.findall(data, start))
    return figures


def set_figures(data: bytes, figures: Mapping[bytes, bytes]) -> bytes:
    """Return an answer, or events of one, in which those ``figures`` that its usage contains have these values."""
    start = data.find(_MARK)
    if start < 0 or not figures:
        return data
    pattern = rb'("(' + b"|".join(figures) + rb')"\s*:\s*)\d{1,15}\b'
    return data[:start] + re.sub(pattern, lambda found: found[1] + figures[found[2]], data[start:])


class TokenCount:
    """Number of tokens in an event stream so far, needed while its engine has not sent its usage."""

    __slots__ = ("_by_ids", "_by_text")

    def __init__(self) -> None:
        self._by_ids = self._by_text = 0

    @property
    def tokens(self) -> int:
        """The number of token ids if the engine sends them; else an estimate from the text, at least one per event."""
        return self._by_ids or self._by_text

    def add(self, events: bytes) -> None:
        """Count the tokens of these events, as received from the engine."""
        for ids in _GENERATED_IDS.findall(events):
            self._by_ids += ids.count(b",") + 1
        if not self._by_ids:
            text = sum(map(len, _TEXT.findall(events)))
            self._by_text += max(events.count(b"data:"), text // _BYTES_PER_TOKEN)
