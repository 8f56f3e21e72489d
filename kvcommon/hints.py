"""Suggests the nearest known name for a mistyped name, for error messages."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping

__all__ = ["did_you_mean", "find_nearest", "list_flags", "list_unknown", "suggest_name"]

# This accepts one or two letters that are wrong, missing or swapped; --bogus is not near --host.
_NEAR = 0.65


def find_nearest(name: str, known: Iterable[str]) -> str:
    """Return the name in ``known`` that is most similar to ``name``; ``""`` if none is similar enough."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_NEAR)
    return near[0] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message, ``; did you mean NEAREST?``; ``""`` if no known name is similar."""
    near = find_nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: ``; did you mean NEAREST?``, or all known names if none is similar."""
    known = list(known)
    return did_you_mean(name, known) or f"; valid: {', '.join(known)}"


def list_unknown(names: Iterable[str], known: Iterable[str]) -> str:
    """Join unknown names with commas, each with the most similar known name: ``hots (did you mean host?), abc``."""
    known = list(known)
    nearest = [(name, find_nearest(name, known)) for name in names]
    return ", ".join(f"{name} (did you mean {near}?)" if near else name for name, near in nearest)


def list_flags(parser: argparse.ArgumentParser) -> Mapping[str, argparse.Action]:
    """Return argparse's action of each flag, by the flag's text. (argparse has only a private member for this.)"""
    return parser._option_string_actions
