"""An engine's token figures, read from its response without parsing it."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Usage", "read_usage"]

_MARK = b'"usage"'
_FIGURE = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens|own_cached_tokens)"\s*:\s*(\d{1,15})\b')


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
    found: dict[str, int] = {}
    for name, figure in _FIGURE.findall(data, start):
        found[name.decode()] = int(figure)
    return Usage(**found) if found else None
