"""Reads files with secrets. No error message contains text from such a file."""

from __future__ import annotations

from pathlib import Path

__all__ = ["read_lines", "read_token"]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, without empty lines and comments (lines that begin with ``#``).

    Raises:
        ValueError: the file cannot be read; the message is one sentence that begins with the file's path.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ValueError(f"{path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ValueError(f"{path} is not text in UTF-8") from exc
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def read_token(path: Path) -> str:
    """Return the only word of a file, which is a secret token.

    Raises:
        ValueError: the file cannot be read, is empty, or has more than one word; the message is one sentence that
            begins with the file's path.
    """
    words = [word for line in read_lines(path) for word in line.split()]
    if not words:
        raise ValueError(f"{path} is empty")
    if len(words) != 1:
        raise ValueError(f"{path} must have the token as its only line, with no space in it")
    return words[0]
