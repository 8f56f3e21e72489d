"""``sabotage.py NAME FLAGS...``: starts the reference engine without one of the measures that make a shared pool safe.

``kvstore certify`` must find each sabotage::

    kvstore certify examples/certify/engine.yaml --set start="python examples/certify/sabotage.py checksums"

``sabotage.py all`` tries all sabotages, each with the cases that should find it, and prints a table.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import api_server
from engine.scheduling import request
from engine.scheduling.pool_use import Reason
from engine.scheduling.scheduler import Scheduler
from kvstore_backend.backend import Status
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import BlockPool
from kvstore_backend.transfers import Transfers
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import GuardedBackend


def accept_all_checksums() -> None:
    """Let every block that was read pass its check."""
    replace(CheckedBackend, "_find_fault", lambda old, *_: None)


def use_one_namespace() -> None:
    """Give all models the same namespace."""
    for name, value in (("digest", "0" * 32), ("prefix", "kv-" + "0" * 32)):
        setattr(Namespace, name, value)


def ignore_salts() -> None:
    """Let requests with different salts share blocks."""
    setattr(request, "root_hash", lambda salt="", extra=b"": root_hash("", extra))  # noqa: B010


def hash_own_tokens() -> None:
    """Let the hash of a block depend only on its own tokens, and not on those before it."""

    def extend(hashes: list[bytes], tokens: Any, size: int, root: bytes) -> list[bytes]:
        for start in range(len(hashes) * size, len(tokens) // size * size, size):
            hashes += extend_block_hashes([], tokens[start : start + size], size, root)
        return hashes

    setattr(request, "extend_block_hashes", extend)  # noqa: B010


def count_failed_reads() -> None:
    """Count a failed read as a load."""
    replace(BlockPool, "get_blocks", lambda old, *args, **options: [Status.OK] * len(old(*args, **options)))


def find_all() -> None:
    """Let each look-up report that the pool has all blocks."""
    for name in ("exists", "exists_for_all"):
        replace(GuardedBackend, name, lambda old, pool, keys: [Status.OK] * len(keys))


def free_at_once() -> None:
    """Give the memory of a late call back to the engine at once."""
    replace(Transfers, "_end_call", lambda old, transfers, transfer, window, **_: window.take_back())


def wait_without_deadline() -> None:
    """Remove the deadline from calls to the store."""
    replace(GuardedBackend, "_wait_for_call", lambda old, guard, call, operation: call.ended.acquire())


def fail_requests() -> None:
    """Let a failure of the pool end the request that needed it."""

    def end(old: Callable[..., None], scheduler: Any, sequence: Any, *args: Any, **options: Any) -> None:
        old(scheduler, sequence, *args, **options)
        if sequence.pool_use.reason is Reason.FAILED:
            raise RuntimeError("the pool failed")

    replace(Scheduler, "on_load_end", end)


def never_recover() -> None:
    """Keep the breaker open for ever after it has opened."""

    def recover(old: Callable[..., None], guard: GuardedBackend) -> None:
        if guard.times_opened:
            threading.Event().wait()
        old(guard)

    replace(GuardedBackend, "_recover", recover)


def stop_saving() -> None:
    """Stop all saves after the first failure."""
    failed: list[bool] = []

    def save(old: Callable[..., list[Status]], pool: Any, hashes: Any, sources: Any, **options: Any) -> list[Status]:
        if failed:
            return [Status.FAILED] * len(hashes)
        statuses = old(pool, hashes, sources, **options)
        failed.extend([True] * (Status.FAILED in statuses))
        return statuses

    replace(BlockPool, "save", save)


SABOTAGES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "checksums": (accept_all_checksums, ("bytes flipped",)),
    "namespaces": (use_one_namespace, ("two models of one shape",)),
    "salts": (ignore_salts, ("one prefix with two salts",)),
    "chained-hashes": (hash_own_tokens, ("same words after other words",)),
    "failed-reads": (count_failed_reads, ("evicted between look-up and read", "bytes flipped")),
    "look-ups": (find_all, ("no fault",)),
    "late-calls": (free_at_once, ("owner hung",)),
    "deadlines": (wait_without_deadline, ("owner hung",)),
    "failures": (fail_requests, ("master killed and restarted",)),
    "recovery": (never_recover, ("master killed and restarted",)),
    "saves": (stop_saving, ("master killed and restarted",)),
}


def replace(owner: type, name: str, new: Callable[..., Any]) -> None:
    """Replace a method by ``new``, which gets the old method as its first argument."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: new(old, *args, **options))


def try_all(names: list[str]) -> int:
    """Run ``kvstore certify`` for each sabotage; return the number of those that it did not find."""
    missed = 0
    for name in names or SABOTAGES:
        command = [sys.executable, "-m", "kvstore_backend.cli", "certify", str(Path(__file__).with_name("engine.yaml"))]
        command += ["--quick", "--json", "--set", f"start={sys.executable} {__file__} {name}"]
        for case in SABOTAGES[name][1]:
            command += ["--only", case]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if not ended.stdout:
            print(f"| {name} | not run |", flush=True)
            missed += 1
            continue
        cases = json.loads(ended.stdout)["cases"]
        missed += not any(case["problems"] for case in cases)
        for case in cases:
            problems = "; ".join(case["problems"]) or f"not found; longest request: {case['longest_seconds']:.1f} s"
            print(f"| {name} | {case['case']} | {problems} |", flush=True)
    return missed


if __name__ == "__main__":
    if sys.argv[1] == "all":
        sys.exit(try_all(sys.argv[2:]))
    SABOTAGES[sys.argv.pop(1)][0]()
    sys.exit(api_server.main())
