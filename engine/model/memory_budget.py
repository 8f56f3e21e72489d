"""Number of KV blocks of an instance: memory for everything else is reserved first, then KV blocks get their share.

Everything else is the memory of sparse attention, and on a GPU the memory of a step, measured by running one, and the
buffers that blocks pass through on their way to the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.args import EngineArgs
from engine.model.model_runner import ModelRunner
from engine.model.out_of_memory import LEAVE_ROOM, told_if_too_large
from engine.scheduling.request import Request, SamplingParams, Sequence
from engine.scheduling.scheduler import Chunk
from kvstore_backend import ConfigError

__all__ = ["choose_num_blocks"]

_STAGING_BUFFER_BYTES = 64 << 20
_MAX_LOGPROBS = 20
_HOST_SHARE, _MAX_HOST_BYTES = 4, 4 << 30
"""KV blocks get 1/4 of the host's memory, at most 4 GiB, because a laptop runs several instances."""


def choose_num_blocks(args: EngineArgs, runner: ModelRunner) -> int:
    """Return the requested number of KV blocks, else as many as fit in the memory of the device.

    Raises:
        ConfigError: they cannot hold the longest sequence, or everything else leaves no memory for them.
    """
    longest, override = -(-args.max_model_len // args.block_size), args.num_gpu_blocks_override
    free, needs = runner.count_free_bytes(), _list_needs(args, runner)
    left = max(0, free - sum(needs.values()))
    share = _share_of(left, args, runner)
    if needs:
        told = (
            f"{_tell_needs(needs)} for --max-num-seqs {args.max_num_seqs} of --max-model-len "
            f"{args.max_model_len}, and {_tell_size(free)} are free"
        )
        if override:
            _check_room(told, override * runner.shape.nbytes, left, args, "lower")
        else:
            _check_room(told, longest * runner.shape.nbytes, share, args, "set")
    num_blocks = override or max(1, share // runner.shape.nbytes)
    if num_blocks < longest:
        raise ConfigError(
            f"{num_blocks} KV blocks of {args.block_size} tokens cannot hold one sequence of "
            f"--max-model-len {args.max_model_len}; lower it or raise --num-gpu-blocks-override"
        )
    return num_blocks


def _list_needs(args: EngineArgs, runner: ModelRunner) -> dict[str, int]:
    """Return the reserved bytes of the device by the part that needs them; only parts that need some."""
    needs = {"a step": 0 if runner.device.type == "cpu" else _measure_step_bytes(args, runner)}
    if args.retrieval:
        needs["retrieval"] = runner.count_retrieval_bytes(args.retrieval, args.max_num_seqs, args.max_model_len)
    if runner.device.type != "cpu" and (args.kvcache_storage_backend or args.splitwise_role != "mixed"):
        needs["staging"] = _count_staging_bytes(runner.shape.nbytes)
    return {name: nbytes for name, nbytes in needs.items() if nbytes}


def _tell_needs(needs: Mapping[str, int]) -> str:
    first, *others = [f"{name} needs {_tell_size(nbytes)}" for name, nbytes in needs.items()]
    return ", ".join([first, *(other.replace(" needs", "") for other in others)])


def _check_room(told: str, wanted: int, room: int, args: EngineArgs, verb: str) -> None:
    """Check that the memory available for KV blocks is enough."""
    if wanted > room:
        remedies = ["--max-num-seqs", "--max-model-len", *(["--retrieval-topk-percent"] if args.retrieval else [])]
        raise ConfigError(
            f"{told}; KV blocks may have {_tell_size(room)} of it, but need {_tell_size(wanted)}; lower "
            f"{', '.join(remedies[:-1])} or {remedies[-1]}, or {verb} --num-gpu-blocks-override"
        )


def _measure_step_bytes(args: EngineArgs, runner: ModelRunner) -> int:
    """Measure the bytes of the device that the largest step takes in addition to weights and KV blocks, by running one.

    The step reads as much KV as the largest one, but always the same block. Memory that only a first step allocates
    (kernels, workspaces) is counted, too. On a CPU nothing is measured: KV blocks have only a share of the
    free memory.

    Raises:
        ConfigError: there is no memory for it, or the model cannot be run (as ``try_out`` says).
    """
    runner.allocate_kv(1)
    _give_back_memory(runner.device)
    free = runner.count_free_bytes()
    runner.try_out()
    wanted = f"a step of {args.max_num_batched_tokens} tokens and {args.max_num_seqs} sequences; {LEAVE_ROOM}"
    with told_if_too_large(wanted, any_failure=False):
        runner.run(_largest_step(args))
    taken = free - runner.count_free_bytes()
    runner.kv = torch.empty(0)
    _give_back_memory(runner.device)
    return max(0, taken)


def _largest_step(args: EngineArgs) -> list[Chunk]:
    """Return a chunk at the end of the longest prompt, and decodes at the end of theirs.

    All chunks choose a token with every sampling feature. All of their blocks are block 0.
    """
    num_decodes = min(args.max_num_seqs, args.max_num_batched_tokens) - 1
    sizes = [min(args.max_model_len, args.max_num_batched_tokens - num_decodes), *[1] * num_decodes]
    # This number of candidates is the whole vocabulary.
    draw: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 1 << 30, "seed": 0}
    params = SamplingParams(1, **draw, repetition_penalty=1.1, logprobs=_MAX_LOGPROBS)
    request = Request("the largest step", (0,) * args.max_model_len, params)
    chunks = [Chunk(Sequence(request, args.block_size), size) for size in sizes]
    for chunk in chunks:
        chunk.sequence.num_computed = args.max_model_len - chunk.num_tokens
        chunk.sequence.block_table = [0] * -(-args.max_model_len // args.block_size)
    return chunks


def _give_back_memory(device: torch.device) -> None:
    """Return memory that torch caches to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _count_staging_bytes(block_bytes: int) -> int:
    """Return the device's staging bytes for loads and saves, in both forms of blocks (KV memory's and the pool's)."""
    return 4 * max(_STAGING_BUFFER_BYTES, block_bytes)


def _share_of(nbytes: int, args: EngineArgs, runner: ModelRunner) -> int:
    """Return the part of otherwise unused memory that KV blocks may have."""
    if runner.device.type == "cpu":
        return min(nbytes // _HOST_SHARE, _MAX_HOST_BYTES)
    return int(nbytes * args.gpu_memory_utilization)


def _tell_size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
