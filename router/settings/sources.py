"""load_settings: reads the settings from flags, a YAML file and the environment, in this order of precedence.

The file has the format of FastDeploy's Go router (``--config-path``) or of its Python router (``--config``). The
environment variable of a setting is ``KVROUTER__`` and the field's name in capitals. The prefix has two underscores
because Kubernetes sets ``KVROUTER_PORT`` if a service is named ``kvrouter``. FastDeploy's ``FD_DEBUG=1`` sets the log
level to debug.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcommon import spans
from kvcommon.hints import find_nearest, list_unknown, suggest_name
from router.settings.flags import FlagParser
from router.settings.router_settings import SETTINGS, RouterSettings, SettingsError
from router.settings.yaml_file import YamlFileError, read_yaml

__all__ = ["find_trace_receiver", "load_settings", "make_parser"]

_ENV_PREFIX = "KVROUTER__"

# Settings of FastDeploy's Go router that have no effect in this router, and the reasons.
_WITHOUT_EFFECT = {
    "server.name": "no output shows the router's name",
    "server.mode": "the router runs in one mode; what it logs is set by log.level",
    "scheduler.cache-block-size": "prefixes are compared in chunks of text, not in blocks of tokens",
    "scheduler.tokenizer-url": "prompts are compared as text, without a tokenizer",
    "scheduler.tokenizer-timeout-secs": "prompts are compared as text, without a tokenizer",
    "scheduler.eviction-interval-secs": "stale entries are removed when requests arrive, not in rounds",
    "log.max-age-days": "only log.max-total-size-mb limits log files",
    "log.cleanup-interval-secs": "log files are limited whenever a line is written",
}

# The settings of FastDeploy's Go router. In its files, 0, "" and an empty value mean the default. As in that router,
# port 0 is an exception.
_GO_KEYS = frozenset(
    {
        *(f"server.{name}" for name in ("name", "host", "port", "mode", "splitwise")),
        *(f"manager.{name}" for name in ("register-path", "health-failure-threshold", "health-success-threshold")),
        *(f"manager.health-check-{name}" for name in ("timeout-secs", "interval-secs", "endpoint")),
        *(f"scheduler.{name}" for name in ("policy", "prefill-policy", "decode-policy", "eviction-interval-secs")),
        *(f"scheduler.{name}" for name in ("eviction-duration-mins", "cache-block-size", "tokenizer-url")),
        *(f"scheduler.{name}" for name in ("tokenizer-timeout-secs", "balance-abs-threshold")),
        *(f"scheduler.{name}" for name in ("balance-rel-threshold", "hit-ratio-weight", "load-balance-weight")),
        *(f"scheduler.{name}" for name in ("waiting-weight", "stats-interval-secs")),
        *(f"log.{name}" for name in ("level", "output", "max-age-days", "max-total-size-mb", "cleanup-interval-secs")),
    }
)
# Defaults in the Go router's dialect that differ from ours. Others are ours (reasons: docs/operations/routers.md).
_GO_DEFAULTS = {"load_balance_weight": 1.0, "waiting_weight": 1.0}

# Settings that protect the router. An unknown name that resembles one of them is an error, not a warning, because the
# router would be unprotected.
_PROTECTING = frozenset(
    {
        *("api-keys-file", "admin-token-file", "register-token-file", "cache-salt-per-key"),
        *("ssl-certfile", "ssl-keyfile"),
    }
)
# An unknown name that contains one of these words is an error, too.
_PROTECTING_WORDS = frozenset(
    {
        *("apikey", "apikeys", "auth", "authentication", "authorization", "cert", "certfile", "credentials", "key"),
        *("keyfile", "keys", "password", "salt", "secret", "secrets", "ssl", "tls", "token", "tokens"),
    }
)


def load_settings(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, *, dialect: str = "python", epp_port: int = 0
) -> RouterSettings:
    """Read the router's settings from all sources.

    Args:
        argv: the flags, without the program's name.
        environ: the environment variables; by default those of the process.
        dialect: default of the setting ``dialect``; with a file in the Go router's format the default is ``go``.
        epp_port: default of the setting ``epp_port``.

    Raises:
        SettingsError: a source has an unknown name or an invalid value.
        SystemExit: ``argv`` contains ``--help`` or ``--version``.
    """
    flags = vars(make_parser().parse_args([_normalize_flag(arg) for arg in argv]))
    config_path, config = flags.pop("config_path"), flags.pop("config")
    if config is not None and config_path is not None:
        raise SettingsError(
            "--config and --config_path are both given; give only --config (a file of FastDeploy's Python router) or "
            "only --config_path (a file of its Go router)"
        )
    values = _read_environment(os.environ if environ is None else environ)
    if config_path is not None:
        values = {"dialect": "go"} | values | _read_yaml_settings(Path(config_path))
    elif config is not None:
        values |= _read_flat_settings(Path(config))
    values |= {
        field.name: _convert_value(flags[field.name], field, f"--{field.name.replace('_', '-')}")
        for field in SETTINGS
        if flags[field.name] is not None
    }
    values = {"dialect": dialect, "epp_port": epp_port, **values}
    return RouterSettings(**(_GO_DEFAULTS if values["dialect"] == "go" else {}) | values)


def make_parser() -> FlagParser:
    """Return the parser of the router's flags, including ``--config-path`` and ``--config``."""
    parser = FlagParser(
        prog="python -m router.launch",
        usage="%(prog)s [--port PORT] [--splitwise] [more of the flags below]",
        description="Sends each OpenAI request to an inference instance, or to a prefill and a decode instance.",
        epilog="Instances register themselves: start them with --router HOST:PORT. "
        f"Each setting can also be given in the YAML file of --config-path under the key in brackets, or in the "
        f"environment as {_ENV_PREFIX}NAME; a flag overrides the file, and the file overrides the environment.",
    )
    parser.add_argument(
        "--config-path", metavar="FILE", help="YAML file in the form of FastDeploy's Go router: sections of settings"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file in the form of FastDeploy's Python router: flags without the leading dashes",
    )
    for field in SETTINGS:
        flag = "--" + field.name.replace("_", "-")
        choices = field.metadata["choices"]
        default = field.default if field.default not in ("", ()) else "none"
        about = f"{field.metadata['help']}{': ' + ', '.join(choices) if choices else ''} " \
                f"(default {default}) [{field.metadata['key']}]"  # fmt: skip
        if isinstance(field.default, bool):
            parser.add_argument(flag, nargs="?", const=True, metavar="true|false", help=about)
        elif isinstance(field.default, tuple):
            parser.add_argument(
                flag,
                nargs="*",
                action="extend",
                metavar=field.name.split("_")[-1].removesuffix("s").upper(),
                help=about,
            )
        else:
            is_number = type(field.default) is int and not field.name.endswith("port")
            metavar = field.metadata["metavar"] or ("N" if is_number else field.name.split("_")[-1].upper())
            parser.add_argument(flag, metavar=metavar, help=about)
    return parser


