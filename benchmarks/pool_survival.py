"""Measure how much of a Mooncake pool can still be read after its master, or an owner of its memory, was killed.

    python benchmarks/pool_survival.py [--blocks 10000] [--only WORD] [--json FILE]

There is one trial for each way to run the pool (``MEANS``) and each of its events. It starts a real ``mooncake_master``
(with a real etcd if necessary), and a process that gives memory to the pool, holds 10,000 blocks of 8 KiB as an
instance's own cache does, and puts them. 12 s later, when no lease protects a block any more, a process is killed with
SIGKILL: the master or the owner of the memory. Except in a failover, it is then started again. 10 s and 30 s after the
kill, new processes join the pool and read all blocks: one through our checks, one with Mooncake's client alone. The
table shows the share of the blocks that was read, and the number of blocks with wrong bytes. If instances put lost
blocks again and the owner is killed, another process without memory of the pool holds the blocks.

The ways with ``etcd`` in their name need etcd (Debian: etcd-server). Each line takes about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.pool.saved_blocks import SavedBlocks
from engine.scheduling.block_manager import BlockManager
from kvstore_backend.backend import Span, Status, StorageBackend, Value
from kvstore_backend.config import PoolConfig, load_config
from kvstore_backend.pool import BlockPool, open_store
from kvstore_backend.refill import Refill
from kvstore_backend.transfers import DirectMemory, Outcome, Transfers
from kvstore_backend.wrappers.checked import HEADER_BYTES, CheckedBackend
from kvstore_backend.wrappers.guarded import GuardedBackend
from tests.faults.blocks import NAMESPACE, right_bytes
from tests.support.memory import Memory
from tests.support.mooncake import find_master
from tests.support.peer import Peer
from tests.support.ports import free_ports
from tests.support.processes import Child, child
from tests.support.waiting import port_answers, wait_until

BLOCK_BYTES = 8192
BATCH = 250
LEASE_SECONDS = 12.0  # the time after which no lease protects a block that was put or read
OFFLOAD_SECONDS = 25.0  # the time in which an owner writes all blocks to its SSD
FIRST_LOOK, SECOND_LOOK = 10.0, 30.0  # seconds after the event
ROOT = Path(__file__).resolve().parent.parent
OWNER_ENVIRON = {
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(128 << 20),
}


@dataclass(frozen=True)
class Means:
    """A way to run the pool, and the events of its trials.

    Attributes:
        flags: flags of the master; ``{folder}`` stands for the trial's folder.
        environ: environment variables of the master, also with ``{folder}``.
        etcd_masters: number of masters that use etcd; 0: one master without etcd.
        ssd: whether the owner also stores blocks on disk.
        refills: whether the process that holds the blocks puts lost blocks again, as our engine does.
        churn: before the event, other blocks are put, ``churn`` times as many, and evict the first ones.
        pause: seconds between puts of 250 blocks.
    """

    name: str
    events: Sequence[str]
    flags: Sequence[str] = ()
    environ: dict[str, str] = field(default_factory=dict)
    etcd_masters: int = 0
    ssd: bool = False
    refills: bool = False
    churn: int = 0
    pause: float = 0.0


@dataclass
class Line:
    """A line of the table.

    Attributes:
        shares, raw_shares: share of the blocks that were read after 10 s and 30 s, with and without our checks.
        rejected: number of blocks that our checks rejected.
        wrong_blocks, raw_wrong_blocks: number of blocks that were read with wrong bytes, with and without our checks.
    """

    means: str
    event: str
    shares: list[float] = field(default_factory=list)
    raw_shares: list[float] = field(default_factory=list)
    rejected: int = 0
    wrong_blocks: int = 0
    raw_wrong_blocks: int = 0


SNAPSHOT = (
    "--enable_snapshot=true",
    "--enable_snapshot_restore=true",
    "--snapshot_object_store_type=local",
    "--snapshot_interval_seconds=5",
)
OLD_SNAPSHOT = (*SNAPSHOT[:-1], "--snapshot_interval_seconds=20", "--eviction_high_watermark_ratio=0.5")
SNAPSHOT_FOLDER = {"MOONCAKE_SNAPSHOT_LOCAL_PATH": "{folder}/snapshots"}
UNLEASED = {"MOONCAKE_MASTER_SERVICE_SNAPSHOT_TEST_SKIP_CLEANUP": "1"}
BOTH, FAILING_OVER = ("master restarted", "owner restarted"), ("master restarted", "failover")
MEANS = (
    Means("nothing", BOTH),
    Means("refill", BOTH, refills=True),
    Means("snapshot, as in Mooncake's guide", BOTH[:1], SNAPSHOT, SNAPSHOT_FOLDER),
    Means("snapshot", BOTH[:1], SNAPSHOT, SNAPSHOT_FOLDER | UNLEASED),
    Means("old snapshot", ("master restarted",), OLD_SNAPSHOT, SNAPSHOT_FOLDER | UNLEASED, churn=3),
    Means("etcd", FAILING_OVER, etcd_masters=2),
    Means("etcd, refill", FAILING_OVER[1:], etcd_masters=2, refills=True),
    Means("etcd, snapshot", FAILING_OVER[1:], SNAPSHOT, SNAPSHOT_FOLDER | UNLEASED, etcd_masters=2),
    Means("etcd, oplog", FAILING_OVER[1:], ("--enable_oplog=true",), etcd_masters=2),
    Means("etcd, oplog, one master", FAILING_OVER[:1], ("--enable_oplog=true",), etcd_masters=1),
    Means("SSD", BOTH, ("--enable_offload=true",), ssd=True),
    # Each time the owner looks for blocks to write to its SSD, it finds too few for one of Mooncake's buckets (500).
    Means("SSD, filled slowly", BOTH[1:], ("--enable_offload=true",), ssd=True, pause=1.2),
    Means("etcd, SSD", FAILING_OVER[1:], ("--enable_offload=true",), etcd_masters=2, ssd=True),
)


# --- in the processes that join the pool ----------------------------------------------------------------------


class Instance:
    """A client with blocks in its own memory, like an engine's cache; it puts them, and with ``refills`` also again."""

    def __init__(self, config: PoolConfig, blocks: int, refills: bool, environ: dict[str, str]) -> None:
        os.environ.update(environ)
        backend = GuardedBackend(lambda: CheckedBackend(open_store(config)))
        assert backend.wait_ready(60), backend.health().detail
        self._pool = BlockPool(backend, NAMESPACE)
        self._cache = Memory(blocks * BLOCK_BYTES)
        self._pool.register(self._cache.address, self._cache.nbytes)
        self._blocks = BlockManager(blocks)
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run_posts, daemon=True).start()
        self._transfers = Transfers(self._pool, DirectMemory(self._locate, lambda _: None), self._posts.put)
        self._saved = SavedBlocks(self._blocks, self._transfers, self._posts.put, BATCH)
        if refills:
            Refill(self._pool, self._saved, lambda _: None)

    def fill(self, hashes: Sequence[bytes], pause: float) -> int:
        """Make blocks with these hashes, publish and save them; return the number of blocks that the pool accepted.

        Args:
            pause: seconds between batches.
        """
        stored = 0
        for start in range(0, len(hashes), BATCH):
            batch = hashes[start : start + BATCH]
            ended: queue.SimpleQueue[int] = queue.SimpleQueue()
            self._posts.put(partial(self._compute, batch, ended.put))
            stored += ended.get()
            time.sleep(pause)
        return stored

    def is_ready(self) -> bool:
        """Return whether the pool is ready."""
        return self._pool.is_ready

    def _compute(self, hashes: Sequence[bytes], on_end: Callable[[int], None]) -> None:
        allocated = self._blocks.allocate_blocks(len(hashes))
        for block, block_hash in zip(allocated, hashes, strict=True):
            self._cache.fill(right_bytes(block_hash, BLOCK_BYTES), block * BLOCK_BYTES)
            self._blocks.publish_block(block, block_hash)

        def on_saved(outcome: Outcome) -> None:
            self._saved.note_blocks(hashes, allocated)
            on_end(outcome.count)

        self._transfers.save(hashes, allocated, on_saved, partial(self._blocks.release_blocks, allocated))

    def _locate(self, blocks: Sequence[int]) -> list[Value]:
        return [[Span(self._cache.address + block * BLOCK_BYTES, BLOCK_BYTES)] for block in blocks]

    def _run_posts(self) -> None:
        while True:
            self._posts.get()()


