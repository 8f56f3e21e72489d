"""Files with secrets: the admin token in one, the API keys of clients in another. No message contains a secret.

A file of keys has one key per line, or YAML's ``name: key``. A client's limit and priority are next to the key, as in
``name: {key: KEY, tokens_per_sec: 500, priority: -5}``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from kvcommon import secret_files
from router.settings.router_settings import SettingsError

__all__ = ["PRIORITIES", "ApiKey", "parse_priority", "read_keys", "read_token", "stamp_file"]

PRIORITIES = range(-10, 11)
"""Allowed priorities; higher values come first."""


class ApiKey(NamedTuple):
    """A client's key, limit and priority."""

    key: str
    tokens_per_sec: float | None = None
    """Tokens per second. None: the common setting; 0: no limit."""
    priority: int = 0


_MEMBERS = ApiKey._fields


def read_keys(path: Path, setting: str) -> dict[str, ApiKey]:
    """Return the keys of a file with ``name: key`` or one key per line, by name; default names are ``key1``, ...

    Raises:
        SettingsError: the file cannot be read, or has another format; the message names ``setting``.
    """
    lines = _read_lines(path, setting)
    if not any(":" in line for line in lines):
        pairs = [(f"key{number}", ApiKey(key.strip())) for number, key in enumerate(lines, start=1)]
    else:
        pairs = _parse_pairs("\n".join(lines), path, setting)
    names: dict[str, ApiKey] = {}
    holders: dict[str, str] = {}
    for name, entry in pairs:
        key = entry.key
        if not key or any(character.isspace() for character in key):
            raise SettingsError(f"{setting} {path}: the key of {name!r} is empty or has a space in it")
        if name in names:
            raise SettingsError(f"{setting} {path}: the name {name!r} stands there twice")
        if key in holders:
            raise SettingsError(f"{setting} {path}: {holders[key]!r} and {name!r} have the same key")
        names[name], holders[key] = entry, name
    return names


def parse_priority(text: str) -> int | None:
    """Return the priority in ``text``; None if it is not in ``PRIORITIES``."""
    try:
        priority = int(text)
    except ValueError:
        return None
    return priority if priority in PRIORITIES else None


def _parse_pairs(text: str, path: Path, setting: str) -> list[tuple[str, ApiKey]]:
    # Composed, not loaded: loading would convert the key 1234 to a number, and drop one of two equal names. YAML's own
    # message quotes the wrong line, and so the key; therefore it is not repeated here.
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if not (isinstance(node, yaml.MappingNode) and all(_is_entry(name, entry) for name, entry in node.value)):
        raise SettingsError(
            f"{setting} {path} must have lines 'name: key' or 'name: {{key: KEY, tokens_per_sec: 500, priority: 0}}', "
            "or one key a line and no ':' anywhere"
        )
    pairs = []
    for name, entry in node.value:
        where = f"{setting} {path}: {name.value!r}"
        is_key = isinstance(entry, yaml.ScalarNode)
        pairs.append((name.value, ApiKey(entry.value) if is_key else _parse_entry(entry.value, where)))
    return pairs


def _is_entry(name: yaml.Node, entry: yaml.Node) -> bool:
    """Return whether it is a name with a key, or with members that contain no lists or further members."""
    members = [part for member in entry.value for part in member] if isinstance(entry, yaml.MappingNode) else [entry]
    return all(isinstance(part, yaml.ScalarNode) for part in (name, *members))


def _parse_entry(members: Sequence[tuple[yaml.ScalarNode, yaml.ScalarNode]], where: str) -> ApiKey:
    """Parse an entry with several members, one of which is the key."""
    found: dict[str, str] = {}
    for name, value in members:
        if name.value not in _MEMBERS:
            raise SettingsError(f"{where} has a member that is none of {', '.join(_MEMBERS)}")
        if name.value in found:
            raise SettingsError(f"{where} has {name.value!r} twice")
        found[name.value] = value.value
    if "key" not in found:
        raise SettingsError(f"{where} has no 'key'")
    rate, priority = _parse_rate(found.get("tokens_per_sec")), parse_priority(found.get("priority", "0"))
    if rate is not None and not 0 <= rate < math.inf:
        text = found["tokens_per_sec"]
        raise SettingsError(f"{where} has tokens_per_sec {text!r}; it must be a number from 0 on; 0 is no limit")
    if priority is None:
        text, least, most = found["priority"], PRIORITIES[0], PRIORITIES[-1]
        raise SettingsError(f"{where} has priority {text!r}; it must be a whole number from {least} to {most}")
    return ApiKey(found["key"], rate, priority)


def _parse_rate(text: str | None) -> float | None:
    """Return the number; nan, which is not a valid limit, if it cannot be parsed."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return math.nan


def read_token(path: Path, setting: str) -> str:
    """Return the token in a file that contains nothing else.

    Raises:
        SettingsError: the file cannot be read, or does not contain exactly one word; the message names ``setting``.
    """
    try:
        return secret_files.read_token(path)
    except ValueError as exc:
        raise SettingsError(f"{setting} {exc}") from exc


def stamp_file(path: Path) -> tuple[int, int] | None:
    """Return a file's modification time and its inode, so that changes are detected; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _read_lines(path: Path, setting: str) -> list[str]:
    """Return the lines of the file that are neither empty nor a comment, at least one."""
    try:
        lines = secret_files.read_lines(path)
    except ValueError as exc:
        raise SettingsError(f"{setting} {exc}") from exc
    if not lines:
        raise SettingsError(f"{setting} {path} is empty")
    return lines
