"""Trial of a pool with a block that no other client uses."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np

from kvstore_backend.backend import PoolUnavailable, Span, Status, StorageBackend
from kvstore_backend.cli.report import Finding, fail, ok, show_progress
from kvstore_backend.config import PoolConfig
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import open_store

__all__ = ["TRIAL_NAMESPACE", "native_log_to", "try_pool"]

TRIAL_NAMESPACE = Namespace("kvstore-doctor", "uint8", 1, 1, 1, 1, "bytes")
_BLOCK_BYTES = 64 << 10
_DEADLINE_SECONDS = 60.0
_STEPS = ("joining the pool", "put", "exists", "get", "remove")


def try_pool(config: PoolConfig) -> list[Finding]:
    """Put, find, get and remove a block; a pool that hangs is given up after a minute."""
    findings: list[Finding] = []
    steps: list[str] = []
    # A daemon thread, because a native call that never returns must not prevent the end of the process.
    thread = threading.Thread(target=lambda: findings.extend(_run_trial(config, steps.append)), daemon=True)
    with tempfile.TemporaryFile() as native_log:
        with native_log_to(native_log) as outside, show_progress("trial", len(_STEPS), outside) as tell:
            thread.start()
            give_up_at = time.monotonic() + _DEADLINE_SECONDS
            while True:
                thread.join(0.1)
                if steps:
                    tell(len(steps) - 1, steps[-1])
                if not thread.is_alive() or time.monotonic() >= give_up_at:
                    break
        native_log.seek(0)
        complaints = native_log.read().decode(errors="replace")
    if thread.is_alive():
        findings.append(
            fail("trial", f"the pool hangs: no answer within {_DEADLINE_SECONDS:.0f} s", "restart its master")
        )
    if any(finding.level == "fail" for finding in findings):
        sys.stderr.write(complaints)
    return findings


@contextlib.contextmanager
def native_log_to(file: IO[bytes]) -> Iterator[IO[str]]:
    """Redirect standard error to ``file``, because Mooncake writes to it even without an error; yield the original."""
    sys.stderr.flush()
    outside = os.dup(2)
    os.dup2(file.fileno(), 2)
    with open(outside, "w") as before:
        try:
            yield before
        finally:
            os.dup2(outside, 2)


def _run_trial(config: PoolConfig, on_step: Callable[[str], None]) -> Iterator[Finding]:
    on_step(_STEPS[0])
    try:
        store = open_store(config)
    except PoolUnavailable as exc:
        yield fail("trial", str(exc))
        return
    try:
        yield _round_trip(store, on_step)
    finally:
        store.close()


def _round_trip(store: StorageBackend, on_step: Callable[[str], None]) -> Finding:
    source = np.frombuffer(os.urandom(_BLOCK_BYTES), dtype=np.uint8).copy()
    target = np.zeros_like(source)
    key = TRIAL_NAMESPACE.key(os.urandom(32))
    for memory in (source, target):
        store.register(memory.ctypes.data, memory.nbytes)
    try:
        on_step("put")
        if not store.put([key], [[Span(source.ctypes.data, source.nbytes)]])[0]:
            return fail(
                "trial",
                f"a block of {_BLOCK_BYTES >> 10} KiB could not be put",
                "the pool is full of blocks in use, no client gives it memory, or a client that died is still listed; "
                "kvstore stats shows which",
            )
        on_step("exists")
        found = store.exists([key])[0]
        on_step("get")
        read = store.get([key], [[Span(target.ctypes.data, target.nbytes)]])[0]
        on_step("remove")
        removed = store.remove([key], force=True)[0]
    finally:
        for memory in (source, target):
            store.unregister(memory.ctypes.data, memory.nbytes)
    if not found or not read:
        return fail(
            "trial",
            f"a block was put, but exists said {found.value} and get {read.value}",
            "the client that holds it cannot be reached: check local_hostname, and firewalls between the machines",
        )
    if not np.array_equal(source, target):
        return fail("trial", "a block came back with other bytes", "do not use this pool; report it with its versions")
    if removed is Status.FAILED:
        return fail("trial", "put, exists and get work, but the block could not be removed", "look at the master's log")
    return ok("trial", f"put, exists, get and remove of {_BLOCK_BYTES >> 10} KiB work, bytes equal")
