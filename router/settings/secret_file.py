"""Files with secrets: one with the admin token, another with the API keys of clients. No error shows a secret.

A file of API keys has one key per line, or YAML lines ``name: key``. A line can also give the client's limit and
priority: ``name: {key: KEY, tokens_per_sec: 500, priority: -5}``.
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
"""Allowed priorities of a request. Requests of a higher value are served first."""


class ApiKey(NamedTuple):
    """A client's API key, limit and priority."""

    key: str
    tokens_per_sec: float | None = None
    """Limit of the client's tokens per second, or None if the limit for all clients applies. 0 means no limit."""
    priority: int = 0


_MEMBERS = ApiKey._fields


def read_keys(path: Path, setting: str) -> dict[str, ApiKey]:
    """Return the API keys in a file, by client name. A file without names gets the names ``key1``, ``key2``, ...

    Args:
        path: the file, with lines ``name: key`` or one key per line.
        setting: name of the setting with the path, for messages.

    Raises:
        SettingsError: the file cannot be read, or has another format.
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
            raise SettingsError(f"{setting} {path}: the name {name!r} is given twice")
        if key in holders:
            raise SettingsError(f"{setting} {path}: {holders[key]!r} and {name!r} have the same key")
        names[name], holders[key] = entry, name
    return names


def parse_priority(text: str) -> int | None:
    """Return the priority in ``text``; None if it is not one of ``PRIORITIES``."""
    try:
        priority = int(text)
    except ValueError:
        return None
    return priority if priority in PRIORITIES else None


def _parse_pairs(text: str, path: Path, setting: str) -> list[tuple[str, ApiKey]]:
    # ``compose`` keeps each value as text. ``load`` would convert the key 1234 to a number, and drop one of two equal
    # names. YAML's error message is not shown, because it quotes the line with the key.
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if not (isinstance(node, yaml.MappingNode) and all(_is_entry(name, entry) for name, entry in node.value)):
        raise SettingsError(
            f"{setting} {path} must have lines 'name: key' or 'name: {{key: KEY, tokens_per_sec: 500, priority: 0}}', "
            "or one key per line and no ':' anywhere"
        )
    pairs = []
    for name, entry in node.value:
        where = f"{setting} {path}: {name.value!r}"
        is_key = isinstance(entry, yaml.ScalarNode)
        pairs.append((name.value, ApiKey(entry.value) if is_key else _parse_entry(entry.value, where)))
    return pairs


def _is_entry(name: yaml.Node, entry: yaml.Node) -> bool:
    """Return whether a line is a name with a key, or a name with members that are neither lists nor maps."""
    members = [part for member in entry.value for part in member] if isinstance(entry, yaml.MappingNode) else [entry]
    return all(isinstance(part, yaml.ScalarNode) for part in (name, *members))


def _parse_entry(members: Sequence[tuple[yaml.ScalarNode, yaml.ScalarNode]], where: str) -> ApiKey:
    """Parse the members of a client in the file of API keys. One of the members is the key."""
    found: dict[str, str] = {}
    for name, value in members:
        if name.value not in _MEMBERS:
            raise SettingsError(f"{where} has a member that is not one of {', '.join(_MEMBERS)}")
        if name.value in found:
            raise SettingsError(f"{where} has {name.value!r} twice")
        found[name.value] = value.value
    if "key" not in found:
        raise SettingsError(f"{where} has no 'key'")
    rate, priority = _parse_rate(found.get("tokens_per_sec")), parse_priority(found.get("priority", "0"))
    if rate is not None and not 0 <= rate < math.inf:
        text = found["tokens_per_sec"]
        raise SettingsError(f"{where} has tokens_per_sec {text!r}; it must be 0 or more; 0 means no limit")
    if priority is None:
        text, least, most = found["priority"], PRIORITIES[0], PRIORITIES[-1]
        raise SettingsError(f"{where} has priority {text!r}; it must be a whole number from {least} to {most}")
    return ApiKey(found["key"], rate, priority)


def _parse_rate(text: str | None) -> float | None:
    """Return the number in ``text``; nan, which is not a valid limit, if it is not a number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return math.nan


def read_token(path: Path, setting: str) -> str:
    """Return the token in a file, which contains nothing else.

    Args:
        path: the file.
        setting: name of the setting with the path, for messages.

    Raises:
        SettingsError: the file cannot be read, or does not contain exactly one word.
    """
    try:
        return secret_files.read_token(path)
    except ValueError as exc:
        raise SettingsError(f"{setting} {exc}") from exc


def stamp_file(path: Path) -> tuple[int, int] | None:
    """Return modification time and inode of a file, which change with the file; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _read_lines(path: Path, setting: str) -> list[str]:
    """Return the lines of the file that are not empty and not comments. There is at least one."""
    try:
        lines = secret_files.read_lines(path)
    except ValueError as exc:
        raise SettingsError(f"{setting} {exc}") from exc
    if not lines:
        raise SettingsError(f"{setting} {path} is empty")
    return lines
