"""Check properties of the engine and the pool that only a GPU can show, except rates (``gpu_staging.py``).

    python benchmarks/gpu_evidence.py [--device cpu] [sdpa] [precision] [layouts] [errors] [budget] [handover] [soak]

sdpa:      the attention kernels that torch chooses, for each dtype and kind of chunk; the time of 500 decode steps of
           one sequence, without and with cuDNN's attention; the time of prompts with new lengths.
precision: log probabilities in float32, bfloat16 and float16 against those of a CPU in float32, with the same tokens
           in all runs. bfloat16 on a CPU shows which part of a difference comes from the dtype.
layouts:   blocks in each of vLLM's layouts and dtypes are saved through ``StagedMemory`` behind a busy stream, loaded
           into other blocks, and compared byte by byte; codecs on the device are compared with those on a CPU.
errors:    in separate processes: a step without enough memory, and an error after which all CUDA calls fail.
budget:    the number of blocks that an instance chooses from the free memory, and the largest step in the rest.
handover:  KV of 8K tokens is handed over from one engine to another with Mooncake's TransferEngine, several times.
soak:      blocks are saved and loaded for SOAK_SECONDS (environment variable, default 120) while the engine decodes
           and uses the pool; bytes and answers are compared.

The output and ``--device cpu`` are as in ``gpu_staging.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from gpu_staging import (
    BLOCK,
    Figure,
    Instance,
    Parts,
    Sizes,
    await_device,
    made_model,
    random_tokens,
    run_parts,
    wait_for_end,
)

from engine.args import parse_args
from engine.disaggregation import BlockMemory, Transfer
from engine.disaggregation.wire import Prompt
from engine.model.attention import paged
from engine.model.checkpoint import load_model_config
from engine.model.memory_budget import _largest_step, choose_num_blocks
from engine.model.model_runner import ModelRunner
from engine.model.sampler import Choice
from engine.pool.kv_codec import choose_codec, quantised_namespace
from engine.pool.staging import stage_handovers
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.request import Sequence as EngineSequence
from engine.scheduling.scheduler import Chunk
from kvstore_backend import BlockPool, Namespace
from kvstore_backend.integrations.vllm.memory import KVMemory
from kvstore_backend.staging import KVTensors, StagedMemory
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.transfers import Transfers

CPU = torch.device("cpu")
ATTEND_AS_DEVICE_DOES = paged.form_for
HALVES = (torch.bfloat16, torch.float16)

MAX_STEP_SECONDS, MAX_SLOWEST, MAX_GROWTH_BYTES = 0.03, 5.0, 64 << 20
"""Bars of decode steps: the median, the slowest step as a multiple of the median, and the growth of memory."""
MAX_FIRST_SEEN = 3.0
"""Bar of a prompt with a new length: its time as a multiple of the time with a known length."""
CUDNN_SECONDS = 40.0
"""Time limit of the decode steps with cuDNN's attention, which is known to be slow."""
MAX_ERROR_SHARE, ERROR_SLACK = 1.5, 0.005
"""Bar of the mean error of log probabilities, relative to that of a CPU in bfloat16, plus a constant."""
CHILD_SECONDS = {"cuda": 40.0, "cpu": 150.0}
HANDOVER_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
MAX_MODEL_LENS = {"cuda": (32 << 10, 128 << 10), "cpu": (1024, 2048)}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def build_runner(folder: Path, device: torch.device, dtype: torch.dtype, num_blocks: int = 0) -> ModelRunner:
    runner = ModelRunner(str(folder), load_model_config(str(folder)), device.type, dtype, BLOCK)
    if num_blocks:
        runner.allocate_kv(num_blocks)
    return runner


def make_sequence(tokens: Sequence[int], blocks: Sequence[int], **params: Any) -> EngineSequence:
    """Return a sequence in these blocks of KV memory, for steps without a scheduler."""
    request = Request("evidence", tuple(tokens), SamplingParams(1 << 20, temperature=0.0, **params))
    sequence = EngineSequence(request, BLOCK)
    sequence.block_table = list(blocks)
    return sequence


