"""How many KV blocks an instance has: memory for sparse attention is put aside first, then they get their share."""

from __future__ import annotations

from engine.args import EngineArgs
from engine.model_runner import ModelRunner
from kvstore_backend import ConfigError

__all__ = ["choose_num_blocks"]

_HOST_SHARE, _MAX_HOST_BYTES = 4, 4 << 30
"""Of the host's memory KV blocks get a quarter, but no more than this: a laptop runs several instances."""


def choose_num_blocks(args: EngineArgs, runner: ModelRunner) -> int:
    """As many KV blocks as are asked for, else as many as the memory of the device has room for.

    Raises:
        ConfigError: they cannot hold the longest sequence, or sparse attention leaves no room for them.
    """
    longest, override = -(-args.max_model_len // args.block_size), args.num_gpu_blocks_override
    free, beside = runner.count_free_bytes(), _count_retrieval_bytes(args, runner)
    left = max(0, free - beside)
    share = _share_of(left, args, runner)
    if beside:
        told = (
            f"retrieval needs {_tell_size(beside)} for --max-num-seqs {args.max_num_seqs} of --max-model-len "
            f"{args.max_model_len}, and {_tell_size(free)} are free"
        )
        if override:
            _check_room(told, override * runner.shape.nbytes, left, "lower")
        else:
            _check_room(told, longest * runner.shape.nbytes, share, "set")
    num_blocks = override or max(1, share // runner.shape.nbytes)
    if num_blocks < longest:
        raise ConfigError(
            f"{num_blocks} KV blocks of {args.block_size} tokens cannot hold one sequence of "
            f"--max-model-len {args.max_model_len}; lower it or raise --num-gpu-blocks-override"
        )
    return num_blocks


def _check_room(told: str, wanted: int, room: int, verb: str) -> None:
    """Memory for KV blocks: is there as much room as is wanted?"""
    if wanted > room:
        raise ConfigError(
            f"{told}; KV blocks may have {_tell_size(room)} of it, but need {_tell_size(wanted)}; lower "
            f"--max-num-seqs, --max-model-len or --retrieval-topk-percent, or {verb} --num-gpu-blocks-override"
        )


def _count_retrieval_bytes(args: EngineArgs, runner: ModelRunner) -> int:
    if args.retrieval is None:
        return 0
    return runner.count_retrieval_bytes(args.retrieval, args.max_num_seqs, args.max_model_len)


def _share_of(nbytes: int, args: EngineArgs, runner: ModelRunner) -> int:
    """The part that KV blocks may have of memory that nothing else needs."""
    if runner.device.type == "cpu":
        return min(nbytes // _HOST_SHARE, _MAX_HOST_BYTES)
    return int(nbytes * args.gpu_memory_utilization)


def _tell_size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
