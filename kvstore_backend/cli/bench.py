"""Measure the throughput and latency of a pool, with all wrappers (full stack) and without them (bare store)."""

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

from kvcommon.formats import format_bytes
from kvstore_backend.backend import ConfigError, PoolUnavailable, Span, Status, StorageBackend, Value
from kvstore_backend.cli.operator.pool import find_pool
from kvstore_backend.cli.report import Tell, print_json, print_table, show_progress
from kvstore_backend.config import PoolConfig, parse_size
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import open_pool, open_store

__all__ = ["add_arguments", "run"]


@dataclass(frozen=True)
class _Row:
    """Measurements of one operation.

    Attributes:
        operation: ``put``, ``exists`` or ``get``.
        through: ``bare store`` or ``full stack``.
        bytes_per_second: throughput, or None for an operation that moves no blocks.
        median_seconds: median time of a batch.
        worst_seconds: longest time of a batch.
        min_seconds: shortest time of a batch.
        batches: number of measured batches.
    """

    operation: str
    through: str
    bytes_per_second: float | None
    median_seconds: float
    worst_seconds: float
    min_seconds: float
    batches: int


_LookUp = Callable[[Sequence[bytes]], int]
_Move = Callable[[Sequence[bytes], Sequence[Value]], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore bench``."""
    parser.add_argument(
        "config", nargs="?", help="URL of the pool, or a configuration file of any engine; default: the environment"
    )
    parser.add_argument("--block-size", default="1MiB", metavar="SIZE", help="size of a block (default 1MiB)")
    parser.add_argument("--blocks", type=int, default=16, metavar="N", help="number of blocks in a batch (default 16)")
    parser.add_argument(
        "--batches", type=int, default=5, metavar="N", help="number of batches of each operation (default 5)"
    )
    parser.add_argument(
        "--warm-up", type=int, default=1, metavar="N", help="number of batches before the measurement (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure a pool and print the measurements. The blocks that were put are removed, also after a failure.

    Raises:
        ConfigError: the configuration or an argument cannot be used.
        PoolUnavailable: the pool cannot be opened, or an operation did not succeed for all blocks of a batch.
    """
    logging.getLogger("kvstore_backend").setLevel(logging.ERROR)
    config = find_pool(arguments.config, [])
    try:
        block_bytes = parse_size(arguments.block_size)
    except ValueError as exc:
        raise ConfigError(f"--block-size is {arguments.block_size!r}; {exc}") from None
    if min(block_bytes, arguments.blocks, arguments.batches) < 1:
        raise ConfigError("--block-size, --blocks and --batches must be at least 1")
    if arguments.warm_up < 0:
        raise ConfigError(f"--warm-up is {arguments.warm_up}; it must not be negative")
    namespace = Namespace(f"kvstore-bench-{os.urandom(8).hex()}", "uint8", 1, 1, 1, 1, "bytes")
    # Three operations through two paths.
    with show_progress("bench", 6 * (arguments.warm_up + arguments.batches)) as tell:
        meter = _Meter(block_bytes, arguments.blocks, arguments.batches, arguments.warm_up, tell)
        _measure_bare_store(meter, config, namespace)
        _measure_full_stack(meter, config, namespace)
    if arguments.json:
        rows = [asdict(row) for row in meter.rows]
        figures = {"block_bytes": block_bytes, "blocks": arguments.blocks, "warm_up": arguments.warm_up}
        print_json({**figures, "rows": rows})
    else:
        _print_rows(meter.rows, block_bytes, arguments.blocks)
    return 0


class _Meter:
    """Measures operations, and has the memory for one batch of blocks to put and one to get."""

    def __init__(self, block_bytes: int, blocks: int, batches: int, warm_up: int, tell: Tell | None = None) -> None:
        """Allocate the memory for one batch.

        Args:
            block_bytes: size of a block.
            blocks: number of blocks in a batch.
            batches: number of batches that are measured.
            warm_up: number of batches before the measurement.
            tell: function that shows the progress; None: no progress is shown.

        Raises:
            ConfigError: the machine does not have enough memory for one batch.
        """
        nbytes = block_bytes * blocks
        try:
            self._source = np.frombuffer(os.urandom(nbytes), dtype=np.uint8).copy()
            self._target = np.zeros_like(self._source)
        except (MemoryError, OverflowError):
            text = f"--blocks of --block-size are {nbytes} bytes, which is more memory than this machine has"
            raise ConfigError(text) from None
        self._block_bytes = block_bytes
        self._blocks = blocks
        self._batches = batches
        self._warm_up = warm_up
        self._tell = tell
        self._done = 0
        self.rows: list[_Row] = []

    def register_memory(self, register: Callable[[int, int], None]) -> None:
        """Register the memory with a store or a pool, by its method ``register``."""
        for memory in (self._source, self._target):
            register(memory.ctypes.data, memory.nbytes)

    def measure(self, through: str, put: _Move, get: _Move, exists: _LookUp) -> None:
        """Put batches of new blocks, look them up and read them; append the measurements to ``rows``.

        The warm-up batches are not counted, because connections are opened during them.
        """
        number = self._warm_up + self._batches
        batches = [[os.urandom(32) for _ in range(self._blocks)] for _ in range(number)]
        sources, targets = _values(self._source, self._block_bytes), _values(self._target, self._block_bytes)
        nbytes = self._source.nbytes
        self.rows += [
            self._time_batches("put", through, nbytes, lambda hashes: put(hashes, sources), batches),
            self._time_batches("exists", through, None, exists, batches),
            self._time_batches("get", through, nbytes, lambda hashes: get(hashes, targets), batches),
        ]
        if not np.array_equal(self._source, self._target):
            raise PoolUnavailable(f"blocks that were read through the {through} have other bytes than were stored")

    def _time_batches(
        self,
        operation: str,
        through: str,
        nbytes: int | None,
        call: _LookUp,
        batches: Sequence[Sequence[bytes]],
    ) -> _Row:
        """Call ``call`` with the block hashes of each batch; return the measurements without the warm-up batches.

        Args:
            operation: ``put``, ``exists`` or ``get``.
            through: ``bare store`` or ``full stack``.
            nbytes: bytes that a batch moves; None if the operation moves no blocks.
            call: does the operation, and returns the number of blocks for which it succeeded.
            batches: the block hashes of each batch.

        Raises:
            PoolUnavailable: the operation did not succeed for all blocks of a batch.
        """
        seconds = []
        for hashes in batches:
            start = time.perf_counter()
            done = call(hashes)
            seconds.append(time.perf_counter() - start)
            self._done += 1
            if self._tell is not None:
                self._tell(self._done, f"{operation}, {through}")
            if done != len(hashes):
                raise PoolUnavailable(
                    f"{operation} through the {through} succeeded for {done} of {len(hashes)} blocks; the pool may be "
                    f"too small for {len(batches)} batches; try fewer --batches or --blocks"
                )
        counted = seconds[self._warm_up :]
        rate = nbytes * len(counted) / sum(counted) if nbytes else None
        return _Row(
            operation, through, rate, statistics.median(counted), max(counted), min(counted), batches=len(counted)
        )


def _measure_bare_store(meter: _Meter, config: PoolConfig, namespace: Namespace) -> None:
    store = open_store(config)
    meter.register_memory(store.register)

    def keys(hashes: Sequence[bytes]) -> list[str]:
        return [*map(namespace.key, hashes)]

    try:
        meter.measure(
            "bare store",
            lambda hashes, values: sum(map(bool, store.put(keys(hashes), values))),
            lambda hashes, values: sum(map(bool, store.get(keys(hashes), values))),
            lambda hashes: sum(map(bool, store.exists(keys(hashes)))),
        )
    finally:
        _clear_blocks(store, namespace)
        store.close()


def _measure_full_stack(meter: _Meter, config: PoolConfig, namespace: Namespace) -> None:
    try:
        # Writes in the background are off, because their time would be that of the queue, not of the pool.
        with open_pool(replace(config, async_write=False), namespace, CollectorRegistry(), background=False) as pool:
            meter.register_memory(pool.register)
            meter.measure(
                "full stack",
                lambda hashes, values: pool.save(hashes, values).count(Status.OK),
                lambda hashes, values: pool.get_blocks(hashes, values).count(Status.OK),
                pool.lookup,
            )
    finally:
        # The blocks are removed after the pool was closed: after Ctrl-C, a save may still run in an open pool.
        for each in (config, *([PoolConfig(config.fast)] if config.fast else [])):
            with contextlib.closing(open_store(each)) as store:
                _clear_blocks(store, namespace)


def _clear_blocks(store: StorageBackend, namespace: Namespace) -> None:
    """Remove the blocks that this run has put, also blocks with a lease: no other client knows their keys."""
    if not store.clear(namespace.prefix):
        print(
            f"kvstore: blocks of this run could not be removed and stay until they are evicted: {store!r}",
            file=sys.stderr,
        )


def _values(memory: np.typing.NDArray[np.uint8], block_bytes: int) -> list[Value]:
    """Return the memory of each block of ``block_bytes`` bytes in ``memory``."""
    return [[Span(memory.ctypes.data + start, block_bytes)] for start in range(0, memory.nbytes, block_bytes)]


def _print_rows(rows: Sequence[_Row], block_bytes: int, blocks: int) -> None:
    """Print a table of the measurements, sorted by operation: first the bare store, then the full stack."""
    print(f"{rows[0].batches} batches of {blocks} blocks of {format_bytes(block_bytes)}; times are per batch")
    bare = {row.operation: row for row in rows if row.through == "bare store"}
    print_table(
        ("operation", "through", "GB/s", "min", "median", "max", "median / bare"),
        [
            (
                row.operation,
                row.through,
                f"{row.bytes_per_second / 1e9:.2f}" if row.bytes_per_second else "-",
                f"{row.min_seconds * 1000:.2f} ms",
                f"{row.median_seconds * 1000:.2f} ms",
                f"{row.worst_seconds * 1000:.2f} ms",
                f"{row.median_seconds / bare[row.operation].median_seconds:.2f}",
            )
            for row in sorted(rows, key=lambda row: ("put", "get", "exists").index(row.operation))
        ],
    )