def take_step(runner: ModelRunner, chunks: Sequence[Chunk]) -> list[Choice]:
    """Run a step and mark its chunks as computed; the new tokens are returned, not added to the sequences."""
    choices = runner.run(chunks)
    for chunk in chunks:
        chunk.sequence.num_computed += chunk.num_tokens
    return choices


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- sdpa -----------------------------------------------------------------------------------------------------


def measure_sdpa(device: torch.device, sizes: Sizes, _pool_kind: str) -> Iterator[Figure]:
    """Yield the attention kernels, and the times of steps that each have a new shape."""
    yield from list_kernels(device, sizes)
    with made_model(sizes) as folder:
        runner = build_runner(folder, device, torch.bfloat16, num_blocks=max(sizes.prompts) // BLOCK + 32)
        num_tokens = 500 if device.type == "cuda" else 30
        yield measure_tokens(runner, num_tokens, math.inf, "without cuDNN")
        yield measure_new_lengths(runner, min(sizes.prompts))
        if device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(True)
        try:
            with_cudnn = measure_tokens(runner, num_tokens, CUDNN_SECONDS, "with cuDNN, as torch would have it")
            yield with_cudnn._replace(bar="", is_met=True)
        finally:
            if device.type == "cuda":
                torch.backends.cuda.enable_cudnn_sdp(False)


def list_kernels(device: torch.device, sizes: Sizes) -> Iterator[Figure]:
    """Yield the attention kernels that torch's profiler found in steps, for each model and dtype."""
    for model, dtype in itertools.product((sizes.model, sizes.wide_model), (*HALVES, torch.float32)):
        small = {**model, "LAYERS": 1, "INTERMEDIATE": 256}
        with made_model(sizes._replace(model=small)) as folder:
            runner = build_runner(folder, device, dtype, num_blocks=24)
        one, other = (make_sequence(random_tokens(200 + 90 * i, "sdpa"), range(12 * i, 12 * i + 12)) for i in range(2))
        steps = {
            "first chunk": [Chunk(one, 150)],
            "later chunk": [Chunk(one, 49)],
            "one decode": [Chunk(one, 1)],
            "": [Chunk(other, 289)],
            "decodes of two lengths": [Chunk(one, 1), Chunk(other, 1)],
        }
        one.token_ids += [1]
        found = {name: found_kernels(runner, chunks) for name, chunks in steps.items()}
        del found[""]
        value = "; ".join(f"{name}: {kernel}" for name, kernel in found.items())
        is_met = all(kernel in ("flash", "efficient") for kernel in found.values())
        figure = f"kernels of {name_of(dtype)}, heads of {model['HEAD_DIM']}"
        yield Figure(figure, value, "flash or efficient", is_met)


def found_kernels(runner: ModelRunner, chunks: Sequence[Chunk]) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_step(runner, chunks)
    names = {event.key for event in profile.key_averages()}
    found = {
        match[1] for name in names if (match := re.match(r"aten::_scaled_dot_product_(\w+?)(_attention.*)?$", name))
    }
    return " and ".join(sorted(found - {"attention"})) or "none"


def measure_tokens(runner: ModelRunner, num_tokens: int, seconds: float, how: str) -> Figure:
    """Measure decode steps of one sequence, and the growth of memory; stop after ``seconds``."""
    prompt = random_tokens(512, how)
    sequence = make_sequence(prompt, range(-(-(len(prompt) + num_tokens) // BLOCK)))
    take_step(runner, [Chunk(sequence, len(prompt))])
    times: list[float] = []
    before = begin = time.perf_counter()
    memory = count_memory(runner)
    while len(times) < num_tokens and before - begin < seconds:
        sequence.token_ids.append(7)
        take_step(runner, [Chunk(sequence, 1)])
        times.append(-before + (before := time.perf_counter()))
    grown = [now - then for now, then in zip(count_memory(runner), memory, strict=True)]
    median, slowest = statistics.median(times), max(times[5:])  # the first steps load kernels
    value = f"median {median * 1e3:.2f} ms, slowest {slowest * 1e3:.2f} ms (token {times.index(slowest)}), "
    value += (
        f"{sum(times):.1f} s in all; memory grew by {grown[0] >> 20} MiB on the host, {grown[1] >> 20} on the device"
    )
    bar = (
        f"<= {MAX_STEP_SECONDS * 1e3:.0f} ms, slowest <= {MAX_SLOWEST:.0f} times that, <= {MAX_GROWTH_BYTES >> 20} MiB"
    )
    is_met = median <= MAX_STEP_SECONDS and slowest <= MAX_SLOWEST * median and max(grown) <= MAX_GROWTH_BYTES
    return Figure(f"{len(times)} tokens of one sequence {how}", value, bar, is_met)


def count_memory(runner: ModelRunner) -> tuple[int, int]:
    """Return the bytes of host memory that this process uses, and a figure that grows with the used device memory."""
    host = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return host, 0 if runner.device.type == "cpu" else -runner.count_free_bytes()


def measure_new_lengths(runner: ModelRunner, longest: int) -> Figure:
    """Measure prompts of new lengths, each in one chunk, and then the same lengths again."""
    lengths = [longest * share // 16 + 1 for share in range(4, 12)]

    def compute(length: int) -> float:
        sequence = make_sequence(random_tokens(length, "length"), range(-(-length // BLOCK)))
        start = time.perf_counter()
        take_step(runner, [Chunk(sequence, length)])
        return time.perf_counter() - start

    compute(longest)
    first, again = ([compute(length) for length in lengths] for _ in range(2))
    worst = max(range(len(lengths)), key=lambda i: first[i] / again[i])
    share = first[worst] / again[worst]
    value = f"{share:.2f} of the next time, at worst: {first[worst] * 1e3:.1f} ms for {lengths[worst]} tokens"
    return Figure("a prompt of a new length", value, f"<= {MAX_FIRST_SEEN}", share <= MAX_FIRST_SEEN)


# --- precision ------------------------------------------------------------------------------------------------

LENGTHS, DECODED = (3, 64, 200, 201, 700), 24


def measure_precision(device: torch.device, sizes: Sizes, _pool_kind: str) -> Iterator[Figure]:
    """Yield the errors of each dtype's log probabilities, in prefill and in decode steps of several lengths."""
    with made_model(sizes) as folder:
        with unittest.mock.patch.object(paged, "form_for", ATTEND_AS_DEVICE_DOES):
            reference = list_choices(build_runner(folder, CPU, torch.float32, 40), ())
            tokens = [choice[0] for choice in reference]
            plain = compare_choices(list_choices(build_runner(folder, CPU, torch.bfloat16, 40), tokens), reference)
        yield Figure("bfloat16 on a CPU, no GPU's code", format_errors(*plain), "", True)
        for dtype in (torch.float32, *HALVES):
            errors, same = compare_choices(list_choices(build_runner(folder, device, dtype, 40), tokens), reference)
            limit = MAX_ERROR_SHARE * statistics.mean(plain[0]) + ERROR_SLACK if dtype in HALVES else 1e-3
            figure = f"{name_of(dtype)} compared with float32 on a CPU"
            yield Figure(figure, format_errors(errors, same), f"mean <= {limit:.4f}", statistics.mean(errors) <= limit)
            free_memory(device)


def list_choices(runner: ModelRunner, tokens: Sequence[int]) -> list[tuple[int, dict[int, float]]]:
    """Run all steps; return the chosen token and the top log probabilities for each position.

    Args:
        tokens: the tokens with which the sequences continue; empty: with the chosen tokens.
    """
    sequences, first = [], 0
    for length in LENGTHS:
        num_blocks = -(-(length + DECODED) // BLOCK)
        blocks = range(first, first + num_blocks)
        sequences.append(make_sequence(random_tokens(length, f"{length}"), blocks, logprobs=20))
        first += num_blocks
    found: list[tuple[int, dict[int, float]]] = []
    for i in range(4 + DECODED):
        chunks = [Chunk(s, min(200, len(s.token_ids) - s.num_computed)) for s in sequences if i or s is sequences[-1]]
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        for sequence, choice in zip(sampling, take_step(runner, chunks), strict=True):
            assert choice
            assert choice[1]
            found.append((choice[0], dict(choice[1].top)))
            sequence.token_ids.append(tokens[len(found) - 1] if tokens else choice[0])
        sequences = [s for s in sequences if len(s.token_ids) < s.num_prompt_tokens + DECODED]
        if not sequences:
            break
    return found


def compare_choices(
    found: Sequence[tuple[int, dict[int, float]]], reference: Sequence[tuple[int, dict[int, float]]]
) -> tuple[list[float], int]:
    """Return the errors of the log probabilities that both arguments have, and the number of equal chosen tokens."""
    pairs = list(zip(found, reference, strict=True))
    errors = [abs(got[token] - value) for (_, got), (_, top) in pairs for token, value in top.items() if token in got]
    return [error for error in errors if math.isfinite(error)], sum(one[0] == other[0] for one, other in pairs)


def format_errors(errors: Sequence[float], same: int) -> str:
    of_all = f"{same} of {len(LENGTHS) * DECODED} tokens the same"
    return f"log probabilities off by {statistics.mean(errors):.4f} (mean), {max(errors):.3f} (most); {of_all}"


# --- layouts --------------------------------------------------------------------------------------------------

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's layouts: the order of the axes in memory (L layer, B block, H head, N token, C content)."""


def check_layouts(device: torch.device, sizes: Sizes, _pool_kind: str) -> Iterator[Figure]:
    """Check that loaded blocks have the bytes of the saved blocks, and that no other block changes."""
    is_small = device.type == "cpu"
    kinds: dict[str, dict[str, int]] = {
        # bytes of an element, heads, bytes of a token's content (K and V), kernel blocks in a block
        "bfloat16": {"size": 2, "H": 8, "C": 256, "per_block": 1},
        "FP8": {"size": 1, "H": 8, "C": 256, "per_block": 1},
        "MLA": {"size": 2, "H": 1, "C": 576, "per_block": 1},
        "kernel blocks": {"size": 2, "H": 4, "C": 128, "per_block": 4},
    }
    for kind, shape in kinds.items():
        different = {order for order in ORDERS if not is_moved_whole(device, order, shape, 8 if is_small else 128)}
        value = f"{', '.join(sorted(different))} differ" if different else f"{', '.join(ORDERS)}: the same"
        yield Figure(f"vLLM's layouts, {kind}", value, "the same", not different)
    for codec in ("int8", "fp8"):
        yield check_codec(device, codec)


def is_moved_whole(device: torch.device, order: str, shape: dict[str, int], num_layers: int) -> bool:
    """Save blocks that a busy stream writes, load them into other blocks through small buffers, and compare the bytes.

    Args:
        order: the order of the axes in memory.
        shape: ``size`` of an element in bytes, ``H`` heads, ``C`` content, ``per_block`` kernel blocks in a block.

    Returns:
        Whether the loaded blocks equal the saved ones, and no other block has changed.
    """
    num_blocks = 40
    axes = {"L": num_layers, "B": num_blocks * shape["per_block"], "H": shape["H"], "N": 16, "C": shape["C"]}
    # One allocation for all layers, as in vLLM.
    memory = torch.zeros(math.prod(axes.values()) * shape["size"], dtype=torch.int8, device=device)
    dtype = {1: torch.float8_e4m3fn, 2: torch.bfloat16}[shape["size"]]
    lying = memory.view(dtype).view([axes[axis] for axis in order])
    layers = list(lying.permute([order.index(axis) for axis in "LBHNC"]))
    kv = KVMemory({f"l{i}": layer for i, layer in enumerate(layers)}, num_blocks)
    namespace = Namespace("m", kv.layout, 16, num_layers, shape["H"], shape["C"], kv.layout)
    pool = BlockPool(MemoryStore(4 * memory.nbytes), namespace)
    tensors = KVTensors(kv.merge_layers(), num_blocks)
    transfers = Transfers(pool, StagedMemory(tensors, pool, buffer_bytes=4 * kv.block_bytes), lambda call: call())
    blocks = random.Random(order).sample(range(num_blocks), 30)
    sources, targets, others = blocks[:15], blocks[15:], sorted(set(range(num_blocks)) - set(blocks[:30]))
    names = [i.to_bytes(32, "little") for i in sources]
    if device.type == "cuda":
        torch.cuda._sleep(50_000_000)  # the device writes the blocks only after this
    memory.random_(-128, 127)
    expected = memory.clone()
    wait_for_end(partial(transfers.save, names, sources))
    loaded = wait_for_end(partial(transfers.load, names, targets))
    transfers.close()
    await_device(device)

    def rows(of: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        whole: torch.Tensor = of.view(lying.dtype).view(lying.shape).permute([order.index(axis) for axis in "BLHNC"])
        every: torch.Tensor = whole.view(torch.uint8).unflatten(0, (num_blocks, -1))
        return every[list(numbers)]

    return (
        loaded == len(names)
        and torch.equal(rows(memory, targets), rows(expected, sources))
        and torch.equal(rows(memory, [*sources, *others]), rows(expected, [*sources, *others]))
    )


def check_codec(device: torch.device, name: str) -> Figure:
    """Check that the device encodes and decodes blocks as a CPU does; it may round one byte of 1,000 differently."""
    kv = torch.randn(6, 4, 2, 2, BLOCK, 64).to(torch.bfloat16)
    namespace = quantised_namespace(Namespace("m", "bfloat16", BLOCK, 4, 2, 64, "layout"), name)
    encoded = []
    decoded = []
    for where in (CPU, device):
        codec = choose_codec(namespace, kv.to(where))
        assert codec
        encoded.append(codec.encode(kv.to(where).flatten(1).view(torch.uint8)).cpu())
        decoded.append(codec.decode(encoded[-1].to(where)).cpu().view(torch.bfloat16).float())
    others = float((encoded[0] != encoded[1]).float().mean())
    off = float((decoded[1] - kv.flatten(1).float()).abs().max())
    value = f"{others * 100:.3f} % of the bytes differ from a CPU's; values off by {off:.3f} at most"
    return Figure(f"codec {name}", value, "<= 0.1 %", others <= 1e-3)


# --- errors ---------------------------------------------------------------------------------------------------


def check_errors(device: torch.device, sizes: Sizes, _pool_kind: str) -> Iterator[Figure]:
    """Check two instances in separate processes: one runs out of memory, the other one loses its device."""
    yield ask_child(lose_memory, device, sizes, "a step that finds no memory", "ends with error; the next is answered")
    yield ask_child(lose_device, device, sizes, "a step on a lost device", "ends with error; health says no")


def ask_child(
    work: Callable[[torch.device, Sizes], tuple[str, bool]], device: torch.device, sizes: Sizes, figure: str, bar: str
) -> Figure:
    """Run ``work`` in a new process and return its result; a process that ends early or hangs has missed the bar."""
    context = multiprocessing.get_context("spawn")
    mine, others = context.Pipe(duplex=False)
    child = context.Process(target=answer_parent, args=(work, device, sizes, others), daemon=True)
    child.start()
    others.close()
    value, is_met = "the process gave no result in time", False
    with contextlib.suppress(EOFError):
        if mine.poll(CHILD_SECONDS[device.type]):
            value, is_met = mine.recv()
    child.kill()
    child.join()
    return Figure(figure, value, bar, is_met)


def answer_parent(
    work: Callable[[torch.device, Sizes], tuple[str, bool]], device: torch.device, sizes: Sizes, pipe: Connection
) -> None:
    try:
        pipe.send(work(device, sizes))
    except Exception as exc:
        pipe.send((f"{type(exc).__name__}: {exc}".splitlines()[0], False))
    os._exit(0)  # a lost device answers no destructor


def reason_of(instance: Instance, seed: str, num_tokens: int) -> str | None:
    """Send a prompt and return the finish reason of the answer; None if it did not end."""
    asked = instance.answer(random_tokens(num_tokens, seed), 4)
    with contextlib.suppress(RuntimeError, TimeoutError):
        asked.wait()
    return asked.sequence.finish_reason


def lose_memory(device: torch.device, sizes: Sizes) -> tuple[str, bool]:
    """Answer a prompt while the device has no free memory, and another one when it has memory again."""
    with made_model(sizes) as folder, Instance(folder, device, sizes, "memory") as instance:
        reasons = [reason_of(instance, "before", 100)]
        if device.type == "cuda":
            torch.cuda.empty_cache()
            left = torch.cuda.mem_get_info(device)[0] - (32 << 20)
            taken = torch.empty(max(0, left), dtype=torch.uint8, device=device)
            reasons.append(reason_of(instance, "without memory", min(sizes.prompts)))
            del taken
            torch.cuda.empty_cache()
        else:
            with unittest.mock.patch.object(instance.runner, "run", side_effect=torch.OutOfMemoryError("pretended")):
                reasons.append(reason_of(instance, "without memory", 100))
        reasons.append(reason_of(instance, "after", min(sizes.prompts)))
        value = f"before: {reasons[0]}; without memory: {reasons[1]}; after: {reasons[2]}"
        return value, reasons == ["length", "error", "length"] and instance.core.is_alive


def lose_device(device: torch.device, sizes: Sizes) -> tuple[str, bool]:
    """Cause an error after which every CUDA call fails, and check that the instance reports it."""
    with made_model(sizes) as folder, contextlib.ExitStack() as broken:
        instance = Instance(folder, device, sizes, "memory")
        reasons = [reason_of(instance, "before", 100)]
        if device.type == "cuda":
            torch.zeros(4, device=device)[torch.tensor([1 << 20], device=device)]  # an assertion on the device fails
        else:
            for name in ("run", "wait_for_device"):
                lost = unittest.mock.patch.object(instance.runner, name, side_effect=RuntimeError("pretended"))
                broken.enter_context(lost)
        reasons.append(reason_of(instance, "on a lost device", 100))
        end = time.monotonic() + 20
        while instance.core.is_alive and time.monotonic() < end:
            time.sleep(0.05)
        reasons.append(reason_of(instance, "after", 100))
        value = f"before: {reasons[0]}; then: {reasons[1]}, {reasons[2]}; "
        value += "health says yes" if instance.core.is_alive else "health says no"
        return value, reasons == ["length", "error", "error"] and not instance.core.is_alive


# --- budget ---------------------------------------------------------------------------------------------------


def measure_budget(device: torch.device, sizes: Sizes, _pool_kind: str) -> Iterator[Figure]:
    """Allocate KV memory as ``engine.api_server`` does by default, for each length, and run the largest step."""
    for length in MAX_MODEL_LENS[device.type]:
        with made_model(sizes._replace(prompts=(length,))) as folder:
            flags = ["--model", str(folder), "--max-model-len", str(length), "--device", device.type]
            args = parse_args([*flags, "--dtype", name_of(sizes.dtype), "--kvcache-storage-backend", "memory"], {})
            start = time.perf_counter()
            runner = ModelRunner(str(folder), load_model_config(str(folder)), device.type, sizes.dtype, args.block_size)
        free = runner.count_free_bytes()
        runner.allocate_kv(num_blocks := choose_num_blocks(args, runner))
        started = time.perf_counter() - start
        chunks = _largest_step(args)
        draw = random.Random(length)
        for chunk in chunks:  # so that the step reads blocks in random places
            chunk.sequence.block_table = draw.sample(range(num_blocks), len(chunk.sequence.block_table))
        runner.run(chunks)
        start = time.perf_counter()
        runner.run(chunks)
        step, left = time.perf_counter() - start, runner.count_free_bytes()
        value = (
            f"{num_blocks} blocks, {num_blocks * runner.shape.nbytes / (1 << 30):.1f} of {free / (1 << 30):.1f} GiB, "
        )
        value += f"in {started:.1f} s; the largest step takes {step * 1e3:.0f} ms and leaves {left / (1 << 30):.2f} GiB"
        yield Figure(f"start for {length} tokens", value, "there is memory for the step", True)
        del runner
        free_memory(device)


# --- handover -------------------------------------------------------------------------------------------------


def measure_handover(device: torch.device, sizes: Sizes, pool_kind: str) -> Iterator[Figure]:
    """Measure direct hand-overs of blocks from prefill to decode, without HTTP."""
    num_tokens = min(sizes.prompts)
    with (
        made_model(sizes) as folder,
        Instance(folder, device, sizes, pool_kind) as prefill,
        Instance(folder, device, sizes, pool_kind) as decode,
    ):
        sides, start = [], time.perf_counter()
        for instance, incoming_bytes in ((prefill, 0), (decode, HANDOVER_BYTES[device.type])):
            transfer = Transfer("127.0.0.1", "tcp")
            memory = stage_handovers(instance.runner, transfer, incoming_bytes)
            sides.append(BlockMemory(instance.core, instance.runner, transfer, memory))
        value = f"{time.perf_counter() - start:.2f} s"
        yield Figure(f"{HANDOVER_BYTES[device.type] >> 20} MiB of host memory for hand-overs", value, "", True)
        for turn in ("the first time", "the second", "the third"):
            times, is_same = asyncio.run(hand_over((prefill, decode), sides, random_tokens(num_tokens, turn)))
            nbytes = num_tokens // BLOCK * prefill.runner.shape.nbytes
            value = f"{nbytes / sum(times) / 1e9:.2f} GB/s: opened in {times[0] * 1e3:.0f} ms, "
            value += f"written in {times[1] * 1e3:.0f} ms, accepted in {times[2] * 1e3:.0f} ms"
            yield Figure(f"hand-over of {num_tokens} tokens, {turn}", value, "the same bytes", is_same)


async def hand_over(
    instances: tuple[Instance, Instance], sides: Sequence[BlockMemory], tokens: Sequence[int]
) -> tuple[list[float], bool]:
    """Hand a prompt over; return the seconds to open, write and accept its blocks, and whether the bytes are equal."""
    (prefill, decode), (from_side, to_side) = instances, sides
    count = len(tokens) // BLOCK
    blocks = await asyncio.wrap_future(prefill.core.call(lambda: prefill.scheduler.blocks.allocate_blocks(count)))
    prefill.runner.kv[blocks] = torch.randn_like(prefill.runner.kv[blocks])
    reservation = await to_side.reserve_blocks(Prompt.of_sequence(make_sequence(tokens, ())))
    if reservation is None:
        raise RuntimeError("the decode side has no free blocks")
    times = [time.perf_counter()]
    target = await to_side.open_blocks(reservation)
    times.append(time.perf_counter())
    digests = await asyncio.wrap_future(from_side.write_blocks(blocks, 0, target))
    times.append(time.perf_counter())
    is_taken = await to_side.accept_blocks(reservation, digests)
    times.append(time.perf_counter())
    is_same = is_taken and torch.equal(prefill.runner.kv[blocks], decode.runner.kv[list(reservation.missing)])
    to_side.cancel_reservation(reservation, clear=False)
    return [after - before for before, after in itertools.pairwise(times)], is_same


# --- soak -----------------------------------------------------------------------------------------------------


def soak(device: torch.device, sizes: Sizes, pool_kind: str) -> Iterator[Figure]:
    """Save and load blocks while the engine decodes; compare bytes and answers.

    The model runs in float32, so that an answer does not depend on the other sequences of its batches.
    """
    seconds = float(os.environ.get("SOAK_SECONDS", "120" if device.type == "cuda" else "4"))
    sizes = sizes._replace(dtype=torch.float32, prompts=(min(sizes.prompts) // 4, min(sizes.prompts)))
    with (
        made_model(sizes) as folder,
        Instance(folder, device, sizes, pool_kind, spare_blocks=2 * sizes.moved_blocks) as instance,
    ):
        chat, stop = Chat(instance, sizes), threading.Event()
        thread = threading.Thread(target=chat.go_on, args=(stop,))
        thread.start()
        try:
            moved, different = move_for(seconds, instance, sizes.moved_blocks)
        finally:
            stop.set()
            thread.join()
    value = f"{moved / 1e9:.1f} GB saved and loaded, {moved / seconds / 1e9:.2f} GB/s; {different} blocks differ"
    yield Figure(f"{seconds:.0f} s of saves and loads during decode", value, "0 differ", different == 0)
    value = (
        f"{chat.num_answers} answers, {chat.num_cached} tokens of their prompts from the pool; {chat.num_other} differ"
    )
    yield Figure("answers meanwhile", chat.failure or value, "0 differ", not chat.failure and chat.num_other == 0)


class Chat:
    """A client that sends the same prompts again and again; their blocks come from the pool."""

    def __init__(self, instance: Instance, sizes: Sizes) -> None:
        self._instance = instance
        self._prompts = [random_tokens(min(sizes.prompts) + i, f"chat {i}") for i in range(sizes.decodes)]
        self._expected: list[list[int]] | None = None
        self.num_answers = self.num_other = self.num_cached = 0
        self.failure = ""

    def go_on(self, stop: threading.Event) -> None:
        """Send the prompts and compare the answers until ``stop`` is set."""
        try:
            while not stop.is_set():
                asked = [self._instance.answer(prompt, 64) for prompt in self._prompts]
                answers = [each.wait() for each in asked]
                self._expected = self._expected or answers
                self.num_other += sum(one != other for one, other in zip(answers, self._expected, strict=True))
                self.num_answers += len(answers)
                self.num_cached += sum(each.sequence.pool_cached_tokens for each in asked)
                self._instance.core.clear_prefix_cache()
        except Exception as exc:
            self.failure = f"{type(exc).__name__}: {exc}"


def move_for(seconds: float, instance: Instance, count: int) -> tuple[int, int]:
    """For ``seconds``, save spare blocks of KV memory, which the engine does not use, and load them into other ones.

    Returns:
        The moved bytes, and the number of blocks that differ or were not moved.
    """
    kv = instance.runner.kv
    pool = BlockPool(MemoryStore(4 * count * kv[0].nbytes), instance.runner.namespace)
    transfers = Transfers(pool, StagedMemory(KVTensors([kv], len(kv)), pool), lambda call: call())
    spare = list(range(instance.num_blocks, len(kv)))
    draw = random.Random(0)
    moved = different = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        draw.shuffle(spare)
        sources, targets = spare[:count], spare[count : 2 * count]
        names = [draw.randbytes(32) for _ in sources]
        kv[sources] = torch.randn_like(kv[sources])
        saved = wait_for_end(partial(transfers.save, names, sources))
        loaded = wait_for_end(partial(transfers.load, names, targets))
        is_same = (kv[sources] == kv[targets]).flatten(1).all(1)
        different += int((~is_same).sum()) + (saved != count) + (loaded != count)
        moved += 2 * count * kv[0].nbytes
    transfers.close()
    return moved, different


PARTS: Parts = {
    "sdpa": measure_sdpa,
    "precision": measure_precision,
    "layouts": check_layouts,
    "errors": check_errors,
    "budget": measure_budget,
    "handover": measure_handover,
    "soak": soak,
}

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, None, "Measure and check properties that only a GPU shows."))
