"""Instances that are made from their arguments, but not started."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.args import EngineArgs, parse_args
from engine.disaggregation import TransferUnavailable
from engine.model.model_runner import ModelRunner
from engine.serving import instance as instance_module
from engine.serving.instance import Instance
from engine.serving.surroundings import find_surroundings
from kvstore_backend.config import values


def instance_of(model: Path, *flags: str) -> Instance:
    args = parse_args(["--model", str(model), "--device", "cpu", "--num-gpu-blocks-override", "64", *flags])
    with socket.socket() as connector:
        return Instance(args, find_surroundings(args), connector)


@pytest.mark.parametrize(("block_size", "times"), [("64", 1), ("128", 0)])
def test_one_warning_recommends_another_block_size_for_retrieval(
    word_model: Path, caplog: pytest.LogCaptureFixture, block_size: str, times: int
) -> None:
    instance_of(word_model, "--enable-retrieval", "--retrieval-dense-boundary", "1K", "--block-size", block_size)
    warnings = [message for message in caplog.messages if "128 is recommended with retrieval" in message]
    assert len(warnings) == times


def test_an_instance_is_ready_after_its_router_has_accepted_its_registration(
    word_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = instance_of(word_model, "--router", "127.0.0.1:9")
    monkeypatch.setattr(type(instance.core), "is_alive", True)
    assert instance.find_obstacle() == (
        "this instance is not registered at the router http://127.0.0.1:9; the instance's log says why"
    )
    instance.note_registration()
    assert instance.find_obstacle() == ""
    monkeypatch.setattr(instance_module, "_FORGOTTEN_SECONDS", -1.0)
    assert "is not registered" in instance.find_obstacle()
    monkeypatch.setattr(type(instance.core), "is_alive", False)
    assert instance.find_obstacle() == "the engine of this instance has failed; the instance's log says why"


@pytest.mark.parametrize(("device", "is_separate"), [("cpu", False), ("cuda", True)])
def test_the_first_step_on_a_gpu_runs_in_a_separate_thread_that_ends(
    word_model: Path, monkeypatch: pytest.MonkeyPatch, device: str, is_separate: bool
) -> None:
    prepared: list[threading.Thread] = []
    prepare = instance_module._prepare_kv

    def record_thread(args: EngineArgs, runner: ModelRunner) -> int:
        prepared.append(threading.current_thread())
        return prepare(args, runner)

    monkeypatch.setattr(instance_module, "_prepare_kv", record_thread)
    monkeypatch.setattr(instance_module, "choose_device", lambda _: device)
    monkeypatch.setattr(instance_module, "ModelRunner", lambda a, b, _, d, e, **more: ModelRunner(a, b, "cpu", d, e))
    instance_of(word_model)
    [thread] = prepared
    assert (thread is not threading.current_thread()) is is_separate
    assert thread.is_alive() is not is_separate


def test_each_process_has_its_own_start_id(word_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (instance_of(word_model) for _ in range(2))
    monkeypatch.setattr(type(first.receiver), "port", 7000)  # the instance does not listen in this test
    payload = [each.registration_payload("127.0.0.1") for each in (first, second)]
    assert payload[0]["start_id"] != payload[1]["start_id"]
    assert payload[0]["max_num_seqs"] == 8


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_hand_overs_use_the_rdma_devices_of_the_environment(
    word_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, role: str
) -> None:
    started: list[tuple[str, str]] = []

    class UnavailableTransfer:
        """Replaces ``Transfer``, which needs an RDMA device."""

        def __init__(self, host: str, protocol: str, devices: str) -> None:
            started.append((protocol, devices))
            raise TransferUnavailable("none here")

    monkeypatch.setattr(instance_module, "Transfer", UnavailableTransfer)
    monkeypatch.setattr(values, "DEVICES_FOLDER", tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setenv("MOONCAKE_RDMA_DEVICES", " mlx5_0,mlx5_1 ")
    instance_of(word_model, "--splitwise-role", role, "--cache-transfer-protocol", "rdma")
    assert started == [("rdma", "mlx5_0,mlx5_1")]


@pytest.mark.parametrize(("role", "incoming_bytes"), [("prefill", 0), ("decode", 3 << 20)])
def test_only_decode_has_memory_for_incoming_hand_overs_on_a_gpu(
    word_model: Path, monkeypatch: pytest.MonkeyPatch, role: str, incoming_bytes: int
) -> None:
    instance = instance_of(word_model, "--splitwise-role", role, "--handover-memory", "3MiB")
    runner: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=SimpleNamespace(nbytes=1 << 20))
    monkeypatch.setattr(instance_module, "Transfer", lambda *_: None)
    monkeypatch.setattr(instance_module, "stage_handovers", lambda _, __, nbytes: nbytes)
    monkeypatch.setattr(instance_module, "BlockMemory", lambda *args: args[3:])
    memory: Any = instance._open_block_memory(runner, "")
    assert memory == (incoming_bytes, incoming_bytes >> 20)


def test_the_registration_has_the_actual_protocol_of_hand_overs(
    word_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(values, "DEVICES_FOLDER", tmp_path)
    instance = instance_of(word_model, "--splitwise-role", "prefill", "--cache-transfer-protocol", "rdma")
    monkeypatch.setattr(type(instance.receiver), "port", 7000)  # the instance does not listen in this test
    assert instance.registration_payload("127.0.0.1")["transfer_protocol"] == ["tcp"]


def test_the_registration_and_the_manifest_change_with_the_weights(
    word_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(word_model, tmp_path / "model"))
    (folder / "version.yaml").write_text("version: RL-STEP1\n")
    instance = instance_of(folder, "--dynamic-load-weight")
    monkeypatch.setattr(type(instance.receiver), "port", 7000)  # the instance does not listen in this test
    assert instance.registration_payload("127.0.0.1")["version"] == "RL-STEP1"
    assert str(instance.describe_blocks()["manifest"]["fields"]["weights_version"]).startswith("RL-STEP1+")

    async def update() -> None:
        instance.core.start()
        await instance.control.pause()
        await instance.control.update_weights("RL-STEP2")

    asyncio.run(update())
    instance.core.stop()
    payload = instance.registration_payload("127.0.0.1")
    assert (payload["version"], payload["is_paused"]) == ("RL-STEP2", True)
    assert str(instance.describe_blocks()["manifest"]["fields"]["weights_version"]).startswith("RL-STEP2+")
    assert instance.find_obstacle() != ""


def test_the_metric_of_the_pool_has_the_namespace_of_the_current_weights(word_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(word_model, tmp_path / "model"))
    instance = instance_of(folder, "--dynamic-load-weight", "--kvcache-storage-backend", "memory")

    def get_namespace() -> str:
        (family,) = [each for each in instance.metrics.registry.collect() if each.name == "kvstore_pool"]
        return family.samples[0].labels["namespace"]

    async def update() -> str:
        instance.core.start()
        await instance.control.pause()
        before = get_namespace()
        await instance.control.update_weights("RL-STEP2")
        return before

    before = asyncio.run(update())
    instance.core.stop()
    assert get_namespace() != before


def test_the_registration_has_the_endpoint_of_kv_events(word_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zmq")
    config = '{"publisher":"zmq","endpoint":"tcp://127.0.0.1:*","bind":true,"topic":"kv"}'
    instance = instance_of(word_model, "--max-model-len", "256", "--block-size", "16", "--kv-events-config", config)
    monkeypatch.setattr(type(instance.receiver), "port", 7000)  # the instance does not listen in this test
    assert instance.kv_events
    instance.kv_events.stop()
    payload = instance.registration_payload("10.0.0.1")["kv_events"]
    assert payload.pop("endpoint").startswith("tcp://127.0.0.1:")
    assert payload == {"topic": "kv", "block_size": 16}
    assert "kv_events" not in instance_of(word_model).registration_payload("10.0.0.1")
