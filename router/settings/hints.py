"""suggest_name: names that an operator may have meant, to stand at the end of an error's sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "find_nearest", "list_unknown", "suggest_name"]

# As near as a letter or two that are wrong, missing or swapped; --bogus is not near --host.
_NEAR = 0.65


def suggest_name(name: str, known: Iterable[str]) -> str:
    """The name among ``known`` that is nearest to ``name``; all of them where none is near."""
    return did_you_mean(name, known) or f"; known are {', '.join(known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The name among ``known`` that is nearest to ``name``; nothing where none is near."""
    near = find_nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def find_nearest(name: str, known: Iterable[str]) -> str:
    """The name among ``known`` that is nearest to ``name``; ``""`` where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_NEAR)
    return near[0] if near else ""


def list_unknown(names: Iterable[str], known: Iterable[str]) -> str:
    """Names that nobody knows, each with the nearest one that is known, to stand in a sentence."""
    nearest = [(name, find_nearest(name, known)) for name in names]
    return ", ".join(f"{name} (did you mean {near}?)" if near else name for name, near in nearest)
