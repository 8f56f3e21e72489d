"""Measure a pool: throughput and latency as an engine gets them, beside the bare store's."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from prometheus_client import CollectorRegistry

from kvstore_backend.backend import ConfigError, PoolUnavailable, Span, Status, StorageBackend, Value
from kvstore_backend.cli.report import human_bytes, print_json, print_table
from kvstore_backend.config import PoolConfig, parse_size, read_config
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import open_pool, open_store

__all__ = ["add_arguments", "run"]


@dataclass(frozen=True)
class _Row:
    """One operation by one way: bytes moved in a second (None: it moves none), and seconds a batch took."""

    operation: str
    through: str
    bytes_per_second: float | None
    median_seconds: float
    worst_seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``kvstore bench`` takes."""
    parser.add_argument("config", nargs="?", help="a configuration file in any dialect, or a URL; else the environment")
    parser.add_argument("--block-size", default="1MiB", metavar="SIZE", help="bytes of a block (default 1MiB)")
    parser.add_argument("--blocks", type=int, default=16, metavar="N", help="blocks in a batch (default 16)")
    parser.add_argument("--batches", type=int, default=5, metavar="N", help="batches of each operation (default 5)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the figures; whatever happens, take what was stored for them out of the pool.

    Raises:
        ConfigError: the configuration or an argument cannot be used.
        PoolUnavailable: the pool cannot be opened, or did not do what was measured.
    """
    logging.getLogger("kvstore_backend").setLevel(logging.ERROR)
    config = read_config(arguments.config)
    if config is None:
        raise ConfigError("the configuration says that there is no pool")
    try:
        block_bytes = parse_size(arguments.block_size)
    except ValueError as exc:
        raise ConfigError(f"--block-size is {arguments.block_size!r}; {exc}") from None
    if min(block_bytes, arguments.blocks, arguments.batches) < 1:
        raise ConfigError("--block-size, --blocks and --batches must be at least 1")
    namespace = Namespace(f"kvstore-bench-{os.urandom(8).hex()}", "uint8", 1, 1, 1, 1, "bytes")
    nbytes = block_bytes * arguments.blocks
    try:
        source = np.frombuffer(os.urandom(nbytes), dtype=np.uint8).copy()
        target = np.zeros_like(source)
    except (MemoryError, OverflowError):
        raise ConfigError(f"--blocks of --block-size are {nbytes} bytes, more than this machine has room for") from None
    rows: list[_Row] = []

    def measure(through: str, put: _Move, get: _Move, exists: _Look) -> None:
        batches = [[os.urandom(32) for _ in range(arguments.blocks)] for _ in range(arguments.batches)]
        spans = [_values(memory, block_bytes) for memory in (source, target)]
        rows.append(_timed("put", through, source.nbytes, lambda each: put(each, spans[0]), batches))
        rows.append(_timed("exists", through, None, exists, batches))
        rows.append(_timed("get", through, source.nbytes, lambda each: get(each, spans[1]), batches))
        if not np.array_equal(source, target):
            raise PoolUnavailable(f"{through}: what was read is not what was stored")

    store = open_store(config)
    for memory in (source, target):
        store.register(memory.ctypes.data, memory.nbytes)
    try:
        measure(
            "bare store",
            lambda hashes, values: sum(map(bool, store.put([*map(namespace.key, hashes)], values))),
            lambda hashes, values: sum(map(bool, store.get([*map(namespace.key, hashes)], values))),
            lambda hashes: sum(map(bool, store.exists([*map(namespace.key, hashes)]))),
        )
    finally:
        _clear(store, namespace)
        store.close()
    try:
        # Written at once: what is measured is the pool, not the queue before it.
        with open_pool(replace(config, async_write=False), namespace, CollectorRegistry(), background=False) as pool:
            for memory in (source, target):
                pool.register(memory.ctypes.data, memory.nbytes)
            measure(
                "full stack",
                lambda hashes, values: pool.save(hashes, values).count(Status.OK),
                pool.load,
                pool.lookup,
            )
    finally:
        # Not through the pool: while it is open, a save that Ctrl-C cut off still goes on behind it.
        for each in (config, *([PoolConfig(config.fast)] if config.fast else [])):
            with contextlib.closing(open_store(each)) as store:
                _clear(store, namespace)
    if arguments.json:
        print_json({"block_bytes": block_bytes, "blocks": arguments.blocks, "rows": [asdict(row) for row in rows]})
    else:
        _print(rows, block_bytes, arguments.blocks)
    return 0


def _clear(store: StorageBackend, namespace: Namespace) -> None:
    """Remove what was stored, leases or not: nobody else can know these keys."""
    if not store.clear(namespace.prefix):
        print(f"kvstore: blocks of this run stay in the pool until they are evicted: {store!r}", file=sys.stderr)


_Look = Callable[[Sequence[bytes]], int]
_Move = Callable[[Sequence[bytes], Sequence[Value]], int]


def _values(memory: np.typing.NDArray[np.uint8], block_bytes: int) -> list[Value]:
    return [[Span(memory.ctypes.data + start, block_bytes)] for start in range(0, memory.nbytes, block_bytes)]


def _timed(operation: str, through: str, nbytes: int | None, call: _Look, batches: Sequence[Sequence[bytes]]) -> _Row:
    """Time ``call`` over all batches; it must answer how many blocks it was good for."""
    seconds = []
    for hashes in batches:
        start = time.perf_counter()
        done = call(hashes)
        seconds.append(time.perf_counter() - start)
        if done != len(hashes):
            raise PoolUnavailable(
                f"{operation} through the {through} did {done} of {len(hashes)} blocks: the pool may be too small for "
                f"{len(batches)} batches of them; try fewer --batches or --blocks"
            )
    rate = nbytes * len(seconds) / sum(seconds) if nbytes else None
    return _Row(operation, through, rate, statistics.median(seconds), max(seconds))


def _print(rows: Sequence[_Row], block_bytes: int, blocks: int) -> None:
    print(f"batches of {blocks} blocks of {human_bytes(block_bytes)}")
    bare = {row.operation: row for row in rows if row.through == "bare store"}
    print_table(
        ("operation", "through", "GB/s", "median", "worst", "times bare"),
        [
            (
                row.operation,
                row.through,
                f"{row.bytes_per_second / 1e9:.2f}" if row.bytes_per_second else "-",
                f"{row.median_seconds * 1000:.2f} ms",
                f"{row.worst_seconds * 1000:.2f} ms",
                f"{row.median_seconds / bare[row.operation].median_seconds:.2f}",
            )
            for row in sorted(rows, key=lambda row: ("put", "get", "exists").index(row.operation))
        ],
    )
