"""RouterSettings: flags > YAML > environment > defaults, each setting declared once.

The YAML keys are those of FastDeploy's Go router. An environment variable is ``KVROUTER__`` and the field's name in
capitals, with two underscores because Kubernetes itself sets ``KVROUTER_PORT`` beside a service named ``kvrouter``.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from router.policies import POLICIES

__all__ = ["RouterSettings", "SettingsError", "load_settings"]

_ENV_PREFIX = "KVROUTER__"
_LOG_LEVELS = ("debug", "info", "warn", "error")


class SettingsError(ValueError):
    """A setting that cannot be used: one sentence, naming where it stands, its value and what would be right."""


def _setting(default: Any, key: str, help: str, choices: Iterable[str] = ()) -> Any:
    metadata = {"key": key, "help": help, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RouterSettings:
    """Everything that can be set; the flag is the field's name with dashes."""

    host: str = _setting("0.0.0.0", "server.host", "address to listen at")
    port: int = _setting(9000, "server.port", "port to listen at; 0 takes a free one")
    splitwise: bool = _setting(
        False, "server.splitwise", "serve each request by a prefill and a decode instance, instead of a mixed one"
    )
    request_timeout_secs: float = _setting(
        1800.0, "server.request-timeout-secs", "seconds after which a request is given up"
    )
    policy: str = _setting("request_num", "scheduler.policy", "how a mixed instance is chosen", POLICIES)
    prefill_policy: str = _setting(
        "process_tokens", "scheduler.prefill-policy", "how a prefill instance is chosen", POLICIES
    )
    decode_policy: str = _setting("request_num", "scheduler.decode-policy", "how a decode instance is chosen", POLICIES)
    stats_interval_secs: float = _setting(
        5.0, "scheduler.stats-interval-secs", "seconds between two looks at instances' own figures, by remote policies"
    )
    health_check_endpoint: str = _setting(
        "/health", "manager.health-check-endpoint", "path that a healthy instance answers with 200"
    )
    health_check_interval_secs: float = _setting(
        5.0, "manager.health-check-interval-secs", "seconds between two rounds of probes"
    )
    health_check_timeout_secs: float = _setting(
        5.0, "manager.health-check-timeout-secs", "seconds that one probe may take"
    )
    health_failure_threshold: int = _setting(
        3, "manager.health-failure-threshold", "failed probes in a row that make an instance unhealthy"
    )
    health_success_threshold: int = _setting(
        1, "manager.health-success-threshold", "good probes in a row that make it healthy again"
    )
    heartbeat_expiry_secs: float = _setting(
        30.0, "manager.heartbeat-expiry-secs", "seconds without a registration after which an instance is forgotten"
    )
    log_level: str = _setting("info", "log.level", "what is logged to stderr", _LOG_LEVELS)
    access_log: str = _setting(
        "stderr", "log.access-log", "where one line for each request goes: stderr, off, or a file to append to"
    )
    max_concurrent_requests: int = _setting(
        0, "server.max-concurrent-requests", "requests that are served at once; others wait in line; 0 is no limit"
    )
    max_concurrent_requests_per_key: int = _setting(
        0, "server.max-concurrent-requests-per-key", "the same for the holder of each API key; 0 is no limit"
    )
    max_queued_requests: int = _setting(
        1000, "server.max-queued-requests", "requests that may wait in line; one too many is answered with 429"
    )
    queue_timeout_secs: float = _setting(
        60.0, "server.queue-timeout-secs", "seconds after which a request that waits in line is answered with 429"
    )
    api_keys_file: str = _setting(
        "",
        "server.api-keys-file",
        "file with the API keys that clients must send, as lines 'name: key' or one key a line; none lets everyone in",
    )
    admin_token_file: str = _setting(
        "",
        "server.admin-token-file",
        "file with the token that /register, /registered and /admin ask for, as 'Authorization: Bearer TOKEN'; "
        "FastDeploy's instances send none: list them in a register file then; no file leaves all of these open",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        if self.max_concurrent_requests_per_key and not self.api_keys_file:
            raise SettingsError(
                f"server.max-concurrent-requests-per-key is {self.max_concurrent_requests_per_key}, but there are no "
                "keys to tell clients apart; name them with server.api-keys-file"
            )


def load_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> RouterSettings:
    """Read the settings of one start.

    Args:
        argv: the flags, without the program's name.
        environ: defaults to the process's environment.

    Raises:
        SettingsError: an unknown name or an impossible value, wherever it stands.
        SystemExit: ``--help``.
    """
    flags = vars(_parser().parse_args([_dashes(arg) for arg in argv]))
    config_path = flags.pop("config_path")
    values = _from_environment(os.environ if environ is None else environ)
    if config_path is not None:
        values |= _from_yaml(Path(config_path))
    values |= {
        field.name: _convert(flags[field.name], field, f"--{field.name.replace('_', '-')}")
        for field in dataclasses.fields(RouterSettings)
        if flags[field.name] is not None
    }
    return RouterSettings(**values)


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one sentence that names the nearest flag."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0]
            raise SettingsError(f"{flag} is not a flag of the router{_nearest(flag, self._option_string_actions)}")
        return known


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m router.launch",
        usage="%(prog)s [--port PORT] [--splitwise] [more of the flags below]",
        description="Sends each OpenAI request to an inference instance, or to a prefill and a decode instance.",
        epilog="Instances register themselves: start them with --router HOST:PORT. "
        f"Each setting may also stand in the YAML file under the key in brackets, or in the environment as "
        f"{_ENV_PREFIX}NAME; a flag wins over the file, and the file over the environment.",
        allow_abbrev=False,
    )
    parser.add_argument("--config-path", metavar="FILE", help="YAML file, as of FastDeploy's Go router")
    for field in dataclasses.fields(RouterSettings):
        flag = "--" + field.name.replace("_", "-")
        choices = field.metadata["choices"]
        about = f"{field.metadata['help']}{': ' + ', '.join(choices) if choices else ''} " \
                f"(default {field.default if field.default != '' else 'none'}) [{field.metadata['key']}]"  # fmt: skip
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_const", const=True, help=about)
        else:
            parser.add_argument(flag, metavar=field.name.split("_")[-1].upper(), help=about)
    return parser


