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
    describe_override,
    load_config,
    names_protocol,
    read_config,
)

GIB = 1 << 30
MASTER = {"MOONCAKE_MASTER_SERVER_ADDR": "10.0.0.1:15001", "MOONCAKE_METADATA_SERVER": "P2PHANDSHAKE"}


def mooncake(environ: dict[str, str], **kwargs: Any) -> MooncakeSettings:
    settings = load_config("mooncake", environ=environ, **kwargs).store
    assert isinstance(settings, MooncakeSettings)
    return settings


def write_json(folder: Path, content: object) -> Path:
    path = folder / "mooncake_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_all_variables_of_fastdeploy_are_read() -> None:
    environ = {
        "MOONCAKE_MASTER_SERVER_ADDR": "master.example:15001",
        "MOONCAKE_METADATA_SERVER": "http://master.example:15002/metadata",
        "MOONCAKE_LOCAL_HOSTNAME": "node7",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1000000000",
        "MOONCAKE_LOCAL_BUFFER_SIZE": "134217728",
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_RDMA_DEVICES": "mlx5_0,mlx5_1",
    }
    assert mooncake(environ) == MooncakeSettings(
        master_server_addr="master.example:15001",
        metadata_server="http://master.example:15002/metadata",
        local_hostname="node7",
        protocol="tcp",
        rdma_devices="mlx5_0,mlx5_1",
        global_segment_size=1_000_000_000,
        local_buffer_size=134_217_728,
    )


def test_all_keys_in_a_file_of_fastdeploy_are_read(tmp_path: Path) -> None:
    values = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 1_000_000_000,
        "local_buffer_size": "128MiB",
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": "0.0.0.0:15001",
    }
    path = write_json(tmp_path, values)
    expected = MooncakeSettings(**{**values, "local_buffer_size": 128 << 20})  # type: ignore[arg-type]
    assert mooncake({"MOONCAKE_CONFIG_PATH": str(path)}) == mooncake({}, config_path=path) == expected


def test_settings_that_are_not_given_have_the_defaults_of_fastdeploy() -> None:
    settings = mooncake(MASTER)
    assert settings.global_segment_size == GIB
    assert settings.local_buffer_size == GIB // 8
    assert settings.local_hostname == settings.rdma_devices == ""


def test_the_order_is_explicit_then_file_then_environment_then_default(tmp_path: Path) -> None:
    environ = {
        "MOONCAKE_CONFIG_PATH": str(write_json(tmp_path, {"global_segment_size": 64 << 20, "local_hostname": "file"})),
        "MOONCAKE_MASTER_SERVER_ADDR": "environment:1",
        "MOONCAKE_LOCAL_HOSTNAME": "environment",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "32MiB",
    }
    settings = mooncake(environ, explicit={"global_segment_size": 16 << 20})
    assert settings.global_segment_size == 16 << 20
    assert settings.local_hostname == "file"
    assert settings.master_server_addr == "environment:1"
    assert settings.local_buffer_size == 128 << 20


def test_a_config_path_overrides_the_one_in_the_environment(tmp_path: Path) -> None:
    path = write_json(tmp_path, {"local_hostname": "file"})
    assert mooncake({**MASTER, "MOONCAKE_CONFIG_PATH": "/nowhere"}, config_path=path).local_hostname == "file"


