"""FastDeploy's storage, as its processes use it: correct bytes or none, in bounded time."""

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
# Both instances wait 10 s for an outage; Mooncake's client takes some seconds of its own.
_PATIENT_SECONDS = 60.0


def has_form(form: str) -> bool:
    """Whether this tree has FastDeploy's storage in this form."""
    found = find_spec("fastdeploy")
    assert found is not None
    assert found.origin is not None
    named = "v1/storage/staging_manager.py" if form == "v1" else "transfer_factory/mooncake_store/mooncake_store.py"
    return (Path(found.origin).parent / "cache_manager" / named).exists()


def line(model: Path, *more: str) -> list[str]:
    """The command line of an API server."""
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
    """Two instances that are alike, but for what cannot change KV, and some that differ from them in one thing."""
    if not has_form(request.param):
        pytest.skip(f"this tree of FastDeploy has no storage of form {request.param}")
    lines = {
        "writer": line(models["one"]),
        "reader": line(models["one"], "--max-num-seqs", "16", "--gpu-memory-utilization", "0.5"),
        "other model": line(models["two"]),
        "other quantization": line(models["one"], "--quantization", "wint8"),
    }
    with start_instances(request.param, tmp_path_factory.mktemp("fd"), lines) as started:
        yield started


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with mooncake_master(tmp_path_factory.mktemp("master") / "log", "--default_kv_lease_ttl=200") as master:
        yield master


def variables(master: MooncakeMaster) -> dict[str, str]:
    """The environment that names a master's pool to FastDeploy."""
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
    """The variables that name a pool to FastDeploy."""
    named = variables(master)
    if request.param == "folder":
        named["MOONCAKE_MASTER_SERVER_ADDR"] = f"file://{tmp_path}/pool?size=64MiB"
    return named


def new_prompt(blocks: int = 4) -> list[int]:
    """Tokens that no test has seen."""
    return [next(_numbers) for _ in range(blocks * 64)]


class TestSharing:
    def test_what_one_instance_stores_another_of_the_same_settings_reads(
        self, instances: dict[str, Instance], pool: dict[str, str]
    ) -> None:
        writer, reader = instances["writer"], instances["reader"]
        for instance in (writer, reader):
            instance.open(pool)
        names = writer.name(new_prompt())
        held = writer.write(names, CONTENTS)
        assert len({*held}) == 4
        assert reader.read(names) == held

    def test_of_a_partial_hit_the_leading_blocks_are_read(
        self, instances: dict[str, Instance], pool: dict[str, str]
    ) -> None:
        writer, reader = instances["writer"], instances["reader"]
        for instance in (writer, reader):
            instance.open(pool)
        prompt = new_prompt()
        held = writer.write(writer.name(prompt)[:2], CONTENTS[:2])
        assert reader.read(reader.name(prompt)) == held

    @pytest.mark.parametrize("other", ["other model", "other quantization"])
    def test_an_instance_that_differs_neither_reads_nor_changes_the_blocks(
        self, instances: dict[str, Instance], pool: dict[str, str], other: str
    ) -> None:
        writer, stranger = instances["writer"], instances[other]
        for instance in (writer, stranger):
            instance.open(pool)
        names = writer.name(new_prompt())
        held = writer.write(names, CONTENTS)
        assert stranger.read(names) == []
        own = stranger.write(names, CONTENTS[::-1])
        assert own != held
        assert (writer.read(names), stranger.read(names)) == (held, own)

    def test_after_new_weights_blocks_of_the_old_ones_are_not_read(
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
            held = writer.write(names, CONTENTS[::-1])
            assert len(held) == 4
            reader.call("mover", "update_weights")
            assert reader.read(names) == held
        finally:
            version.unlink()


class TestMasterInTrouble:
    @pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hung"])
    def test_nothing_is_read_and_calls_end(
        self, instances: dict[str, Instance], tmp_path: Path, trouble: signal.Signals
    ) -> None:
        """Each call ends, or the socket's deadline does: FastDeploy itself would wait for ever."""
        writer, reader = instances["writer"], instances["reader"]
        with mooncake_master(tmp_path / "log") as doomed:
            for instance in (writer, reader):
                instance.open(variables(doomed))
            names = writer.name(new_prompt())
            held = writer.write(names, CONTENTS)
            assert reader.read(names) == held
            doomed.process.signal(trouble)
            assert reader.read(names) == []
            later = writer.name(new_prompt())
            writer.write(later, CONTENTS)  # what it returns is FastDeploy's: before 2.6 it did not look at the codes
            assert reader.read(later) == []


@pytest.fixture(scope="module")
def pair(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Instance]]:
    """A prefill and a decode instance, as FastDeploy's ``run_03b_pd_storage.sh`` starts them."""
    if not has_form("2.6"):
        pytest.skip("this tree of FastDeploy has no storage of form 2.6")
    common = ["--cache-transfer-protocol", "rdma", "--router", "0.0.0.0:9000"]
    lines = {
        "prefill": line(models["one"], "--splitwise-role", "prefill", *common),
        "decode": line(models["one"], "--splitwise-role", "decode", *common, "--enable-output-caching"),
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
        held = pair["prefill"].write(names, CONTENTS)
        assert pair["decode"].read(names) == held

    def test_decode_waits_for_a_master_that_hangs_for_a_while(self, pair: dict[str, Instance], tmp_path: Path) -> None:
        """Longer than any other instance would wait for it; FastDeploy would answer 502 for a miss."""
        with mooncake_master(tmp_path / "log") as slow:
            for instance in pair.values():
                instance.open(variables(slow))
            names = pair["prefill"].name(new_prompt())
            held = pair["prefill"].write(names, CONTENTS)
            slow.process.signal(signal.SIGSTOP)
            threading.Timer(5, slow.process.signal, [signal.SIGCONT]).start()
            assert pair["decode"].read(names) == held

    def test_with_the_master_killed_in_the_middle_hand_overs_end_in_time_and_without_wrong_bytes(
        self, pair: dict[str, Instance], tmp_path: Path
    ) -> None:
        """The outage is waited for once, not by each look-up and copy of both instances."""
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
                told = [each.result(max(0.0, until - time.monotonic())) for each in turns]
            finally:
                for each in turns:
                    each.cancel()
        for turn, (_, read) in enumerate(told, 2):
            assert read == whole[turn % 2][0][: len(read)]
        assert told[-1] == ([], [])
