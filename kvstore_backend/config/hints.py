"""The end of sentences about a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]

# As near as a letter or two that are wrong, missing or swapped; --bogus is not near --host.
_NEAR = 0.65


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The end of a sentence on an unknown ``name``: the valid one that is nearest, or all there are."""
    valid = list(valid)
    if near := difflib.get_close_matches(name, valid, 1, _NEAR):
        return f"; did you mean {near[0]}?"
    return f"; valid: {', '.join(valid)}"
