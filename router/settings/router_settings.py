"""RouterSettings: declares each setting once, with its default, its YAML key and its valid values.

All YAML keys of FastDeploy's Go router are accepted, so that its files can be used unchanged. Keys that have no effect
in this router are reported to the operator (``RouterSettings.without_effect``).
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvcommon.hints import did_you_mean
from router.policies import DEFAULT_MAX_ENTRIES, POLICIES, PolicyOptions

__all__ = ["ROUTER_GONE_SECONDS", "SETTINGS", "RouterSettings", "SettingsError"]

ROUTER_GONE_SECONDS = 5.0
"""If routers share a state, a router that sends no message for this time is assumed to have ended."""

# Maximum number of workers that is chosen automatically. More workers are not faster, because they wait for instances.
MAX_AUTO_WORKERS = 4
# Each worker is a process with a hundred megabytes; with too many the machine stands still before any listens.
MAX_WORKERS = 1024
# After Ctrl-C, running requests may continue for this time. Then they end with an error.
INTERRUPT_GRACE_SECONDS = 1.0

_LOG_LEVELS = ("debug", "info", "warn", "error")
_LOG_OUTPUTS = ("stderr", "stdout", "file")

_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@*]+")

_SESSION_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+(:[!#$%&'*+.^_`|~0-9A-Za-z-]+)?")

# Minimum of each integer setting; 0 for all others.
_MINIMUMS = {
    "health_failure_threshold": 1,
    "health_success_threshold": 1,
    "max_body_bytes": 1,
    "log_max_total_size_mb": 1,
    "prefix_index_entries": 2,
    "requests_per_instance": 1,
}


class SettingsError(ValueError):
    """A setting cannot be used. The message is one sentence with the source, the value and a valid value."""


def _declare(default: Any, key: str, help: str, choices: Iterable[str] = (), metavar: str = "") -> Any:
    metadata = {"key": key, "help": help, "choices": tuple(choices), "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RouterSettings:
    """All settings of the router. The flag of a setting is the field's name with dashes."""

    host: str = _declare("0.0.0.0", "server.host", "address to listen at")
    port: int = _declare(9000, "server.port", "port to listen at; 0: any free port")
    epp_port: int = _declare(
        0,
        "server.epp-port",
        "port at which gateways such as Envoy ask for an instance (ext_proc), as with kvrouter epp; 0: none",
    )
    workers: int = _declare(
        0,
        "server.workers",
        f"number of processes that serve the port; 0 or auto: one per core, up to {MAX_AUTO_WORKERS}",
    )
    shared_state: str = _declare(
        "",
        "server.shared-state",
        "Redis over which several routers share their instances and loads: redis://HOST:PORT/0",
    )
    splitwise: bool = _declare(
        False, "server.splitwise", "serve each request by a prefill and a decode instance, instead of a mixed one"
    )
    dialect: str = _declare(
        "python",
        "server.dialect",
        "errors and metric labels as in FastDeploy's Python or Go router, where the two differ; default go if started "
        "as fd-router or with --config_path",
        ("python", "go"),
    )
    request_timeout_secs: float = _declare(
        1800.0, "server.request-timeout-secs", "seconds after which a request ends with an error"
    )
    shutdown_delay_secs: float = _declare(
        0.0,
        "server.shutdown-delay-secs",
        "seconds after SIGTERM in which the router still accepts requests while /ready responds with 503, so that load "
        "balancers stop using it first",
    )
    shutdown_grace_secs: float = _declare(
        25.0,
        "server.shutdown-grace-secs",
        "seconds for which running requests may continue after the shutdown delay (1 after Ctrl-C)",
    )
    max_body_bytes: int = _declare(
        64 * 1024 * 1024, "server.max-body-bytes", "maximum size of a request's body in bytes"
    )
    preempt_retry_count: int = _declare(
        3, "server.preempt-retry-count", "how many times a request is continued after a decode instance preempted it"
    )
    preempt_retry_exclude_decode: bool = _declare(
        False,
        "server.preempt-retry-exclude-decode",
        "continue a preempted request at another decode instance, if there is one",
    )
    stream_resume_count: int = _declare(
        5,
        "server.stream-resume-count",
        "how many times a stream is resumed at another instance after its instance died, ended it early or hung",
    )
    session_headers: tuple[str, ...] = _declare(
        (),
        "scheduler.session-headers",
        "headers that name a request's session, as NAME or NAME:PARENT; they have precedence over the built-in ones, "
        "such as X-Session-Id",
    )
    policy: str = _declare("pool_aware", "scheduler.policy", "policy that chooses a mixed instance", POLICIES)
    prefill_policy: str = _declare(
        "pool_aware", "scheduler.prefill-policy", "policy that chooses a prefill instance", POLICIES
    )
    decode_policy: str = _declare(
        "request_num", "scheduler.decode-policy", "policy that chooses a decode instance", POLICIES
    )
    stats_interval_secs: float = _declare(
        5.0,
        "scheduler.stats-interval-secs",
        "seconds between two polls of the instances' own metrics, for policies that read them, such as "
        "fd_remote_metrics_score",
    )
    eviction_duration_mins: float = _declare(
        30.0,
        "scheduler.eviction-duration-mins",
        "minutes after which the router deletes an unused prefix from the prefix index",
    )
    kv_events: bool = _declare(
        False,
        "scheduler.kv-events",
        "read the KV events of instances that publish them, to know which blocks they have cached; needs pyzmq",
    )
    prefix_index_entries: int = _declare(
        DEFAULT_MAX_ENTRIES,
        "scheduler.prefix-index-entries",
        "maximum number of prompt chunks (128 tokens each) in the prefix index; the default needs 10 to 180 MB",
    )
    balance_abs_threshold: float = _declare(
        1.0,
        "scheduler.balance-abs-threshold",
        "cache_aware ignores caches if the highest and the lowest load differ by more than this and by more than "
        "--balance-rel-threshold",
    )
    balance_rel_threshold: float = _declare(
        0.2,
        "scheduler.balance-rel-threshold",
        "limit as of --balance-abs-threshold, but as a fraction of the highest load",
    )
    hit_ratio_weight: float = _declare(
        1.0, "scheduler.hit-ratio-weight", "weight of the cached part of a prompt in cache_aware"
    )
    load_balance_weight: float = _declare(
        0.05,
        "scheduler.load-balance-weight",
        "weight of an instance's load in cache_aware; 1 in the Go router's dialect",
    )
    waiting_weight: float = _declare(
        10.0,
        "scheduler.waiting-weight",
        "weight of a waiting request in fd_metrics_score (a running one: 1); 1 in the Go router's dialect",
    )
    target_utilization: float = _declare(
        0.7,
        "scheduler.target-utilization",
        "fraction of time that an instance should be busy, for the metric router_instances_needed",
    )
    requests_per_instance: int = _declare(
        32,
        "scheduler.requests-per-instance",
        "requests that a decode or mixed instance runs concurrently, for the metric router_instances_needed; an "
        "instance may register its own max_num_seqs",
    )
    register_path: str = _declare("", "manager.register-path", "YAML file of instances that do not register themselves")
    snapshot_path: str = _declare(
        "", "manager.snapshot-path", "file that stores instances and prefixes for the next start"
    )
    # Not shorter, because writing a full prefix index blocks the router for about 0.2 s.
    snapshot_interval_secs: float = _declare(
        60.0, "manager.snapshot-interval-secs", "seconds between two writes of the snapshot file"
    )
    health_check_endpoint: str = _declare(
        "/health", "manager.health-check-endpoint", "path for probes, to which a healthy instance responds with 200"
    )
    health_check_interval_secs: float = _declare(
        5.0, "manager.health-check-interval-secs", "seconds between two rounds of probes"
    )
    health_check_timeout_secs: float = _declare(
        5.0, "manager.health-check-timeout-secs", "seconds that one probe may take"
    )
    health_failure_threshold: int = _declare(
        3, "manager.health-failure-threshold", "failed probes in a row that make an instance unhealthy"
    )
    health_success_threshold: int = _declare(
        1, "manager.health-success-threshold", "successful probes in a row that make an instance healthy again"
    )
    heartbeat_expiry_secs: float = _declare(
        30.0, "manager.heartbeat-expiry-secs", "seconds without a registration after which an instance is removed"
    )
    log_level: str = _declare("info", "log.level", "lowest level of the messages that are logged", _LOG_LEVELS)
    log_output: str = _declare("stderr", "log.output", "where messages are logged; file: logs/router.log", _LOG_OUTPUTS)
    log_max_total_size_mb: int = _declare(500, "log.max-total-size-mb", "maximum total size of log files in megabytes")
    access_log: str = _declare(
        "stderr",
        "log.access-log",
        "where the access log is written, one line of JSON per request: stderr, stdout, off, or a file to append to",
    )
    flight_recorder: float = _declare(
        0.0,
        "log.flight-recorder",
        "minutes of decisions and outcomes to keep in files for kvrouter replay, without prompts and keys; 0: none",
        metavar="MINUTES",
    )
    flight_recorder_path: str = _declare("logs", "log.flight-recorder-path", "folder of the flight recorder's files")
    max_concurrent_requests: int = _declare(
        0, "server.max-concurrent-requests", "maximum number of concurrent requests; others are queued; 0: no limit"
    )
    max_concurrent_requests_per_key: int = _declare(
        0,
        "server.max-concurrent-requests-per-key",
        "maximum number of concurrent requests of the client of each API key; 0: no limit",
    )
    max_tokens_per_sec_per_key: float = _declare(
        0.0,
        "server.max-tokens-per-sec-per-key",
        "prompt and generated tokens per second that the client of each API key may use; further requests are answered "
        "with 429; 0: no limit; a tokens_per_sec of the key in the file of API keys has precedence",
    )
    max_queued_requests: int = _declare(
        1000, "server.max-queued-requests", "maximum number of queued requests; further requests are answered with 429"
    )
    queue_timeout_secs: float = _declare(
        60.0, "server.queue-timeout-secs", "seconds after which a queued request is answered with 429"
    )
    api_keys_file: str = _declare(
        "",
        "server.api-keys-file",
        "file with the API keys that clients must send, as lines 'name: key', 'name: {key: KEY, tokens_per_sec: 500, "
        "priority: 0}' or one key per line; without a file, no key is required",
    )
    cache_salt_per_key: bool = _declare(
        False,
        "server.cache-salt-per-key",
        "separate the caches of clients: a completion gets a cache_salt derived from the API key, its name and the "
        "client's own cache_salt",
    )
    sse_keepalive_secs: float = _declare(
        0.0,
        "server.sse-keepalive-secs",
        "seconds between two comments (': keep-alive') that the client of a stream gets until the first token; "
        "0: no comments",
    )
    stream_stall_secs: float = _declare(
        0.0,
        "server.stream-stall-secs",
        "seconds without a byte from the instance after which a stream that has begun fails; 0: no limit",
    )
    admin_token_file: str = _declare(
        "",
        "server.admin-token-file",
        "file with the token that /register, /registered and /admin require, as 'Authorization: Bearer TOKEN'; "
        "FastDeploy's instances send no token, so list them in a register file; without a file, no token is required",
    )
    register_token_file: str = _declare(
        "",
        "server.register-token-file",
        "file with a token that /register and /decode_instances also accept, so that instances do not need the admin "
        "token",
    )
    ssl_certfile: str = _declare(
        "",
        "server.ssl-certfile",
        "file with this router's certificate in PEM format; with it, the router serves only HTTPS",
    )
    ssl_keyfile: str = _declare(
        "", "server.ssl-keyfile", "file with the certificate's key; empty if the certificate's file has the key, too"
    )
    cors_allowed_origins: tuple[str, ...] = _declare(
        (),
        "server.cors-allowed-origins",
        "origins of pages whose scripts may use /v1 from a browser, such as https://chat.example.com, or * for all",
    )
    model_alias: tuple[str, ...] = _declare(
        (),
        "server.model-alias",
        "other names of models, as NAME=MODEL; in YAML a map of names to models",
    )
    service_discovery: str = _declare(
        "none",
        "manager.service-discovery",
        "how to find instances that do not register themselves: kubernetes finds pods of the router's cluster",
        ("none", "kubernetes", "k8s"),
    )
    selector: tuple[str, ...] = _declare(
        (), "manager.selector", "labels of the pods that are instances, such as app=kv,tier=gpu; in YAML also a map"
    )
    service_discovery_namespace: str = _declare(
        "", "manager.service-discovery-namespace", "namespace of the pods, or all; default: the router's own"
    )
    service_discovery_port: int = _declare(
        0,
        "manager.service-discovery-port",
        "port of the instances in the pods; 0: the port named http, or the only port",
    )
    kubernetes_api: str = _declare(
        "https://kubernetes.default.svc",
        "manager.kubernetes-api",
        "URL of the cluster's API server; in a pod, Kubernetes sets it in the environment",
    )
    kubernetes_account: str = _declare(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        "manager.kubernetes-account",
        "folder with the files token, ca.crt and namespace of a service account that may list and watch pods",
    )
    instance_ca_file: str = _declare(
        "",
        "manager.instance-ca-file",
        "file with the CA certificates for instances with https addresses, in PEM format; default: the system's",
    )

    without_effect: tuple[str, ...] = ()
    """One sentence for each setting in the YAML file that has no effect in this router."""

    def __post_init__(self) -> None:
        for field in SETTINGS:
            _check_value(field, getattr(self, field.name))
        for field in SETTINGS:
            value = getattr(self, field.name)
            if field.name.endswith("_per_key") and value and not self.api_keys_file:
                raise SettingsError(
                    f"{field.metadata['key']} is {_format_value(value)}, but clients have no API keys; "
                    "set server.api-keys-file"
                )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise SettingsError(
                f"server.ssl-keyfile is {self.ssl_keyfile!r}, but no certificate is given; set server.ssl-certfile"
            )
        if self.finds_pods and not self.selector:
            raise SettingsError(
                f"manager.service-discovery is {self.service_discovery!r}, but no pods are selected; set "
                "manager.selector, such as app=kv"
            )
        if self.selector and not self.finds_pods:
            raise SettingsError(
                f"manager.selector is {','.join(self.selector)!r}, but service discovery is off; set "
                "manager.service-discovery to kubernetes"
            )
        # An instance's heartbeats reach only one router. If that router ends, the others must notice this before they
        # remove the instance for missing heartbeats.
        if self.shared_state and self.heartbeat_expiry_secs <= ROUTER_GONE_SECONDS:
            raise SettingsError(
                f"manager.heartbeat-expiry-secs is {self.heartbeat_expiry_secs:g}; with server.shared-state it must be "
                f"more than {ROUTER_GONE_SECONDS:g}, the time after which other routers notice that a router died"
            )

    @property
    def finds_pods(self) -> bool:
        """Whether the router discovers instances as pods of a Kubernetes cluster."""
        return self.service_discovery != "none"

    @property
    def num_workers(self) -> int:
        """Number of processes that serve requests."""
        return self.workers or min(MAX_AUTO_WORKERS, len(os.sched_getaffinity(0)))

    @property
    def graces(self) -> dict[signal.Signals, float]:
        """For each signal that ends the router, the seconds for which running requests may continue."""
        return {signal.SIGTERM: self.shutdown_grace_secs, signal.SIGINT: INTERRUPT_GRACE_SECONDS}

    @property
    def model_aliases(self) -> dict[str, str]:
        """Names of models, by their aliases."""
        return dict(entry.split("=", 1) for entry in self.model_alias)

    @property
    def plain_values(self) -> dict[str, Any]:
        """The settings that are numbers, switches or choices. Paths and addresses may contain secrets, so they are
        left out.
        """
        return {
            field.name: getattr(self, field.name)
            for field in SETTINGS
            if isinstance(field.default, (bool, int, float)) or field.metadata["choices"]
        }

    @property
    def policy_options(self) -> PolicyOptions:
        """The settings that policies use."""
        return PolicyOptions(**{name: getattr(self, name) for name in PolicyOptions._fields})


