"""Configuration in the dialects of other engines, and as a URL."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvstore_backend.backend import ConfigError
from kvstore_backend.config import (
    FileSettings,
    MemorySettings,
    MooncakeSettings,
    PoolConfig,
    load_config,
    read_config,
)

GIB = 1 << 30

VLLM = {
    "mode": "embedded",
    "metadata_server": "http://10.0.0.1:8080/metadata",
    "master_server_address": "10.0.0.1:50051",
    "global_segment_size": "30GB",
    "local_buffer_size": "1GB",
    "protocol": "tcp",
    "device_name": "mlx5_0,mlx5_1",
    "enable_offload": False,
}
SGLANG = {
    "local_hostname": "node7",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "10.0.0.1:50051",
    "master_metrics_port": 9003,
    "check_server": False,
    "protocol": "tcp",
    "device_name": "",
    "global_segment_size": "4gb",
    "enable_ssd_offload": True,
    "ssd_offload_path": "/data/offload",
}
MINDIE = {
    "local_hostname": "10.0.0.7",
    "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": 30_000_000_000,
    "protocol": "ascend",
    "device_name": "",
    "master_server_address": "10.0.0.1:50088",
    "use_ascend_direct": True,
}


def write_json(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def read(source: object, **environ: str) -> PoolConfig:
    config = read_config(str(source), environ=environ)
    assert config is not None
    return config


def mooncake(source: object, **environ: str) -> MooncakeSettings:
    store = read(source, **environ).store
    assert isinstance(store, MooncakeSettings)
    return store


def test_a_file_of_vllm_is_read(tmp_path: Path) -> None:
    assert mooncake(write_json(tmp_path / "mooncake.json", VLLM)) == MooncakeSettings(
        master_server_addr="10.0.0.1:50051",
        metadata_server="http://10.0.0.1:8080/metadata",
        protocol="tcp",
        rdma_devices="mlx5_0,mlx5_1",
        global_segment_size=30 * GIB,
        local_buffer_size=GIB,
    )


def test_a_file_of_sglang_is_read(tmp_path: Path) -> None:
    settings = mooncake(write_json(tmp_path / "mooncake.json", SGLANG))
    assert settings.local_hostname == "node7"
    assert settings.global_segment_size == 4 * GIB
    assert (settings.enable_ssd_offload, settings.ssd_offload_path) == (True, "/data/offload")


def test_a_mooncake_file_of_mindie_is_read(tmp_path: Path) -> None:
    settings = mooncake(write_json(tmp_path / "mooncake.json", MINDIE))
    assert (settings.protocol, settings.global_segment_size) == ("ascend", 30_000_000_000)
    assert settings.master_server_addr == "10.0.0.1:50088"


MINDIE_POOL = {"backend": "mooncake", "configPath": "mooncake.json", "asyncWrite": True}


@pytest.mark.parametrize(
    "server",
    [
        {"Version": "1.0.0", "BackendConfig": {"kvPoolConfig": MINDIE_POOL}},
        {"Version": "1.0.0", "kvPoolConfig": MINDIE_POOL},
        {"BackendConfig": {"kvPoolConfig": json.dumps(MINDIE_POOL)}},
    ],
    ids=["nested", "flat", "JSON in a string"],
)
def test_the_server_configuration_of_mindie_names_the_mooncake_file(tmp_path: Path, server: dict[str, object]) -> None:
    write_json(tmp_path / "mooncake.json", MINDIE)
    config = read(write_json(tmp_path / "config.json", server))
    assert config.async_write
    assert config.store == mooncake(tmp_path / "mooncake.json")


def test_an_empty_backend_of_mindie_is_no_pool(tmp_path: Path) -> None:
    path = write_json(tmp_path / "config.json", {"kvPoolConfig": {"backend": "", "configPath": ""}})
    assert read_config(path, environ={}) is None
    with pytest.raises(ConfigError, match=r"the configuration turns the pool off .* but mooncake was requested"):
        load_config("mooncake", config_path=path, environ={})


@pytest.mark.parametrize("backend", [{}, {"kvPoolConfig": None}], ids=["absent", "null"])
def test_a_server_configuration_of_mindie_without_kv_pool_config_is_no_pool(
    tmp_path: Path, backend: dict[str, object]
) -> None:
    assert read_config(write_json(tmp_path / "config.json", {"BackendConfig": backend}), environ={}) is None


def test_an_unknown_key_is_reported_in_the_file_that_mindies_configuration_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_json(tmp_path / "mooncake.json", {**MINDIE, "szie": 1})
    read(write_json(tmp_path / "config.json", {"BackendConfig": {"kvPoolConfig": MINDIE_POOL}}))
    assert f'unknown keys in {tmp_path}/mooncake.json, which are not used: "szie"' in caplog.text


def test_the_variable_of_mooncake_may_name_a_file_of_vllm(tmp_path: Path) -> None:
    path = write_json(tmp_path / "mooncake.json", VLLM)
    assert load_config("mooncake", environ={"MOONCAKE_CONFIG_PATH": str(path)}).store == mooncake(path)


def test_writes_are_asynchronous_only_if_that_is_set(tmp_path: Path) -> None:
    assert not read(write_json(tmp_path / "c.json", VLLM)).async_write
    assert read(write_json(tmp_path / "c.json", {**VLLM, "async_write": True})).async_write
    assert read(tmp_path / "c.json", KVSTORE_ASYNC_WRITE="off").async_write
    assert read("memory:", KVSTORE_ASYNC_WRITE="on").async_write


def test_the_size_of_a_gigabyte_depends_on_the_dialect(tmp_path: Path) -> None:
    common = {"protocol": "tcp", "metadata_server": "P2PHANDSHAKE", "global_segment_size": "1GB"}
    fastdeploys = write_json(tmp_path / "f.json", {**common, "master_server_addr": "h:1"})
    mooncakes = write_json(tmp_path / "m.json", {**common, "master_server_address": "h:1"})
    assert mooncake(fastdeploys).global_segment_size == 10**9
    assert mooncake(mooncakes).global_segment_size == GIB


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64m", 64 << 20),
        ("64MB", 64 << 20),
        ("1.5gb", GIB * 3 // 2),
        ("2 GiB", 2 * GIB),
        ("1TB", 1 << 40),
        ("3e7", None),
    ],
)
def test_units_in_files_of_mooncake_are_powers_of_two(tmp_path: Path, text: str, nbytes: int | None) -> None:
    path = write_json(tmp_path / "mooncake.json", {**VLLM, "global_segment_size": text})
    if nbytes is None:
        with pytest.raises(ConfigError, match="a size is a number of bytes"):
            mooncake(path)
    else:
        assert mooncake(path).global_segment_size == nbytes


def test_a_key_for_another_engine_is_ignored_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = write_json(tmp_path / "mooncake.json", MINDIE)
    mooncake(path)
    assert f'The key "use_ascend_direct" in {path} is only for MindIE and is ignored' in caplog.messages


@pytest.mark.parametrize(
    ("url", "store"),
    [
        (
            "mooncake://10.0.0.1:15001?protocol=tcp&metadata_server=P2PHANDSHAKE&global_segment_size=4GiB",
            MooncakeSettings("10.0.0.1:15001", "P2PHANDSHAKE", protocol="tcp", global_segment_size=4 * GIB),
        ),
        (
            "mooncake://h:1/?protocol=tcp&metadata_server=http://h:2/metadata&device_name=mlx5_0",
            MooncakeSettings("h:1", "http://h:2/metadata", protocol="tcp", rdma_devices="mlx5_0"),
        ),
        (
            "etcd://h1:2379;h2:2379?cluster_id=prod&protocol=tcp&metadata_server=P2PHANDSHAKE",
            MooncakeSettings("etcd://h1:2379;h2:2379", "P2PHANDSHAKE", protocol="tcp", cluster_id="prod"),
        ),
        (
            "redis://h:6379?protocol=tcp&metadata_server=redis://h:6379",
            MooncakeSettings("redis://h:6379", "redis://h:6379", protocol="tcp"),
        ),
        (
            "k8s://default/masters?protocol=tcp&metadata_server=P2PHANDSHAKE",
            MooncakeSettings("k8s://default/masters", "P2PHANDSHAKE", protocol="tcp"),
        ),
        ("file:///dev/shm/kvpool?size=4GiB", FileSettings(Path("/dev/shm/kvpool"), 4 * GIB)),
        ("file:///srv/a%20b", FileSettings(Path("/srv/a b"))),
        ("memory:?size=2GiB", MemorySettings(2 * GIB)),
        ("memory:", MemorySettings(GIB)),
    ],
)
def test_a_url_is_read(url: str, store: object) -> None:
    assert read(url).store == store
    assert load_config(url, environ={}).store == store


def test_the_environment_has_the_settings_that_a_url_lacks() -> None:
    settings = mooncake("mooncake://h:1", MOONCAKE_PROTOCOL="tcp", MOONCAKE_MASTER_SERVER_ADDR="other:2")
    assert (settings.protocol, settings.master_server_addr) == ("tcp", "h:1")


@pytest.mark.parametrize(
    ("environ", "master"),
    [
        ({"MOONCAKE_MASTER_SERVER_ADDR": "etcd://h:2379"}, "etcd://h:2379"),
        ({"MOONCAKE_MASTER_SERVER_ADDR": "etcd://h:2379, i:2379"}, "etcd://h:2379;i:2379"),
    ],
)
def test_the_address_of_the_master_may_be_etcd(environ: dict[str, str], master: str) -> None:
    config = read_config(environ={**environ, "MOONCAKE_PROTOCOL": "tcp", "MC_STORE_CLUSTER_ID": "prod"})
    assert config is not None
    assert isinstance(config.store, MooncakeSettings)
    assert config.store.master_server_addr == master
    assert config.store.list_servers(master) == master.removeprefix("etcd://").split(";")
    assert config.store.cluster_id == "prod"


def test_a_fast_tier_is_read_from_a_url_a_file_and_the_environment(tmp_path: Path) -> None:
    config = read("mooncake://h:1?protocol=tcp&fast=memory:?size=1GiB")
    assert config.fast == MemorySettings(GIB)
    assert config.store.backend == "mooncake"
    path = write_json(tmp_path / "c.json", {**VLLM, "fast": "file:///dev/shm/fast?size=2GiB"})
    assert read(path).fast == FileSettings(Path("/dev/shm/fast"), 2 * GIB)
    assert read("memory:", KVSTORE_FAST_TIER="memory:?size=1MiB").fast == MemorySettings(1 << 20)
    assert read("memory:").fast is None


@pytest.mark.parametrize(
    ("environ", "backend"),
    [
        ({"MOONCAKE_MASTER_SERVER_ADDR": "h:1", "MOONCAKE_PROTOCOL": "tcp"}, "mooncake"),
        ({"KVSTORE_FILE_PATH": "/dev/shm/x"}, "file"),
        ({"KVSTORE_MEMORY_SIZE": "1MiB"}, "memory"),
    ],
)
def test_the_environment_selects_the_store_without_a_source(environ: dict[str, str], backend: str) -> None:
    config = read_config(environ=environ)
    assert config is not None
    assert config.backend == backend


def test_our_files_are_recognised_by_their_keys(tmp_path: Path) -> None:
    assert read(write_json(tmp_path / "a.json", {"path": "/dev/shm/x", "size": "1GiB"})).backend == "file"
    assert read(write_json(tmp_path / "b.json", {"size": "1GiB"})).backend == "memory"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("moncake://h:1", "'moncake://h:1' has the unknown scheme 'moncake'; did you mean mooncake?"),
        ("zk://h:1", "'zk://h:1' has the unknown scheme 'zk'; valid: mooncake, etcd, redis, k8s, file, memory"),
        ("mooncake://h", "its address is 'h'; the address must be host:port, such as 127.0.0.1:15001"),
        ("mooncake:?protocol=tcp", "must have the form mooncake://host:port"),
        ("mooncake://h:1/pool", "or mooncake://host:port?SETTINGS"),
        ("mooncake://h:1?protocl=tcp", 'unknown key "protocl" in mooncake://h:1?protocl=tcp; did you mean protocol?'),
        ("mooncake://h:1?protocol=tpc", "is 'tpc'; the protocol must be tcp or rdma, or ascend"),
        ("mooncake://h:1?master_server_address=g:2", "has master_server_addr twice"),
        ("mooncake://h:1?protocol", "is not a URL of a pool"),
        ("file:///pool?size=4GiB&size=8GiB", "is not a URL of a pool: the name 'size' occurs twice"),
        ("file:///pool#1?size=4GiB", "in a path, write %23 for #"),
        ("etcd://h1:2379;h2", "etcd:// must be followed by host:port, or by several host:port separated by ;"),
        ("file://dev/shm/kvpool", "must have an absolute path after three slashes"),
        ("file:dev/shm/kvpool", "must have an absolute path after three slashes"),
        ("memory://x", "must be memory:, or memory:?size=1GiB"),
        ("memory:?size=0", "is '0'; a size must be more than 0 bytes"),
        ("memory:?fast=mooncake://h:1", "the value must be a URL such as memory:?size=1GiB"),
        ("memory:?fast=memory:?sze=1", 'unknown key "sze" in memory:?sze=1; did you mean size?'),
        ("memory:?async_write=perhaps", "is 'perhaps'; the value must be true or false"),
    ],
)
def test_a_wrong_url_gets_one_sentence(source: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(source)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({**VLLM, "master_server_addr": "h:1"}, "are the same setting; remove one"),
        ({**VLLM, "device_name": '{"0": "mlx5_0"}'}, "the devices must be names, separated by commas"),
        ({**VLLM, "global_segment_size": "many GB"}, "\"global_segment_size\" in {} is 'many GB'; a size is"),
        ({**VLLM, "enable_ssd_offload": "maybe"}, "is 'maybe'; the value must be true or false"),
        ({"kvPoolConfig": []}, '"kvPoolConfig" in {} is []; it must be an object with the keys backend, configPath'),
        ({"kvPoolConfig": {"backnd": ""}}, 'unknown key "backnd" in "kvPoolConfig" in {}; did you mean backend?'),
        ({"kvPoolConfig": {"backend": "unifiedcache"}}, 'it must be mooncake, file, memory, or "" for no pool'),
        ({"kvPoolConfig": {"backend": "mooncake"}}, 'has no "configPath"; with "backend"'),
        ({"kvPoolConfig": {"backend": "mooncake", "configPath": "no.json"}}, 'no.json\' (named by "kvPoolConfig" in'),
        ({"kvPoolConfig": {"backend": "memory", "asyncWrite": "often"}}, "asyncWrite of"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path: Path, content: dict[str, Any], sentence: str) -> None:
    path = write_json(tmp_path / "config.json", content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert sentence.replace("{}", str(path)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", '{"backend": "", "configPath": ""}'])
def test_a_string_that_names_no_backend_is_no_pool(tmp_path: Path, text: str) -> None:
    path = write_json(tmp_path / "config.json", {"BackendConfig": {"kvPoolConfig": text}})
    assert read_config(path, environ={}) is None


def test_a_string_that_is_not_json_gets_one_sentence(tmp_path: Path) -> None:
    path = write_json(tmp_path / "config.json", {"BackendConfig": {"kvPoolConfig": "{'backend': 'mooncake'}"}})
    with pytest.raises(ConfigError, match=r"kvPoolConfig. in .* a string that is not valid JSON"):
        read_config(path, environ={})
