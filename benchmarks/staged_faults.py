"""Check the engine's answers while the pool is faulty and blocks pass through staging: 100 prompts for each fault.

    python benchmarks/staged_faults.py                     # every fault
    python benchmarks/staged_faults.py --fault late torn   # some of them
    python benchmarks/staged_faults.py --family gemma3     # a model with several groups of layers

A small checkpoint runs on CPU in float32. Its KV memory is used like a device's memory (by the stand-in of
``kvstore_backend.staging``); the buffers have space for three blocks. An instance without a pool computes the right
answers. One instance fills a real Mooncake pool; other processes hold the pool's memory. Another instance, with an
empty cache, then answers all prompts, eight at a time, while the fault begins and ends. Faults of processes are real.
``evicted`` removes blocks between look-up and read. ``late`` lets one call in five exceed its deadline, with garbage in
its targets. ``torn`` lets some reads fail half-way.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.pool.pool_connector import PoolConnector
from kvstore_backend.backend import Status, StorageBackend, Value
from kvstore_backend.config import PoolConfig
from kvstore_backend.pool import open_store
from kvstore_backend.staging import StagedMemory
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.wrapper import Wrapper
from tests.engine.checkpoints import CHECKPOINTS, GROUPED, VOCAB_SIZE, write_checkpoint
from tests.engine.running import Engine, SubmittedRequest
from tests.faults.client import Owner
from tests.support.mooncake import MooncakeMaster, mooncake_master

PROMPTS, MAX_TOKENS, AT_ONCE = 100, 12, 8
DEADLINES = Deadlines(lookup_seconds=2.0, transfer_seconds=0.5)


class Broken(Wrapper):
    """A store with random faults in its transfers; ``fault`` is the kind of fault, or "" for none."""

    def __init__(self, store: StorageBackend, fault: str) -> None:
        super().__init__(store)
        self.fault = fault
        self._random = random.Random(fault)

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self._linger()
        return super().put(keys, values)

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        if self.fault == "evicted":
            self.remove([key for key in keys if self._random.random() < 0.2], force=True)
        if self.fault in ("late", "torn"):
            _fill_with_garbage(targets)
        if self.fault == "torn" and self._random.random() < 0.3:
            half = len(keys) // 2
            return super().get(keys[:half], targets[:half]) + [Status.FAILED] * (len(keys) - half)
        self._linger()
        return super().get(keys, targets)

    def _linger(self) -> None:
        if self.fault == "late" and self._random.random() < 0.2:
            time.sleep(DEADLINES.transfer_seconds + self._random.uniform(0.05, 0.5))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check answers with staging while the pool is faulty.")
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS), help="faults (default all)")
    families = {**CHECKPOINTS, **GROUPED}
    parser.add_argument("--family", choices=families, default="qwen2-grouped-untied", help="default %(default)s")
    args = parser.parse_args(argv)
    num_bad = 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(families[args.family](), Path(folder) / "model")
        prompts = make_prompts()
        with Engine(checkpoint) as engine:
            block_bytes = engine.runner.shape.nbytes
            right = [engine.begin(prompt, MAX_TOKENS).wait() for prompt in prompts]
        print(f"{'fault':<14}  prompts  wrong  failed  hit tokens  calls given up  seconds")
        for fault in args.fault:
            begun = time.monotonic()
            with staging(3 * block_bytes):
                asked, hits, late = try_fault(fault, checkpoint, prompts, Path(folder) / "master.log")
            wrong = sum(each.wait() != tokens for each, tokens in zip(asked, right, strict=True))
            failed = sum(each.finish_reason not in ("length", "stop") for each in asked)
            seconds = time.monotonic() - begun
            print(f"{fault:<14}{len(asked):>9}{wrong:>7}{failed:>8}{hits:>12.0f}{late:>16}{seconds:>9.1f}", flush=True)
            num_bad += wrong + failed
    return 1 if num_bad else 0


def make_prompts() -> list[list[int]]:
    """Return prompts with ten different beginnings of four blocks, and random endings of at most 100 tokens."""
    chance = random.Random(0)
    beginnings = [chance.choices(range(VOCAB_SIZE), k=64) for _ in range(10)]
    return [[*beginnings[i % 10], *chance.choices(range(VOCAB_SIZE), k=chance.randint(1, 100))] for i in range(PROMPTS)]


def try_fault(
    fault: str, checkpoint: Path, prompts: list[list[int]], log: Path
) -> tuple[list[SubmittedRequest], float, int]:
    """Run all prompts with one fault.

    Returns:
        The answers, the number of prompt tokens from the pool, and the number of calls that were given up.
    """
    with (
        mooncake_master(log, "--default_kv_lease_ttl=200") as master,
        Owner(master.config()) as owner,
        Owner(master.config()),
    ):
        config = master.config(global_segment_size=0)
        with Engine(checkpoint, store=open_broken(config, "")) as writer:
            for prompt in prompts:
                writer.answer(prompt, 1)
        store = open_broken(config, fault)
        with Engine(checkpoint, store=store) as reader:
            asked: list[SubmittedRequest] = []
            actions = FAULTS[fault](master, owner)
            for batch, begin in enumerate(range(0, len(prompts), AT_ONCE)):
                actions.get(batch, lambda: None)()
                asked += [reader.begin(prompt, MAX_TOKENS) for prompt in prompts[begin : begin + AT_ONCE]]
                for each in asked[-AT_ONCE:]:
                    each.wait()
            reader.wait_until_idle()
            return asked, reader.metric("kvstore_pool_cached_tokens_total"), store.late_calls


def open_broken(config: PoolConfig, fault: str) -> GuardedBackend:
    """Return the pool's store with a fault below its checks."""
    guarded = GuardedBackend(lambda: CheckedBackend(Broken(open_store(config), fault)), DEADLINES)
    assert guarded.wait_ready(60)
    return guarded


@contextlib.contextmanager
def staging(buffer_bytes: int) -> Iterator[None]:
    """Let engines move all blocks through buffers of this size during the ``with`` block."""
    connector = functools.partial(PoolConnector, staged=True)
    memory = functools.partial(StagedMemory, buffer_bytes=buffer_bytes)
    with mock.patch("engine.core.PoolConnector", connector), mock.patch("engine.pool.staging.StagedMemory", memory):
        yield


def _fill_with_garbage(targets: Sequence[Value]) -> None:
    for target in targets:
        for address, nbytes in target:
            ctypes.memset(address, 0xFF, nbytes)


FAULTS: dict[str, Callable[[MooncakeMaster, Owner], dict[int, Callable[[], None]]]] = {
    "nothing": lambda master, owner: {},
    "owner killed": lambda master, owner: {4: owner.kill},
    "owner hung": lambda master, owner: {
        4: lambda: owner.signal(signal.SIGSTOP),
        9: lambda: owner.signal(signal.SIGCONT),
    },
    "master killed": lambda master, owner: {4: master.kill},
    "master hung": lambda master, owner: {
        4: lambda: master.process.signal(signal.SIGSTOP),
        9: lambda: master.process.signal(signal.SIGCONT),
    },
    "evicted": lambda master, owner: {},
    "late": lambda master, owner: {},
    "torn": lambda master, owner: {},
}
"""For each fault, a function that returns its actions. An action's key is the number of the batch that it precedes."""


if __name__ == "__main__":
    sys.exit(main())
