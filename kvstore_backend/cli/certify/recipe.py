"""Reads a recipe: a YAML file that says how to start, stop and break a KV pool and the instances that share it.

``${name}`` in any text of the recipe is replaced by the value of a variable (from ``variables`` or ``--set
NAME=VALUE``), or by a free port for a name in ``ports``. Some names have fixed meanings: ``${folder}`` is a new folder
for files and logs, ``${recipe}`` the folder of the recipe, and ``${python}`` the Python that runs this command. In the
command of an instance, ``${port}`` is the instance's port, and ``${cache}`` is ``instance.cache``, or
``instance.plain`` for the instance without a cache.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from kvcommon.hints import suggest_name
from kvstore_backend.backend import ConfigError

__all__ = ["Change", "InstanceSettings", "PartSettings", "Recipe", "RouterSettings", "read_recipe", "split_command"]

_NAME = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class PartSettings:
    """One program of the pool, such as Mooncake's master. The program is ready when it listens on ``port``.

    If ``command`` is empty, the recipe does not have this program.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    port: int


@dataclass(frozen=True)
class InstanceSettings:
    """Inference server with OpenAI's endpoints, which the command starts several times.

    Attributes:
        command: command that starts the server.
        cache: text that replaces ``${cache}`` in ``command`` for an instance that shares the pool.
        plain: text that replaces ``${cache}`` in ``command`` for the instance that runs without a cache.
        environment: environment variables of the server.
        ready: path that the server answers with status 200 when it is ready.
        model: name of the model in requests.
        hits: metric with the number of tokens from the pool; if empty, ``cached_tokens`` in the responses are counted.
        salts: whether requests may have a ``cache_salt``.
        start_seconds: longest time until the server is ready.
    """

    command: str
    cache: str
    plain: str
    environment: Mapping[str, str]
    ready: str = "/health"
    model: str = "default"
    hits: str = ""
    salts: bool = False
    start_seconds: float = 300.0


@dataclass(frozen=True)
class RouterSettings:
    """Router in front of the instances, which distinguishes its clients by their API keys.

    Attributes:
        command: command that starts the router. ``${keys}`` is a file with two API keys, ``${instances}`` a file with a
            list of the instances, and ``${salts}`` is the text in ``salts``, or empty in a run without salts.
        salts: flags with which the router adds a salt for each API key.
        instance: further members of each entry in the list of the instances.
    """

    command: str
    salts: str
    instance: Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """Change of the configuration after which an instance must not use the blocks that were saved before.

    Attributes:
        variables: variables of the recipe with other values, for the start of another instance.
        cache: another value of ``instance.cache``, or None if it does not change.
        request: members of the requests, such as the name of another adapter as ``model``.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    cache: str | None = None
    request: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """Recipe: how to start, stop and break a pool and the instances that share it (``docs/certify.md``)."""

    title: str
    variables: Mapping[str, str]
    files: Mapping[str, str]
    prepare: Sequence[Sequence[str]]
    parts: Mapping[str, PartSettings]
    instance: InstanceSettings
    router: RouterSettings | None
    pool: str
    """URL of a Mooncake pool, or a folder with one file for each value; if empty, no values are removed or damaged."""
    pool_metrics: str
    """Address of the metrics of Mooncake's master, as HOST:PORT."""
    groups: Mapping[str, str]
    """Name of a group of layers -> regular expression for the keys of the group's blocks."""
    changes: Mapping[str, Change]
    stall_seconds: float
    """Longest time that a request may take, in seconds."""
    saved_seconds: float
    """Time after an answer until the blocks of the prompt are in the pool, in seconds."""
    heal_seconds: float
    """Longest time after a fault until both instances use the pool again, in seconds."""
    prompt_words: int
    answer_tokens: int

    def expand(self, text: str, **more: str) -> str:
        """Return ``text`` with each ``${name}`` replaced by the variable's value, from the recipe or ``more``.

        Raises:
            ConfigError: a name is not known.
        """
        return _expand(text, {**self.variables, **more})


