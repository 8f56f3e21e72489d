"""Files with one token: no message repeats their content."""

from __future__ import annotations

from pathlib import Path

__all__ = ["read_lines", "read_token"]


def read_lines(path: Path) -> list[str]:
    """The lines of a file that are neither empty nor a comment.

    Raises:
        ValueError: the file cannot be read, in one sentence that begins with its path.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ValueError(f"{path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ValueError(f"{path} is not text in UTF-8") from exc
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def read_token(path: Path) -> str:
    """The token in a file of its own.

    Raises:
        ValueError: the file cannot be read, or has more than one word; in one sentence that begins with its path.
    """
    words = [word for line in read_lines(path) for word in line.split()]
    if not words:
        raise ValueError(f"{path} is empty")
    if len(words) != 1:
        raise ValueError(f"{path} must have the token as its only line, with no space in it")
    return words[0]
