from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore_backend.config import (
    MooncakeSettings,
    ascend_buffer_pool,
    choose_rdma_devices,
    engine_variables,
    fastdeploy_plugins,
    library_folders,
    read_config,
    read_model_folder,
    read_protocol,
    select_variables,
    set_native_cluster,
    set_native_defaults,
)


def test_our_defaults_for_the_native_library_do_not_override_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    monkeypatch.setenv("MC_TCP_SLICE_SIZE", "65536")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT", "500")
    monkeypatch.delenv("MC_RPC_TIMEOUT_MS", raising=False)
    set_native_defaults()
    assert os.environ["MC_LOG_LEVEL"] == "INFO"
    assert os.environ["MC_TCP_SLICE_SIZE"] == "65536"
    assert os.environ["MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT"] == "500"
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "2000"


def test_only_variables_that_are_set_are_selected() -> None:
    environ = {"VLLM_B": "2", "VLLM_A": "", "HOME": "/root"}
    assert list(select_variables(["VLLM_C", "VLLM_B", "VLLM_A"], environ).items()) == [("VLLM_A", ""), ("VLLM_B", "2")]


def test_the_native_library_gets_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_STORE_CLUSTER_ID", "another")
    config = read_config("etcd://h:1?cluster_id=prod&protocol=tcp", environ={})
    assert config is not None
    assert isinstance(config.store, MooncakeSettings)
    set_native_cluster(config.store)
    assert os.environ["MC_STORE_CLUSTER_ID"] == "prod"


def test_plugins_are_separated_by_commas() -> None:
    assert fastdeploy_plugins({"FD_PLUGINS": "kvstore, other,"}) == ["kvstore", "other"]
    assert fastdeploy_plugins({}) == []


def test_the_model_is_named_by_a_variable() -> None:
    assert read_model_folder({"KVSTORE_MODEL": "/models/m"}) == "/models/m"
    assert read_model_folder({}) == ""


def test_the_protocol_and_devices_for_direct_transfer_are_read() -> None:
    assert read_protocol({"MOONCAKE_PROTOCOL": " TCP "}) == "tcp"
    assert read_protocol({}) == ""
    environ = {"MOONCAKE_RDMA_DEVICES": "mlx5_1"}
    mooncake = read_config("mooncake://h:1?protocol=tcp&rdma_devices=mlx5_0", environ=environ)
    assert choose_rdma_devices(mooncake, environ) == "mlx5_0"
    assert choose_rdma_devices(read_config("memory:", environ={}), environ) == "mlx5_1"
    assert choose_rdma_devices(None, environ) == "mlx5_1"


def test_the_variables_for_ascend_are_read() -> None:
    environ = {"ASCEND_BUFFER_POOL": " 4:8", "LD_LIBRARY_PATH": "/usr/local/lib::/opt/mooncake"}
    assert ascend_buffer_pool(environ) == "4:8"
    assert library_folders(environ) == [Path("/usr/local/lib"), Path("/opt/mooncake")]
    assert (ascend_buffer_pool({}), library_folders({})) == ("", [])


def test_the_variables_of_an_engine_are_found_by_their_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"FD_DEBUG": "1", "FLAGS_x": "2", "MY_FD_DEBUG": "3"}
    assert engine_variables(("FD_", "FLAGS_"), environ) == {"FD_DEBUG": "1", "FLAGS_x": "2"}
    monkeypatch.setenv("SGLANG_X", "4")
    assert engine_variables(("SGLANG_X",)) == {"SGLANG_X": "4"}
