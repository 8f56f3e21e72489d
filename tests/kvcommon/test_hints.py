"""suggest_name: the nearest known name, or all of them."""

from __future__ import annotations

from kvcommon.hints import did_you_mean, suggest_name


def test_the_nearest_name_is_suggested() -> None:
    assert suggest_name("prot", ["host", "port"]) == "; did you mean port?"
    assert did_you_mean("prot", ["host", "port"]) == "; did you mean port?"
    assert did_you_mean("--bogus", ["--host", "--port"]) == ""


def test_without_a_near_name_all_names_or_none_are_listed() -> None:
    assert suggest_name("xyz", ["host", "port"]) == "; valid: host, port"
    assert did_you_mean("xyz", ["host", "port"]) == ""