def split_command(text: str) -> list[str]:
    """Split a command into its words, as a shell does.

    Raises:
        ConfigError: the command has a quotation that is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise ConfigError(f"the command {text!r} cannot be split into words: {str(exc).lower()}") from None


def read_recipe(path: Path, variables: Mapping[str, str], folder: Path, ports: Sequence[int]) -> Recipe:
    """Read a recipe from a YAML file.

    Args:
        path: the file.
        variables: values that replace those of variables in the recipe.
        folder: folder for files and logs.
        ports: free ports, at least one for each name in the recipe's ``ports``.

    Raises:
        ConfigError: the file cannot be read or used; the message names the file and the member.
    """
    try:
        members = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigError(f"the recipe {path} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError(f"the recipe {path} is not YAML: {' '.join(str(exc).split())}") from exc
    except RecursionError:
        raise ConfigError(f"the recipe {path} is nested too deeply") from None
    try:
        return _make_recipe(members, path, variables, folder, ports)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _make_recipe(members: Any, path: Path, variables: Mapping[str, str], folder: Path, ports: Sequence[int]) -> Recipe:
    _check_members("the recipe", members, Recipe, "ports", required=("title", "instance"))
    names = _read_list(members, "ports")
    if len(names) > len(ports):
        raise ConfigError(f"ports has {len(names)} names; at most {len(ports)} names are possible")
    known = dict(zip(names, map(str, ports), strict=False))
    known |= {"folder": str(folder), "recipe": str(path.resolve().parent), "python": shlex.quote(sys.executable)}
    declared = {name: str(value) for name, value in _read_map(members, "variables").items()}
    for name in variables:
        if name not in declared:
            raise ConfigError(f"--set {name}: the recipe has no such variable{suggest_name(name, declared)}")
    for name, value in {**declared, **variables}.items():
        known[name] = _expand(value, known)
    parts = {name: _read_part(f"parts.{name}", part, known) for name, part in _read_map(members, "parts").items()}
    return Recipe(
        title=_expand(str(members["title"]), known),
        variables=known,
        files={_check_file(name): _expand(str(text), known) for name, text in _read_map(members, "files").items()},
        prepare=[_read_command("prepare", line, known) for line in _read_list(members, "prepare")],
        parts={name: part for name, part in parts.items() if part.command},
        instance=_read_instance(members["instance"]),
        router=_read_router(members.get("router")),
        pool=_expand(_read_text(members, "pool"), known),
        pool_metrics=_expand(_read_text(members, "pool_metrics"), known),
        groups=_read_groups(members),
        changes={name: _read_change(name, each, declared) for name, each in _read_map(members, "changes").items()},
        stall_seconds=_read_number(members, "stall_seconds", 30),
        saved_seconds=_read_number(members, "saved_seconds", 2),
        heal_seconds=_read_number(members, "heal_seconds", 90),
        prompt_words=int(_read_number(members, "prompt_words", 600, least=6)),
        answer_tokens=int(_read_number(members, "answer_tokens", 12, least=1)),
    )


def _read_part(where: str, part: Any, known: Mapping[str, str]) -> PartSettings:
    _check_members(where, part, PartSettings, required=("command", "port"))
    port = _expand(str(part["port"]), known)
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise ConfigError(
            f"{where}.port is {port!r}; it must be the number of the port on which the program listens when it is ready"
        )
    environment = {name: _expand(str(value), known) for name, value in _read_map(part, "environment").items()}
    return PartSettings(split_command(_expand(str(part["command"]), known)), environment, int(port))


def _read_instance(instance: Any) -> InstanceSettings:
    _check_members("instance", instance, InstanceSettings, required=("command", "cache"))
    command, ready = _read_text(instance, "command"), _read_text(instance, "ready", "/health")
    salts = instance.get("salts")
    environment = {name: str(value) for name, value in _read_map(instance, "environment").items()}
    if not any("${cache}" in text for text in (command, *environment.values())):
        raise ConfigError("instance.command has no ${cache}, so the instance without a cache would use the pool, too")
    if not ready.startswith("/"):
        raise ConfigError(f"instance.ready is {ready!r}; it must be a path that begins with /")
    if not isinstance(salts, bool | None):
        raise ConfigError(f"instance.salts is {salts!r}; it must be true or false")
    return InstanceSettings(
        command=command,
        cache=_read_text(instance, "cache"),
        plain=_read_text(instance, "plain"),
        environment=environment,
        ready=ready,
        model=_read_text(instance, "model", "default"),
        hits=_read_text(instance, "hits"),
        salts=bool(salts),
        start_seconds=_read_number(instance, "start_seconds", 300),
    )


def _read_router(router: Any) -> RouterSettings | None:
    if router is None:
        return None
    _check_members("router", router, RouterSettings, required=("command", "salts"))
    return RouterSettings(str(router["command"]), str(router["salts"]), _read_map(router, "instance"))


def _read_change(name: str, change: Any, declared: Mapping[str, str]) -> Change:
    _check_members(f"changes.{name}", change, Change)
    variables = {key: str(value) for key, value in _read_map(change, "variables").items()}
    for key in variables:
        if key not in declared:
            raise ConfigError(f"changes.{name}.variables: no variable is named {key!r}{suggest_name(key, declared)}")
    cache = change.get("cache")
    return Change(variables, None if cache is None else str(cache), _read_map(change, "request"))


def _expand(text: str, known: Mapping[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name in known:
            return known[name]
        raise ConfigError(f"${{{name}}} is neither a variable nor a port{suggest_name(name, known)}")

    return _NAME.sub(replace, text)


def _check_members(where: str, members: Any, kind: type, *more: str, required: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` unless ``members`` is a mapping with known names and all ``required`` ones.

    The known names are the fields of the dataclass ``kind``, and ``more``.
    """
    names = [*(each.name for each in fields(kind)), *more]
    if not isinstance(members, dict):
        raise ConfigError(
            f"{where} is {members!r}; it must be a mapping with some of these members: {', '.join(names)}"
        )
    for name in members:
        if name not in names:
            raise ConfigError(f"{where} has the unknown member {name!r}{suggest_name(str(name), names)}")
    for name in required:
        if name not in members:
            raise ConfigError(f"{where} lacks the member {name!r}")


