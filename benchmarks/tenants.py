"""Measure whether the puts of one tenant evict the frequently used blocks of another tenant of the same Mooncake pool.

    python benchmarks/tenants.py

The quiet tenant reads blocks of a working set that fits its quota, some far more often than others, and puts those that
it does not find. The loud tenant only puts new blocks, at ten times the rate. The hit rate of the quiet tenant alone is
compared with its hit rate during the loud tenant's puts, with three masters that the script starts: without tenants,
with quotas that together exceed the pool's watermark, and with quotas that do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvstore_backend.backend import Span, Status, StorageBackend
from kvstore_backend.pool import open_store
from tests.support.beside import working_beside
from tests.support.mooncake import MooncakeMaster, mooncake_master

MIB = 1 << 20
BLOCK_BYTES = 64 << 10
POOL_MIB = 64
WORKING_SET = 320  # blocks: 20 MiB
QUIET_RATE = 100.0  # blocks a second
FLOOD_FACTOR = 10
CASES: dict[str, tuple[int, int] | None] = {  # quotas in MiB of the quiet and of the loud tenant
    "one tenant": None,
    "quotas of 24 and 40 MiB, the whole pool": (24, 40),
    "quotas of 24 and 32 MiB, below the watermark": (24, 32),
}


class Tenant:
    """One tenant's client. All its blocks have the same bytes, from one block of memory."""

    def __init__(self, master: MooncakeMaster, name: str, segment: str) -> None:
        self.store: StorageBackend = open_store(master.config(tenant_id=name, global_segment_size=segment))
        self._memory = np.ones(BLOCK_BYTES, dtype=np.uint8)
        self.store.register(self._memory.ctypes.data, BLOCK_BYTES)
        self._value = [Span(self._memory.ctypes.data, BLOCK_BYTES)]

    def put(self, keys: list[str]) -> list[Status]:
        return self.store.put(keys, [self._value] * len(keys))

    def read(self, key: str) -> bool:
        """Read a block; put it if the pool does not have it. Return whether the pool had it."""
        if self.store.get([key], [self._value])[0]:
            return True
        self.put([key])
        return False


def measure_hits(tenant: Tenant, seconds: float) -> float:
    """Read blocks of the working set at the quiet tenant's rate; return the share of reads that found their block."""
    chance = random.Random(7)
    weights = [1 / (rank + 1) ** 0.7 for rank in range(WORKING_SET)]
    hits = reads = 0
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for number in chance.choices(range(WORKING_SET), weights, k=10):
            hits += tenant.read(f"hot-{number}")
            reads += 1
        time.sleep(max(0.0, began + reads / QUIET_RATE - time.monotonic()))
    return hits / reads


@contextlib.contextmanager
def flooding(tenant: Tenant, figures: dict[str, float]) -> Iterator[None]:
    """Put new blocks at ten times the quiet tenant's rate during the ``with`` block; add the figures to ``figures``."""

    def flood(is_over: threading.Event) -> None:
        began, count, taken = time.monotonic(), 0, 0
        while not is_over.is_set():
            keys = [f"flood-{count + i}" for i in range(20)]
            taken += sum(map(bool, tenant.put(keys)))
            count += len(keys)
            is_over.wait(max(0.0, began + count / (FLOOD_FACTOR * QUIET_RATE) - time.monotonic()))
        figures["flood_per_second"] = count / (time.monotonic() - began)
        figures["flood_taken"] = taken / count

    with working_beside(flood):
        yield


def run_case(quotas: tuple[int, int] | None, seconds: float, folder: Path) -> dict[str, float]:
    """Return the quiet tenant's hit rates alone and with the loud tenant, and the loud tenant's figures."""
    flags = []
    if quotas:
        policy = folder / "quotas.yaml"
        sizes = zip(("quiet", "loud"), quotas, strict=True)
        lines = [f"  - name: {name}\n    quota: {size * MIB}\n" for name, size in sizes]
        policy.write_text("version: 1\ntenants:\n" + "".join(lines))
        flags = ["--enable_multi_tenants=true", f"--tenant_quota_connector_uri={policy}"]
    with mooncake_master(folder / "log", *flags) as master:
        quiet, loud = Tenant(master, "quiet", f"{POOL_MIB}MiB"), Tenant(master, "loud", "0")
        for first in range(0, WORKING_SET, 20):
            quiet.put([f"hot-{first + i}" for i in range(20)])
        figures = {"alone": measure_hits(quiet, seconds)}
        with flooding(loud, figures):
            time.sleep(seconds / 4)  # until the loud tenant has filled its quota or the pool
            figures["with_flood"] = measure_hits(quiet, seconds)
        quiet.store.close()
        loud.store.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each figure (default 20)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    results = {}
    print("| pool of 64 MiB | quiet alone | with the flood | flood, blocks/s | of these taken |\n|---|---|---|---|---|")
    for name, quotas in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            figures = results[name] = run_case(quotas, arguments.seconds, Path(folder))
        print(
            f"| {name} | {figures['alone']:.1%} | {figures['with_flood']:.1%} | {figures['flood_per_second']:.0f} "
            f"| {figures['flood_taken']:.0%} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
