"""Measure transfers between a GPU and the pool: rates of staging, TTFT of a hit, and decode steps during loads.

    python benchmarks/gpu_staging.py [--device cpu] [--pool memory|mooncake] [rates] [ttft] [decode]

rates:  blocks are loaded and saved through ``kvstore_backend.staging``; the rates are compared with plain copies of
        pinned memory. The pool is a fake that has every block and moves no bytes, so that only the staging is measured.
        The same follows with KV memory of more than 16 GB, and with a pool that copies bytes and has checksums.
ttft:   the time to the first token of prompts that the pool has, and of the same prompts without the pool. The engine
        runs in this process, with models in the shape of Qwen2-0.5B and of four layers of Qwen2.5-7B (without their
        vocabularies); the pool's memory is on this machine. A fast GPU computes a small model very quickly, so the
        ratio of the times means little. The bar is the rate of the loaded blocks against a plain copy on this host.
decode: decode steps alone, and while another thread loads blocks without a pause. The bar is the time that decodes
        lose for each loaded GB, because the amount that is loaded during a step depends on the GPU.

The program prints a Markdown table with one row for each figure. It ends with 1 if a figure misses its bar or cannot be
measured. ``--device cpu`` only tests the program: with a stand-in for the device, a GPU's form of attention, and small
sizes. Its figures mean nothing, so no bar applies.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import xxhash
from pool_overhead import pool_config, running_master

from engine import make_model
from engine.core import EngineCore, Listener
from engine.model.attention import paged
from engine.model.checkpoint import load_model_config
from engine.model.model_runner import ModelRunner
from engine.pool.pool_connector import PoolConnector
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.request import Request, SamplingParams, TokenOutput
from engine.scheduling.request import Sequence as EngineSequence
from engine.scheduling.scheduler import Scheduler
from engine.telemetry.metrics import EngineMetrics
from kvstore_backend import BlockPool, Health, Namespace, Status, StorageBackend, Value, open_pool
from kvstore_backend.staging import KVTensors, StagedMemory
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.transfers import Outcome, Transfers
from kvstore_backend.wrappers.checked import CheckedBackend

BLOCK = 64
DEADLINE_SECONDS = 120.0
COLD_TOKENS = 32
"""Length of the first answer to a prompt. The engine saves blocks in later steps if too many saves are pending."""
MIN_RATE, MIN_CHECKED_RATE, MIN_HIT_RATE, MAX_LOST = 0.8, 0.5, 0.5, 20.0
"""Bars: lowest rates, relative to a pinned copy, to hash and copy on one core, and to a copy on one core; ms per GB."""
MAX_DIFFERENT = 0.2
"""Bar: share of different answers with KV from the pool. Other kernels compute them, so that near-ties may differ."""


Move: TypeAlias = Callable[[Sequence[bytes], Sequence[int], Callable[[Outcome], None], Callable[[], None]], None]


class Sizes(NamedTuple):
    """The sizes of the measurements, and the models (with the names of ``engine.make_model``)."""

    model: dict[str, Any]
    wide_model: dict[str, Any]
    dtype: torch.dtype
    prompts: tuple[int, ...]  # tokens
    step_tokens: int
    moved_blocks: int
    large_bytes: int  # of KV memory
    decodes: int
    steps: int
    rounds: int


FULL = Sizes(
    model={"HIDDEN": 896, "LAYERS": 24, "INTERMEDIATE": 4864, "HEADS": 14, "KV_HEADS": 2, "HEAD_DIM": 64},
    wide_model={"HIDDEN": 3584, "LAYERS": 4, "INTERMEDIATE": 18944, "HEADS": 28, "KV_HEADS": 4, "HEAD_DIM": 128},
    dtype=torch.bfloat16,
    prompts=(8192, 32768),
    step_tokens=8192,
    moved_blocks=2048,
    large_bytes=18 << 30,
    decodes=16,
    steps=150,
    rounds=5,
)
SMALL = Sizes(
    model={"HIDDEN": 128, "LAYERS": 2, "INTERMEDIATE": 64, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 32},
    wide_model={"HIDDEN": 256, "LAYERS": 1, "INTERMEDIATE": 512, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 64},
    dtype=torch.float32,
    prompts=(512, 1024),
    step_tokens=256,
    moved_blocks=64,
    large_bytes=64 << 20,
    decodes=4,
    steps=20,
    rounds=2,
)


class Figure(NamedTuple):
    """One line of the report."""

    figure: str
    value: str
    bar: str
    is_met: bool


Parts: TypeAlias = Mapping[str, Callable[[torch.device, Sizes, str], Iterator[Figure]]]


def run_parts(parts: Parts, argv: Sequence[str] | None, description: str) -> int:
    """Run the parts that the command line names; return 1 if a bar is missed or a part fails, else 0."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)} (default: all)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test the program (default cuda)"
    )
    parser.add_argument("--pool", choices=("memory", "mooncake"), default="memory", help="the store of the pool")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(parts):
        parser.error(f"there is no part {unknown.pop()!r}; there are {', '.join(parts)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"{parser.prog}: PyTorch sees no CUDA device; --device cpu tests the program without one")
    sizes = FULL if args.device == "cuda" else SMALL
    if args.device == "cpu":
        torch.set_num_threads(1)  # more threads do not speed up such small models
    print("| figure | measured | bar | |\n|---|---|---|---|", flush=True)
    missed = failed = 0
    with gpu_form():
        for name in args.parts or parts:
            try:
                for row in parts[name](torch.device(args.device), sizes, args.pool):
                    verdict = ("met" if row.is_met else "**missed**") if args.device == "cuda" else "try-out"
                    print(f"| {row.figure} | {row.value} | {row.bar} | {verdict} |", flush=True)
                    missed += not row.is_met and args.device == "cuda"
            except Exception as exc:  # the figures so far count, and the other parts still run
                failed += 1
                reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
                print(f"| {name} | {type(exc).__name__}: {reason} | | **failed** |", flush=True)
                traceback.print_exc()
    return min(missed + failed, 1)


@contextlib.contextmanager
def gpu_form() -> Iterator[None]:
    """Use a GPU's form of attention, and transfers through buffers, on every device."""
    form, staged = paged.form_for(torch.device("cuda")), partial(PoolConnector, staged=True)
    with (
        unittest.mock.patch.object(paged, "form_for", return_value=form),
        unittest.mock.patch("engine.core.PoolConnector", staged),
    ):
        yield


# --- rates ----------------------------------------------------------------------------------------------------


class FakeStore(StorageBackend):
    """A store that has every block, accepts every block, and moves no bytes."""

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return [Status.OK] * len(keys)

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return [Status.OK] * len(keys)

    def exists(self, keys: Sequence[str]) -> list[Status]:
        return [Status.ABSENT] * len(keys)  # so that each block is saved

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return [Status.OK] * len(keys)

    def clear(self, prefix: str) -> Status:
        return Status.OK

    def health(self) -> Health:
        return Health(True, "a fake")

    def close(self) -> None:
        pass


def measure_rates(device: torch.device, sizes: Sizes, _pool_kind: str) -> Iterator[Figure]:
    """Measure loads and saves of blocks against copies of pinned memory in the same direction."""
    block_bytes = make_kv(sizes, 1, torch.device("cpu")).nbytes
    yield from measure_moves(make_kv(sizes, sizes.moved_blocks, device), sizes, FakeStore(), "")
    large = max(sizes.large_bytes // block_bytes, 2 * sizes.moved_blocks)
    yield from measure_moves(make_kv(sizes, large, device), sizes, FakeStore(), " of a large memory")
    kv = make_kv(sizes, 2 * sizes.moved_blocks, device)
    kv.view(torch.int16).random_()
    yield from measure_moves(kv, sizes, CheckedBackend(MemoryStore(4 * kv.nbytes)), " with checksums")


def make_kv(sizes: Sizes, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Return KV memory with ``num_blocks`` blocks."""
    layers, heads, head_dim = (sizes.model[name] for name in ("LAYERS", "KV_HEADS", "HEAD_DIM"))
    return torch.zeros((num_blocks, layers, 2, heads, BLOCK, head_dim), dtype=sizes.dtype, device=device)


def measure_moves(kv: torch.Tensor, sizes: Sizes, store: StorageBackend, label: str) -> Iterator[Figure]:
    """Measure saves and loads of blocks; with a store that moves bytes, also compare the saved and loaded bytes."""
    has_bytes = not isinstance(store, FakeStore)
    device, count = kv.device, sizes.moved_blocks
    layers, _, heads, _, head_dim = kv.shape[1:]
    namespace = Namespace("benchmark", str(sizes.dtype), BLOCK, layers, heads, head_dim, "layer,kv,head,token,dim")
    pool = BlockPool(store, namespace)
    transfers = Transfers(pool, StagedMemory(KVTensors([kv], len(kv)), pool), lambda call: call())
    # The blocks are in random order, as in an engine. The first half is saved and then loaded into the second half.
    blocks = random.Random(1).sample(range(len(kv)), min(2 * count, len(kv)))
    sources, targets = blocks[:count], blocks[-count:]
    nbytes = count * kv[0].nbytes
    moves: dict[str, Move] = {"save": transfers.save, "load": transfers.load}
    for direction, move in moves.items():
        if has_bytes:
            copied = 1 / (1 / host_rate(hash_bytes) + 1 / host_rate(copy_bytes))
            reference, bar = "one core", MIN_CHECKED_RATE
        else:
            copied = statistics.median(copy_rate(nbytes, device, direction) for _ in range(sizes.rounds))
            reference, bar = "a pinned copy", MIN_RATE
        rates = []
        for turn in range(sizes.rounds + 1):
            # Each save has new names, because blocks that the pool has are not saved again.
            names = [f"{turn}, {i}".encode().rjust(32) for i in range(count)]
            start = time.perf_counter()
            moved = wait_for_end(partial(move, names, sources if direction == "save" else targets))
            rates.append(moved * kv[0].nbytes / (time.perf_counter() - start) / 1e9)
        rate = statistics.median(rates[1:])  # the first warms up
        share = rate / copied
        value = f"{rate:.1f} GB/s, {share:.2f} of the {copied:.1f} of {reference}"
        figure = f"{direction} {nbytes >> 20} MiB in blocks{label} ({kv.nbytes / (1 << 30):.1f} GiB)"
        yield Figure(figure, value, f">= {bar}", share >= bar)
    transfers.close()
    if has_bytes:
        is_same = torch.equal(kv[sources].view(torch.int16), kv[targets].view(torch.int16))
        yield Figure(f"blocks{label} that were saved and loaded", "same" if is_same else "other", "same", is_same)


def host_rate(work: Callable[[Any], object]) -> float:
    """Measure the GB/s with which one core of the host processes 64 MiB."""
    memory = ctypes.create_string_buffer(64 << 20)
    work(memory)
    start = time.perf_counter()
    work(memory)
    return len(memory) / (time.perf_counter() - start) / 1e9


def hash_bytes(memory: Any) -> object:
    """Compute a checksum, as a pool does."""
    return xxhash.xxh3_64_intdigest(memory)


def copy_bytes(memory: Any) -> object:
    """Copy the memory's halves, as a pool in this process copies blocks."""
    half = len(memory) // 2
    return ctypes.memmove(memory, ctypes.addressof(memory) + half, half) and ctypes.memmove(
        ctypes.addressof(memory) + half, memory, half
    )


def wait_for_end(move: Callable[[Callable[[Outcome], None], Callable[[], None]], None]) -> int:
    """Begin a load or save, wait until its blocks are released, and return the number of blocks that were moved."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    released = threading.Event()
    move(lambda outcome: ended.put(outcome.count), released.set)
    count = ended.get(timeout=DEADLINE_SECONDS)
    if not released.wait(DEADLINE_SECONDS):
        raise TimeoutError("blocks were not given back")
    return count


def copy_rate(nbytes: int, device: torch.device, direction: str) -> float:
    """Measure the GB/s of one plain copy between pinned memory and the device."""
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    source, target = (here, there) if direction == "load" else (there, here)
    target.copy_(source, non_blocking=True)
    await_device(device)
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    await_device(device)
    return nbytes / (time.perf_counter() - start) / 1e9


def await_device(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the engine -----------------------------------------------------------------------------------------------


class Instance:
    """The engine in this process, and its pool."""

    def __init__(self, folder: Path, device: torch.device, sizes: Sizes, pool_kind: str, spare_blocks: int = 0) -> None:
        self.runner = ModelRunner(str(folder), load_model_config(str(folder)), device.type, sizes.dtype, BLOCK)
        longest = max(sizes.prompts) // BLOCK + 2
        self.num_blocks = 4 * longest
        self.runner.allocate_kv(self.num_blocks + spare_blocks)
        self.scheduler = Scheduler(
            BlockManager(self.num_blocks),
            BLOCK,
            sizes.decodes,
            sizes.step_tokens,
            max_model_len=longest * BLOCK,
            prefix_caching=True,
            pool=True,
        )
        self._closing = contextlib.ExitStack()
        nbytes = 4 * self.num_blocks * self.runner.shape.nbytes
        self.pool = self._join_pool(pool_kind, nbytes)
        self.core = EngineCore(self.runner, self.scheduler, EngineMetrics(), pool=self.pool)
        self.core.start()

    def _join_pool(self, kind: str, nbytes: int) -> BlockPool:
        if kind == "memory":
            return BlockPool(MemoryStore(nbytes), self.runner.namespace)
        master = self._closing.enter_context(running_master())
        return open_pool(pool_config(master, nbytes), self.runner.namespace, background=False)

    def answer(self, prompt: Sequence[int], max_tokens: int = 1) -> Asked:
        """Begin a greedy answer."""
        params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        answer = Asked(EngineSequence(Request("benchmark", tuple(prompt), params), BLOCK))
        self.core.submit(answer.sequence, Listener(answer.on_output, answer.saved.set))
        return answer

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.stop()
        self._closing.close()


class Asked:
    """A sequence in the engine, and the times of its tokens."""

    def __init__(self, sequence: EngineSequence) -> None:
        self.sequence = sequence
        self.asked = time.perf_counter()
        self.times: list[float] = []
        self.saved = threading.Event()
        self._ended = threading.Event()

    def on_output(self, output: TokenOutput) -> None:
        """Note the time of a token; called on the engine's thread."""
        self.times.append(time.perf_counter())
        if output.finish_reason:
            self._ended.set()

    def wait(self) -> list[int]:
        """Wait until the answer has ended and the prompt's blocks are saved; return the tokens."""
        if not (self._ended.wait(DEADLINE_SECONDS) and self.saved.wait(DEADLINE_SECONDS)):
            raise TimeoutError("an answer did not come")
        if self.sequence.finish_reason != "length":
            raise RuntimeError(f"an answer ended with {self.sequence.finish_reason}; the log says why")
        return self.sequence.token_ids[self.sequence.num_prompt_tokens :]


@contextlib.contextmanager
def made_model(sizes: Sizes) -> Iterator[Path]:
    """Write a checkpoint of these sizes to a temporary folder; yield its path."""
    more: dict[str, Any] = {"MAX_POSITIONS": max(sizes.prompts) + 4 * BLOCK}
    with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.multiple(make_model, **sizes.model, **more):
        make_model.make_model(Path(folder) / "model")
        yield Path(folder) / "model"


def random_tokens(count: int, seed: str) -> list[int]:
    """Return random tokens; different seeds give different beginnings."""
    return random.Random(seed).choices(range(256), k=count)


# --- ttft -----------------------------------------------------------------------------------------------------


def measure_ttft(device: torch.device, sizes: Sizes, pool_kind: str) -> Iterator[Figure]:
    """Measure the time to the first token of prompts that the pool has, and of the same prompts without the pool."""
    copied = host_rate(copy_bytes)
    for model, name in ((sizes.model, "Qwen2-0.5B"), (sizes.wide_model, "4 layers of Qwen2.5-7B")):
        with made_model(sizes._replace(model=model)) as folder, Instance(folder, device, sizes, pool_kind) as instance:
            for length in sizes.prompts:
                prompts = [random_tokens(length, f"{length}, {i}") for i in range(sizes.rounds + 1)]
                pairs = [measure_pair(instance, prompt) for prompt in prompts]
                cold, hit = (statistics.median(pair[i] for pair in pairs[1:]) for i in range(2))  # the first warms up
                different = sum(not pair.is_same for pair in pairs)
                rate = length // BLOCK * instance.runner.shape.nbytes / hit / 1e9
                value = f"{hit * 1e3:.1f} ms, {hit / cold:.3f} of {cold * 1e3:.1f} ms computed; {rate:.1f} GB/s, "
                value += f"{rate / copied:.2f} of one core's copy"
                value += f"; {different} of {len(pairs)} first tokens differ" if different else ""
                is_longest = length == max(sizes.prompts)
                is_met = (not is_longest or rate >= MIN_HIT_RATE * copied) and different <= MAX_DIFFERENT * len(pairs)
                bar = f">= {MIN_HIT_RATE} of the copy" if is_longest else ""
                yield Figure(f"TTFT of a hit of {length} tokens, {name}", value, bar, is_met)


class Pair(NamedTuple):
    """Seconds to the first token of a new prompt, and of the same prompt from the pool."""

    cold: float
    hit: float
    is_same: bool  # whether both first tokens are equal


def measure_pair(instance: Instance, prompt: Sequence[int]) -> Pair:
    """Send a prompt twice, with an empty prefix cache both times.

    Raises:
        RuntimeError: the second prompt did not come from the pool.
    """
    cold = instance.answer(prompt, COLD_TOKENS)
    tokens = cold.wait()
    instance.core.clear_prefix_cache()
    hit = instance.answer(prompt)
    is_same = hit.wait() == tokens[:1]
    if (loaded := hit.sequence.pool_cached_tokens) < len(prompt) - BLOCK:
        raise RuntimeError(f"only {loaded} of {len(prompt)} tokens came from the pool: {hit.sequence.pool_use}")
    instance.core.clear_prefix_cache()
    return Pair(cold.times[0] - cold.asked, hit.times[0] - hit.asked, is_same)


# --- decode ---------------------------------------------------------------------------------------------------


def measure_decode(device: torch.device, sizes: Sizes, pool_kind: str) -> Iterator[Figure]:
    """Measure decode steps alternately without and with concurrent loads."""
    with (
        made_model(sizes) as folder,
        Instance(folder, device, sizes, pool_kind, spare_blocks=sizes.moved_blocks) as instance,
    ):
        loads = Loads(instance, sizes.moved_blocks)
        alone, loaded = [], []
        for i in range(sizes.rounds + 1):
            alone.append(median_step(instance, sizes, f"alone {i}"))
            with loads.going_on():
                loaded.append(median_step(instance, sizes, f"with loads {i}"))
        step, slowed = statistics.median(alone[1:]), statistics.median(loaded[1:])
        # A second of decoding with loads does as much as step / slowed seconds without loads.
        lost = max(0.0, 1 - step / slowed) * 1e3 / loads.rate
        value = f"{lost:.1f} ms a GB: {slowed * 1e3:.2f} ms with {loads.rate:.1f} GB/s of loads, "
        value += f"{slowed / step:.3f} of {step * 1e3:.2f} ms alone"
        figure = f"decode of {sizes.decodes} sequences: time lost by loads"
        yield Figure(figure, value, f"<= {MAX_LOST:.0f} ms a GB", lost <= MAX_LOST)


def median_step(instance: Instance, sizes: Sizes, seed: str) -> float:
    """Return the median seconds of a step in which all sequences decode."""
    length = min(sizes.prompts) // 8
    answers = [instance.answer(random_tokens(length, f"{seed}, {i}"), sizes.steps) for i in range(sizes.decodes)]
    for answer in answers:
        answer.wait()
    # All sequences decode from the second token of the one that began last until the first one ends.
    last, end = max(answers, key=lambda answer: answer.times[0]), min(answer.times[-1] for answer in answers)
    times = [moment for moment in last.times[1:] if moment <= end]
    return statistics.median(after - before for before, after in itertools.pairwise(times))


class Loads:
    """Loads without a pause, into spare blocks of the instance's KV memory, which its scheduler does not use."""

    def __init__(self, instance: Instance, num_blocks: int) -> None:
        runner = instance.runner
        self._transfers = Transfers(
            instance.pool,
            StagedMemory(KVTensors([runner.kv], len(runner.kv)), instance.pool),
            lambda call: call(),
        )
        self._blocks = list(range(instance.num_blocks, instance.num_blocks + num_blocks))
        self._names = [b"load" + i.to_bytes(28, "little") for i in self._blocks]
        self._block_bytes = runner.shape.nbytes
        self._moved = self._seconds = 0.0
        if wait_for_end(partial(self._transfers.save, self._names, self._blocks)) != num_blocks:
            raise RuntimeError("the pool did not save all blocks that this benchmark loads")

    @property
    def rate(self) -> float:
        """The mean rate of all loads in GB/s."""
        return self._moved / self._seconds / 1e9

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Load blocks during the ``with`` block."""
        stop = threading.Event()
        thread = threading.Thread(target=self._load_until, args=(stop,))
        start = time.perf_counter()
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self._seconds += time.perf_counter() - start

    def _load_until(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._moved += self._block_bytes * wait_for_end(partial(self._transfers.load, self._names, self._blocks))


PARTS: Parts = {"rates": measure_rates, "ttft": measure_ttft, "decode": measure_decode}

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, None, "KV blocks between a GPU and the pool."))
