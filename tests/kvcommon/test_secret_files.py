"""Files with one token."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcommon.secret_files import read_token


def test_comments_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("# of the cluster\n\n  secret \n")
    assert read_token(path) == "secret"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"# only this", "is empty"),
        (b"two words", "must have the token as its only line, with no space in it"),
        (b"one\ntwo", "must have the token as its only line, with no space in it"),
        (b"\xff", "is not text in UTF-8"),
    ],
)
def test_a_file_without_one_token_is_refused_without_its_content(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        read_token(path)
    assert str(refused.value) == f"{path} {message}"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_token(tmp_path / "token")
