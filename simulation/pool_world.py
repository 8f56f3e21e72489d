"""World ``pool``: instances that save and load blocks through the real pool stack, over a model of Mooncake.

An instance has block memory, the engine's block manager and a bookkeeping thread. It runs no model: the bytes of a
block are a function of its namespace and its name, so that every byte in memory and in the pool can be checked at any
time.
"""

from __future__ import annotations

import hashlib
import queue
import random
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from engine.pool.saved_blocks import SavedBlocks
from engine.scheduling.block_manager import BlockManager, NoFreeBlocks
from kvstore_backend import transfers
from kvstore_backend.backend import Span, Status, Value
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.clear_marks import ALL, mark_key
from kvstore_backend.cli.operator import clear
from kvstore_backend.cli.operator.scope import Scope
from kvstore_backend.config import MemorySettings, MooncakeSettings, PoolConfig
from kvstore_backend.manifest import manifest_key
from kvstore_backend.namespace import BLOCK_PREFIX, Namespace, parse_key
from kvstore_backend.pool import BlockPool, name_tenant, open_pool
from kvstore_backend.refill import Refill
from kvstore_backend.staging import KVTensors, StagedMemory, StandInDevice
from kvstore_backend.stores.holdings import MooncakeHoldings
from kvstore_backend.transfers import DirectMemory, TransferMemory, Transfers
from kvstore_backend.wrappers.checked import HEADER_BYTES, find_fault
from simulation.actors.mooncake import TROUBLES, Mooncake, Trouble, in_place
from simulation.world import Event, Outcome, Plan, Process, World

__all__ = ["PoolWorld"]

_BLOCK_BYTES = 192
_NUM_BLOCKS = 40
_ARENA_ROWS = 40
_BLOCK_SIZE = 4
_KINDS = ("plain", "async", "tiered", "tiered-async")
_MASTER = "10.0.0.9:50051"
_TOGETHER = ("kill-master", "hang-master", "crash", "pause", "leave", "stall", "flip", "raise", "slow", "evict", "lose")
_SETTLE_SECONDS = 100.0
# The time before and after a clear with few faults, so that the clear's outcome can be checked.
_QUIET_SECONDS = 45.0


