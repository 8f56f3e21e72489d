"""RouterSettings: flags > YAML > environment > defaults, each setting declared once.

The YAML keys are those of FastDeploy's Go router, all of them, so that its files are read unchanged; of those that mean
nothing here the operator is told (``RouterSettings.without_effect``). An environment variable is ``KVROUTER__`` and the
field's name in capitals, with two underscores because Kubernetes itself sets ``KVROUTER_PORT`` beside a service named
``kvrouter``.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.metadata
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from router.policies import POLICIES, PolicyOptions
from router.policies.prefix_index import DEFAULT_MAX_ENTRIES
from router.settings.yaml_file import YamlFileError, read_yaml

__all__ = ["RouterSettings", "SettingsError", "load_settings"]

_ENV_PREFIX = "KVROUTER__"
_LOG_LEVELS = ("debug", "info", "warn", "error")
_LOG_OUTPUTS = ("stderr", "stdout", "file")

# What a whole number is at least; 0 where it is not named.
_LEAST = {
    "health_failure_threshold": 1,
    "health_success_threshold": 1,
    "max_body_bytes": 1,
    "log_max_total_size_mb": 1,
    "prefix_index_entries": 2,
}

# Settings of FastDeploy's Go router that have nothing to set here, and why.
_WITHOUT_EFFECT = {
    "server.name": "nothing shows the router's name",
    "server.mode": "the router runs in one mode; what it logs is set by log.level",
    "scheduler.cache-block-size": "prefixes are compared in chunks of text, not in blocks of tokens",
    "scheduler.tokenizer-url": "prompts are compared as text, so no tokenizer is asked",
    "scheduler.tokenizer-timeout-secs": "prompts are compared as text, so no tokenizer is asked",
    "scheduler.eviction-interval-secs": "what is stale is forgotten as requests come, not in rounds",
    "log.max-age-days": "log files are bounded by log.max-total-size-mb alone",
    "log.cleanup-interval-secs": "log files are bounded whenever a line is written",
}


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
    max_body_bytes: int = _setting(64 * 1024 * 1024, "server.max-body-bytes", "bytes that a request's body may have")
    preempt_retry_count: int = _setting(
        3, "server.preempt-retry-count", "times that a request is continued after decode instances preempted it"
    )
    preempt_retry_exclude_decode: bool = _setting(
        False, "server.preempt-retry-exclude-decode", "continue it at another decode instance, if there is one"
    )
    policy: str = _setting("pool_aware", "scheduler.policy", "how a mixed instance is chosen", POLICIES)
    prefill_policy: str = _setting(
        "pool_aware", "scheduler.prefill-policy", "how a prefill instance is chosen", POLICIES
    )
    decode_policy: str = _setting("request_num", "scheduler.decode-policy", "how a decode instance is chosen", POLICIES)
    stats_interval_secs: float = _setting(
        5.0, "scheduler.stats-interval-secs", "seconds between two looks at instances' own figures, by remote policies"
    )
    eviction_duration_mins: float = _setting(
        30.0, "scheduler.eviction-duration-mins", "minutes after which a prefix that nobody used is forgotten"
    )
    prefix_index_entries: int = _setting(
        DEFAULT_MAX_ENTRIES,
        "scheduler.prefix-index-entries",
        "chunks of prompts (128 tokens, 110 bytes each) that are remembered at most",
    )
    balance_abs_threshold: float = _setting(
        1.0, "scheduler.balance-abs-threshold", "difference of loads up to which cache_aware looks at caches first"
    )
    balance_rel_threshold: float = _setting(
        0.2, "scheduler.balance-rel-threshold", "the same as a part of the highest load; both must be exceeded"
    )
    hit_ratio_weight: float = _setting(
        1.0, "scheduler.hit-ratio-weight", "what the cached part of a prompt counts in cache_aware"
    )
    load_balance_weight: float = _setting(
        0.05, "scheduler.load-balance-weight", "what an instance's load counts in cache_aware"
    )
    waiting_weight: float = _setting(
        10.0, "scheduler.waiting-weight", "what a waiting request counts in fd_metrics_score; a running one counts 1"
    )
    register_path: str = _setting("", "manager.register-path", "YAML file of instances that do not register themselves")
    snapshot_path: str = _setting(
        "", "manager.snapshot-path", "file that keeps instances and prefixes for the next start"
    )
    # Not shorter: writing out a full prefix index holds everything up for some 0.2 s.
    snapshot_interval_secs: float = _setting(
        60.0, "manager.snapshot-interval-secs", "seconds between two writes of that file"
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
    log_level: str = _setting("info", "log.level", "what is logged", _LOG_LEVELS)
    log_output: str = _setting("stderr", "log.output", "where it is logged; file is logs/router.log", _LOG_OUTPUTS)
    log_max_total_size_mb: int = _setting(500, "log.max-total-size-mb", "megabytes that log files may have in all")
    access_log: str = _setting(
        "stderr",
        "log.access-log",
        "where one line of JSON for each request goes: stderr, stdout, off, or a file to append to",
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

    without_effect: tuple[str, ...] = ()
    """One sentence for each setting that was given and means nothing here."""

    def __post_init__(self) -> None:
        for field in _SETTINGS:
            _check(field, getattr(self, field.name))
        if self.max_concurrent_requests_per_key and not self.api_keys_file:
            raise SettingsError(
                f"server.max-concurrent-requests-per-key is {self.max_concurrent_requests_per_key}, but there are no "
                "keys to tell clients apart; name them with server.api-keys-file"
            )

    @property
    def policy_options(self) -> PolicyOptions:
        """What is set about policies."""
        return PolicyOptions(**{name: getattr(self, name) for name in PolicyOptions._fields})


# Every field but without_effect.
_SETTINGS = tuple(field for field in dataclasses.fields(RouterSettings) if "key" in field.metadata)


def load_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> RouterSettings:
    """Read the settings of one start.

    Args:
        argv: the flags, without the program's name.
        environ: defaults to the process's environment.

    Raises:
        SettingsError: an unknown name or an impossible value, wherever it stands.
        SystemExit: ``--help`` and ``--version``.
    """
    flags = vars(_parser().parse_args([_dashes(arg) for arg in argv]))
    config_path = flags.pop("config_path")
    values = _from_environment(os.environ if environ is None else environ)
    if config_path is not None:
        values |= _from_yaml(Path(config_path))
    values |= {
        field.name: _convert(flags[field.name], field, f"--{field.name.replace('_', '-')}")
        for field in _SETTINGS
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
    version = f"kvrouter {importlib.metadata.version('fastdeploy-kvstore')}"
    parser.add_argument("-V", "--version", action="version", version=version, help="print the version and end")
    parser.add_argument("--config-path", metavar="FILE", help="YAML file, as of FastDeploy's Go router")
    for field in _SETTINGS:
        flag = "--" + field.name.replace("_", "-")
        choices = field.metadata["choices"]
        about = f"{field.metadata['help']}{': ' + ', '.join(choices) if choices else ''} " \
                f"(default {field.default if field.default != '' else 'none'}) [{field.metadata['key']}]"  # fmt: skip
        if isinstance(field.default, bool):
            parser.add_argument(flag, nargs="?", const=True, metavar="true|false", help=about)
        else:
            is_number = type(field.default) is int and field.name != "port"
            metavar = "N" if is_number else field.name.split("_")[-1].upper()
            parser.add_argument(flag, metavar=metavar, help=about)
    return parser


def _dashes(arg: str) -> str:
    # FastDeploy's parser takes --request_timeout_secs for --request-timeout-secs, and documents --config_path; that
    # of its Go router takes -port for --port.
    if len(arg) > 2 and arg[0] == "-" and arg[1].isalpha():
        arg = f"-{arg}"
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {_ENV_PREFIX + field.name.upper(): field for field in _SETTINGS}
    values = {}
    for name in sorted(environ):
        if name.startswith(_ENV_PREFIX):
            if name not in names:
                raise SettingsError(f"environment variable {name} is no setting of the router{_nearest(name, names)}")
            values[names[name].name] = _convert(environ[name], names[name], f"environment variable {name}")
    return values


def _from_yaml(path: Path) -> dict[str, Any]:
    try:
        document = read_yaml(path)
    except YamlFileError as exc:
        raise SettingsError(f"--config_path {path}: {exc}") from exc
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(f"--config_path {path} has no sections, such as 'server:' with 'port: 9000' under it")
    fields = {field.metadata["key"]: field for field in _SETTINGS}
    sections = {key.split(".")[0]: None for key in fields}
    values: dict[str, Any] = {}
    without_effect = []
    for section, entries in document.items():
        if section not in sections:
            raise SettingsError(f"{path}: {section!r} is not a section of settings{_nearest(str(section), sections)}")
        if not isinstance(entries, dict | None):
            raise SettingsError(f"{path}: {section} is {entries!r}; it must be a section with settings under it")
        for name, value in (entries or {}).items():
            key = f"{section}.{name}"
            if key in _WITHOUT_EFFECT:
                without_effect.append(f"{path}: {key} has no effect: {_WITHOUT_EFFECT[key]}")
            elif key in fields:
                values[fields[key].name] = _convert(value, fields[key], f"{path}: {key}")
            else:
                raise SettingsError(f"{path}: {key} is not a setting of the router{_nearest(key, fields)}")
    return values | {"without_effect": tuple(without_effect)}


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
        hint = _did_you_mean(value, choices)
        raise SettingsError(f"{name} is {value!r}; it must be one of {', '.join(choices)}{hint}")
    if field.name == "port" and not 0 <= value <= 65535:
        raise SettingsError(f"{name} is {value}; it must be a port, 1 to 65535, or 0 for a free one")
    if field.name.endswith(("_secs", "_mins")) and not 0 < value < float("inf"):
        unit = "seconds" if field.name.endswith("_secs") else "minutes"
        raise SettingsError(f"{name} is {value:g}; it must be a number of {unit} above 0")
    if isinstance(value, float) and not 0 <= value < float("inf"):
        raise SettingsError(f"{name} is {value:g}; it must be a number from 0 on")
    least = _LEAST.get(field.name, 0)
    if type(value) is int and value < least:
        raise SettingsError(f"{name} is {value}; it must be at least {least}")
    if field.name == "health_check_endpoint" and not value.startswith("/"):
        raise SettingsError(f"{name} is {value!r}; a path begins with '/'")


def _nearest(name: str, known: Iterable[str]) -> str:
    return _did_you_mean(name, known) or f"; known are {', '.join(known)}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