def open_reader(config: PoolConfig, *, checked: bool) -> StorageBackend:
    """Return a client that gives no memory to the pool, with or without our checks."""
    store = open_store(config)
    return CheckedBackend(store) if checked else store


def read_blocks(backend: StorageBackend, hashes: Sequence[bytes]) -> tuple[int, int, int]:
    """Read blocks; return the numbers of blocks that were read, that had wrong bytes, and that our checks rejected."""
    checked = isinstance(backend, CheckedBackend)
    header = 0 if checked else HEADER_BYTES
    counts: Counter[str] = Counter()
    for start in range(0, len(hashes), BATCH):
        batch = hashes[start : start + BATCH]
        targets = [Memory(header + BLOCK_BYTES) for _ in batch]
        keys = [NAMESPACE.prefix + each.hex() for each in batch]
        statuses = backend.get(keys, [target.value for target in targets])
        for block_hash, target, status in zip(batch, targets, statuses, strict=True):
            if status is Status.OK:
                counts["read"] += 1
                counts["wrong"] += target.content[header:] != right_bytes(block_hash, BLOCK_BYTES)
    rejected = sum(backend.rejected.values()) if isinstance(backend, CheckedBackend) else 0
    return counts["read"], counts["wrong"], rejected


def list_hashes(blocks: int, seed: int = 0) -> list[bytes]:
    """Return hashes for this number of blocks."""
    return [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(blocks)]


