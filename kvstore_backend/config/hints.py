"""The end of sentences that say which name was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["instead"]


def instead(name: str, valid: Iterable[str]) -> str:
    """The end of a sentence on an unknown ``name``: the one that was meant, or all there are."""
    valid = list(valid)
    if near := difflib.get_close_matches(name, valid, 1):
        return f"; did you mean {near[0]}?"
    return f"; valid: {', '.join(valid)}"
