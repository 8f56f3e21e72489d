"""A client of a pool in its own process, which does what an instance does: look up, load, save the rest."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from kvstore_backend.backend import StorageBackend
from kvstore_backend.config import PoolConfig
from kvstore_backend.pool import BlockPool, open_store
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import GuardedBackend
from tests.faults.blocks import NAMESPACE, conversation, right_bytes
from tests.faults.mover import Mover
from tests.faults.report import Report
from tests.support.peer import Peer
from tests.support.waiting import wait_until

__all__ = ["BLOCKS", "BLOCK_BYTES", "Client", "Owner", "run_request"]

BLOCK_BYTES = 128 << 10
BLOCKS = 4
# A pause between two requests, as in an engine.
_BETWEEN_S = 0.005

T = TypeVar("T")


class Owner(Peer):
    """A process that only gives memory to the pool."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(partial(open_store, config))

    def __enter__(self) -> Owner:
        return self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, such as ``SIGSTOP``, to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


class Client(Peer):
    """A process with a guarded and checked pool of the configured store."""

    def __init__(self, config: PoolConfig, folder: Path) -> None:
        super().__init__(partial(_open_guarded, config))
        self._progress = folder / f"progress-{id(self)}.json"
        self._stop = folder / f"stop-{id(self)}"

    def __enter__(self) -> Client:
        return self

    def request_each(self, numbers: Sequence[int]) -> Report:
        """Process one request for each of these conversations, in sequence."""
        return cast(Report, self.call(_run_requests, list(numbers)))

    def start(self, numbers: Sequence[int]) -> None:
        """Process requests for these conversations in turn, repeatedly, until ``stop``."""
        self._stop.unlink(missing_ok=True)
        self._progress.unlink(missing_ok=True)
        self.begin(_run_requests, list(numbers), self._stop, self._progress)

    def stop(self) -> Report:
        """End the requests, and return the report about them."""
        self._stop.touch()
        assert self._mine.poll(60), "the client hangs"
        return cast(Report, self._mine.recv())

    def wait_for(self, figure: str, more: int, deadline_s: float = 40.0) -> None:
        """Wait until ``tried`` or ``hits`` has grown by ``more``."""
        start = self._figure(figure)
        wait_until(lambda: self._figure(figure) >= start + more, f"{more} more {figure}", deadline_s)

    def is_ready(self) -> bool:
        """Return whether the breaker is closed."""
        return cast(bool, self.call(_is_ready))

    def _figure(self, name: str) -> int:
        wait_until(self._progress.exists, "the client's first request")
        return int(json.loads(self._progress.read_bytes())[name])


def _open_guarded(config: PoolConfig) -> StorageBackend:
    logging.disable(logging.ERROR)
    guarded = GuardedBackend(lambda: CheckedBackend(open_store(config)))
    assert guarded.wait_ready(30)
    return guarded


def _is_ready(backend: StorageBackend) -> bool:
    return backend.is_ready


def _run_requests(
    backend: StorageBackend, numbers: list[int], stop: Path | None = None, progress: Path | None = None
) -> Report:
    pool = BlockPool(backend, NAMESPACE)
    mover = Mover(pool, BLOCK_BYTES)
    report = Report()
    while True:
        for number in numbers:
            try:
                run_request(pool, mover, conversation(number, BLOCKS), report)
            except Exception:
                report.exceptions += 1
            report.tried += 1
            if progress is not None:
                draft = progress.with_suffix(".draft")
                draft.write_text(json.dumps({"tried": report.tried, "hits": report.hits}))
                os.replace(draft, progress)
                time.sleep(_BETWEEN_S)
            if stop is not None and stop.exists():
                return report
        if stop is None:
            return report


def run_request(
    pool: BlockPool, mover: Mover, hashes: list[bytes], report: Report, after_lookup: Callable[[], object] | None = None
) -> None:
    """Look up blocks, load and compare them, and save those that were not loaded."""
    present = _time_call(report, lambda: pool.lookup(hashes))
    if after_lookup is not None:
        after_lookup()
    loaded = _time_call(report, lambda: mover.load(hashes[:present]))
    for block_hash, content in zip(hashes, loaded, strict=False):
        right = right_bytes(block_hash, BLOCK_BYTES)
        if content != right:
            report.wrong_bytes += sum(a != b for a, b in zip(content, right, strict=True))
    report.hits += len(loaded)
    missing = hashes[len(loaded) :]
    contents = [right_bytes(block_hash, BLOCK_BYTES) for block_hash in missing]
    _time_call(report, lambda: mover.save(missing, contents))


def _time_call(report: Report, call: Callable[[], T]) -> T:
    start = time.monotonic()
    try:
        return call()
    finally:
        report.longest_stall_s = max(report.longest_stall_s, time.monotonic() - start)
