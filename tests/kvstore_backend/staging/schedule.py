"""An engine, a device and a pool with random delays, over one ``StagedMemory``.

Each schedule saves and loads conversations with few blocks and fewer buffers, and delays every step of every copy. The
engine has a reference on each block of a transfer until its release. It overwrites a free block at once, and reads
loaded blocks as soon as their load has ended.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from kvstore_backend import BlockPool
from kvstore_backend.backend import HEADROOM_BYTES, Span, Status, Value
from kvstore_backend.staging import KVTensors, StagedMemory, StandInDevice, Step, Stream
from kvstore_backend.transfers import Event, Outcome, Transfers
from tests.faults.blocks import conversation, right_bytes
from tests.support.waiting import wait_until

__all__ = ["SlowDevice", "run_schedule"]

NUM_BLOCKS = 16
LAYER_BYTES = 32
NUM_LAYERS = 2
CONVERSATIONS = [conversation(number, 6) for number in range(2)]
GARBAGE = 0xFF


class Chance:
    """Random delays and choices, for any thread."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def delay(self) -> None:
        if self.is_true(0.5):
            time.sleep(self._random.uniform(0, 2e-4))

    def is_true(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, among: Sequence[Any], count: int) -> list[Any]:
        return self._random.sample(list(among), count)


class SlowDevice(StandInDevice):
    """A device with an engine that also computes on a stream, and continues before the computation has ended."""

    def __init__(self, chance: Chance) -> None:
        super().__init__(before_step=chance.delay)
        self._compute: Stream = StandInDevice.open_stream(self)  # subclasses do not break this stream
        self._computed: Event | None = None

    def compute(self, steps: Sequence[Step]) -> None:
        """Queue the engine's next work."""
        self._computed = self._compute.queue(steps, None)

    def record_event(self) -> Event | None:
        return self._computed


class SlowPool:
    """A pool with slow calls; some miss their deadline and still run when others have begun."""

    def __init__(self, chance: Chance) -> None:
        self.contents = {each: right_bytes(each, NUM_LAYERS * LAYER_BYTES) for each in CONVERSATIONS[0]}
        self._chance = chance
        self._spans: set[Span] = set()
        self._late: list[threading.Thread] = []

    def register(self, address: int, nbytes: int, *, headroom: bool) -> None:
        assert headroom
        self._spans.add(Span(address, nbytes))

    def unregister(self, address: int, nbytes: int) -> None:
        self._spans.remove(Span(address, nbytes))

    def get_blocks(self, hashes: Sequence[bytes], targets: Sequence[Value], *, wait: bool) -> list[Status]:
        found = [self.contents.get(block_hash) for block_hash in hashes]

        def read() -> None:
            for target, content in zip(targets, found, strict=True):
                (span,) = target
                self._check_registered(span)
                ctypes.memset(span.address, GARBAGE, span.nbytes)
                self._chance.delay()
                if content is not None:
                    ctypes.memmove(span.address, content, span.nbytes)

        if self._runs_late(read):
            return [Status.FAILED] * len(hashes)
        return [Status.ABSENT if content is None else Status.OK for content in found]

    def save(self, hashes: Sequence[bytes], sources: Sequence[Value], *, wait: bool) -> list[Status]:
        def write() -> None:
            for block_hash, (span,) in zip(hashes, sources, strict=True):
                self._check_registered(span)
                half = span.nbytes // 2
                content = ctypes.string_at(span.address, half)
                self._chance.delay()
                self.contents.setdefault(block_hash, content + ctypes.string_at(span.address + half, half))

        return [Status.FAILED if self._runs_late(write) else Status.OK] * len(hashes)

    def wait_for_late_calls(self, seconds: float) -> bool:
        for call in self._late:
            call.join(seconds)
        return not any(call.is_alive() for call in self._late)

    def count_late_calls(self) -> int:
        return len(self._late)

    def close(self) -> None:
        pass

    def _check_registered(self, span: Span) -> None:
        begin = span.address - HEADROOM_BYTES
        end = span.address + span.nbytes
        assert any(each.address <= begin and end <= each.address + each.nbytes for each in self._spans)

    def _runs_late(self, call: Callable[[], None]) -> bool:
        """Make the call; return whether it missed its deadline and still runs."""
        if not self._chance.is_true(0.1):
            call()
            return False

        def run_late() -> None:
            time.sleep(1e-3)
            call()

        late = threading.Thread(target=run_late)
        late.start()
        self._late.append(late)
        return True