def _read_map(members: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = members.get(name) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {value!r}; it must be a mapping of names to values")
    return {str(key): each for key, each in value.items()}


def _read_list(members: Mapping[str, Any], name: str) -> list[str]:
    value = members.get(name) or []
    if not isinstance(value, list):
        raise ConfigError(f"{name} is {value!r}; it must be a list")
    return [str(each) for each in value]


def _read_number(members: Mapping[str, Any], name: str, default: float, *, least: int = 0) -> float:
    value = members.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf or value < least:
        raise ConfigError(
            f"{name} is {value!r}; it must be a {f'number of at least {least}' if least else 'positive number'}"
        )
    return float(value)


def _read_text(members: Mapping[str, Any], name: str, default: str = "") -> str:
    value = members.get(name)
    return default if value is None else str(value)


def _read_command(where: str, line: str, known: Mapping[str, str]) -> list[str]:
    command = split_command(_expand(line, known))
    if not command or not command[0]:
        raise ConfigError(f"{where} has an empty command")
    return command


def _read_groups(members: Mapping[str, Any]) -> dict[str, str]:
    groups = {name: str(keys) for name, keys in _read_map(members, "groups").items()}
    for name, keys in groups.items():
        try:
            re.compile(keys)
        except re.error as exc:
            raise ConfigError(f"groups.{name} is {keys!r}, which is not a regular expression: {exc}") from None
    return groups


def _check_file(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(f"files has the name {name!r}; it must be the name of a file in ${{folder}}")
    return name
