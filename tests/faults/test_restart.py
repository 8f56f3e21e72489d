"""A process that starts just after another one was killed can store its first values.

For about 10 s, Mooncake still allocates the memory of a process that crashed, and puts to this memory fail. Each round
kills a process and starts the next one at once, so that this memory grows. With ``RESTART_ROUNDS=20`` in the
environment there are twenty rounds. The counts are printed at the end of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_backend.backend import Status
from tests.end_to_end.cluster import QUESTION, Instance, ask, instance
from tests.faults.client import Owner
from tests.faults.report import STARTS
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.ports import free_ports
from tests.support.processes import Child, child
from tests.support.waiting import port_answers, wait_until

ROUNDS = int(os.environ.get("RESTART_ROUNDS", "2"))
SNAPSHOT_WRITTEN = "successfully persisted state"
ENGINE_ROUNDS = int(os.environ.get("RESTART_ROUNDS", "1"))

pytestmark = pytest.mark.timeout(120 + 60 * ROUNDS)


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    with mooncake_master(tmp_path / "master.log") as running:
        yield running


@pytest.fixture(scope="module")
def model(few_words: Path) -> Path:
    return few_words


@contextlib.contextmanager
def joiner(kind: str, settings: dict[str, object], model: Path, log: Path) -> Iterator[Child]:
    """Run a process until it has joined the pool and stored its first values; fail if it cannot."""
    argv = [sys.executable, "-m", "tests.faults.joiner", kind, json.dumps(settings)]
    with child(argv, log, {"KVSTORE_MODEL": str(model)}) as process:
        process.wait_for(lambda: "started" in process.output, "joining the pool", deadline_s=60)
        yield process


@contextlib.contextmanager
def counted_start(name: str) -> Iterator[None]:
    """Count a start in the table, and whether the block succeeded."""
    started, tried = STARTS.get(name, (0, 0))
    STARTS[name] = (started, tried + 1)
    yield
    STARTS[name] = (started + 1, tried + 1)


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [("pool", "http"), ("pool", "P2PHANDSHAKE"), ("fastdeploy", "http"), ("fastdeploy-newer", "P2PHANDSHAKE")],
)
def test_a_process_starts_just_after_the_crash_of_another_one(
    own_master: MooncakeMaster, model: Path, tmp_path: Path, kind: str, metadata: str
) -> None:
    settings = own_master.settings(**({} if metadata == "http" else {"metadata_server": metadata}))
    with joiner(kind, settings, model, tmp_path / "first.log") as first:
        first.kill()
    for number in range(ROUNDS):
        with counted_start(f"{kind}, {metadata}"), joiner(kind, settings, model, tmp_path / f"{number}.log") as process:
            process.kill()


@pytest.mark.parametrize("metadata", ["http", "P2PHANDSHAKE"])
def test_a_process_without_memory_for_the_pool_starts_if_another_one_has_some(
    own_master: MooncakeMaster, model: Path, tmp_path: Path, metadata: str
) -> None:
    changes = {} if metadata == "http" else {"metadata_server": metadata}
    config, name = own_master.config(**changes), f"fastdeploy, no memory of its own, {metadata}"
    with Owner(config):
        for number in range(ROUNDS):
            with Owner(config) as crashed:
                crashed.kill()
            with (
                counted_start(name),
                joiner(
                    "fastdeploy-without-memory", own_master.settings(**changes), model, tmp_path / f"{number}.log"
                ) as process,
            ):
                process.kill()


def test_an_engine_saves_its_first_blocks_just_after_the_crash_of_another_one(
    own_master: MooncakeMaster, model: Path, tmp_path: Path
) -> None:
    for number in range(ENGINE_ROUNDS):
        with counted_start("engine, http"), instance(tmp_path, model, master=own_master) as running:
            # The kill comes only now, because the start of an engine may take longer than Mooncake's detection.
            with Owner(own_master.config(global_segment_size="256MiB")) as crashed:
                crashed.kill()
            answer = ask(running.url, [{"role": "user", "content": f"{number} {QUESTION}"}], max_tokens=4)
            assert answer["status"] == 200
            assert _count_saves(running) == (3, 0)
            running.process.kill()


def test_a_master_with_snapshots_has_the_values_from_before_its_death(tmp_path: Path) -> None:
    rpc, metadata, metrics = free_ports(3)
    ports = [f"--port={rpc}", f"--metadata-port={metadata}", f"--metrics-port={metrics}"]
    kept = [f"--snapshot-dir={tmp_path / 'snapshots'}", "--snapshot-interval=1", "--lease=200ms"]
    command = [sys.executable, "-m", "kvstore_backend.cli", "master", *ports, *kept]

    @contextlib.contextmanager
    def master(log: str) -> Iterator[MooncakeMaster]:
        with child(command, tmp_path / log) as process:
            process.wait_for(lambda: port_answers(rpc) and port_answers(metadata), "answering")
            yield MooncakeMaster(process, rpc, metadata, metrics)

    with contextlib.ExitStack() as stack:
        with master("first.log") as first:
            owner = stack.enter_context(Owner(first.config()))
            assert owner.put("a", b"stored") is owner.put("b", b"too") is Status.OK
            written = first.process.output.count(SNAPSHOT_WRITTEN)
            first.process.wait_for(
                lambda: first.process.output.count(SNAPSHOT_WRITTEN) > written + 3, "two snapshots", deadline_s=60
            )
            first.kill()
        stack.enter_context(master("second.log"))
        wait_until(lambda: owner.get("a", 6) == b"stored", "what was stored")
        assert owner.get("b", 3) == b"too"
        wait_until(lambda: owner.put("c", b"new") is Status.OK and owner.get("c", 3) == b"new", "new values")


def _count_saves(running: Instance) -> tuple[float, float]:
    """Wait until blocks of a prompt were saved or not; return both numbers."""

    def counts() -> tuple[float, float]:
        return running.metric("kvstore_saved_blocks_total"), running.metric("kvstore_unsaved_blocks_total")

    wait_until(lambda: sum(counts()), "the end of a save")
    return counts()
