"""Parses the command line, with FastDeploy's flags. No other file of the engine reads environment variables."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from engine.fastdeploy_flags import IN_FLOAT32, add_foreign_flags, expand_abbreviations, read_config_file
from engine.scheduling.retrieval_config import REPRESENTATIVES, RetrievalConfig
from engine.telemetry.kv_events import KvEventsConfig, parse_kv_events
from kvcommon.hints import did_you_mean, list_flags
from kvcommon.spans import find_trace_receiver
from kvstore_backend import ConfigError
from kvstore_backend.config import parse_size

__all__ = ["EngineArgs", "parse_args", "set_native_defaults"]

log = logging.getLogger(__name__)

_ROLES = ("mixed", "prefill", "decode")
_STORES = ("mooncake", "file", "memory")
_TRANSFERS = ("ipc", "rdma", "tcp")
_LOG_LEVELS = ("debug", "info", "warn", "error")

_TOKEN_VARIABLE = "FD_ROUTER_TOKEN_FILE"
_RETRIEVAL_VARIABLES = {
    "init_tokens": "VLLM_RETRIEVAL_INIT_TOKENS_NUM",
    "local_tokens": "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM",
    "topk_percent": "VLLM_RETRIEVAL_TOPK_PERCENT",
    "dense_boundary": "VLLM_RETRIEVAL_DENSE_BOUNDARY",
    "offload_boundary": "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY",
}
_RETRIEVAL_FIELDS = tuple(field.name for field in fields(RetrievalConfig) if field.name != "block_size")


@dataclass(frozen=True)
class EngineArgs:
    """Configuration of an instance, from its command line and environment. Each field has the name of its flag.

    Port 0 means any free port.
    """

    model: str
    served_model_name: str
    host: str
    port: int
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_gpu_blocks_override: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    enable_output_caching: bool
    kvcache_storage_backend: str | None
    splitwise_role: str
    cache_transfer_protocol: tuple[str, ...]
    handover_memory: int
    pd_comm_port: int
    router: str | None
    router_token_file: Path | None
    metrics_port: int | None
    metrics_dialect: str
    engine_worker_queue_port: int
    rdma_comm_ports: str | None
    tensor_parallel_size: int
    dynamic_load_weight: bool
    retrieval: RetrievalConfig | None
    log_dir: Path | None
    log_level: str
    kv_events: KvEventsConfig | None
    trace_receiver: str
    """The URL that spans are sent to; empty: no spans are sent."""
    remarks: tuple[str, ...]
    """Sentences about flags that have no effect, for the log."""


def set_native_defaults() -> None:
    """Let idle CPU threads of torch sleep instead of spin, unless the user has set ``OMP_WAIT_POLICY``.

    Spinning threads take CPU time from other instances on the same machine. With two instances on two cores, a decode
    step took 180 ms with spinning threads and 15 ms with sleeping threads.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error as ``ConfigError`` in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """A help formatter that shows the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parse_args(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> EngineArgs:
    """Parse and check the command line and the environment.

    Raises:
        ConfigError: a flag or a variable cannot be used; the message is one sentence.
    """
    environ = os.environ if environ is None else environ
    parser = _build_parser()
    words = expand_abbreviations(sys.argv[1:] if argv is None else argv, list_flags(parser))
    known, unknown = parser.parse_known_args(words)
    remarks: list[str] = []
    if known.config is not None:
        first, unnamed = read_config_file(known.config, parser)
        if unnamed:
            remarks.append(f"--config {known.config}: these names are not flags and are ignored: {', '.join(unnamed)}")
        known, unknown = parser.parse_known_args([*first, *words])
    if unknown:
        raise ConfigError(_explain_unknown_flag(unknown[0], parser))
    values = vars(known)
    if not values["model"]:  # checked here because argparse would report a missing model before an unknown flag
        raise ConfigError("--model is not given; it must be a checkpoint folder in Hugging Face's format")
    for name in IN_FLOAT32:
        if name in values["without_effect"] and values["dtype"] != "float32":
            raise ConfigError(
                f"{name}: this engine computes all of a model in one dtype; add --dtype float32, or leave {name} out"
            )
    if values["without_effect"]:
        remarks.append(
            f"these flags of FastDeploy have no effect in this engine: {', '.join(values['without_effect'])}"
        )
    values["remarks"] = tuple(remarks)
    if values["tokenizer"] not in ("", None, values["model"]):
        raise ConfigError(f"--tokenizer {values['tokenizer']}: the tokenizer of --model is used; leave the flag out")
    values["served_model_name"] = values["served_model_name"] or values["model"]
    values["cache_transfer_protocol"] = _parse_protocols(values["cache_transfer_protocol"])
    if any(environ.get("FD_API_KEY", "").split(",")):
        raise ConfigError(
            "FD_API_KEY: this engine checks no API keys; give the keys to the router, let only the router reach the "
            "instance, and unset this variable"
        )
    values["log_dir"] = Path(environ["FD_LOG_DIR"]) if environ.get("FD_LOG_DIR") else None
    values["log_level"] = values["log_level"] or ("debug" if _read_debug(environ) else "info")
    values["router_token_file"] = _find_token_file(values, environ)
    values["retrieval"] = _read_retrieval(values, environ)
    values["kv_events"] = parse_kv_events(values["kv_events_config"]) if values["kv_events_config"] else None
    values["trace_receiver"] = find_trace_receiver(environ)
    args = EngineArgs(**{field.name: values[field.name] for field in fields(EngineArgs)})
    _check_combinations(args)
    return args


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="engine.api_server",
        allow_abbrev=False,
        description="One instance of the reference engine: OpenAI endpoints over a shared pool of KV blocks.",
        formatter_class=_HelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        help="checkpoint folder in Hugging Face's format, or ORGANISATION/NAME of a downloaded one; required",
    )
    add("--served-model-name", help="name in /v1/models and answers; the value of --model if not given")
    add("--host", default="0.0.0.0", help="address to listen on")
    add("--port", type=_parse_port, default=8000, help="port to listen on")
    add(
        "--config",
        metavar="FILE",
        help="YAML file with flags, such as max_model_len: 4096; the command line overrides it",
    )
    add("--tokenizer", help="only the value of --model is accepted")
    add("--metrics-port", type=_parse_port, help="second port with the same HTTP paths, for example for /metrics")
    add(
        "--metrics-dialect",
        choices=("fastdeploy", "vllm"),
        default="fastdeploy",
        help="vllm: /metrics also has the metrics that schedulers read from vLLM, with vLLM's names",
    )
    add("--log-level", choices=_LOG_LEVELS, help="level of the log; FD_DEBUG=1 also sets debug")
    _add_batch_flags(parser)
    _add_pool_flags(parser)
    _add_pair_flags(parser)
    _add_router_flags(parser)
    _add_retrieval_flags(parser)
    add_foreign_flags(parser)
    return parser


def _add_batch_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("device, precision and limits of the computation").add_argument
    add("--device", choices=("cpu", "cuda", "auto"), default="auto", help="auto: cuda if the machine has a CUDA device")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of weights and KV; auto: the dtype of the checkpoint",
    )
    add(
        "--max-model-len",
        type=_parse_positive,
        default=2048,
        help="maximum number of tokens of prompt and answer together",
    )
    add("--max-num-seqs", type=_parse_positive, default=8, help="maximum number of sequences that run concurrently")
    add(
        "--max-num-batched-tokens",
        type=_parse_positive,
        default=2048,
        help="maximum number of tokens computed in one step",
    )
    add("--block-size", type=_parse_positive, default=64, help="tokens in a KV block")
    add(
        "--num-gpu-blocks-override",
        type=_parse_positive,
        help="number of KV blocks (default: as many as fit in memory)",
    )
    add("--gpu-memory-utilization", type=_parse_share, default=0.9, help="share of a GPU's free memory for KV blocks")
    add(
        "--dynamic-load-weight",
        action="store_true",
        help="let HTTP requests free the weights and load them again (/v1/sleep, /v1/update_weights)",
    )
    add("--tensor-parallel-size", "-tp", type=_parse_positive, default=1, help="number of devices; only 1 is supported")


def _add_pool_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("cached blocks and the pool").add_argument
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse KV blocks of equal prefixes",
    )
    add(
        "--kvcache-storage-backend",
        type=_parse_store,
        help=f"the pool: {', '.join(_STORES)}, or a URL such as file:///dev/shm/kvpool?size=4GiB; not given: no pool",
    )
    add(
        "--enable-output-caching",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="also save blocks of generated tokens, unless sparse attention computed them",
    )
    add(
        "--kv-events-config",
        metavar="JSON",
        help="publish which blocks the own cache stores and removes, over ZeroMQ; vLLM's JSON: enable_kv_cache_events, "
        "publisher, endpoint, replay_endpoint, topic, buffer_steps, hwm, max_queue_size",
    )


def _add_pair_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prefill/decode disaggregation").add_argument
    add("--splitwise-role", choices=_ROLES, default="mixed", help="role in prefill/decode disaggregation")
    add(
        "--cache-transfer-protocol",
        default="ipc",
        help="protocol of direct transfers: ipc, rdma, tcp, or several with commas; reported to the router",
    )
    add(
        "--handover-memory",
        type=_parse_size,
        default=2 << 30,
        help="host memory for prompts that arrive at a decode instance with a GPU; further prompts use the pool [2GiB]",
    )
    add(
        "--pd-comm-port",
        type=_parse_port,
        default=0,
        help="connector port, to which prefill instances connect; 0: any free port",
    )


def _add_router_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the router, and what is reported to it").add_argument
    add("--router", help="router to register with: host:port")
    add(
        "--router-token-file",
        type=Path,
        help="file with the token that the router requires for registrations (the router's --register-token-file); "
        f"the variable {_TOKEN_VARIABLE} has the same effect",
    )
    add("--engine-worker-queue-port", type=_parse_port, default=0, help="reported to the router; not used otherwise")
    add("--rdma-comm-ports", help="reported to the router; not used otherwise")


def _add_retrieval_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sparse attention over an index of KV blocks").add_argument
    default = RetrievalConfig(block_size=1)
    add(
        "--enable-retrieval",
        action=argparse.BooleanOptionalAction,
        help="long prompts read only the most relevant blocks in decode [default if VLLM_PLUGINS names retrieval]",
    )

    def add_value(name: str, parse: Callable[[str], object], text: str) -> None:
        variable = _RETRIEVAL_VARIABLES.get(name)
        also = f"; or the variable {variable}" if variable else ""
        add(f"--retrieval-{name.replace('_', '-')}", type=parse, help=f"{text} [{getattr(default, name)}{also}]")

    add_value("init_tokens", _parse_tokens, "tokens at the beginning that are always read")
    add_value("local_tokens", _parse_tokens, "tokens at the end that are always read; more than a block")
    add_value("topk_percent", _parse_share, "share of all other blocks that a step reads")
    add_value("dense_boundary", _parse_tokens, "prompts with fewer tokens use full attention")
    add_value("offload_boundary", _parse_tokens, "the blocks of longer prompts move to host memory")
    add_value("representative", str, f"what represents a block in the index: {', '.join(REPRESENTATIVES)}")
    add_value("stride", _parse_positive, "number of steps that use one selection of blocks")
    add_value("dense_layers", _parse_number, "number of first layers that read every block")


def _read_retrieval(values: Mapping[str, Any], environ: Mapping[str, str]) -> RetrievalConfig | None:
    """Return the settings of sparse attention, or None if it is not enabled.

    Each setting comes from its flag, else from its environment variable, else from the defaults.
    """
    given = {name: values[f"retrieval_{name}"] for name in _RETRIEVAL_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    named = {name: environ[variable] for name, variable in _RETRIEVAL_VARIABLES.items() if environ.get(variable)}
    enabled, plugins = values["enable_retrieval"], environ.get("VLLM_PLUGINS", "").split(",")
    if enabled is None:
        enabled = "retrieval" in map(str.strip, plugins)
    if not enabled:
        _report_idle_settings(given, named)
        return None
    given.update({name: _parse_variable(name, text) for name, text in named.items() if name not in given})
    config = RetrievalConfig(values["block_size"], **given)
    if values["max_model_len"] < config.dense_boundary:
        asked = "--enable-retrieval" if values["enable_retrieval"] else "VLLM_PLUGINS names retrieval"
        raise ConfigError(
            f"{asked}: no prompt reaches --retrieval-dense-boundary {config.dense_boundary} with "
            f"--max-model-len {values['max_model_len']}; raise --max-model-len or lower the boundary"
        )
    return config


def _report_idle_settings(given: Iterable[str], named: Iterable[str]) -> None:
    """Refuse the flags of the settings ``given`` and warn of the variables of ``named``: sparse attention is off."""
    for name in given:
        raise ConfigError(
            f"--retrieval-{name.replace('_', '-')} has no effect without --enable-retrieval; add that flag"
        )
    if named:
        variables = ", ".join(_RETRIEVAL_VARIABLES[name] for name in named)
        log.warning(
            "Sparse attention is off, so these environment variables have no effect: %s; add --enable-retrieval",
            variables,
        )


def _parse_variable(name: str, text: str) -> float | int:
    try:
        return _parse_share(text) if name == "topk_percent" else _parse_tokens(text)
    except argparse.ArgumentTypeError as exc:
        raise ConfigError(f"{_RETRIEVAL_VARIABLES[name]}: {exc}") from None


def _check_combinations(args: EngineArgs) -> None:
    if args.kvcache_storage_backend and not args.enable_prefix_caching:
        raise ConfigError(
            f"--kvcache-storage-backend {args.kvcache_storage_backend} needs prefix caching; "
            "leave out --no-enable-prefix-caching"
        )
    if args.enable_output_caching and not args.enable_prefix_caching:
        raise ConfigError("--enable-output-caching needs prefix caching; leave out --no-enable-prefix-caching")
    if args.kv_events and not args.enable_prefix_caching:
        raise ConfigError("--kv-events-config needs prefix caching; leave out --no-enable-prefix-caching")
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {args.max_num_batched_tokens} is below --max-num-seqs {args.max_num_seqs}, but "
            "every running sequence needs one token in a step; raise the first or lower the second"
        )
    if args.pd_comm_port in (args.port, args.metrics_port):
        raise ConfigError(f"--pd-comm-port {args.pd_comm_port} is also --port or --metrics-port; choose another port")
    if args.tensor_parallel_size != 1:
        raise ConfigError(
            f"--tensor-parallel-size {args.tensor_parallel_size}: this engine runs a model on one device; only 1 works"
        )


def _explain_unknown_flag(argument: str, parser: argparse.ArgumentParser) -> str:
    name = argument.partition("=")[0]
    hint = did_you_mean(name, list_flags(parser)) or "; see --help"
    return f"{name!r} is not a flag of this program{hint}"


def _parse_protocols(text: str) -> tuple[str, ...]:
    protocols = tuple(part.strip() for part in text.split(","))
    for protocol in protocols:
        if protocol not in _TRANSFERS:
            raise ConfigError(f"--cache-transfer-protocol {text!r}: {protocol!r} is not one of {', '.join(_TRANSFERS)}")
    return protocols


def _find_token_file(values: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """Return the file with the router's token, from the flag, else from the environment, or None if there is no router.

    Without ``--router`` the flag is an error, and the variable is ignored.
    """
    if values["router"] is None:
        if values["router_token_file"] is not None:
            raise ConfigError("--router-token-file has no effect without --router; add --router")
        return None
    named = environ.get(_TOKEN_VARIABLE)
    return values["router_token_file"] or (Path(named) if named else None)


def _read_debug(environ: Mapping[str, str]) -> bool:
    value = environ.get("FD_DEBUG", "0")
    if value not in ("0", "1", ""):
        raise ConfigError(f"FD_DEBUG={value!r}: set it to 1 for debug logs, or to 0 for none")
    return value == "1"


def _parse_store(text: str) -> str | None:
    if text in ("", "None"):  # FastDeploy's values for no pool
        return None
    if text not in _STORES and ":" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is neither one of {', '.join(_STORES)} nor a URL")
    return text


def _parse_size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _parse_positive(text: str) -> int:
    value = _parse_number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _parse_tokens(text: str) -> int:
    """Parse a number of tokens; a final K multiplies it by 1024, a final M by 1024 * 1024."""
    digits, unit = text[:-1], {"k": 10, "m": 20}.get(text[-1:].lower())
    try:
        value = int(text) if unit is None else int(digits) << unit
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 1024 or 32K")
    return value


def _parse_port(text: str) -> int:
    value = _parse_number(text)
    if not 0 < value < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port (1 to 65535)")
    return value


def _parse_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _parse_share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction above 0 and at most 1")
    return value
