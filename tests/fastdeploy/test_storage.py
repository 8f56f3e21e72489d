"""FastDeploy's storage in its processes: each call returns the correct bytes or none, before a deadline."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fastdeploy.instance import Instance, start_instances, write_model
from tests.support.mooncake import MooncakeMaster, mooncake_master

if find_spec("fastdeploy") is None:
    pytest.skip("FastDeploy is not installed here; scripts/test-fastdeploy runs these", allow_module_level=True)

CONTENTS = ["first", "second", "third", "fourth"]
_numbers = itertools.count()
# Each instance waits up to 10 s during an outage, and Mooncake's client needs some seconds more.
_PATIENT_SECONDS = 60.0


def has_form(form: str) -> bool:
    """Return whether this tree of FastDeploy has this form of the storage."""
    found = find_spec("fastdeploy")
    assert found is not None
    assert found.origin is not None
    file = "v1/storage/staging_manager.py" if form == "v1" else "transfer_factory/mooncake_store/mooncake_store.py"
    return (Path(found.origin).parent / "cache_manager" / file).exists()


def make_command(model: Path, *more: str) -> list[str]:
    """Return the command line of an API server."""
    words = ["--model", str(model), "--max-model-len", "512", "--max-num-batched-tokens", "512"]
    return [*words, "--kvcache-storage-backend", "mooncake", *more]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / name, name.encode() * 1000) for name in ("one", "two")}


@pytest.fixture(scope="module", params=["2.6", "v1"])
def instances(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Instance]]:
    """Yield two instances with equal settings for KV, and two that each differ in one of these settings."""
    if not has_form(request.param):
        pytest.skip(f"this tree of FastDeploy has no storage of form {request.param}")
    lines = {
        "writer": make_command(models["one"]),
        "reader": make_command(models["one"], "--max-num-seqs", "16", "--gpu-memory-utilization", "0.5"),
        "other model": make_command(models["two"]),
        "other quantization": make_command(models["one"], "--quantization", "wint8"),
    }
    with start_instances(request.param, tmp_path_factory.mktemp("fd"), lines) as started:
        yield started


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with mooncake_master(tmp_path_factory.mktemp("master") / "log", "--default_kv_lease_ttl=200") as master:
        yield master


def variables(master: MooncakeMaster) -> dict[str, str]:
    """Return the environment of FastDeploy for a master's pool."""
    return {
        "MOONCAKE_MASTER_SERVER_ADDR": master.address,
        "MOONCAKE_METADATA_SERVER": master.metadata_server,
        "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(64 << 20),
        "MOONCAKE_LOCAL_BUFFER_SIZE": str(16 << 20),
        "MOONCAKE_PROTOCOL": "tcp",
    }


@pytest.fixture(params=["mooncake", "folder"])
def pool(request: pytest.FixtureRequest, master: MooncakeMaster, tmp_path: Path) -> dict[str, str]:
    """Return the environment of FastDeploy for a pool."""
    environ = variables(master)
    if request.param == "folder":
        environ["MOONCAKE_MASTER_SERVER_ADDR"] = f"file://{tmp_path}/pool?size=64MiB"
    return environ


def new_prompt(blocks: int = 4) -> list[int]:
    """Return tokens that are in no earlier prompt."""
    return [next(_numbers) for _ in range(blocks * 64)]


class TestSharing:
    def test_an_instance_reads_blocks_that_another_with_the_same_settings_stored(
        self, instances: dict[str, Instance], pool: dict[str, str]
    ) -> None:
        writer, reader = instances["writer"], instances["reader"]
        for instance in (writer, reader):
            instance.open(pool)
        names = writer.name(new_prompt())
        digests = writer.write(names, CONTENTS)
        assert len({*digests}) == 4
        assert reader.read(names) == digests

    def test_a_partial_hit_reads_the_leading_blocks(self, instances: dict[str, Instance], pool: dict[str, str]) -> None:
        writer, reader = instances["writer"], instances["reader"]
        for instance in (writer, reader):
            instance.open(pool)
        prompt = new_prompt()
        digests = writer.write(writer.name(prompt)[:2], CONTENTS[:2])
        assert reader.read(reader.name(prompt)) == digests

    @pytest.mark.parametrize("other", ["other model", "other quantization"])
    def test_an_instance_with_other_settings_does_not_read_or_change_the_blocks(
        self, instances: dict[str, Instance], pool: dict[str, str], other: str
    ) -> None:
        writer, different = instances["writer"], instances[other]
        for instance in (writer, different):
            instance.open(pool)
        names = writer.name(new_prompt())
        digests = writer.write(names, CONTENTS)
        assert different.read(names) == []
        own = different.write(names, CONTENTS[::-1])
        assert own != digests
        assert (writer.read(names), different.read(names)) == (digests, own)

    def test_after_an_update_of_the_weights_old_blocks_are_not_read(
        self, instances: dict[str, Instance], models: dict[str, Path], pool: dict[str, str]
    ) -> None:
        writer, reader = instances["writer"], instances["reader"]
        names = writer.name(new_prompt())
        version = models["one"] / "version.yaml"
        try:
            version.write_text("version: RL-STEP1-17-a")
            for instance in (writer, reader):
                instance.open(pool)
            writer.write(names, CONTENTS)
            version.write_text("version: RL-STEP2-18-b")
            writer.call("mover", "update_weights")
            assert writer.read(names) == []
            digests = writer.write(names, CONTENTS[::-1])
            assert len(digests) == 4
            reader.call("mover", "update_weights")
            assert reader.read(names) == digests
        finally:
            version.unlink()


