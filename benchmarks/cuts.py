"""Measure the cost of look-ups and reads of blocks in other shardings.

    python benchmarks/cuts.py [--json FILE] [--rounds 15]

Starts its own Mooncake master on loopback, and another process that holds the pool's memory. *Plain* measures the calls
of a hit and of a miss in the own sharding, alternately with and without the look-up of other shardings. *Gathered*
measures reads of the same tokens from other shardings, alternately with reads from the own sharding. ``scattered`` is
another way to read: each piece is read directly to its place, with many spans for each block. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from pool_overhead import memory_elsewhere, pool_config, running_master

from kvstore_backend import BlockPool, Namespace, Span, Value
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.pool import open_store
from kvstore_backend.resharding import PeerShardings, Run, ShardingFamily, find_family
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend

LAYERS, HEADS, TOKENS = 16, 8, 64
AXES = [("layer", LAYERS), ("kv", 2), ("head", HEADS), ("token", TOKENS), ("dim", 128)]
OWN = Namespace("cuts", "bfloat16", TOKENS, LAYERS, HEADS, 64, "layer,kv,head,token,dim")
LENGTH = 16 * TOKENS
PLAIN_CALLS = 20
CUTS = ((2, 64), (4, 64), (8, 64), (1, 256), (1, 16), (2, 256), (2, 16))


def main() -> None:
    """Measure all figures and print them."""
    parser = argparse.ArgumentParser(description="Measure the cost of look-ups and reads of blocks in other shardings.")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of each comparison (default 15)")
    args = parser.parse_args()
    with running_master() as master, memory_elsewhere(master):
        store = open_store(pool_config(master, 0))
        # A busy machine must not count as a hung pool.
        stack = GuardedBackend(lambda: CheckedBackend(store), Deadlines(lookup_seconds=30, transfer_seconds=30))
        assert stack.wait_ready(10)
        bench = Bench(stack, args.rounds)
        figures = {"plain": bench.measure_plain(), "gathered": bench.measure_gathered()}
        stack.close()
    for name, rows in figures.items():
        print(name)
        for row in rows:
            print("  ", ", ".join(f"{key}: {value}" for key, value in row.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


class Bench:
    """Measurements in one pool."""

    def __init__(self, stack: GuardedBackend, rounds: int) -> None:
        self._stack = stack
        self._rounds = rounds
        self._kept: list[PeerShardings] = []
        self._tokens = list(range(LENGTH))
        self.family = find_family(OWN, HEADS, AXES, block_sizes=(16, 32, 64, 128, 256))
        self._save_as(OWN)

    def measure_plain(self) -> list[dict[str, object]]:
        """Measure a hit of 16 blocks of 2 MiB, and misses of as many, with and without a look-up of other shardings."""
        pool = BlockPool(self._stack, OWN)
        peers = PeerShardings(pool, self.family)
        hashes = self._names(TOKENS)
        absent = extend_block_hashes([], [1, *self._tokens[1:]], TOKENS, root_hash())
        memory, targets = self._room(OWN, len(hashes))

        def hit(*, ask: bool) -> None:
            statuses = pool.exists(hashes)
            assert not (ask and peers.extend_run(statuses, 0, self._names))
            assert all(pool.get_blocks(hashes, targets, wait=False))

        def miss(*, ask: bool) -> None:
            for _ in range(PLAIN_CALLS):
                statuses = pool.exists(absent)
                assert not (ask and peers.extend_run(statuses, 0, self._names))

        rows: list[dict[str, object]] = []
        for name, call, count in (("hit", hit, 1), ("miss", miss, PLAIN_CALLS)):
            without, with_peers = self._in_turn(partial(call, ask=False), partial(call, ask=True))
            ratio = statistics.median(b / a for a, b in zip(without, with_peers, strict=True))
            rows.append(
                {
                    "what": name,
                    "without_us": round(1e6 * statistics.median(without) / count, 1),
                    "with_us": round(1e6 * statistics.median(with_peers) / count, 1),
                    "ratio": round(ratio, 4),
                }
            )
        self._stack.unregister(memory.ctypes.data, len(memory))
        return rows

    def measure_gathered(self) -> list[dict[str, object]]:
        """Measure how TP 1 with blocks of 64 tokens reads other shardings, and a rank of TP 2 reads TP 1's blocks."""
        rows = []
        for tp_size, block_size in CUTS:
            sharding = self._cut(tp_size, block_size)
            self._save_as(sharding)
            rows.append(self._compare(OWN, sharding))
        rank = self._cut(2, TOKENS)
        rows.append(self._compare(rank, OWN))
        return [*rows, self._measure_scattered(rank)]

    def _compare(self, own: Namespace, sharding: Namespace) -> dict[str, object]:
        pool = BlockPool(self._stack, own)
        family = replace(self.family, own=own, axes=tuple(zip(dict(AXES), self.family.shape_of(own), strict=True)))
        hashes, names = self._names(own.block_size), self._names(sharding.block_size)
        memory, targets = self._room(own, len(hashes))
        run = Run(len(hashes), sharding, (range(len(hashes)),))
        peers = PeerShardings(pool, family)
        self._kept.append(peers)  # so that its memory stays registered
        read = peers.reader_of(run, hashes, 0, names)

        def plain() -> None:
            assert all(pool.get_blocks(hashes, targets, wait=False))

        def gather() -> None:
            assert read(0, targets) == len(hashes)

        gather()
        own_seconds, gathered = self._in_turn(plain, gather)
        nbytes = len(hashes) * family.block_bytes(own)
        row: dict[str, object] = {
            "reader": f"TP {own.tp_size}, {own.block_size}",
            "stored": f"TP {sharding.tp_size}, {sharding.block_size}",
            "own_gb_s": round(nbytes / statistics.median(own_seconds) / 1e9, 2),
            "gathered_gb_s": round(nbytes / statistics.median(gathered) / 1e9, 2),
        }
        self._stack.unregister(memory.ctypes.data, len(memory))
        return row

    def _measure_scattered(self, sharding: Namespace) -> dict[str, object]:
        """Measure how a reader with TP 1 reads each piece of ``sharding`` directly to its place.

        There is no headroom, because the bytes of another head lie in front of each piece.
        """
        hashes = self._names(TOKENS)
        memory = np.zeros(len(hashes) * self.family.block_bytes(OWN), np.uint8)
        self._stack.register(memory.ctypes.data, len(memory))
        keys, values = self._scatter(self.family, sharding, hashes, memory)
        seconds, _ = self._in_turn(lambda: _check(self._stack.get(keys, values)), lambda: None)
        self._stack.unregister(memory.ctypes.data, len(memory))
        scattered = round(len(memory) / statistics.median(seconds) / 1e9, 2)
        return {"reader": f"TP 1, {TOKENS}", "stored": f"TP {sharding.tp_size}, {TOKENS}", "scattered_gb_s": scattered}

    def _scatter(
        self, family: ShardingFamily, sharding: Namespace, hashes: Sequence[bytes], memory: np.ndarray
    ) -> tuple[list[str], list[Value]]:
        """Return the key of each rank's piece, and the memory in the reader's blocks to which that piece belongs."""
        keys: list[str] = []
        values: list[Value] = []
        per_head = TOKENS * 128
        for i, block_hash in enumerate(hashes):
            base = memory.ctypes.data + i * family.block_bytes(OWN)
            for rank in family.ranks_with(sharding, range(HEADS)):
                heads = family.heads_of(rank)
                keys.append(rank.key(block_hash))
                starts = [base + (plane * HEADS + heads.start) * per_head for plane in range(2 * LAYERS)]
                values.append([Span(start, len(heads) * per_head) for start in starts])
        return keys, values

    def _in_turn(self, one: Callable[[], object], other: Callable[[], object]) -> tuple[list[float], list[float]]:
        """Call both functions alternately; return the seconds of their calls, without the first one."""
        seconds: tuple[list[float], list[float]] = [], []
        for number in range(self._rounds + 1):
            for call, taken in zip((one, other), seconds, strict=True):
                begun = time.perf_counter()
                call()
                if number:
                    taken.append(time.perf_counter() - begun)
        return seconds

    def _save_as(self, sharding: Namespace) -> None:
        hashes = self._names(sharding.block_size)
        memory, values = self._room(sharding, len(hashes))
        for rank in range(sharding.tp_size):
            pool = BlockPool(self._stack, replace(sharding, tp_rank=rank))
            assert all(pool.save(hashes, values))
        self._stack.unregister(memory.ctypes.data, len(memory))

    def _room(self, sharding: Namespace, count: int) -> tuple[np.ndarray, list[Value]]:
        """Return registered memory for ``count`` blocks with headroom, and the blocks' places."""
        nbytes = self.family.block_bytes(sharding)
        memory = np.random.default_rng(1).integers(0, 256, count * (128 + nbytes), dtype=np.uint8)
        self._stack.register(memory.ctypes.data, len(memory), headroom=True)
        return memory, [(Span(memory.ctypes.data + 128 + i * (128 + nbytes), nbytes),) for i in range(count)]

    def _names(self, block_size: int) -> list[bytes]:
        return extend_block_hashes([], self._tokens, block_size, root_hash())

    @staticmethod
    def _cut(tp_size: int, block_size: int) -> Namespace:
        return replace(OWN, tp_size=tp_size, num_kv_heads=HEADS // tp_size, block_size=block_size)


def _check(statuses: Sequence[object]) -> None:
    assert all(statuses)


if __name__ == "__main__":
    main()
