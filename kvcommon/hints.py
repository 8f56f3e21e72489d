"""Suggestions for mistyped names: the nearest known name, to append to an error message."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping

__all__ = ["did_you_mean", "find_nearest", "list_flags", "list_unknown", "suggest_name"]

# Accepts one or two letters that are wrong, missing or swapped; --bogus is not near --host.
_NEAR = 0.65


def find_nearest(name: str, known: Iterable[str]) -> str:
    """Return the name in ``known`` that is nearest to ``name``; ``""`` if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_NEAR)
    return near[0] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean NEAREST?``; ``""`` if no known name is near."""
    near = find_nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the same as ``did_you_mean``, or a list of all known names if none is near."""
    known = list(known)
    return did_you_mean(name, known) or f"; valid: {', '.join(known)}"


def list_unknown(names: Iterable[str], known: Iterable[str]) -> str:
    """List unknown names for a sentence, each with the nearest known name."""
    known = list(known)
    nearest = [(name, find_nearest(name, known)) for name in names]
    return ", ".join(f"{name} (did you mean {near}?)" if near else name for name, near in nearest)


def list_flags(parser: argparse.ArgumentParser) -> Mapping[str, argparse.Action]:
    """Return the flags of a parser with their actions; argparse has no public way to list them."""
    return parser._option_string_actions