def _dashes(arg: str) -> str:
    # FastDeploy's parser takes --request_timeout_secs for --request-timeout-secs, and documents --config_path.
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {_ENV_PREFIX + field.name.upper(): field for field in dataclasses.fields(RouterSettings)}
    values = {}
    for name in sorted(environ):
        if name.startswith(_ENV_PREFIX):
            if name not in names:
                raise SettingsError(f"environment variable {name} is no setting of the router{_nearest(name, names)}")
            values[names[name].name] = _convert(environ[name], names[name], f"environment variable {name}")
    return values


def _from_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise SettingsError(f"--config_path {path}: {exc.strerror}") from exc
    except (UnicodeDecodeError, yaml.YAMLError) as exc:
        raise SettingsError(f"--config_path {path} is not YAML: {' '.join(str(exc).split())}") from exc
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(f"--config_path {path} has no sections, such as 'server:' with 'port: 9000' under it")
    fields = {field.metadata["key"]: field for field in dataclasses.fields(RouterSettings)}
    sections = {key.split(".")[0]: None for key in fields}
    values = {}
    for section, entries in document.items():
        if section not in sections:
            raise SettingsError(f"{path}: {section!r} is not a section of settings{_nearest(str(section), sections)}")
        if not isinstance(entries, dict | None):
            raise SettingsError(f"{path}: {section} is {entries!r}; it must be a section with settings under it")
        for name, value in (entries or {}).items():
            key = f"{section}.{name}"
            if key not in fields:
                raise SettingsError(f"{path}: {key} is not a setting of the router{_nearest(key, fields)}")
            values[fields[key].name] = _convert(value, fields[key], f"{path}: {key}")
    return values


def _convert(value: Any, field: dataclasses.Field[Any], where: str) -> Any:
    """``value`` as the field's type; text is read, a value of another type is refused."""
    kind = type(field.default)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        if kind is bool and value.lower() in ("1", "0", "true", "false"):
            return value.lower() in ("1", "true")
        if kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                pass
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    raise SettingsError(f"{where} is {value!r}; it must be {expected}")


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    name, choices = field.metadata["key"], field.metadata["choices"]
    if choices and value not in choices:
        raise SettingsError(f"{name} is {value!r}; it must be one of {', '.join(choices)}{_nearest(value, choices)}")
    if field.name == "port" and not 0 <= value <= 65535:
        raise SettingsError(f"{name} is {value}; a port is at most 65535")
    if isinstance(value, float) and not 0 < value < float("inf"):
        raise SettingsError(f"{name} is {value:g}; it must be more than 0 seconds")
    if field.name.startswith("max_") and value < 0:
        raise SettingsError(f"{name} is {value}; it must be at least 0")
    if field.name.endswith("_threshold") and value < 1:
        raise SettingsError(f"{name} is {value}; it must be at least 1")
    if field.name == "health_check_endpoint" and not value.startswith("/"):
        raise SettingsError(f"{name} is {value!r}; a path begins with '/'")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