def test_none_and_an_empty_variable_count_as_not_given() -> None:
    settings = mooncake({**MASTER, "MOONCAKE_GLOBAL_SEGMENT_SIZE": ""}, explicit={"local_buffer_size": None})
    assert (settings.global_segment_size, settings.local_buffer_size) == (GIB, GIB // 8)


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_MEMORY_SIZE", "3MiB")
    assert load_config("memory").store == MemorySettings(size=3 << 20)


def test_the_default_protocol_without_an_rdma_device_is_tcp(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert mooncake(MASTER).protocol == "tcp"
    assert caplog.messages == ["protocol is not given: using tcp because this machine has no RDMA device"]


def test_the_default_protocol_with_an_rdma_device_is_rdma(rdma_devices: Path, caplog: pytest.LogCaptureFixture) -> None:
    (rdma_devices / "mlx5_0").mkdir(parents=True)
    caplog.set_level(logging.INFO)
    assert mooncake(MASTER).protocol == "rdma"
    assert caplog.messages == ["protocol is not given: using rdma because this machine has an RDMA device"]


def test_the_default_metadata_server_is_p2phandshake_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    environ = {"MOONCAKE_MASTER_SERVER_ADDR": "10.0.0.1:15001", "MOONCAKE_PROTOCOL": "tcp"}
    assert mooncake(environ).metadata_server == "P2PHANDSHAKE"
    assert caplog.messages == [
        "metadata_server is not given: using P2PHANDSHAKE; every other client of the pool must use it too"
    ]


def test_a_protocol_that_is_given_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert mooncake({**MASTER, "MOONCAKE_PROTOCOL": "TCP"}).protocol == "tcp"
    assert not caplog.messages


def test_rdma_is_accepted_with_a_device(rdma_devices: Path) -> None:
    (rdma_devices / "mlx5_0").mkdir(parents=True)
    assert mooncake({**MASTER, "MOONCAKE_PROTOCOL": "rdma"}).protocol == "rdma"


def test_variables_of_mooncake_and_of_other_programs_are_ignored() -> None:
    others = ["MOONCAKE_MASTER", "MOONCAKE_TE_META_DATA_SERVER", "MOONCAKE_DEVICE", "MOONCAKE_STORE_CHECKSUM"]
    assert mooncake({**MASTER, **dict.fromkeys(others, "x")}) == mooncake(MASTER)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (
            {},
            "master_server_addr is not given: set MOONCAKE_MASTER_SERVER_ADDR, "
            'or "master_server_addr" in the file that MOONCAKE_CONFIG_PATH names',
        ),
        (
            {"MOONCAKE_MASTER_SERVER_ADDRESS": "h:1"},
            "environment variable MOONCAKE_MASTER_SERVER_ADDRESS is not known; "
            "did you mean MOONCAKE_MASTER_SERVER_ADDR?",
        ),
        (
            {**MASTER, "MOONCAKE_PROTOCL": "tcp"},
            "environment variable MOONCAKE_PROTOCL is not known; did you mean MOONCAKE_PROTOCOL?",
        ),
        (
            {"MOONCAKE_MASTER_SERVER_ADDR": "10.0.0.1"},
            "MOONCAKE_MASTER_SERVER_ADDR is '10.0.0.1'; the address must be host:port, such as 127.0.0.1:15001",
        ),
        (
            {**MASTER, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "lots"},
            'MOONCAKE_GLOBAL_SEGMENT_SIZE is \'lots\'; a size is a number of bytes, or text such as "4GiB" or "512MB"',
        ),
        (
            {**MASTER, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1MiB"},
            "MOONCAKE_GLOBAL_SEGMENT_SIZE is '1MiB'; "
            "Mooncake needs at least 16MiB, or 0 to contribute no memory to the pool",
        ),
        (
            {**MASTER, "MOONCAKE_METADATA_SERVER": "127.0.0.1:15002"},
            "MOONCAKE_METADATA_SERVER is '127.0.0.1:15002'; "
            "the metadata server must be P2PHANDSHAKE, or a URL such as http://127.0.0.1:15002/metadata, "
            "etcd://host:port;host:port or redis://host:port",
        ),
        (
            {**MASTER, "MOONCAKE_PROTOCOL": "tpc"},
            "MOONCAKE_PROTOCOL is 'tpc'; the protocol must be tcp or rdma, or ascend with a build of Mooncake for "
            "Ascend",
        ),
        (
            {**MASTER, "MOONCAKE_PROTOCOL": "rdma"},
            "MOONCAKE_PROTOCOL is 'rdma'; this machine has no RDMA device; set tcp, or leave the protocol out",
        ),
        (
            {"MOONCAKE_CONFIG_PATH": "/nowhere/c.json"},
            "configuration file '/nowhere/c.json' (named by MOONCAKE_CONFIG_PATH) does not exist",
        ),
        (
            {"MOONCAKE_CONFIG_PATH": "/tmp"},
            "configuration file '/tmp' (named by MOONCAKE_CONFIG_PATH) cannot be read: Is a directory",
        ),
    ],
)
def test_a_wrong_environment_gets_one_sentence(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mooncake(environ)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"master_server_addr": 15001}, '"master_server_addr" in {} is 15001; the address must be host:port, such as'),
        ({"master_server_addr": "http://h:1"}, "the address must be host:port"),
        ({"master_server_addr": "h:70000"}, "the address must be host:port"),
        ({"master_server_addr": "::1:15001"}, "the address must be host:port"),
        ({"local_hostname": None}, '"local_hostname" in {} is None; the value must be text'),
        ({"rdma_devices": ["mlx5_0"]}, "\"rdma_devices\" in {} is ['mlx5_0']; the value must be text"),
        ({"global_segment_size": True}, '"global_segment_size" in {} is True; a size is a number of bytes'),
        ({"global_segment_size": -1}, '"global_segment_size" in {} is -1; a size is a number of bytes'),
        ({"local_buffer_size": 1.5e9}, '"local_buffer_size" in {} is 1500000000.0; a size is a number of bytes'),
        ({"local_buffer_size": "4G"}, "\"local_buffer_size\" in {} is '4G'; a size is a number of bytes"),
        ({"metadata_server": "p2phandshake"}, "the metadata server must be P2PHANDSHAKE, or a URL"),
        ({"metadata_server": "http://h:port/metadata"}, "the metadata server must be P2PHANDSHAKE, or a URL"),
        ({"protocol": "rdma"}, "\"protocol\" in {} is 'rdma'; this machine has no RDMA device"),
        ({"protocol": "rdma"}, "set tcp, or leave the protocol out"),
        ("{", "configuration file '{}' is not JSON: "),
        (
            '{"protocol": "tcp", "protocol": "rdma"}',
            "configuration file '{}' cannot be used: the name 'protocol' occurs twice",
        ),
        ('{"protocol": ' + "[" * 100_000, "configuration file '{}' is nested too deep"),
        ("\xff", "configuration file '{}' is not JSON: "),
        ("[]", "configuration file '{}' must contain one JSON object"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path: Path, content: object, sentence: str) -> None:
    path = write_json(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        mooncake(MASTER, config_path=path)
    assert sentence.replace("{}", str(path)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_warning_names_the_unknown_keys_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = {"comment": "of FastDeploy's users", "protocl": "rdma", "device_nam": "mlx5_0", "protocol": "tcp"}
    path = write_json(tmp_path, content)
    for _ in range(2):
        assert mooncake(MASTER, config_path=path).rdma_devices == ""
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        f'unknown keys in {path}, which are not used: "comment", "protocl" (did you mean protocol?), '
        '"device_nam" (did you mean device_name?)'
    ]


def test_a_misspelt_required_key_is_still_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="master_server_addr is not given"):
        mooncake({}, config_path=write_json(tmp_path, {"master_server_adr": "h:1", "protocol": "tcp"}))
    assert '"master_server_adr" (did you mean master_server_addr?)' in caplog.text


