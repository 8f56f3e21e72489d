"""Files with secrets: the admin token in one, the API keys of clients in another. No message repeats a secret."""

from __future__ import annotations

from pathlib import Path

import yaml

from router.settings.router_settings import SettingsError

__all__ = ["read_keys", "read_token"]


def read_keys(path: Path, setting: str) -> dict[str, str]:
    """Names and keys of a file with ``name: key`` or one key a line; holders without a name are ``key1`` and so on.

    Raises:
        SettingsError: the file cannot be read, or is not of this form; it names ``setting``.
    """
    lines = _read_lines(path, setting)
    if not any(":" in line for line in lines):
        pairs = [(f"key{number}", key.strip()) for number, key in enumerate(lines, start=1)]
    else:
        pairs = _parse_pairs("\n".join(lines), path, setting)
    names: dict[str, str] = {}
    holders: dict[str, str] = {}
    for name, key in pairs:
        if not key or any(character.isspace() for character in key):
            raise SettingsError(f"{setting} {path}: the key of {name!r} is empty or has a space in it")
        if name in names:
            raise SettingsError(f"{setting} {path}: the name {name!r} stands there twice")
        if key in holders:
            raise SettingsError(f"{setting} {path}: {holders[key]!r} and {name!r} have the same key")
        names[name], holders[key] = key, name
    return names


def _parse_pairs(text: str, path: Path, setting: str) -> list[tuple[str, str]]:
    # Composed, not loaded: loading would make a number of key 1234, and drop a name that stands there twice. YAML's own
    # message quotes the faulty line, and so the key; hence it is not repeated here.
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if isinstance(node, yaml.MappingNode) and all(
        isinstance(part, yaml.ScalarNode) for entry in node.value for part in entry
    ):
        return [(name.value, key.value) for name, key in node.value]
    raise SettingsError(f"{setting} {path} must have lines 'name: key', or one key a line and no ':' anywhere")


def read_token(path: Path, setting: str) -> str:
    """The token in a file of its own.

    Raises:
        SettingsError: the file cannot be read, or has anything beside one word; it names ``setting``.
    """
    lines = _read_lines(path, setting)
    if len(lines) != 1 or len(lines[0].split()) != 1:
        raise SettingsError(f"{setting} {path} must have the token as its only line, with no space in it")
    return lines[0].strip()


def _read_lines(path: Path, setting: str) -> list[str]:
    """The lines of the file that are neither empty nor a comment, at least one."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"{setting} {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{setting} {path} is not text in UTF-8") from exc
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise SettingsError(f"{setting} {path} is empty")
    return lines