class TinyEngine:
    """Sequences that share a few blocks of the device's memory."""

    def __init__(self, device: SlowDevice, pool: SlowPool, chance: Chance) -> None:
        self.layers = [torch.zeros(NUM_BLOCKS, LAYER_BYTES, dtype=torch.uint8) for _ in range(NUM_LAYERS)]
        self.references = [0] * NUM_BLOCKS
        self.wrong: list[str] = []
        self.lock = threading.RLock()
        self._device = device
        self._chance = chance
        kv = KVTensors(self.layers, NUM_BLOCKS)
        memory = StagedMemory(
            kv, cast(BlockPool, pool), device=device, buffer_bytes=2 * (kv.block_bytes + HEADROOM_BYTES)
        )
        self.transfers = Transfers(cast(BlockPool, pool), memory, self._run_with_lock)

    def compute_and_save(self, hashes: Sequence[bytes]) -> None:
        """Run a sequence that computes blocks, saves them and ends."""
        blocks = self._take(len(hashes))
        self._write(blocks, [right_bytes(each, NUM_LAYERS * LAYER_BYTES) for each in hashes])
        self.transfers.save(hashes[: len(blocks)], blocks, lambda _: None, lambda: self._release(blocks))

    def load(self, hashes: Sequence[bytes]) -> None:
        """Run a sequence that loads blocks, compares them when the load has ended, and ends."""
        blocks = self._take(len(hashes))

        def on_end(outcome: Outcome) -> None:
            for block, block_hash in list(zip(blocks, hashes, strict=False))[: outcome.count]:
                if self._read(block) != right_bytes(block_hash, NUM_LAYERS * LAYER_BYTES):
                    self.wrong.append(f"block {block} did not have the saved bytes when its load had ended")
            self._release(blocks)

        self._hold(blocks)
        self.transfers.load(hashes[: len(blocks)], blocks, on_end, lambda: self._release(blocks))

    def _take(self, count: int) -> list[int]:
        """Take free blocks and queue writes to them, as a new owner does."""
        free = [block for block, references in enumerate(self.references) if not references]
        blocks = self._chance.pick(free, min(count, len(free)))
        self._hold(blocks)
        self._write(blocks, [b"\xaa" * (NUM_LAYERS * LAYER_BYTES)] * len(blocks))
        return blocks

    def _write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        def write_layer(number: int) -> None:
            for block, content in zip(blocks, contents, strict=False):
                part = content[number * LAYER_BYTES : (number + 1) * LAYER_BYTES]
                self.layers[number][block] = torch.frombuffer(bytearray(part), dtype=torch.uint8)

        self._device.compute([lambda number=number: write_layer(number) for number in range(NUM_LAYERS)])  # type: ignore[misc]

    def _read(self, block: int) -> bytes:
        return b"".join(bytes(layer[block].tolist()) for layer in self.layers)

    def _hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] += 1

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] -= 1

    def _run_with_lock(self, event: Callable[[], None]) -> None:
        with self.lock:
            event()


def run_schedule(seed: int, make_device: Callable[[Chance], SlowDevice] = SlowDevice, steps: int = 14) -> list[str]:
    """Run one schedule; return the errors: blocks that were read before or overwritten during their transfer."""
    chance = Chance(seed)
    pool = SlowPool(chance)
    engine = TinyEngine(make_device(chance), pool, chance)
    for _ in range(steps):
        (hashes,) = chance.pick(CONVERSATIONS, 1)
        with engine.lock:
            if not all(engine.references):
                (engine.load if chance.is_true(0.5) else engine.compute_and_save)(hashes)
        chance.delay()
    wait_until(lambda: not any(engine.references), "the release of all blocks", pause_s=1e-3)
    assert pool.wait_for_late_calls(30)
    engine.transfers.close()
    return engine.wrong + [
        "the pool has other bytes than the block had when its save began"
        for block_hash, content in pool.contents.items()
        if content != right_bytes(block_hash, NUM_LAYERS * LAYER_BYTES)
    ]
