"""Computes the number of KV blocks of an instance from the free memory of its device.

First it reserves memory for sparse attention. On a GPU it also reserves the memory of a step, which it measures by
running one, and of the buffers through which blocks go to the pool and come from it. KV blocks get a share of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.args import EngineArgs
from engine.model.model_runner import ModelRunner
from engine.model.out_of_memory import LEAVE_ROOM, explain_out_of_memory
from engine.scheduling.request import BlockTable, Request, SamplingParams, Sequence
from engine.scheduling.scheduler import Chunk
from kvcommon.formats import format_bytes
from kvstore_backend import ConfigError

__all__ = ["choose_num_blocks"]

_STAGING_BUFFER_BYTES = 64 << 20
_MAX_LOGPROBS = 20
_HOST_SHARE, _MAX_HOST_BYTES = 4, 4 << 30
"""On a CPU, KV blocks get 1/4 of the free memory, at most 4 GiB, because several instances may run on one machine."""


def choose_num_blocks(args: EngineArgs, runner: ModelRunner) -> int:
    """Return the number of KV blocks: ``--num-gpu-blocks-override`` if given, else as many as fit in memory.

    Raises:
        ConfigError: the blocks do not fit in memory, or the longest sequence does not fit in the blocks.
    """
    num_groups, override = len(runner.groups.members), args.num_gpu_blocks_override
    longest = -(-args.max_model_len // args.block_size) * num_groups
    free, needs = runner.count_free_bytes(), _list_needs(args, runner)
    left = max(0, free - sum(needs.values()))
    share = _share_of(left, args, runner)
    if needs:
        reserved = (
            f"{_describe_needs(needs)} for --max-num-seqs {args.max_num_seqs} of --max-model-len "
            f"{args.max_model_len}, and {format_bytes(free)} are free"
        )
        if override:
            _check_room(reserved, override * runner.shape.nbytes, left, args, "lower")
        else:
            _check_room(reserved, longest * runner.shape.nbytes, share, args, "set")
    num_blocks = override or max(1, share // runner.shape.nbytes)
    if num_blocks < longest:
        raise ConfigError(
            f"{num_blocks} KV blocks of {args.block_size} tokens cannot hold one sequence of --max-model-len "
            f"{args.max_model_len}{_describe_groups(num_groups)}; lower --max-model-len or raise "
            "--num-gpu-blocks-override"
        )
    return num_blocks


def _list_needs(args: EngineArgs, runner: ModelRunner) -> dict[str, int]:
    """Return how many bytes to reserve for each purpose, by its name. A purpose that needs none is left out."""
    needs = {"a step": 0 if runner.device.type == "cpu" else _measure_step_bytes(args, runner)}
    if args.retrieval:
        needs["sparse attention"] = runner.count_retrieval_bytes(args.retrieval, args.max_num_seqs, args.max_model_len)
    if runner.device.type != "cpu" and (args.kvcache_storage_backend or args.splitwise_role != "mixed"):
        needs["staging"] = len(runner.groups.members) * _count_staging_bytes(runner.shape.nbytes)
    return {name: nbytes for name, nbytes in needs.items() if nbytes}


def _describe_needs(needs: Mapping[str, int]) -> str:
    first, *others = [f"{name} needs {format_bytes(nbytes)}" for name, nbytes in needs.items()]
    return ", ".join([first, *(other.replace(" needs", "") for other in others)])


def _check_room(reserved: str, wanted: int, room: int, args: EngineArgs, verb: str) -> None:
    """Raise ``ConfigError`` if KV blocks need ``wanted`` bytes, but only ``room`` bytes are available for them.

    ``reserved`` is the beginning of the message: what a step, sparse attention and staging buffers need. ``verb`` says
    what to do with ``--num-gpu-blocks-override``: ``lower`` or ``set``.
    """
    if wanted > room:
        remedies = ["--max-num-seqs", "--max-model-len", *(["--retrieval-topk-percent"] if args.retrieval else [])]
        raise ConfigError(
            f"{reserved}; KV blocks may use {format_bytes(room)} of the free memory, but need {format_bytes(wanted)}; "
            f"lower {', '.join(remedies[:-1])} or {remedies[-1]}, or {verb} --num-gpu-blocks-override"
        )


def _measure_step_bytes(args: EngineArgs, runner: ModelRunner) -> int:
    """Run the largest possible step, and return the device memory in bytes that it takes.

    The result does not include weights and KV blocks; the step reads a single block again and again. It does include
    memory that the device allocates only once (kernels, workspaces).

    Raises:
        ConfigError: there is not enough memory for the step, or the engine cannot run the model (see ``try_out``).
    """
    runner.allocate_kv(1)
    _empty_cache(runner.device)
    free = runner.count_free_bytes()
    runner.try_out()
    wanted = f"a step of {args.max_num_batched_tokens} tokens and {args.max_num_seqs} sequences; {LEAVE_ROOM}"
    with explain_out_of_memory(wanted, any_failure=False):
        runner.run(_largest_step(args, len(runner.groups.members)))
    taken = free - runner.count_free_bytes()
    runner.kv = torch.empty(0)
    _empty_cache(runner.device)
    return max(0, taken)


def _largest_step(args: EngineArgs, num_groups: int = 1) -> list[Chunk]:
    """Return the chunks of the largest step: one long chunk at the end of a prompt, and as many decodes as possible.

    All sequences have the maximum length, sample with all features, and have block 0 as each of their blocks.
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
        table = BlockTable([0] * -(-args.max_model_len // args.block_size))
        chunk.sequence.tables = [table] * num_groups
    return chunks


def _empty_cache(device: torch.device) -> None:
    """Free the device memory that torch caches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _count_staging_bytes(block_bytes: int) -> int:
    """Return the bytes of staging buffers on the device: for loads and saves, in the engine's and the pool's format."""
    return 4 * max(_STAGING_BUFFER_BYTES, block_bytes)


def _share_of(nbytes: int, args: EngineArgs, runner: ModelRunner) -> int:
    if runner.device.type == "cpu":
        return min(nbytes // _HOST_SHARE, _MAX_HOST_BYTES)
    return int(nbytes * args.gpu_memory_utilization)


def _describe_groups(num_groups: int) -> str:
    return f", which needs blocks in each of {num_groups} groups of layers" if num_groups > 1 else ""