def _normalize_flag(arg: str) -> str:
    # FastDeploy's parser accepts --request_timeout_secs for --request-timeout-secs, and documents --config_path. The
    # parser of its Go router accepts -port for --port, and --V for -V.
    if arg == "--V":
        return "-V"
    if len(arg) > 2 and arg[0] == "-" and arg[1].isalpha():
        arg = f"-{arg}"
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    # FD_DEBUG turns on debug output in all of FastDeploy's processes.
    values: dict[str, Any] = {"log_level": "debug"} if environ.get("FD_DEBUG") in ("1", "true", "True") else {}
    if host := environ.get("KUBERNETES_SERVICE_HOST"):  # Kubernetes sets this variable in every pod
        port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        values["kubernetes_api"] = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    names = {_ENV_PREFIX + field.name.upper(): field for field in SETTINGS}
    for name in sorted(environ):
        if name.startswith(_ENV_PREFIX):
            if name not in names:
                raise SettingsError(
                    f"environment variable {name} is not a setting of the router{suggest_name(name, names)}"
                )
            values[names[name].name] = _convert_value(environ[name], names[name], f"environment variable {name}")
    return values


def _read_yaml_settings(path: Path) -> dict[str, Any]:
    """Read the settings from a file in the format of FastDeploy's Go router."""
    fields = {field.metadata["key"]: field for field in SETTINGS}
    sections = {key.split(".")[0] for key in fields}
    values: dict[str, Any] = {}
    without_effect = []
    known = [*fields, *_WITHOUT_EFFECT]
    unknown: list[str] = []
    for key, value in _read_yaml_entries(path, sections):
        if key in _GO_KEYS and _is_default(key, value):
            continue
        if key in _WITHOUT_EFFECT:
            without_effect.append(f"{path}: {key} has no effect: {_WITHOUT_EFFECT[key]}")
        elif key in fields:
            values[fields[key].name] = _convert_value(value, fields[key], f"{path}: {key}")
        else:
            unknown.append(_check_single(path, key, value))
    return values | {"without_effect": (*without_effect, *_warn_of_unknown(path, unknown, known))}


def _is_default(key: str, value: Any) -> bool:
    """Return whether ``value`` is the Go router's default for its setting ``key``."""
    is_zero = isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0
    return value in (None, "") or (is_zero and key != "server.port")


