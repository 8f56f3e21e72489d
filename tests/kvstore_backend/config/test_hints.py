from __future__ import annotations

from kvstore_backend.config.hints import did_you_mean


def test_a_near_name_is_offered() -> None:
    assert did_you_mean("moncake", ["mooncake", "file"]) == "; did you mean mooncake?"


def test_where_none_is_near_all_are_listed() -> None:
    assert did_you_mean("s3", iter(["mooncake", "file"])) == "; valid: mooncake, file"