def test_a_variable_of_fastdeploy_may_name_the_folder(tmp_path: Path) -> None:
    environ = {"FILE_BACKEND_STORAGE_DIR": "/tmp/fastdeploy"}
    assert load_config("file", environ=environ).store == FileSettings(Path("/tmp/fastdeploy"))
    ours = {**environ, "KVSTORE_FILE_PATH": "/dev/shm/kvpool"}
    assert load_config("file", environ=ours).store == FileSettings(Path("/dev/shm/kvpool"))
    a_file = tmp_path / "file"
    a_file.touch()
    with pytest.raises(ConfigError, match=r"^FILE_BACKEND_STORAGE_DIR is .* it is a file"):
        load_config("file", environ={"FILE_BACKEND_STORAGE_DIR": str(a_file)})


def test_the_address_of_the_master_may_be_a_folder(tmp_path: Path) -> None:
    folder = FileSettings(Path("/dev/shm/kvpool"), 4 << 30)
    named = {"master_server_addr": "file:///dev/shm/kvpool?size=4GiB", "protocol": "rdma", "async_write": True}
    path = write_json(tmp_path, named)
    assert load_config("mooncake", config_path=path, environ={}) == PoolConfig(folder, async_write=True)
    assert read_config(environ={"MOONCAKE_CONFIG_PATH": str(path)}) == PoolConfig(folder, async_write=True)
    environ = {"MOONCAKE_MASTER_SERVER_ADDR": "file:///dev/shm/kvpool?size=4GiB", "MOONCAKE_PROTOCOL": "rdma"}
    assert read_config(environ=environ) == PoolConfig(folder)
    with pytest.raises(ConfigError, match="must have an absolute path after three slashes"):
        read_config(environ={"MOONCAKE_MASTER_SERVER_ADDR": "file:kvpool"})


