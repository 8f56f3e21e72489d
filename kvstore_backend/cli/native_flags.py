"""Flags of ``mooncake_master`` itself, as its ``--help`` lists them, for operators who are used to them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Sequence

from kvcommon.hints import suggest_name
from kvstore_backend.backend import ConfigError, PoolUnavailable

__all__ = ["list_native_flags", "parse_native_flags"]

_HELP_SECONDS = 20.0
# Matches " -rpc_port (Port for RPC server ...) type: int32 default: 0", over several lines.
_FLAG = re.compile(r"^ +-(\w+) \(.*?\)\s+type: (\w+)\s+default:", re.MULTILINE | re.DOTALL)


def list_native_flags(program: str) -> dict[str, bool]:
    """Return the flags that the program knows, each with whether it is a switch.

    Raises:
        PoolUnavailable: the program cannot be run.
    """
    try:
        shown = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=_HELP_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise PoolUnavailable(f"{program} --help cannot be run: {exc}") from exc
    return {name: kind == "bool" for name, kind in _FLAG.findall(shown.stdout)}


def parse_native_flags(words: Sequence[str], native: dict[str, bool], own: Collection[str]) -> dict[str, str]:
    """Parse flags of the program from a command line: ``--name value``, ``--name=value``, ``--switch``.

    Args:
        words: the words of the command line except our own flags.
        native: the flags of the program, each with whether it is a switch.
        own: our flags, for the message about a flag that neither knows.

    Raises:
        ConfigError: a word is not a flag of either, or a flag has no value.
    """
    values: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} is no flag of kvstore master: a flag has two dashes, and one value")
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name.startswith("no") and native.get(name[2:]) and not equals:
            name, value = name[2:], "false"
        elif name not in native:
            raise _refuse_flag(name, native, own)
        elif not equals:
            value = "true" if native[name] else _take_value(name, rest)
        values[name] = value
    return values


def _take_value(name: str, rest: list[str]) -> str:
    """Take the value of a flag from the words after it."""
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"--{name} of mooncake_master needs a value: --{name}=VALUE")
    return rest.pop(0)


def _refuse_flag(name: str, native: dict[str, bool], own: Collection[str]) -> ConfigError:
    """Return the error for a flag that neither we nor the program know."""
    near = suggest_name(f"--{name}", [*own, *(f"--{each}" for each in native)])
    hint = near if "did you mean" in near else ": kvstore master --help and mooncake_master --help list them"
    return ConfigError(f"--{name} is no flag of kvstore master, nor of mooncake_master{hint}")
