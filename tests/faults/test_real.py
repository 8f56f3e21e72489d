"""Faults of real processes: masters, owners of memory and writers are killed, stopped, restarted or full.

The figures of each fault are printed at the end of the run. As in an engine, the memory of calls that exceeded their
deadline is held until its release.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvstore_backend.backend import StorageBackend
from kvstore_backend.config import PoolConfig, load_config
from kvstore_backend.pool import BlockPool
from kvstore_backend.wrappers.guarded import Deadlines
from tests.faults.blocks import NAMESPACE, conversation
from tests.faults.client import BLOCK_BYTES, BLOCKS, Client, Owner, run_request
from tests.faults.mover import Mover
from tests.faults.report import REPORTS, Report
from tests.support.mooncake import MooncakeMaster
from tests.support.mooncake import mooncake_master as running_mooncake_master
from tests.support.processes import Child, child

# Ten times the time of a save with a look-up and a transfer up to their deadlines, because the machine may be busy.
MAX_STALL_SECONDS = 10 * (Deadlines().lookup_seconds + Deadlines().transfer_seconds)
NUMBERS = range(8)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with running_mooncake_master(tmp_path / "master.log", "--default_kv_lease_ttl=500") as running:
        yield running


def record_report(fault: str, report: Report) -> Report:
    """Add the report to the table, and assert the rules for all faults."""
    report.fault = fault
    REPORTS.append(report)
    assert report.tried > 0
    assert (report.wrong_bytes, report.exceptions) == (0, 0)
    assert report.longest_stall_s < MAX_STALL_SECONDS
    return report


@contextlib.contextmanager
def restart_master(master: MooncakeMaster, log: Path) -> Iterator[Child]:
    """Start the killed master again."""
    with child(master.process.argv, log) as process:
        yield process


@contextlib.contextmanager
def reading_client(config: PoolConfig, folder: Path) -> Iterator[Client]:
    """Run a client that repeats requests for the same conversations, after it has found them in the pool."""
    with Client(config, folder) as client:
        client.start(NUMBERS)
        client.wait_for("hits", 20)
        yield client


def test_blocks_of_a_killed_master_are_misses_and_the_restarted_master_is_used(
    master: MooncakeMaster, tmp_path: Path
) -> None:
    with reading_client(master.config(), tmp_path) as client:
        master.kill()
        client.wait_for("tried", 100)
        record_report("master killed", client.stop())
        assert not client.is_ready()
        client.start(NUMBERS)
        with restart_master(master, tmp_path / "restarted.log"):
            client.wait_for("hits", 20)
            record_report("master killed, then restarted; hits return", client.stop())


def test_a_master_that_hangs_and_continues_is_used_again(master: MooncakeMaster, tmp_path: Path) -> None:
    with reading_client(master.config(), tmp_path) as client:
        master.process.signal(signal.SIGSTOP)
        client.wait_for("tried", 200)
        master.process.signal(signal.SIGCONT)
        client.wait_for("tried", 1)
        client.wait_for("hits", 20)
        record_report("master stopped, then continued; hits return", client.stop())


def test_blocks_are_misses_after_the_death_of_their_owner_during_reads(master: MooncakeMaster, tmp_path: Path) -> None:
    with Owner(master.config()) as owner, reading_client(master.config(global_segment_size=0), tmp_path) as client:
        owner.kill()
        client.wait_for("tried", 20)
        record_report("owner of the memory killed during reads", client.stop())


def test_blocks_are_misses_while_their_owner_hangs_during_reads(master: MooncakeMaster, tmp_path: Path) -> None:
    with Owner(master.config()) as owner, reading_client(master.config(global_segment_size=0), tmp_path) as client:
        owner.signal(signal.SIGSTOP)
        client.wait_for("tried", 100)
        owner.signal(signal.SIGCONT)
        client.wait_for("hits", 20)
        record_report("owner of the memory stopped, then continued", client.stop())


def test_a_full_pool_with_leases_of_all_blocks_serves_its_blocks(tmp_path: Path) -> None:
    with (
        running_mooncake_master(tmp_path / "master.log", "--default_kv_lease_ttl=60000") as master,
        Client(master.config(global_segment_size="16MiB"), tmp_path) as client,
    ):
        client.request_each(range(100))  # 50 MiB
        present = client.call(_present, 100)
        assert 0 < len(present) < 100
        client.start([*present[:2], *range(1000, 1020)])
        client.wait_for("tried", 60)
        assert record_report("pool full, everything leased", client.stop()).hits > 0
        assert client.is_ready()


def test_a_writer_that_is_killed_during_a_put_leaves_no_partial_block(master: MooncakeMaster, tmp_path: Path) -> None:
    numbers = range(30)
    with Owner(master.config()), Client(master.config(global_segment_size=0), tmp_path) as reader:
        with Client(master.config(global_segment_size=0), tmp_path) as writer:
            reader.start(numbers)
            reader.wait_for("tried", 1)
            writer.start(numbers)
            writer.wait_for("tried", 2)
            writer.kill()
        reader.wait_for("tried", 60)
        record_report("writer killed in the middle of puts", reader.stop())


def test_a_block_evicted_between_look_up_and_load_is_a_miss(master: MooncakeMaster, tmp_path: Path) -> None:
    with Client(master.config(), tmp_path) as client:
        assert client.request_each([*NUMBERS, *NUMBERS]).hits > 0
        report = record_report("evicted between look-up and load", client.call(_evicted_after_lookup, list(NUMBERS)))
        assert report.hits == 0
        assert client.request_each(NUMBERS).hits == len(NUMBERS) * BLOCKS


def test_a_full_disk_stores_nothing_and_serves_its_blocks(tmp_path: Path) -> None:
    config = load_config("file", explicit={"path": str(tmp_path / "pool"), "size": "64MiB"}, environ={})
    with Client(config, tmp_path) as client:
        client.request_each([0])
        client.call(_fill_the_disk)
        client.start([0, *range(1000, 1010)])
        client.wait_for("tried", 60)
        report = record_report("disk full (file store)", client.stop())
        assert report.hits > 0
        assert client.is_ready()


def test_two_writers_of_one_key_store_one_whole_value(master: MooncakeMaster, tmp_path: Path) -> None:
    config = master.config(global_segment_size=0)
    with Owner(master.config()), contextlib.ExitStack() as clients:
        both = [clients.enter_context(Client(config, tmp_path)) for _ in range(2)]
        for client in both:
            client.start(range(2000, 2040))
        for client in both:
            client.wait_for("tried", 80)
        for client in both:
            report = record_report("two writers of the same keys", client.stop())
            assert report.hits > 0


def _present(backend: StorageBackend, count: int) -> list[int]:
    """Return the numbers of the conversations with all blocks in the pool."""
    pool = BlockPool(backend, NAMESPACE)
    return [number for number in range(count) if pool.lookup(conversation(number, BLOCKS)) == BLOCKS]


def _evicted_after_lookup(backend: StorageBackend, numbers: list[int]) -> Report:
    pool, report = BlockPool(backend, NAMESPACE), Report()
    mover = Mover(pool, BLOCK_BYTES)
    for number in numbers:
        hashes = conversation(number, BLOCKS)
        keys = [NAMESPACE.key(block_hash) for block_hash in hashes]
        run_request(pool, mover, hashes, report, after_lookup=partial(backend.remove, keys, force=True))
        report.tried += 1
    return report


def _fill_the_disk(_: StorageBackend) -> None:
    """Simulate a full disk: as in the kernel, a write ends after half of its bytes, and later writes fail."""

    def pwritev(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(file, buffers[0], 0)

    os.pwritev = pwritev  # type: ignore[assignment]