@lru_cache(maxsize=1 << 16)
def content_of(namespace: bytes, block_hash: bytes) -> bytes:
    """Return the bytes of a block; they stand for the KV that a model would compute."""
    seed = hashlib.blake2b(namespace + block_hash, digest_size=48).digest()
    return (seed * (_BLOCK_BYTES // 48 + 1))[:_BLOCK_BYTES]


@lru_cache(maxsize=4096)
def name_blocks(chain: int, count: int, salt: str = "") -> tuple[bytes, ...]:
    """Return a prompt's block hashes. Chain numbers that differ only in the last digit share their first blocks."""
    tokens: list[int] = []
    for i in range(count):
        tokens += [chain // 10 if i < 3 else chain + 1_000_000] * _BLOCK_SIZE
    hashes = tuple(extend_block_hashes([], tokens, _BLOCK_SIZE, root_hash(salt)))
    for i, each in enumerate(hashes):
        contents = (salt, *tokens[: (i + 1) * _BLOCK_SIZE])
        assert _NAMED.setdefault(each, contents) == contents, "blocks of two salts, or of two prompts, have one name"
    return hashes


_NAMED: dict[bytes, tuple[object, ...]] = {}


def _namespace(index: int) -> Namespace:
    return Namespace(f"model{index}", "uint8", _BLOCK_SIZE, 1, 1, _BLOCK_BYTES // 8, "layer,kv,head,token,dim")


def _configure(spec: dict[str, Any]) -> PoolConfig:
    store = MooncakeSettings(
        *(_MASTER, "P2PHANDSHAKE"),
        protocol="tcp",
        global_segment_size=spec["segment"],
        local_buffer_size=0,
        tenant_id=spec["tenant"],
    )
    fast = MemorySettings(spec["fast"] * _BLOCK_BYTES) if "tiered" in spec["kind"] else None
    return PoolConfig(store, async_write="async" in spec["kind"], fast=fast)


@dataclass(eq=False)
class _Work:
    """A request in an instance: its blocks, and the number of them that are computed."""

    hashes: Sequence[bytes]
    table: list[int]
    num_computed: int
    hold_seconds: float
    keep_seconds: float
    pending: int = 0
    is_done: bool = False


class _Instance:
    """An engine without a model. Only its own threads call its methods, except ``check_memory``."""

    def __init__(self, world: PoolWorld, name: str, spec: dict[str, Any]) -> None:
        self.world = world
        self.spec = spec
        self.process = world.make_process(name, offset=spec["offset"], rate=spec["rate"])
        self._config = _configure(spec)
        self.namespace = name_tenant(self._config, _namespace(spec["namespace"]))
        self._digest = bytes.fromhex(self.namespace.digest)
        self.commands: queue.SimpleQueue[Callable[[], None]]
        self.pool: BlockPool | None = None
        self.blocks = BlockManager(_NUM_BLOCKS)
        self.works: list[_Work] = []
        self.memory: NDArray[np.uint8] = np.zeros((_NUM_BLOCKS, _BLOCK_BYTES), dtype=np.uint8)
        self._expected = self.memory.copy()
        self._is_own: NDArray[np.bool_] = np.zeros(_NUM_BLOCKS, dtype=bool)  # blocks that must have the expected bytes
        self.arena = _Arena(world.stream("arena", name))
        self.buffers: list[_Buffer] = []
        self.pending_saves = 0
        self.is_closed = False
        self.is_leaving = False
        self.process.start_thread(self._run)

    # The bookkeeping thread.

    def _run(self) -> None:
        self.commands = queue.SimpleQueue()
        pool = open_pool(self._config, _namespace(self.spec["namespace"]), CollectorRegistry(), facts={})
        memory = self._open_memory(pool)
        self.transfers = Transfers(pool, memory, self.commands.put)
        self.saved = SavedBlocks(self.blocks, self.transfers, self.commands.put, 8)
        self.refill = Refill(pool, self.saved, lambda _: None)
        self.pool = pool
        while not self.is_closed:
            self.commands.get()()
            self.check_memory("after a command")

    def _open_memory(self, pool: BlockPool) -> TransferMemory:
        if self.spec["staged"]:
            tensor = torch.zeros((_NUM_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8)
            self.memory = tensor.numpy()
            device = StandInDevice(before_step=self._delay_copy)
            return StagedMemory(
                KVTensors([tensor], _NUM_BLOCKS), pool, device=device, buffer_bytes=self.spec["window"] * _BLOCK_BYTES
            )
        pool.register(self.memory.ctypes.data, self.memory.nbytes)

        def clear_blocks(blocks: Sequence[int]) -> None:
            self.memory[list(blocks)] = 0

        return DirectMemory(lambda blocks: [self._span(block) for block in blocks], clear_blocks)

    def _delay_copy(self) -> None:
        time.sleep(self.world.copies.uniform(0.0, 0.002))

    def _span(self, block: int) -> Value:
        return (Span(self.memory.ctypes.data + block * _BLOCK_BYTES, _BLOCK_BYTES),)

    def begin_request(self, chain: int, count: int, salt: str, hold: float, keep: float) -> None:
        """Answer a prompt: take cached blocks, load more from the pool, compute and save the rest.

        Args:
            hold: seconds for which the request holds its blocks at the end.
            keep: seconds for which the pool keeps the saved blocks from eviction.
        """
        if self.pool is None or self.is_leaving:
            return
        hashes = name_blocks(chain, count, salt)
        cached = self.blocks.match_prefix(hashes)
        idle = self.blocks.num_idle(hashes[:cached])
        if count - cached + idle > self.blocks.num_available:
            self.world.note(self, f"no memory for {count} blocks")
            return
        table = self.blocks.take_cached_blocks(hashes[:cached]) + self._allocate(count - cached)
        work = _Work(hashes, table, cached, hold, keep)
        self.works.append(work)
        if cached == count:
            self._compute(work)
            return
        rest = table[cached:]
        self.blocks.hold_blocks(rest)
        began = self.world.now
        work.pending += 1

        def on_end(outcome: transfers.Outcome) -> None:
            work.pending -= 1
            self.world.note(self, f"loaded {outcome.count} of {len(rest)} blocks")
            self.world.check_duration(self, "load", began, outcome.seconds, self._bound(len(rest)))
            for i in range(outcome.count):
                self.world.check_bytes(self, self._digest, hashes[cached + i], self.memory[rest[i]].tobytes(), "loaded")
                self._expect(rest[i], hashes[cached + i])
            if outcome.count:
                self.saved.note_blocks(hashes[cached : cached + outcome.count], rest[: outcome.count])
            work.num_computed = cached + outcome.count
            if not outcome.is_released and not self._replace_rest(work):
                self._finish(work)
                return
            self._compute(work)

        release = partial(self._release, rest)
        self.transfers.load(hashes[cached:], rest, on_end, release, decide=partial(self._decide, hashes[cached:]))

    def _decide(self, hashes: Sequence[bytes], read_leading: Any) -> int:
        assert self.pool is not None
        began = time.monotonic()
        present = self.pool.lookup(hashes)
        self.world.check_duration(self, "look-up", self.world.now, time.monotonic() - began, 5 * 0.6 * self._tiers)
        return read_leading(present) if present else 0

    @property
    def _tiers(self) -> int:
        return 2 if "tiered" in self.spec["kind"] else 1

    def _bound(self, count: int) -> float:
        """Return the most seconds that a look-up and one transfer of ``count`` blocks take.

        ``guarded.py`` has the time limits of the calls. A staged transfer makes one call for each buffer of blocks.
        """
        windows = -(-count // self.spec["window"]) if self.spec["staged"] else 1
        return self._tiers * 5 * (0.6 + 1.1 * windows) + 0.1 * windows + 1.0

    def _replace_rest(self, work: _Work) -> bool:
        """Replace the blocks that a late call may still write to; return whether there is memory for new blocks."""
        lost = work.table[work.num_computed :]
        del work.table[work.num_computed :]
        self._release(lost)
        try:
            work.table += self._allocate(len(lost))
        except NoFreeBlocks:
            self.world.note(self, "no memory besides that of late calls")
            return False
        return True

    def _compute(self, work: _Work) -> None:
        """Write the missing blocks, one step for each, and save them."""
        for i in range(work.num_computed, len(work.table)):
            block = work.table[i]
            self.memory[block] = np.frombuffer(content_of(self._digest, work.hashes[i]), dtype=np.uint8)
            self._expect(block, work.hashes[i])
            self.blocks.publish_block(block, work.hashes[i])
        time.sleep(0.002 * (1 + len(work.table) - work.num_computed))
        work.num_computed = len(work.table)
        self._save(work)
        self.world.scheduler.call_later(work.hold_seconds, lambda: self.commands.put(partial(self._finish, work)))

    def _save(self, work: _Work) -> None:
        assert self.pool is not None
        allowed = [i for i, block in enumerate(work.table) if not self.blocks.is_withheld(block)]
        if not self.pool.is_ready or not allowed or self.pending_saves > _NUM_BLOCKS // 4:
            return
        hashes, blocks = [work.hashes[i] for i in allowed], [work.table[i] for i in allowed]
        self.blocks.hold_blocks(blocks)
        self.pending_saves += len(blocks)
        began = self.world.now

        def on_end(outcome: transfers.Outcome) -> None:
            self.pending_saves -= len(blocks)
            self.world.note(self, f"saved {outcome.count} of {len(blocks)} blocks")
            self.world.check_duration(self, "save", began, outcome.seconds, self._bound(len(blocks)))
            if outcome.count == len(blocks):
                self.saved.note_blocks(hashes, blocks)

        self.transfers.save(hashes, blocks, on_end, partial(self._release, blocks), keep_seconds=work.keep_seconds)

    def _finish(self, work: _Work) -> None:
        if not work.is_done:
            work.is_done = True
            self.works.remove(work)
            self._release(work.table)

    def _allocate(self, count: int) -> list[int]:
        blocks = self.blocks.allocate_blocks(count)
        for block in blocks:
            self._is_own[block] = False
        return blocks

    def _release(self, blocks: Sequence[int]) -> None:
        try:
            self.blocks.release_blocks(blocks)
        except ValueError as exc:
            self.world.fail("references", f"{self.process.name}: {exc}")

    def _expect(self, block: int, block_hash: bytes) -> None:
        self._expected[block] = np.frombuffer(content_of(self._digest, block_hash), dtype=np.uint8)
        self._is_own[block] = True

    def check_memory(self, when: str) -> None:
        """Check that only this instance has written to its own blocks."""
        differs = (self.memory != self._expected).any(axis=1) & self._is_own
        for block in np.flatnonzero(differs):
            self._is_own[block] = False
            self.world.fail("memory", f"{self.process.name}: block {block} was written to by another instance ({when})")

    def leave(self) -> None:
        """Close the transfers and the refill, as the engine's core does when it stops."""
        began = self.world.now
        self.is_leaving = True
        self.refill.close()
        self.transfers.close()
        self.world.check_duration(self, "close", began, self.world.now - began, 6.0)
        self.is_closed = True
        self.world.note(self, "left the pool")

    # Threads of callers that wait for the end of their calls.

    def move_blocking(self, is_save: bool, chain: int, count: int, salt: str, skip: int) -> None:
        """Save or load blocks with a blocking call, as some integrations do.

        After the call's return, the pool must not touch the caller's memory.
        """
        pool = self.pool
        if pool is None or self.is_leaving:
            return
        hashes = name_blocks(chain, count, salt)[skip:]
        buffer = self.arena.take(len(hashes))
        if buffer is None:
            return
        self.buffers.append(buffer)
        pool.register(buffer.address, buffer.nbytes)
        began = time.monotonic()
        if is_save:
            for i, each in enumerate(hashes):
                buffer.fill(i, content_of(self._digest, each))
            answer = pool.save(hashes, buffer.values)
            self.world.note(self, f"save answered {answer.count(Status.OK)} of {len(answer)}")
        else:
            statuses = pool.get_blocks(hashes, buffer.values)
            self.world.note(self, f"get answered {statuses.count(Status.OK)} of {len(statuses)}")
            for i, status in enumerate(statuses):
                if status is Status.OK:
                    self.world.check_bytes(self, self._digest, hashes[i], buffer.read(i), "got")
        # A native call takes 40 s at most (``stores/mooncake.py``), and this call may have to wait for earlier ones.
        self.world.check_duration(self, "blocking call", self.world.now, time.monotonic() - began, 90.0)
        buffer.own()
        time.sleep(self.world.copies.uniform(0.0, 3.0))
        buffer.check(self)
        pool.unregister(buffer.address, buffer.nbytes)
        self.buffers.remove(buffer)
        self.arena.give_back(buffer)

    def ask(self, chain: int, count: int, salt: str) -> None:
        """Look blocks up in the pool, as the router and connectors do."""
        if self.pool is None or self.is_leaving:
            return
        began = time.monotonic()
        statuses = self.pool.exists(name_blocks(chain, count, salt))
        self.world.note(self, f"has {statuses.count(Status.OK)} of {count} blocks")
        self.world.check_duration(self, "look-up", self.world.now, time.monotonic() - began, 5 * 0.6 * self._tiers)


class _Arena:
    """Memory for blocking calls. Its rows have one block each; a call takes rows, and later calls get them again."""

    def __init__(self, draw: random.Random) -> None:
        self.memory: NDArray[np.uint8] = np.zeros((_ARENA_ROWS, _BLOCK_BYTES), dtype=np.uint8)
        self._is_used: NDArray[np.bool_] = np.zeros(_ARENA_ROWS, dtype=bool)
        self._draw = draw

    def take(self, count: int) -> _Buffer | None:
        """Take ``count`` adjacent free rows; return None if there are none."""
        places = [i for i in range(_ARENA_ROWS - count + 1) if not self._is_used[i : i + count].any()]
        if not places:
            return None
        first = self._draw.choice(places)
        self._is_used[first : first + count] = True
        return _Buffer(self, first, count)

    def give_back(self, buffer: _Buffer) -> None:
        """Make the rows of a buffer free again."""
        self._is_used[buffer.first : buffer.first + len(buffer.values)] = False


class _Buffer:
    """Rows of an arena. After a call of ``own``, no other instance may write to them."""

    def __init__(self, arena: _Arena, first: int, count: int) -> None:
        self.first = first
        self._rows = arena.memory[first : first + count]
        self._is_own = False
        self.address = int(self._rows.ctypes.data)
        self.nbytes = self._rows.nbytes
        self.values: list[Value] = [(Span(self.address + i * _BLOCK_BYTES, _BLOCK_BYTES),) for i in range(count)]

    def fill(self, row: int, data: bytes) -> None:
        """Write ``data`` to a row."""
        self._rows[row] = np.frombuffer(data, dtype=np.uint8)

    def read(self, row: int) -> bytes:
        """Return a row's bytes."""
        return bytes(self._rows[row].tobytes())

    def own(self) -> None:
        """Overwrite the rows, as a caller that uses its memory for something else."""
        self._rows[:] = 0xCC
        self._is_own = True

    def check(self, instance: _Instance) -> None:
        """Check that no other instance has written to the rows since ``own``."""
        if self._is_own and (self._rows != 0xCC).any():
            self._is_own = False
            instance.world.fail("memory", f"{instance.process.name}: a caller's memory was written to after its call")


_Prompt = tuple[int, int, str]
"""A prompt: its chain number, its number of blocks, its salt."""


@dataclass
class _Clear:
    """One run of ``kvstore clear``.

    Attributes:
        before: the prompts that were requested before it.
        digest: the namespace that it clears; ``""`` for all.
        is_sure: whether all blocks are certainly cleared: the clear succeeded, and no request ran at the same time.
        began: the time of its begin.
    """

    before: list[_Prompt]
    digest: str = ""
    is_sure: bool = False
    began: float = 0.0


class PoolWorld(World):
    """The world ``pool``, which the module's docstring describes."""

    name: ClassVar[str] = "pool"
    max_seconds: ClassVar[float] = 900.0
    allowed_tracebacks: ClassVar[tuple[str, ...]] = (
        "Looking for blocks that the pool has lost, or saving them again, failed",
        "Mooncake's client raised",
        "A store raised",
    )

    def draw_plan(self, draw: random.Random) -> Plan:
        """Draw instances of several kinds, prompts, look-ups, clears and faults."""
        length = draw.choice([60.0, 120.0, 240.0])
        kinds = [draw.choice(_KINDS) for _ in range(draw.choice([2, 3, 3]))]
        instances = [
            {
                "kind": kind,
                "namespace": 0 if i < 2 else draw.choice([0, 1]),
                "staged": draw.random() < 0.4,
                "window": draw.choice([2, 5, 16]),
                "segment": draw.choice([16, 48, 96]) * 384,
                "fast": draw.choice([20, 150]),
                "tenant": draw.choice(["default", "default", "default", "blue"]),
                "offset": draw.choice([0.0, 20.0, -3600.0]),
                "rate": draw.choice([1.0, 1.0, 1.001, 0.98]),
            }
            for i, kind in enumerate(kinds)
        ]
        settings = {
            "instances": instances,
            "strict": draw.random() < 0.5,
            "rpc": draw.choice([2.0, 2.0, 30.0]),
            "lease": draw.choice([1.0, 10.0]),
        }
        events: list[Event] = []
        names = [f"i{i}" for i in range(len(instances))]
        clear_at = draw.uniform(50.0, length - 20.0) if length > 100.0 and draw.random() < 0.5 else None
        self._draw_requests(draw, events, names, length, clear_at)
        self._draw_faults(draw, events, names, length, clear_at)
        if clear_at is None:
            self._draw_bursts(self.stream("bursts"), events, names, length)
            self._draw_together(self.stream("together"), events, names, length)
        if clear_at is not None:
            events.append(Event(clear_at, "clear", draw.choice(["", *names])))
        for _ in range(draw.choice([0, 0, 1, 2])):  # during traffic
            at = round(draw.uniform(5.0, length), 3)
            if clear_at is None or not clear_at - _QUIET_SECONDS < at < clear_at + 20.0:
                events.append(Event(at, "clear", draw.choice(["", *names])))
        return Plan(settings, sorted(events, key=lambda event: event.at))

    def _draw_requests(
        self, draw: random.Random, events: list[Event], names: list[str], length: float, clear_at: float | None
    ) -> None:
        at = 1.0
        while at < length:
            at += draw.expovariate(1.2)
            chain = draw.choice([10, 11, 12, 20, 21, 30, draw.randrange(100, 900)])
            if clear_at is not None:
                if clear_at - 10.0 < at < clear_at + 8.0:
                    continue
                chain += 10_000 * (at > clear_at)
            target, count = draw.choice(names), draw.choice([2, 4, 6, 9, 14])
            kind = draw.choices(["prompt", "save", "get", "ask"], [5, 2, 2, 1])[0]
            details: dict[str, Any] = {"chain": chain, "count": count, "salt": draw.choice(["", "", "", "red"])}
            if kind == "prompt":
                details.update(hold=round(draw.expovariate(0.5), 3), keep=draw.choice([0.0, 0.0, 0.0, 60.0]))
            elif kind != "ask":
                details["skip"] = draw.choice([0, 0, 1])
            events.append(Event(round(at, 3), kind, target, details))

    def _draw_bursts(self, draw: random.Random, events: list[Event], names: list[str], length: float) -> None:
        """Draw moments with many callers at the same time; in some of them, calls are slow or hang."""
        for _ in range(draw.choice([0, 1, 3])):
            at, target = round(draw.uniform(3.0, length), 3), draw.choice(names)
            if draw.random() < 0.7:
                kind = draw.choice(["slow", "stall", "hang-master"])
                details: dict[str, Any] = {"slow": {"factor": 1000.0}, "stall": {"share": 1.0}}.get(kind, {})
                events.append(Event(at - 0.1, kind, "", {**details, "seconds": round(draw.uniform(0.5, 6.0), 3)}))
            for _ in range(draw.choice([6, 12])):
                details = {"chain": draw.choice([10, 11, 20]), "count": draw.choice([2, 4]), "salt": "", "skip": 0}
                kind = draw.choice(["get", "get", "save"])
                events.append(Event(round(at + draw.uniform(0.0, 0.3), 3), kind, target, details))

    def _draw_together(self, draw: random.Random, events: list[Event], names: list[str], length: float) -> None:
        """Draw moments with several faults and prompts at nearly the same time."""
        for _ in range(draw.choice([0, 1, 3])):
            at = draw.uniform(5.0, length)
            for kind in draw.sample(_TOGETHER, draw.choice([2, 3])):
                target = draw.choice(names) if kind in ("crash", "pause", "leave") else ""
                details: dict[str, Any] = {"seconds": round(draw.uniform(0.2, 6.0), 3), "share": 0.5, "factor": 100.0}
                events.append(Event(round(at + draw.uniform(-0.1, 0.5), 3), kind, target, details))
            for _ in range(draw.choice([3, 8])):
                details = {"chain": draw.choice([10, 11, 20]), "count": draw.choice([4, 9]), "salt": ""}
                details.update(hold=round(draw.uniform(0.0, 1.0), 3), keep=draw.choice([0.0, 60.0]))
                events.append(Event(round(at + draw.uniform(0.0, 1.0), 3), "prompt", draw.choice(names), details))

    def _draw_faults(
        self, draw: random.Random, events: list[Event], names: list[str], length: float, clear_at: float | None
    ) -> None:
        kinds = [
            "kill-master",
            "hang-master",
            "crash",
            "pause",
            "starve",
            "stall",
            "flip",
            "slow",
            "evict",
            "step",
            "leave",
            "raise",
            "spoil",
            "lose",
            "quota",
        ]
        for _ in range(draw.choice([0, 3, 6, 12])):
            at = round(draw.uniform(3.0, length), 3)
            if clear_at is not None and clear_at - _QUIET_SECONDS < at < clear_at + 12.0 and draw.random() < 0.8:
                continue
            kind = draw.choice(kinds)
            seconds = round(draw.choice([0.3, 2.0, 6.0, 14.0, 35.0]) * draw.uniform(0.5, 1.2), 3)
            details: dict[str, Any] = {"seconds": seconds}
            target = draw.choice(names) if kind in ("crash", "pause", "starve", "step", "leave") else ""
            if kind in ("stall", "flip", "raise"):
                details["share"] = draw.choice([0.05, 0.3, 1.0])
            elif kind == "slow":
                details["factor"] = draw.choice([10.0, 100.0, 1000.0])
            elif kind in ("evict", "spoil", "lose", "quota"):
                details["share"] = draw.choice([0.3, 1.0])
            elif kind == "step":
                details["by"] = draw.choice([-3600.0, -5.0, 20.0, 86400.0])
            events.append(Event(at, kind, target, details))

    def build(self) -> None:
        settings = self.plan.settings
        self.copies = self.stream("copies")
        self.cluster = Mooncake(
            self, is_strict=settings["strict"], rpc_seconds=settings["rpc"], lease_seconds=settings["lease"]
        )
        self.instances: dict[str, _Instance] = {}
        self.ended_instances: list[_Instance] = []
        self._disturbed: dict[str, list[tuple[float, float]]] = {}
        self._troubled: list[tuple[float, float]] = []
        self._asked: list[_Prompt] = []
        self._clears: list[_Clear] = []
        self._final: _Final | None = None
        for i, spec in enumerate(settings["instances"]):
            self._start(f"i{i}", spec)

    def _start(self, name: str, spec: dict[str, Any]) -> None:
        self.instances[name] = _Instance(self, name, spec)

    def run(self, plan: Plan | None = None) -> Outcome:
        with in_place(lambda: self.cluster):
            return super().run(plan)

    def perform(self, event: Event) -> None:
        kind, instance, details = event.kind, self.instances.get(event.target), dict(event.details)
        seconds = details.pop("seconds", 0.0)
        if kind in ("prompt", "save", "get", "ask"):
            assert instance is not None
            self._request(instance, kind, details)
        elif kind == "clear":
            digest = instance.namespace.digest if instance is not None else ""
            self.make_process("operator").start_thread(partial(self._clear, digest))
        else:
            self._troubled.append((self.now, self.now + seconds))
            self._disturb(kind, instance, seconds, details)

    def _request(self, instance: _Instance, kind: str, details: dict[str, Any]) -> None:
        if not instance.process.is_alive or instance.pool is None or instance.is_leaving:
            return
        self._asked.append((details["chain"], details["count"], details["salt"]))
        if kind == "prompt":
            instance.commands.put(partial(instance.begin_request, **details))
        elif kind == "ask":
            instance.process.start_thread(partial(instance.ask, **details), "ask")
        else:
            instance.process.start_thread(partial(instance.move_blocking, kind == "save", **details), kind)

    def _disturb(self, kind: str, instance: _Instance | None, seconds: float, details: dict[str, Any]) -> None:
        cluster, later = self.cluster, self.scheduler.call_later
        if kind == "kill-master":
            cluster.kill_master()
            later(seconds, cluster.restart_master)
        elif kind == "hang-master":
            cluster.hang_master()
            later(seconds, cluster.wake_master)
        elif kind == "evict":
            cluster.evict_share(details["share"])
        elif kind == "spoil":
            cluster.spoil_share(details["share"])
        elif kind == "lose":
            cluster.lose_share(details["share"], seconds)
        elif kind == "quota":
            cluster.limit(details["share"])
            later(seconds, lambda: cluster.limit(1.0))
        elif kind in TROUBLES:
            trouble = TROUBLES[kind]
            setattr(cluster.trouble, trouble, details["factor" if kind == "slow" else "share"])
            usual = getattr(Trouble(), trouble)
            later(seconds, lambda: setattr(cluster.trouble, trouble, usual))
        elif instance is not None and instance.process.is_alive and not instance.is_leaving:
            self._disturb_process(kind, instance, seconds, details)

    def _disturb_process(self, kind: str, instance: _Instance, seconds: float, details: dict[str, Any]) -> None:
        process, later = instance.process, self.scheduler.call_later
        if kind == "step":
            process.clock.step(details["by"])
        elif kind == "pause":
            self._note_disturbance(process, seconds)
            process.pause()
            later(seconds, process.resume)
        elif kind == "starve":
            self._note_disturbance(process, seconds)
            for i in range(int(seconds / 0.5)):
                later(0.5 * i, process.pause)
                later(0.5 * i + 0.4, process.resume)
        elif kind == "crash":
            process.crash()
            self.ended_instances.append(instance)
            later(seconds, partial(self._start, process.name, instance.spec))
        elif instance.pool is not None:
            process.start_thread(instance.leave, "leave")
            self.ended_instances.append(instance)

    def _note_disturbance(self, process: Process, seconds: float) -> None:
        self._disturbed.setdefault(process.name, []).append((self.now, self.now + seconds))

    def _clear(self, digest: str) -> None:
        """Run ``kvstore clear`` for one namespace or with ``--all``, without its HTTP requests to the master."""
        made = _Clear(sorted(set(self._asked)), digest, began=self.now)
        self._clears.append(made)
        scopes = [Scope(digest, None)] if digest else []
        settings = MooncakeSettings(_MASTER, "P2PHANDSHAKE", protocol="tcp", global_segment_size=0)
        holdings = MooncakeHoldings(settings, types.SimpleNamespace(address=""))  # type: ignore[arg-type]
        try:
            is_marked = clear._write_mark(holdings, mark_key(digest or ALL))
            clear._remove(holdings, scopes, is_whole=not digest)
            time.sleep(clear._SETTLE_SECONDS)
            clear._remove(holdings, scopes, is_whole=not digest)
        except Exception as exc:
            self.trace.add("operator", f"the clear failed: {exc}")
        else:
            self.trace.add("operator", f"cleared {digest[:8] or 'the pool'}, marked {is_marked}")
            made.is_sure = is_marked and not any(
                event.kind in ("prompt", "save", "get", "ask") and made.began - 9.0 < event.at < made.began + 7.0
                for event in self.plan.events
            )
            for instance in self.instances.values():
                # Instances look for marks every 5 s.
                self.scheduler.call_later(15.0, partial(self._ask_for_cleared, instance))
        finally:
            holdings.close()

    # Oracles.

    def note(self, instance: _Instance, event: str) -> None:
        """Write an event of an instance to the trace."""
        self.trace.add(instance.process.name, event)

    def check_bytes(self, instance: _Instance, digest: bytes, block_hash: bytes, data: bytes, how: str) -> None:
        """Check that the bytes that were read are those of the requested block."""
        if data != content_of(digest, block_hash):
            self.fail("bytes", f"{instance.process.name} {how} other bytes than those of block {block_hash.hex()[:8]}")

    def check_duration(self, instance: _Instance, call: str, began: float, seconds: float, most: float) -> None:
        """Check that a call ended within its documented time, unless its process was paused meanwhile."""
        disturbed = self._disturbed.get(instance.process.name, ())
        if seconds > most and not any(start < self.now and began - seconds < end for start, end in disturbed):
            self.fail("deadline", f"{instance.process.name}: a {call} took {seconds:.3f} s, of at most {most:.3f} s")

    def check(self) -> None:
        for instance in self.instances.values():
            if instance.process.is_alive:
                instance.check_memory("between commands")
                for buffer in instance.buffers:
                    buffer.check(instance)
        self._check_removals()
        if int(self.now) % 10 == 0:
            self._check_pool()

    def _check_removals(self) -> None:
        """Check that instances removed only blocks of their own namespace, and operators only those they named."""
        removals, self.cluster.removals = self.cluster.removals, []
        for owner, key in removals:
            if owner == "operator":
                allowed = {made.digest for made in self._clears}
            else:
                found = [
                    each for each in (*self.ended_instances, *self.instances.values()) if each.process.name == owner
                ]
                allowed = {each.namespace.digest for each in found}
            if key.startswith(BLOCK_PREFIX) and not {"", parse_key(key)[0].hex()} & allowed:
                self.fail("tenant", f"{owner} removed block {key[-64:-56]} of a namespace that is not its own")

    def _check_pool(self) -> None:
        """Check that each block in the pool has the bytes that belong to its name."""
        for key, _, data in self.cluster.list_whole() if self.cluster.is_up else []:
            if key.startswith(BLOCK_PREFIX):
                digest, block_hash = parse_key(key)
                fault = find_fault(key, np.frombuffer(data, dtype=np.uint8).copy())
                if fault is not None or data[HEADER_BYTES:] != content_of(digest, block_hash):
                    self.fail("poison", f"the pool has other bytes under {key[-64:-56]} ({fault or 'they verify'})")

    def asked_last(self, most: int) -> list[_Prompt]:
        """Return the beginnings of the last prompts, at most ``most``, so that every pool has space for them."""
        asked = {(chain, salt): (chain, min(count, 4), salt) for chain, count, salt in self._asked}
        return list(asked.values())[-most:]

    def is_at_rest(self) -> bool:
        last = max((end for _, end in self._troubled), default=0.0)
        if self._final is None and self.now > max(last, *(event.at for event in self.plan.events)) + _SETTLE_SECONDS:
            self._final = _Final(self)
        return self._final is not None and self._final.is_over

    def check_at_rest(self) -> None:
        if self._final is None:
            return
        self._check_pool()
        for instance in self._final.living:
            self._check_left(instance)

    def _check_left(self, instance: _Instance) -> None:
        """Check that an instance has ended, without remaining threads or clients."""
        name = instance.process.name
        if not instance.is_closed:
            self.fail("rest", f"{name} does not end")
            return
        left = [thread.name for thread in instance.process.threads if not thread.is_ended]
        # Threads of the stand-in device end when the garbage collector frees its streams, and it does not run here.
        if left := [each for each in left if not each.startswith("staging")]:
            self.fail("rest", f"{name} has left threads: {left}")
        for client in self.cluster.clients:
            if client.owner is instance.process and not client.is_closed:
                self.fail("rest", f"{name} has not left the cluster")

    def _ask_for_cleared(self, instance: _Instance) -> None:
        if instance.process.is_alive and instance.pool is not None and not instance.is_leaving:
            instance.process.start_thread(partial(self.check_cleared, instance), "cleared")

    def check_cleared(self, instance: _Instance) -> None:
        """Check that an instance finds none of the blocks that an operator has cleared, in no tier."""
        for made in self._clears:
            if not made.is_sure or any(
                start < made.began + 12.0 and end > made.began - _QUIET_SECONDS for start, end in self._troubled
            ):
                continue
            if made.digest not in ("", instance.namespace.digest):
                continue
            assert instance.pool is not None
            for chain, count, salt in made.before:
                statuses = instance.pool.exists(name_blocks(chain, count, salt))
                if Status.OK in statuses:
                    self.fail("cleared", f"{instance.process.name} finds blocks of prompt {chain}, which were cleared")
                    return


class _Final:
    """The final checks, long after the last fault: no block is in use any more, and saves and loads work again."""

    def __init__(self, world: PoolWorld) -> None:
        self._world = world
        self.living = [each for each in world.instances.values() if each.process.is_alive and not each.is_leaving]
        self.is_over = False
        self._saved_at: dict[str, float] = {}
        """Time of the last save in each namespace."""
        self._steps: list[tuple[_Instance, Callable[[], None]]] = []
        for instance in self.living:
            self._steps.append((instance, partial(self._check_rest, instance)))
        for prompt in [*world.asked_last(3), (1_000_000, 4, "")]:
            # Damaged blocks are noticed by the first read, and can be put again afterwards.
            for is_last in (False, True):
                for writer in self.living:
                    self._steps.append((writer, partial(self._save, writer, prompt, is_last)))
                for reader in self.living:
                    self._steps.append((reader, partial(self._read, reader, prompt, is_last)))
        for instance in self.living:
            self._steps.append((instance, partial(self._leave, instance)))
        self._next()

    def _next(self) -> None:
        if self._steps:
            instance, step = self._steps.pop(0)
            instance.process.start_thread(partial(self._run, step), "final")
        else:
            self._world.scheduler.call_later(60.0, self._end)

    def _run(self, step: Callable[[], None]) -> None:
        step()
        self._next()

    def _end(self) -> None:
        self.is_over = True

    def _check_rest(self, instance: _Instance) -> None:
        """Check that no call, request or save is running, and that no block is in use."""
        world, name, pool = self._world, instance.process.name, instance.pool
        if pool is None:
            world.fail("rest", f"{name} has not opened its pool yet")
            return
        if not pool.is_ready:
            world.fail("recovery", f"{name} does not use the pool: {pool.health().detail}")
        if not pool.wait_for_late_calls(0):
            world.fail("rest", f"{name} has calls that never ended")
        if not pool.flush_writes(0):
            world.fail("rest", f"{name} has blocks on their way")
        if instance.works or instance.pending_saves:
            world.fail("rest", f"{name}: {len(instance.works)} requests and {instance.pending_saves} saves never ended")
        elif instance.blocks.num_available != _NUM_BLOCKS:
            leaked = [block for block in range(_NUM_BLOCKS) if instance.blocks.num_references(block)]
            world.fail("references", f"{name}: blocks {leaked} have references without an owner")
        world.check_cleared(instance)

    def _save(self, instance: _Instance, prompt: _Prompt, is_last: bool) -> None:
        """Check that a prompt's blocks can be saved, after some attempts if the pool is full."""
        time.sleep(11.0)  # until the leases on old blocks end: otherwise the new blocks would be evicted first
        for _ in range(4):
            if all(statuses := self._move(instance, prompt, is_save=True)):
                self._saved_at[instance.namespace.digest] = self._world.now
                return
            time.sleep(2.0)
        if is_last:
            self._world.fail("recovery", f"{instance.process.name} cannot save prompt {prompt} now: {statuses}")

    def _read(self, instance: _Instance, prompt: _Prompt, is_last: bool) -> None:
        """Check that blocks that were just saved can be read."""
        statuses = self._move(instance, prompt, is_save=False)
        if is_last and not all(statuses) and self._has_manifests(self._saved_at[instance.namespace.digest]):
            self._world.fail("recovery", f"{instance.process.name} does not find prompt {prompt} now: {statuses}")

    def _has_manifests(self, since: float) -> bool:
        """Whether the pool has had all instances' manifests since a time.

        They are much larger than blocks here. So each put of a manifest may evict all blocks, and still find no gap.
        """
        found = [self._world.cluster.objects.get(manifest_key(each.namespace.digest)) for each in self.living]
        return all(each is not None and each.begun_at < since for each in found)

    def _move(self, instance: _Instance, prompt: _Prompt, *, is_save: bool) -> list[Status]:
        pool, digest = instance.pool, bytes.fromhex(instance.namespace.digest)
        if pool is None:
            return []
        hashes = name_blocks(*prompt)
        buffer = instance.arena.take(len(hashes))
        assert buffer is not None, "no other code uses the arena any more"
        pool.register(buffer.address, buffer.nbytes)
        if is_save:
            for i, each in enumerate(hashes):
                buffer.fill(i, content_of(digest, each))
            statuses = pool.save(hashes, buffer.values)
            pool.flush_writes(10.0)
        else:
            statuses = pool.get_blocks(hashes, buffer.values)
            for i, status in enumerate(statuses):
                if status is Status.OK:
                    self._world.check_bytes(instance, digest, hashes[i], buffer.read(i), "got")
        pool.unregister(buffer.address, buffer.nbytes)
        instance.arena.give_back(buffer)
        return statuses

    def _leave(self, instance: _Instance) -> None:
        if instance.pool is not None:
            instance.leave()
            instance.commands.put(lambda: None)
