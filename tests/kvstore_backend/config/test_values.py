from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore_backend import ConfigError
from kvstore_backend.config import FileSettings, load_config, parse_size, values
from kvstore_backend.config.values import parse_master_address, parse_metadata_server

GIB = 1 << 30


def test_addresses_may_be_names_ipv4_and_bracketed_ipv6() -> None:
    for address in ("localhost:1", "10.0.0.1:65535", "[::1]:15001", "node-7.cluster.local:15001"):
        assert parse_master_address(address) == address


@pytest.mark.parametrize("parse", [parse_master_address, parse_metadata_server])
@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("etcd://127.0.0.1:12379;127.0.0.1:22379;127.0.0.1:32379",) * 2,  # FastDeploy's ha_mooncake_config.json
        ("etcd://http://h:2379", "etcd://h:2379"),
        ("etcd://http://h:2379/, http://i:2379", "etcd://h:2379;i:2379"),
        ("redis://127.0.0.1:6399",) * 2,  # its ha_redis_mooncake_config.json
        ("redis://h:6379/", "redis://h:6379"),
    ],
)
def test_addresses_of_several_masters_get_the_form_of_mooncake(
    parse: Callable[[object], str], url: str, parsed: str
) -> None:
    assert parse(url) == parsed


def test_masters_may_be_elected_in_kubernetes() -> None:
    for url in ("k8s://default/mooncake-master", "k8s://mooncake-master"):
        assert parse_master_address(url) == url


@pytest.mark.parametrize(
    ("parse", "url", "sentence"),
    [
        (
            parse_master_address,
            "zookeeper://h:1",
            "or for several masters etcd://host:port;host:port, redis://host:port",
        ),
        (
            parse_master_address,
            "etcd://h1:1;h2",
            "etcd:// must be followed by host:port, or by several host:port separated by ;",
        ),
        (parse_master_address, "etcd://https://h:1", "etcd:// must be followed by host:port"),
        (parse_master_address, "redis://h:1;i:1", "redis:// must be followed by host:port"),
        (parse_master_address, "redis://:secret@h:1", "set the password in MC_REDIS_PASSWORD"),
        (parse_master_address, "redis://secret@h:1", "set the password in MC_REDIS_PASSWORD"),
        (parse_metadata_server, "redis://secret@h:1", "set the password in MC_REDIS_PASSWORD"),
        (parse_master_address, "user@h:1", "the address must be host:port"),
        (parse_master_address, "k8s://a/b/c", "k8s:// must be followed by namespace/lease"),
        (parse_metadata_server, "etcd://h1", "etcd:// must be followed by host:port"),
        (parse_metadata_server, "k8s://default/lease", "the metadata server must be P2PHANDSHAKE, or a URL"),
        (parse_metadata_server, "zookeeper://h:1", "the metadata server must be P2PHANDSHAKE, or a URL"),
    ],
)
def test_a_wrong_address_gets_one_sentence(parse: Callable[[object], str], url: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse(url)


@pytest.mark.parametrize(
    ("url", "environ"),
    [
        ("redis://hidden@h:1?protocol=tcp", {}),
        ("redis://:hidden@h:1?protocl=tcp", {}),
        ("mooncake://u:hidden@h:1", {}),
        ("mooncake", {"MOONCAKE_MASTER_SERVER_ADDR": "redis://hidden@h:1"}),
        ("mooncake://h:1?metadata_server=redis://hidden@h:1", {}),
    ],
)
def test_a_password_in_an_address_is_not_repeated(url: str, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(url, environ=environ)
    assert "hidden" not in str(caught.value)


def test_the_default_folder_of_a_user_is_in_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(values, "SHARED_MEMORY", tmp_path)
    assert load_config("file", environ={}).store == FileSettings(path=tmp_path / f"kvstore-{os.getuid()}")


def test_the_default_folder_without_shared_memory_is_a_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(values, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert load_config("file", environ={}).store == FileSettings(path=tmp_path / f"kvstore-{os.getuid()}")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1073741824", GIB),
        ("7B", 7),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512 MB", 512_000_000),
        ("1GB", 10**9),
        ("4GiB", 4 * GIB),
        ("4gib", 4 * GIB),
        (" 1.5GiB ", GIB * 3 // 2),
        ("1.1GB", 1_100_000_000),
        ("2TiB", 2048 * GIB),
    ],
)
def test_a_size_is_parsed_with_its_unit(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "4G", "1e9", "-1", "4 Gi B", "½GB", "1,5GB", "0x10", None, 1.0, True, -1])
def test_a_value_that_is_not_a_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="a size is a number of bytes"):
        parse_size(text)


@given(st.integers(0, 2**63), st.sampled_from(["", "B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
@example(2**63 - 1, "TiB")
def test_integer_sizes_are_exact(number: int, unit: str) -> None:
    powers = {"K": 1, "M": 2, "G": 3, "T": 4}
    factor = (1024 if "i" in unit else 1000) ** powers.get(unit[:1], 0)
    assert parse_size(f"{number}{unit}") == number * factor