# --- the pool --------------------------------------------------------------------------------------------------


class Master:
    """A master that can be killed and started again with the same ports."""

    def __init__(self, trial: Trial, number: int) -> None:
        self.rpc_port, self.metadata_port, self._metrics_port = free_ports(3)
        self._trial, self._number = trial, number
        self._runs = 0

    def start(self) -> None:
        """Start the master; without other masters, it becomes the leader."""
        self._runs += 1
        means, folder = self._trial.means, self._trial.folder
        argv = [
            find_master(),
            *("--rpc_address=127.0.0.1", f"--rpc_port={self.rpc_port}"),
            *("--metrics_host=127.0.0.1", f"--metrics_port={self._metrics_port}"),
            *(flag.format(folder=folder) for flag in means.flags),
        ]
        if means.etcd_masters:
            argv += ["--enable_ha=true", f"--etcd_endpoints=http://127.0.0.1:{self._trial.etcd_port}"]
        else:
            argv += ["--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1"]
            argv += [f"--http_metadata_server_port={self.metadata_port}"]
        environ = {name: value.format(folder=folder) for name, value in means.environ.items()}
        log = folder / f"master_{self._number}_{self._runs}.log"
        self._child: Child = self._trial.stack.enter_context(child(argv, log, environ))

    def kill(self) -> None:
        """Kill the master with SIGKILL."""
        self._child.kill()

    def is_leading(self) -> bool:
        """Return whether the master is the leader and accepts calls."""
        try:
            health = httpx.get(f"http://127.0.0.1:{self._metrics_port}/health", timeout=2, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return False
        return health.get("role") == "leader" and bool(health.get("service_ready"))


class Trial:
    """One pool and one event."""

    def __init__(self, means: Means, event: str, blocks: int, folder: Path, stack: contextlib.ExitStack) -> None:
        self.means, self.event, self.folder, self.stack = means, event, folder, stack
        self.hashes = list_hashes(blocks)
        self.etcd_port = start_etcd(folder, stack) if means.etcd_masters else 0
        self.masters = [Master(self, number) for number in range(max(1, means.etcd_masters))]
        for master in self.masters:
            master.start()
        self.leader = self.wait_for_leader()
        self.line = Line(means.name, event)
        self._owner = self._start_owner()
        is_apart = means.refills and event == "owner restarted"
        self._holder = self._start_instance() if is_apart else self._owner

    def wait_for_leader(self) -> Master:
        """Wait until a master accepts calls, and return it."""
        leaders = wait_until(lambda: [each for each in self.masters if each.is_leading()], "a leader", 60)
        return leaders[0]

    def config(self, **changes: object) -> PoolConfig:
        """Return the configuration for a process that joins this pool."""
        behind_etcd = bool(self.means.etcd_masters)
        port = self.leader.rpc_port
        settings = {
            "master_server_addr": f"etcd://127.0.0.1:{self.etcd_port}" if behind_etcd else f"127.0.0.1:{port}",
            "metadata_server": "P2PHANDSHAKE"
            if behind_etcd
            else f"http://127.0.0.1:{self.leader.metadata_port}/metadata",
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": 0,
            "local_buffer_size": "64MiB",
            **changes,
        }
        return load_config("mooncake", explicit=settings, environ={})

    def run(self) -> Line:
        """Put all blocks, run the event, and read the blocks twice."""
        stored = self._holder.call(Instance.fill, self.hashes, self.means.pause)
        assert stored == len(self.hashes), f"the pool took {stored} of {len(self.hashes)} blocks"
        time.sleep(OFFLOAD_SECONDS if self.means.ssd or self.means.churn else LEASE_SECONDS)
        for round_ in range(self.means.churn):
            self._owner.call(Instance.fill, list_hashes(len(self.hashes), seed=1 + round_), 0.0)
        begun = time.monotonic()
        getattr(self, f"_{self.event.replace(' ', '_')}")()
        for look in (FIRST_LOOK, SECOND_LOOK):
            time.sleep(max(0.0, begun + look - time.monotonic()))
            self._read_all()
        return self.line

    def _master_restarted(self) -> None:
        self.leader.kill()
        self.leader.start()

    def _failover(self) -> None:
        self.leader.kill()

    def _owner_restarted(self) -> None:
        self._owner.kill()
        self._owner = self._start_owner()

    def _start_owner(self) -> Peer:
        means = self.means
        memory: dict[str, object] = {"global_segment_size": "256MiB"}
        if means.ssd:
            (self.folder / "ssd").mkdir(exist_ok=True)
            memory |= {"enable_ssd_offload": True, "ssd_offload_path": str(self.folder / "ssd")}
        return self._start_instance(**memory)

    def _start_instance(self, **memory: object) -> Peer:
        opened = partial(Instance, self.config(**memory), len(self.hashes), self.means.refills, OWNER_ENVIRON)
        return self.stack.enter_context(Peer(cast("Callable[[], StorageBackend]", opened)))

    def _read_all(self) -> None:
        """Read all blocks with and without our checks, and add the results to the line."""
        for checked, shares in ((False, self.line.raw_shares), (True, self.line.shares)):
            with Peer(partial(open_reader, self.config(), checked=checked)) as reader:
                read, wrong, rejected = reader.call(read_blocks, self.hashes)
            shares.append(read / len(self.hashes))
            self.line.rejected += rejected
            if checked:
                self.line.wrong_blocks += wrong
            else:
                self.line.raw_wrong_blocks += wrong


def start_etcd(folder: Path, stack: contextlib.ExitStack) -> int:
    """Start an etcd; return its port."""
    program = shutil.which("etcd") or str(ROOT / ".cache" / "etcd" / "usr" / "bin" / "etcd")
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    argv = [program, "--name=survival", f"--data-dir={folder}/etcd", f"--initial-cluster=survival={peer}"]
    argv += [f"--{kind}-client-urls={client}" for kind in ("listen", "advertise")]
    argv += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    port = int(client.rpartition(":")[2])
    running = stack.enter_context(child(argv, folder / "etcd.log"))
    running.wait_for(lambda: port_answers(port), "answering")
    return port


def main() -> int:
    """Run all trials, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--only", default="", metavar="TEXT", help="only means and events with this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to this file")
    arguments = parser.parse_args()
    lines = []
    for means in MEANS:
        for event in means.events:
            if arguments.only in f"{means.name}, {event}":
                lines.append(run_trial(means, event, arguments.blocks))
                print(describe_line(lines[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    return 1 if any(line.wrong_blocks for line in lines) else 0


def run_trial(means: Means, event: str, blocks: int) -> Line:
    """Run one trial, end all its processes, and return its line of the table."""
    with tempfile.TemporaryDirectory(prefix="survival-") as folder, contextlib.ExitStack() as stack:
        return Trial(means, event, blocks, Path(folder), stack).run()


def describe_line(line: Line) -> str:
    """Return a line of the table as text."""
    shares = " ".join(f"{share:7.1%}" for share in line.shares)
    return (
        f"{line.means:34} {line.event:16} {shares}   rejected by checks {line.rejected}, "
        f"wrong past them {line.wrong_blocks}, wrong without them {line.raw_wrong_blocks}"
    )


if __name__ == "__main__":
    sys.exit(main())
