"""Measure the cost of the pool's layers: the full stack against the raw native calls of the same Mooncake client.

    python benchmarks/pool_overhead.py [--json] [--rounds 15]

Starts its own master on loopback. Raw and full calls alternate with the same memory and new keys; figures are medians.
"within" is a client that holds the pool's memory itself; "across" is a client without memory of the pool, which moves
all bytes from and to another process over TCP.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from prometheus_client import CollectorRegistry

from kvstore_backend import BlockPool, Namespace, PoolUnavailable, Span, Status, StorageBackend, load_config
from kvstore_backend.backend import HEADROOM_BYTES
from kvstore_backend.config import PoolConfig
from kvstore_backend.pool import open_store
from kvstore_backend.stores.mooncake import MooncakeStore
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.metered import MeteredBackend

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 1 * MIB, 4 * MIB)
BATCH_BYTES = 32 * MIB
MOST_BLOCKS = 256
LOOKED_UP = 512
BARS = {"within": 0.80, "across": 0.90, "lookup": 1.5}
SMALL_BARS = {"within": 0.70, "across": 0.85}  # bars for the smallest blocks
OPEN_BAR_US = 50.0
NAMESPACE = Namespace("benchmark", "float32", 64, 24, 2, 64, "layer,kv,head,token,dim")
CHECKSUMS: dict[str, Callable[[memoryview], object]] = {
    "XXH3-64 (chosen)": xxhash.xxh3_64_intdigest,
    "XXH3-128": xxhash.xxh3_128_intdigest,
    "XXH64": xxhash.xxh64_intdigest,
    "CRC-32 (zlib)": zlib.crc32,
    "Adler-32": zlib.adler32,
    "BLAKE2b": lambda data: hashlib.blake2b(data).digest(),
    "SHA-256": lambda data: hashlib.sha256(data).digest(),
}


class Row(NamedTuple):
    """One row of the table: the figures of the raw calls and of the full stack, their ratio, and its bar if any."""

    name: str
    raw: float
    full: float
    unit: str
    ratio: float
    bar: str = ""
    is_met: bool = True


class Stack:
    """A store and the layers around it; ``native`` is the Mooncake client that raw and full calls share."""

    def __init__(self, config: PoolConfig) -> None:
        store = open_store(config)
        assert isinstance(store, MooncakeStore)
        self.native: Any = store._native
        # A busy machine must not count as a hung pool.
        guarded = GuardedBackend(lambda: CheckedBackend(store), Deadlines(lookup_seconds=30, transfer_seconds=30))
        assert guarded.wait_ready(10)
        self.full: StorageBackend = MeteredBackend(guarded, CollectorRegistry())
        self.pool = BlockPool(self.full, NAMESPACE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the cost of the pool's layers against the raw calls.")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of raw and full calls (default 15)")
    parser.add_argument("--own", metavar="MASTER", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.own:
        return hold_memory(args.own)
    with running_master() as master:
        rows = measured("within", pool_config(master, 1024 * MIB), args.rounds)
        with memory_elsewhere(master):
            rows += measured("across", pool_config(master, 0), args.rounds)
    while_open = lookup_while_open(args.rounds)
    checksums = {
        f"{name}, {size // KIB} KiB": checksum_rate(call, size) for name, call in CHECKSUMS.items() for size in SIZES
    }
    if args.json:
        figures = {"rows": [row._asdict() for row in rows], "breaker_open_us": while_open, "checksums_gb_s": checksums}
        print(json.dumps(figures, indent=2))
    else:
        show(rows, while_open, checksums)
    return 0


def measured(where: str, config: PoolConfig, rounds: int) -> list[Row]:
    """Measure transfers of each block size, and the look-up, with a client of this configuration."""
    stack = Stack(config)
    with stack.pool:
        rows = [row for size in SIZES for row in transfers(where, stack, size, rounds, headroom=True)]
        rows += transfers(where, stack, SIZES[0], rounds, headroom=False)
        return [*rows, lookup(where, stack, rounds)]


def transfers(where: str, stack: Stack, size: int, rounds: int, *, headroom: bool) -> list[Row]:
    """Measure put and get of one batch of blocks of ``size`` bytes, raw and through all layers."""
    count = min(MOST_BLOCKS, BATCH_BYTES // size)
    stride = HEADROOM_BYTES + size
    memory = np.tile(np.frombuffer(secrets.token_bytes(stride), dtype=np.uint8), count)
    base = memory.ctypes.data
    stack.full.register(base, memory.nbytes, headroom=headroom)
    addresses = [base + i * stride + HEADROOM_BYTES for i in range(count)]
    sizes = [size] * count
    values = [(Span(address, size),) for address in addresses]
    native, full = stack.native, stack.full
    seconds: dict[str, list[float]] = {"raw put": [], "raw get": [], "full put": [], "full get": []}
    for _ in range(rounds):
        keys = new_keys(count)
        seconds["raw put"].append(timed(partial(native.batch_put_from, keys, addresses, sizes), 0))
        seconds["raw get"].append(timed(partial(native.batch_get_into, keys, addresses, sizes), size))
        native.batch_remove(keys, True)
        keys = new_keys(count)
        seconds["full put"].append(timed(partial(full.put, keys, values), Status.OK))
        seconds["full get"].append(timed(partial(full.get, keys, values), Status.OK))
        native.batch_remove(keys, True)
    full.unregister(base, memory.nbytes)
    rows = []
    for call in ("put", "get"):
        raw, whole = (count * size / statistics.median(seconds[f"{kind} {call}"]) / 1e9 for kind in ("raw", "full"))
        row = Row(f"{call} {size // KIB:>4} KiB {where}", raw, whole, "GB/s", whole / raw)
        if headroom:
            bar = (SMALL_BARS if size == SIZES[0] else BARS)[where]
            row = row._replace(bar=f">= {bar:.2f}", is_met=row.ratio >= bar)
        else:
            row = row._replace(name=f"{row.name}, no headroom")
        rows.append(row)
    return rows


def lookup(where: str, stack: Stack, rounds: int) -> Row:
    """Measure the look-up of a long prefix that the pool has, from its hashes, against one raw call with ready keys."""
    hashes = [secrets.token_bytes(32) for _ in range(LOOKED_UP)]
    keys = [NAMESPACE.key(block_hash) for block_hash in hashes]
    memory = np.zeros(64 * LOOKED_UP, dtype=np.uint8)
    base = memory.ctypes.data
    stack.full.register(base, memory.nbytes)
    assert all(stack.full.put(keys, [(Span(base + 64 * i, 64),) for i in range(LOOKED_UP)]))
    raw, full = [], []
    for _ in range(20 * rounds):
        raw.append(timed(partial(stack.native.batch_is_exist, keys), 1))
        full.append(timed(partial(stack.pool.lookup, hashes), LOOKED_UP))
    stack.native.batch_remove(keys, True)
    stack.full.unregister(base, memory.nbytes)
    before, after = (1e6 * statistics.median(times) for times in (raw, full))
    bar = BARS["lookup"]
    name = f"lookup of {LOOKED_UP} blocks {where}"
    return Row(name, before, after, "us", after / before, f"<= {bar:.2f}", after / before <= bar)


def lookup_while_open(rounds: int) -> dict[str, float]:
    """Measure a look-up while the breaker is open; return the microseconds of ``GuardedBackend`` and ``BlockPool``."""

    def refuse() -> StorageBackend:
        raise PoolUnavailable("there is no pool, for this measurement")

    logging.disable(logging.WARNING)
    guarded = GuardedBackend(refuse)
    keys = new_keys(LOOKED_UP)
    hashes = [secrets.token_bytes(32) for _ in range(LOOKED_UP)]
    pool = BlockPool(MeteredBackend(guarded, CollectorRegistry()), NAMESPACE)
    layer = [timed(partial(guarded.exists, keys), Status.FAILED) for _ in range(100 * rounds)]
    whole = [timed(partial(pool.lookup, hashes), 0) for _ in range(100 * rounds)]
    pool.close()
    return {
        "GuardedBackend.exists": 1e6 * statistics.median(layer),
        "BlockPool.lookup": 1e6 * statistics.median(whole),
    }


def timed(call: Callable[[], Any], wanted: object) -> float:
    """Return the seconds that ``call`` takes; its result, or each item of it, must be ``wanted``."""
    start = time.perf_counter()
    answer = call()
    seconds = time.perf_counter() - start
    assert set(answer if isinstance(answer, list) else [answer]) == {wanted}, answer
    return seconds


def checksum_rate(checksum: Callable[[memoryview], object], size: int) -> float:
    """Measure a checksum's GB/s with one thread, with blocks that are not in the CPU's caches."""
    data = memoryview(secrets.token_bytes(64 * MIB))
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for block in blocks:
            checksum(block)
        times.append(time.perf_counter() - start)
    return len(data) / min(times) / 1e9


def new_keys(count: int) -> list[str]:
    return [NAMESPACE.key(secrets.token_bytes(32)) for _ in range(count)]


def pool_config(master: str, segment_bytes: int) -> PoolConfig:
    return load_config(
        "mooncake",
        explicit={
            "master_server_addr": master,
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": segment_bytes,
            "local_buffer_size": 16 * MIB,
        },
        environ={},
    )


@contextlib.contextmanager
def running_master() -> Iterator[str]:
    """Run a master on free loopback ports; yield its address."""
    program = Path(sys.executable).with_name("mooncake_master")
    found = str(program) if program.exists() else shutil.which("mooncake_master")
    if found is None:
        sys.exit("mooncake_master is not installed: pip install '/path/to/this/repository[mooncake]'")
    port, metrics = free_ports(2)
    with tempfile.TemporaryFile() as log:
        flags = [
            "--rpc_address=127.0.0.1",
            f"--rpc_port={port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics}",
        ]
        process = subprocess.Popen([found, *flags], stdout=log, stderr=log)
        try:
            while not answers(port):
                if process.poll() is not None:
                    sys.exit(f"mooncake_master ended with exit code {process.returncode}")
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def memory_elsewhere(master: str) -> Iterator[None]:
    """Run another process that gives the pool its memory."""
    argv = [sys.executable, __file__, "--own", master]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"joined\n":
                sys.exit("the process that holds the memory ended")
            yield
        finally:
            process.kill()


def hold_memory(master: str) -> int:
    """Give memory to the pool until this process is killed."""
    store = open_store(pool_config(master, 1024 * MIB))
    print("joined", flush=True)
    sys.stdin.read()
    store.close()
    return 0


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(sock.getsockname()[1]) for sock in sockets]


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def show(rows: Sequence[Row], while_open: dict[str, float], checksums: dict[str, float]) -> None:
    """Print the tables."""
    print(f"{'':<34}{'raw':>10}{'full stack':>12}{'':>6}{'ratio':>8}{'bar':>10}")
    for row in rows:
        raw, full, ratio = (f"{figure:.2f}" for figure in (row.raw, row.full, row.ratio))
        print(
            f"{row.name:<34}{raw:>10}{full:>12} {row.unit:<5}{ratio:>8}{row.bar:>10}{'' if row.is_met else '  MISSED'}"
        )
    print(f"\n{LOOKED_UP} keys while the breaker is open, us (bar: < {OPEN_BAR_US:g})")
    for name, microseconds in while_open.items():
        print(f"{name:<34}{microseconds:>10.2f}{'' if microseconds < OPEN_BAR_US else '  MISSED'}")
    print("\nchecksum alone, one thread, GB/s")
    for name, rate in checksums.items():
        print(f"{name:<34}{rate:>10.2f}")


if __name__ == "__main__":
    sys.exit(main())