def test_the_error_names_a_wrong_explicit_value() -> None:
    with pytest.raises(ConfigError, match=r"^global_segment_size is 'x'; a size is"):
        mooncake(MASTER, explicit={"global_segment_size": "x"})
    with pytest.raises(ConfigError, match=r'^unknown key "siz"; did you mean size\?$'):
        load_config("memory", explicit={"siz": 1}, environ={})


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("moncake", "storage backend 'moncake' is not known; did you mean mooncake?"),
        ("", "storage backend '' is not known; valid: mooncake, file, memory"),
    ],
)
def test_the_error_for_an_unknown_backend_suggests_a_name(backend: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(backend, environ={})
    assert str(caught.value) == sentence


def test_file_takes_its_folder_and_size_from_the_environment_or_a_file(tmp_path: Path) -> None:
    environ = {"KVSTORE_FILE_PATH": str(tmp_path), "KVSTORE_FILE_SIZE": "2GiB"}
    assert load_config("file", environ=environ).store == FileSettings(path=tmp_path, size=2 * GIB)
    path = write_json(tmp_path, {"path": "/data/blocks", "size": 5_000_000})
    assert load_config("file", config_path=path, environ=environ).store == FileSettings(
        path=Path("/data/blocks"), size=5_000_000
    )


def test_file_reads_the_file_that_the_environment_names_if_it_describes_a_folder(tmp_path: Path) -> None:
    environ = {"MOONCAKE_CONFIG_PATH": str(write_json(tmp_path, {"path": "/data/blocks", "async_write": True}))}
    config = load_config("file", environ=environ)
    assert config == PoolConfig(FileSettings(Path("/data/blocks")), async_write=True) == read_config(environ=environ)


def test_file_does_not_read_mooncakes_file(tmp_path: Path) -> None:
    environ = {"MOONCAKE_CONFIG_PATH": str(write_json(tmp_path, {"master_server_addr": "h:1"}))}
    assert load_config("file", environ=environ) == load_config("file", environ={})


@pytest.mark.parametrize("name", ["KVSTORE_SERVICE_HOST", "KVSTORE_PORT", "KVSTORE_PORT_8000_TCP_ADDR"])
def test_variables_of_a_kubernetes_service_named_kvstore_are_ignored(name: str) -> None:
    assert load_config("file", environ={name: "10.0.0.1"}) == load_config("file", environ={})


@pytest.mark.parametrize(
    ("backend", "environ", "sentence"),
    [
        ("file", {"KVSTORE_FILE_SIZE": "0"}, "KVSTORE_FILE_SIZE is '0'; a size must be more than 0 bytes"),
        ("file", {"KVSTORE_FILE_SIZ": "1GB"}, "KVSTORE_FILE_SIZ is not known; did you mean KVSTORE_FILE_SIZE?"),
        ("file", {"KVSTORE_SIZE": "1GB"}, "KVSTORE_SIZE is not known; did you mean KVSTORE_FILE_SIZE?"),
        ("file", {"KVSTORE_PATH": "/ssd"}, "KVSTORE_PATH is not known; did you mean KVSTORE_FILE_PATH?"),
        ("file", {"KVSTORE_FILE_PATH": "~nosuchuser/x"}, "the value must be the path of a folder: "),
        (
            "file",
            {"KVSTORE_FILE_PATH": "/tmp/" + "x" * 300},
            "the value must be the path of a folder: File name too long",
        ),
        ("file", {"KVSTORE_FILE_PATH": "/tmp/a\0b"}, "the value must be the path of a folder: embedded null byte"),
        ("file", {"KVSTORE_FILE_PATH": __file__}, "the value must be the path of a folder, but it is a file"),
        ("file", {"KVSTORE_FILE_PATH": " "}, "KVSTORE_FILE_PATH is ' '; the value must be the path of a folder"),
        ("memory", {"KVSTORE_MEMORY_SIZE": "much"}, "KVSTORE_MEMORY_SIZE is 'much'; a size is"),
    ],
)
def test_a_wrong_variable_of_file_and_memory_gets_one_sentence(
    backend: str, environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(backend, environ=environ)
    assert sentence in str(caught.value)


RDMA_FILE = {
    "master_server_addr": "10.0.0.1:15001",
    "metadata_server": "http://10.0.0.1:15002/metadata",
    "protocol": "rdma",
}


def test_the_variable_of_the_protocol_overrides_the_file_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_json(tmp_path, {**RDMA_FILE, "rdma_devices": ""})
    environ = {"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_PROTOCOL": "tcp"}
    assert mooncake(environ).protocol == mooncake(environ).protocol == "tcp"
    assert caplog.messages == [f'MOONCAKE_PROTOCOL=tcp overrides "protocol" in {path}, which is rdma']


def test_the_variable_of_the_protocol_overrides_a_file_that_the_caller_names(tmp_path: Path) -> None:
    config = read_config(write_json(tmp_path, RDMA_FILE), environ={"MOONCAKE_PROTOCOL": "tcp"})
    assert config is not None
    assert isinstance(config.store, MooncakeSettings)
    assert config.store.protocol == "tcp"


def test_no_other_variable_overrides_the_file(tmp_path: Path) -> None:
    values = {"protocol": "tcp", "rdma_devices": "mlx5_0", "local_hostname": "file", "global_segment_size": 32 << 20}
    path = write_json(tmp_path, {**RDMA_FILE, **values})
    environ = {
        "MOONCAKE_CONFIG_PATH": str(path),
        "MOONCAKE_RDMA_DEVICES": "mlx5_9",
        "MOONCAKE_LOCAL_HOSTNAME": "environment",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64MiB",
        "MOONCAKE_MASTER_SERVER_ADDR": "h:1",
    }
    assert mooncake(environ) == mooncake({"MOONCAKE_CONFIG_PATH": str(path)})


def test_the_variable_of_the_protocol_does_not_override_a_url_or_an_explicit_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {**MASTER, "MOONCAKE_PROTOCOL": "ascend"}
    assert mooncake(environ, explicit={"protocol": "tcp"}).protocol == "tcp"
    config = read_config("mooncake://h:1?protocol=tcp&metadata_server=P2PHANDSHAKE", environ=environ)
    assert config is not None
    assert isinstance(config.store, MooncakeSettings)
    assert config.store.protocol == "tcp"
    assert not caplog.messages


def test_the_error_for_missing_rdma_names_the_file_and_the_variable(tmp_path: Path) -> None:
    path = write_json(tmp_path, RDMA_FILE)
    with pytest.raises(ConfigError) as caught:
        mooncake({"MOONCAKE_CONFIG_PATH": str(path)})
    assert str(caught.value) == (
        f"\"protocol\" in {path} is 'rdma'; this machine has no RDMA device; set tcp, or leave the protocol out, "
        "or set MOONCAKE_PROTOCOL=tcp, which overrides the file"
    )


def test_an_override_by_the_variable_is_described(tmp_path: Path) -> None:
    path = write_json(tmp_path, RDMA_FILE)
    environ = {"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_PROTOCOL": "TCP"}
    sentence = f'MOONCAKE_PROTOCOL=tcp overrides "protocol" in {path}, which is rdma'
    assert describe_override(environ=environ) == describe_override(path, environ=environ) == sentence
    assert describe_override(path, environ={}) == describe_override("mooncake://h:1", environ=environ) == ""
    assert describe_override(path, environ={"MOONCAKE_PROTOCOL": "rdma"}) == describe_override(environ={}) == ""


def test_the_environment_names_a_protocol_by_its_variable_or_in_the_file(tmp_path: Path) -> None:
    path = str(write_json(tmp_path, RDMA_FILE))
    assert names_protocol({"MOONCAKE_PROTOCOL": "tcp"})
    assert names_protocol({"MOONCAKE_CONFIG_PATH": path})
    assert not names_protocol({})