SETTINGS = tuple(field for field in dataclasses.fields(RouterSettings) if "key" in field.metadata)
"""The fields of ``RouterSettings`` that can be set: all except ``without_effect``."""


def _format_value(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _check_value(field: dataclasses.Field[Any], value: Any) -> None:
    name, choices = field.metadata["key"], field.metadata["choices"]
    if choices and value not in choices:
        hint = did_you_mean(value, choices)
        raise SettingsError(f"{name} is {value!r}; it must be one of {', '.join(choices)}{hint}")
    if field.name in ("port", "epp_port") and not 0 <= value <= 65535:
        zero = "any free port" if field.name == "port" else "no such port"
        raise SettingsError(f"{name} is {value}; it must be a port, 1 to 65535, or 0 for {zero}")
    if field.name == "service_discovery_port" and not 0 <= value <= 65535:
        raise SettingsError(f"{name} is {value}; it must be a port, 1 to 65535, or 0 for the port that the pod names")
    is_time = field.name.endswith(("_secs", "_mins")) and not (value == 0 == field.default)
    if is_time and not 0 < value < float("inf"):
        unit = "seconds" if field.name.endswith("_secs") else "minutes"
        raise SettingsError(f"{name} is {value:g}; it must be a number of {unit} above 0")
    if isinstance(value, float) and not 0 <= value < float("inf"):
        raise SettingsError(f"{name} is {value:g}; it must be 0 or more")
    if field.name == "target_utilization" and not 0 < value <= 1:
        raise SettingsError(f"{name} is {value:g}; it must be a fraction above 0 and at most 1, such as 0.7")
    minimum = _MINIMUMS.get(field.name, 0)
    if type(value) is int and value < minimum:
        raise SettingsError(f"{name} is {value}; it must be at least {minimum}")
    if field.name == "workers" and value > MAX_WORKERS:
        raise SettingsError(f"{name} is {value}; it must be at most {MAX_WORKERS}")
    for origin in value if field.name == "cors_allowed_origins" else ():
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise SettingsError(
                f"{name} has {origin!r}; an origin is scheme://host or scheme://host:port without a path, such "
                "as https://chat.example.com, or * for all"
            )
    for entry in value if field.name == "session_headers" else ():
        if not _SESSION_HEADER.fullmatch(entry):
            raise SettingsError(
                f"{name} has {entry!r}; an entry is the header of the session's id, or two headers with a colon "
                "between them, the second of the parent session's id, such as x-chat-id:x-parent-chat-id"
            )
    if field.name == "model_alias":
        _check_aliases(name, value)
    if field.name == "health_check_endpoint" and not value.startswith("/"):
        raise SettingsError(f"{name} is {value!r}; a path begins with '/'")


def _check_aliases(name: str, entries: Iterable[str]) -> None:
    models: dict[str, str] = {}
    for entry in entries:
        alias, _, model = entry.partition("=")
        if not alias or not model:
            raise SettingsError(f"{name} has {entry!r}; an alias is NAME=MODEL, such as chat=Qwen3-8B")
        if models.setdefault(alias, model) != model:
            raise SettingsError(f"{name} has the alias {alias!r} twice, for {models[alias]!r} and for {model!r}")
    for alias, model in models.items():
        if model in models:
            raise SettingsError(f"{name}: the alias {alias!r} is for {model!r}, which is another alias; name the model")
