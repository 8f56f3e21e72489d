"""Reads a recipe: how to start, stop and break a KV pool and the instances that share it.

A recipe is a YAML file. ``${name}`` in any text is replaced: by a variable of the recipe or of ``--set NAME=VALUE``, by
a port of ``ports`` (each gets a free one), by ``${folder}``, a new folder for files and logs, by ``${recipe}``, the
folder of the recipe, and by ``${python}``, the Python that runs this command. In the command of an instance,
``${port}`` is its own port, and ``${cache}`` is ``instance.cache``, or ``instance.plain`` for the instance without a
cache.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvcommon.hints import suggest_name
from kvstore_backend.backend import ConfigError

__all__ = ["Change", "InstanceSettings", "PartSettings", "Recipe", "RouterSettings", "read_recipe", "split_command"]

_NAME = re.compile(r"\$\{(\w+)\}")
_MEMBERS = (
    "title",
    "variables",
    "ports",
    "files",
    "prepare",
    "parts",
    "instance",
    "router",
    "pool",
    "pool_metrics",
    "groups",
    "changes",
    "stall_seconds",
    "saved_seconds",
    "heal_seconds",
    "prompt_words",
    "answer_tokens",
)
_PART_MEMBERS = ("command", "environment", "port")
_INSTANCE_MEMBERS = ("command", "cache", "plain", "environment", "ready", "model", "hits", "salts", "start_seconds")
_ROUTER_MEMBERS = ("command", "salts", "instance")
_CHANGE_MEMBERS = ("variables", "cache", "request")


@dataclass(frozen=True)
class PartSettings:
    """A program of the pool, such as its master. It is ready when something listens on ``port``.

    If ``command`` is empty, the recipe does not have this part.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    port: int


@dataclass(frozen=True)
class InstanceSettings:
    """An inference server with OpenAI's endpoints.

    Attributes:
        plain: text that replaces ``${cache}`` in ``command`` for the instance that runs without a cache.
        ready: path that is answered with 200 when the instance is ready.
        model: name of the model in requests.
        hits: metric with the number of tokens that came from the pool; empty: ``usage`` of the responses has them.
        has_salts: whether requests may have a ``cache_salt``.
    """

    command: str
    cache: str
    plain: str
    environment: Mapping[str, str]
    ready: str = "/health"
    model: str = "default"
    hits: str = ""
    has_salts: bool = False
    start_seconds: float = 300.0


@dataclass(frozen=True)
class RouterSettings:
    """A router in front of the instances, which knows its clients by their API keys.

    Attributes:
        command: ``${keys}`` in it is a file with two API keys, ``${instances}`` one that lists the instances, and
            ``${salts}`` is the next attribute or an empty text.
        salts: flags that add a salt for each API key.
        instance: further members of each entry in the list of the instances.
    """

    command: str
    salts: str
    instance: Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """A second configuration that must not use the blocks of the first.

    Attributes:
        variables: other values of variables, for the start of another instance.
        cache: another value of ``instance.cache``, if the two configurations differ there.
        request: members of the requests, such as another adapter's name as ``model``.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    cache: str | None = None
    request: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """See the module's docstring."""

    title: str
    variables: Mapping[str, str]
    files: Mapping[str, str]
    prepare: Sequence[Sequence[str]]
    parts: Mapping[str, PartSettings]
    instance: InstanceSettings
    router: RouterSettings | None
    pool: str
    """The URL of a Mooncake pool, or a folder whose files are all values; empty: nothing can be removed or damaged."""
    pool_metrics: str
    """HOST:PORT of the metrics of Mooncake's master."""
    groups: Mapping[str, str]
    """Regular expressions for the keys of one group of layers each, for models with several groups."""
    changes: Mapping[str, Change]
    stall_seconds: float
    """Longest time that a request may take."""
    saved_seconds: float
    """Time after an answer until its blocks are in the pool."""
    heal_seconds: float
    """Longest time after a fault until the pool is used again."""
    prompt_words: int
    answer_tokens: int

    def expand(self, text: str, **more: str) -> str:
        """Replace each ``${name}`` in ``text``.

        Raises:
            ConfigError: a name is unknown.
        """
        return _expand(text, {**self.variables, **more})


def split_command(text: str) -> list[str]:
    """Split a command into words, as a shell does.

    Raises:
        ConfigError: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise ConfigError(f"the command {text!r} cannot be split into words: {str(exc).lower()}") from None


def read_recipe(path: Path, variables: Mapping[str, str], folder: Path, ports: Sequence[int]) -> Recipe:
    """Read a recipe.

    Args:
        variables: values that replace those of the recipe.
        folder: for files and logs.
        ports: free ports, at least as many as the recipe names.

    Raises:
        ConfigError: the file cannot be read or used; the message names the file and the member.
    """
    try:
        members = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigError(f"the recipe {path} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError(f"the recipe {path} is not YAML: {' '.join(str(exc).split())}") from exc
    try:
        return _make_recipe(members, path, variables, folder, ports)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _make_recipe(members: Any, path: Path, variables: Mapping[str, str], folder: Path, ports: Sequence[int]) -> Recipe:
    _check_members("the recipe", members, _MEMBERS, required=("title", "instance"))
    names = _read_list(members, "ports")
    if len(names) > len(ports):
        raise ConfigError(f"ports has {len(names)} names; {len(ports)} is the maximum")
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
    _check_members(where, part, _PART_MEMBERS, required=("command", "port"))
    port = _expand(str(part["port"]), known)
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"{where}.port is {port!r}; it is the port on which the program listens when it is ready")
    environment = {name: _expand(str(value), known) for name, value in _read_map(part, "environment").items()}
    return PartSettings(split_command(_expand(str(part["command"]), known)), environment, int(port))


def _read_instance(instance: Any) -> InstanceSettings:
    _check_members("instance", instance, _INSTANCE_MEMBERS, required=("command", "cache"))
    command, ready = _read_text(instance, "command"), _read_text(instance, "ready", "/health")
    salts = instance.get("salts")
    environment = {name: str(value) for name, value in _read_map(instance, "environment").items()}
    if not any("${cache}" in text for text in (command, *environment.values())):
        raise ConfigError("instance.command has no ${cache}, so the instance without a cache would have the pool, too")
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
        has_salts=bool(salts),
        start_seconds=_read_number(instance, "start_seconds", 300),
    )


def _read_router(router: Any) -> RouterSettings | None:
    if router is None:
        return None
    _check_members("router", router, _ROUTER_MEMBERS, required=("command", "salts"))
    return RouterSettings(str(router["command"]), str(router["salts"]), _read_map(router, "instance"))


def _read_change(name: str, change: Any, declared: Mapping[str, str]) -> Change:
    _check_members(f"changes.{name}", change, _CHANGE_MEMBERS)
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


def _check_members(where: str, members: Any, names: Sequence[str], *, required: Sequence[str] = ()) -> None:
    if not isinstance(members, dict):
        raise ConfigError(f"{where} is {members!r}; it must be a mapping with {', '.join(names)}")
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