class TestMasterFails:
    @pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hung"])
    def test_no_block_is_read_and_calls_end(
        self, instances: dict[str, Instance], tmp_path: Path, trouble: signal.Signals
    ) -> None:
        """A call that does not end fails at the deadline of the test's socket. FastDeploy itself has no deadline."""
        writer, reader = instances["writer"], instances["reader"]
        with mooncake_master(tmp_path / "log") as doomed:
            for instance in (writer, reader):
                instance.open(variables(doomed))
            names = writer.name(new_prompt())
            digests = writer.write(names, CONTENTS)
            assert reader.read(names) == digests
            doomed.process.signal(trouble)
            assert reader.read(names) == []
            later = writer.name(new_prompt())
            writer.write(later, CONTENTS)  # the result is not checked, because FastDeploy before 2.6 ignores the codes
            assert reader.read(later) == []


@pytest.fixture(scope="module")
def pair(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Instance]]:
    """Start a prefill and a decode instance as FastDeploy's ``run_03b_pd_storage.sh`` does."""
    if not has_form("2.6"):
        pytest.skip("this tree of FastDeploy has no storage of form 2.6")
    common = ["--cache-transfer-protocol", "rdma", "--router", "0.0.0.0:9000"]
    lines = {
        "prefill": make_command(models["one"], "--splitwise-role", "prefill", *common),
        "decode": make_command(models["one"], "--splitwise-role", "decode", *common, "--enable-output-caching"),
    }
    environ = {"FD_PD_TRANSFER_VIA_STORAGE": "1"}
    with start_instances("2.6", tmp_path_factory.mktemp("pd"), lines, environ) as started:
        if not started["prefill"].call("engine", "name_handed_over", [0]):
            pytest.skip("this tree of FastDeploy does not hand blocks over by storage")
        yield started


class TestHandOver:
    def test_decode_reads_all_blocks_of_a_prompt_with_the_partial_one(
        self, pair: dict[str, Instance], pool: dict[str, str]
    ) -> None:
        for instance in pair.values():
            instance.open(pool)
        names = pair["prefill"].call("engine", "name_handed_over", new_prompt()[:-20])
        assert isinstance(names, list)
        assert names[-1].endswith(":partial:44")
        digests = pair["prefill"].write(names, CONTENTS)
        assert pair["decode"].read(names) == digests

    def test_decode_waits_for_a_master_that_hangs_for_a_while(self, pair: dict[str, Instance], tmp_path: Path) -> None:
        """The outage is longer than the deadline of other instances. For a miss, FastDeploy would return status 502."""
        with mooncake_master(tmp_path / "log") as slow:
            for instance in pair.values():
                instance.open(variables(slow))
            names = pair["prefill"].name(new_prompt())
            digests = pair["prefill"].write(names, CONTENTS)
            slow.process.signal(signal.SIGSTOP)
            threading.Timer(5, slow.process.signal, [signal.SIGCONT]).start()
            assert pair["decode"].read(names) == digests

    def test_after_the_master_is_killed_transfers_end_before_a_deadline_without_wrong_bytes(
        self, pair: dict[str, Instance], tmp_path: Path
    ) -> None:
        """Only one call waits for the end of the outage, not each look-up and copy of both instances."""
        prefill, decode = pair["prefill"], pair["decode"]
        contents = [CONTENTS, CONTENTS[::-1]]

        def hand_over(turn: int) -> tuple[list[str], list[str]]:
            names = prefill.name(new_prompt())
            return prefill.write(names, contents[turn % 2]), decode.read(names)

        with mooncake_master(tmp_path / "log") as doomed, ThreadPoolExecutor(1) as thread:
            for instance in pair.values():
                instance.open(variables(doomed))
            whole = [hand_over(turn) for turn in range(2)]
            assert [len(stored) for stored, _ in whole] == [4, 4]
            assert all(stored == read for stored, read in whole)
            interrupted = thread.submit(hand_over, 2)
            doomed.kill()
            turns = [interrupted, *(thread.submit(hand_over, turn) for turn in range(3, 8))]
            until = time.monotonic() + _PATIENT_SECONDS
            try:
                results = [future.result(max(0.0, until - time.monotonic())) for future in turns]
            finally:
                for future in turns:
                    future.cancel()
        for turn, (_, read) in enumerate(results, 2):
            assert read == whole[turn % 2][0][: len(read)]
        assert results[-1] == ([], [])
