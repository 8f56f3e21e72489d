"""The command line: FastDeploy's flag names and meanings. The only file of the engine that reads the environment."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from kvstore_backend import ConfigError

__all__ = ["EngineArgs", "parse_args", "set_native_defaults"]

_ROLES = ("mixed", "prefill", "decode")
_STORES = ("mooncake", "file", "memory")
_TRANSFERS = ("ipc", "rdma", "tcp")


@dataclass(frozen=True)
class EngineArgs:
    """What an instance was asked to be. Names follow the flags; ports of 0 mean "any free one"."""

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
    pd_comm_port: int
    router: str | None
    metrics_port: int | None
    engine_worker_queue_port: int
    rdma_comm_ports: str | None
    tensor_parallel_size: int
    log_dir: Path
    debug: bool


def set_native_defaults() -> None:
    """Let torch's idle CPU threads sleep instead of spin, unless the user has said otherwise.

    Two instances on one machine otherwise spin against each other: a decode step of 15 ms took 180 ms beside a
    second instance on two cores, and 15 ms with this, alone or not.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence, without the wall of usage before it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def parse_args(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> EngineArgs:
    """Parse and check the command line.

    Raises:
        ConfigError: a flag that cannot be used, in one sentence.
    """
    environ = os.environ if environ is None else environ
    known, unknown = _parser().parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown(unknown[0]))
    values = vars(known)
    values["served_model_name"] = values["served_model_name"] or values["model"]
    values["cache_transfer_protocol"] = _protocols(values["cache_transfer_protocol"])
    values["log_dir"] = Path(environ.get("FD_LOG_DIR") or "log")
    values["debug"] = _debug(environ)
    args = EngineArgs(**{field.name: values[field.name] for field in fields(EngineArgs)})
    _check(args)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="engine.api_server",
        allow_abbrev=False,
        description="One instance of the reference engine: OpenAI endpoints over a shared pool of KV blocks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder in Hugging Face's format")
    add("--served-model-name", help="name in /v1/models and answers; the value of --model if not given")
    add("--host", default="0.0.0.0", help="address to listen on")
    add("--port", type=_port, default=8000, help="port to listen on")
    add("--device", choices=("cpu", "cuda", "auto"), default="auto", help="auto: cuda where there is one")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of weights and KV; auto: as the checkpoint was saved",
    )
    add("--max-model-len", type=_positive, default=2048, help="tokens of prompt and answer together")
    add("--max-num-seqs", type=_positive, default=8, help="sequences that run at once")
    add("--max-num-batched-tokens", type=_positive, default=2048, help="tokens computed in one step")
    add("--block-size", type=_positive, default=64, help="tokens in a KV block")
    add("--num-gpu-blocks-override", type=_positive, help="KV blocks; not given: from the memory there is")
    add("--gpu-memory-utilization", type=_share, default=0.9, help="share of a GPU's free memory for KV blocks")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="reuse prefixes")
    add("--enable-output-caching", action="store_true", help="save generated blocks to the pool, too")
    add(
        "--kvcache-storage-backend",
        type=_store,
        help=f"the pool: {', '.join(_STORES)}, or a URL such as file:///dev/shm/kvpool?size=4GiB; not given: none",
    )
    add("--splitwise-role", choices=_ROLES, default="mixed", help="part in prefill/decode disaggregation")
    add("--cache-transfer-protocol", default="ipc", help="ipc, rdma, tcp, or several with commas; told to the router")
    add("--pd-comm-port", type=_port, default=0, help="connector port: where prefill instances reach this one")
    add("--router", help="router to register with: host:port")
    add("--metrics-port", type=_port, help="a second port, such as for /metrics")
    add("--engine-worker-queue-port", type=_port, default=0, help="told to the router; not used otherwise")
    add("--cache-queue-port", type=_port, help="accepted for FastDeploy's sake; not used")
    add("--rdma-comm-ports", help="told to the router; not used otherwise")
    add("--tensor-parallel-size", type=_positive, default=1, help="only 1")
    return parser


def _check(args: EngineArgs) -> None:
    if args.kvcache_storage_backend and not args.enable_prefix_caching:
        raise ConfigError(
            f"--kvcache-storage-backend {args.kvcache_storage_backend} needs prefix caching; "
            "leave out --no-enable-prefix-caching"
        )
    if args.enable_output_caching and not args.enable_prefix_caching:
        raise ConfigError("--enable-output-caching needs prefix caching; leave out --no-enable-prefix-caching")
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {args.max_num_batched_tokens} is less than the {args.max_num_seqs} of "
            "--max-num-seqs; every running sequence needs one token in a step"
        )
    if args.pd_comm_port in (args.port, args.metrics_port):
        raise ConfigError(f"--pd-comm-port {args.pd_comm_port} serves HTTP here already; choose another port")
    if args.tensor_parallel_size != 1:
        raise ConfigError(
            f"--tensor-parallel-size {args.tensor_parallel_size}: this engine runs a model on one device; only 1 works"
        )


def _unknown(argument: str) -> str:
    name = argument.partition("=")[0]
    flags = [f"--{field.name.replace('_', '-')}" for field in fields(EngineArgs)]
    nearest = difflib.get_close_matches(name, flags, 1)
    hint = f"did you mean {nearest[0]}?" if nearest else "see --help"
    return f"{name!r} is no flag of this program; {hint}"


def _protocols(text: str) -> tuple[str, ...]:
    protocols = tuple(part.strip() for part in text.split(","))
    for protocol in protocols:
        if protocol not in _TRANSFERS:
            raise ConfigError(f"--cache-transfer-protocol {text!r}: {protocol!r} is none of {', '.join(_TRANSFERS)}")
    return protocols


def _debug(environ: Mapping[str, str]) -> bool:
    value = environ.get("FD_DEBUG", "0")
    if value not in ("0", "1", ""):
        raise ConfigError(f"FD_DEBUG={value!r}: set it to 1 for debug logs or to 0")
    return value == "1"


def _store(text: str) -> str:
    if text not in _STORES and ":" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_STORES)}, and no URL")
    return text


def _positive(text: str) -> int:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _port(text: str) -> int:
    value = _number(text)
    if not 0 < value < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port (1 to 65535)")
    return value


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share (above 0, at most 1)")
    return value
