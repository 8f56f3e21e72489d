"""The known name that is nearest to a mistyped one, for the end of an error's sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "find_nearest", "list_unknown", "suggest_name"]

# A letter or two are wrong, missing or swapped; --bogus is not near --host.
_NEAR = 0.65


def find_nearest(name: str, known: Iterable[str]) -> str:
    """The name among ``known`` that is nearest to ``name``; ``""`` where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_NEAR)
    return near[0] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean NEAREST?``; ``""`` where no known name is near."""
    near = find_nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def suggest_name(name: str, known: Iterable[str]) -> str:
    """As ``did_you_mean``; where no known name is near, a list of all of them."""
    known = list(known)
    return did_you_mean(name, known) or f"; valid: {', '.join(known)}"


def list_unknown(names: Iterable[str], known: Iterable[str]) -> str:
    """Unknown names, each with the nearest known one, as a part of a sentence."""
    known = list(known)
    nearest = [(name, find_nearest(name, known)) for name in names]
    return ", ".join(f"{name} (did you mean {near}?)" if near else name for name, near in nearest)
