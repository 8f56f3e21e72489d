from __future__ import annotations

import os

import pytest

from kvstore_backend.config import (
    MooncakeSettings,
    fastdeploy_plugins,
    named_model,
    read_config,
    set_native_cluster,
    set_native_defaults,
)


def test_the_native_librarys_defaults_never_override_what_a_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    monkeypatch.delenv("MC_RPC_TIMEOUT_MS", raising=False)
    set_native_defaults()
    assert os.environ["MC_LOG_LEVEL"] == "INFO"
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "2000"


def test_the_native_library_is_told_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_STORE_CLUSTER_ID", "of somebody before us")
    config = read_config("etcd://h:1?cluster_id=prod&protocol=tcp", environ={})
    assert config is not None
    assert isinstance(config.store, MooncakeSettings)
    set_native_cluster(config.store)
    assert os.environ["MC_STORE_CLUSTER_ID"] == "prod"


def test_plugins_are_separated_by_commas() -> None:
    assert fastdeploy_plugins({"FD_PLUGINS": "kvstore, other,"}) == ["kvstore", "other"]
    assert fastdeploy_plugins({}) == []


def test_the_model_is_named_by_a_variable() -> None:
    assert named_model({"KVSTORE_MODEL": "/models/m"}) == "/models/m"
    assert named_model({}) == ""