def _read_yaml_entries(path: Path, sections: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the key, such as ``server.port``, and the value of each setting in the file."""
    document = _read_document(path, "--config_path")
    if not isinstance(document, dict | None):
        raise SettingsError(f"--config_path {path} has no sections, such as 'server:' with 'port: 9000' under it")
    for section, entries in (document or {}).items():
        if isinstance(entries, dict):
            for name, value in entries.items():
                yield f"{section}.{name}", value
        elif section not in sections:
            yield str(section), entries
        elif entries is not None:
            raise SettingsError(f"{path}: {section} is {entries!r}; it must be a section with settings under it")


def _read_flat_settings(path: Path) -> dict[str, Any]:
    """Read the settings from a file in the format of FastDeploy's Python router: flags, with underscores or dashes."""
    fields = {field.name: field for field in SETTINGS}
    document = _read_document(path, "--config")
    if not isinstance(document, dict | None):
        raise SettingsError(f"--config {path} has no flags, such as 'port: 9000'")
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for key, value in (document or {}).items():
        name = str(key).replace("-", "_")
        if name not in fields:
            unknown.append(_check_single(path, str(key), value))
        elif name in values:
            raise SettingsError(f"{path}: {key} is given twice")
        elif value not in (None, ""):
            values[name] = _convert_value(value, fields[name], f"{path}: {key}")
    return values | {"without_effect": _warn_of_unknown(path, unknown, [name.replace("_", "-") for name in fields])}


def _read_document(path: Path, flag: str) -> Any:
    try:
        return read_yaml(path)
    except YamlFileError as exc:
        raise SettingsError(f"{flag} {path}: {exc}") from exc


def _check_single(path: Path, name: str, value: Any) -> str:
    """Return ``name``, the unknown name of a setting, if ``value`` is not a map.

    Raises:
        SettingsError: ``value`` is a map. It may contain a setting that protects the router, such as API keys.
    """
    if isinstance(value, dict):
        raise SettingsError(
            f"{path}: {name} is a group of settings, but the router has no such group; --config takes a flat "
            "file, --config-path one with the groups server, log, manager and scheduler"
        )
    return name


def _warn_of_unknown(path: Path, unknown: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Return one sentence that names all unknown settings of a file; empty if there are none.

    Raises:
        SettingsError: an unknown name resembles a setting that protects the router.
    """
    for name in unknown:
        lowered = re.sub("(?<=[a-z])(?=[A-Z])", "-", name).lower().replace("_", "-")
        near = find_nearest(lowered, known)
        last = near.rpartition(".")[2]
        if last in _PROTECTING or last.endswith("-per-key"):
            raise SettingsError(f"{path}: {name} is not a setting of the router; did you mean {near}?")
        if _PROTECTING_WORDS & set(re.split("[.-]", lowered)):
            raise SettingsError(
                f"{path}: {name} is not a setting of the router; use one of: {', '.join(sorted(_PROTECTING))}"
            )
    if not unknown:
        return ()
    listed = list_unknown(unknown, known)
    return (f"{path}: these are not settings of the router and have no effect: {listed}",)


def _convert_value(value: Any, field: dataclasses.Field[Any], where: str) -> Any:
    """Convert ``value`` to the type of the setting. Text is parsed; a value of another type is refused."""
    kind = type(field.default)
    if field.name == "workers" and value == "auto":
        return 0
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if field.name == "model_alias" and isinstance(value, dict):
        if all(isinstance(text, str) for pair in value.items() for text in pair):
            return tuple(f"{alias}={model}" for alias, model in value.items())
        raise SettingsError(f"{where} is {value!r}; it must be a map of names to models, all of them text")
    if field.name == "selector" and isinstance(value, dict):
        value = [f"{label}={text}" for label, text in value.items()]
    if kind is tuple and isinstance(value, (str, list)):
        texts = [value] if isinstance(value, str) else value
        if field.name == "selector" and all(isinstance(text, str) for text in texts):
            # A text is not split at commas, because it may be "app in (a, b)".
            return tuple(filter(None, (text.strip().strip(",") for text in texts)))
        if all(isinstance(text, str) for text in texts):
            return tuple(part for text in texts for part in text.replace(",", " ").split())
    if isinstance(value, str):
        if kind is bool and value.lower() in ("1", "0", "true", "false"):
            return value.lower() in ("1", "true")
        if kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                pass
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list of texts"}[
        kind
    ]
    raise SettingsError(f"{where} is {value!r}; it must be {expected}")


def find_trace_receiver() -> str:
    """Return the URL to which spans are sent, from OpenTelemetry's environment variables; "" if spans are disabled."""
    return spans.find_trace_receiver(os.environ)
