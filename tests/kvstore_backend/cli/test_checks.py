"""Checks of devices and settings; files such as those in /sys stand in for RDMA devices."""

from __future__ import annotations

import importlib.util
import resource
from pathlib import Path
from typing import Any

import pytest

from kvstore_backend.cli import checks
from kvstore_backend.cli.report import Finding
from kvstore_backend.config import MooncakeSettings, values


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The state file of the only port of mlx5_0."""
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE\n")
    monkeypatch.setattr(values, "DEVICES_FOLDER", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return state


def check_protocol(protocol: str, rdma_devices: str = "", **settings: Any) -> list[Finding]:
    made = MooncakeSettings("127.0.0.1:1", "P2PHANDSHAKE", protocol=protocol, rdma_devices=rdma_devices, **settings)
    return list(checks.check_protocol(made))


def test_a_device_with_an_active_port_is_accepted(device: Path) -> None:
    assert check_protocol("rdma") == [Finding("ok", "protocol", "rdma over mlx5_0")]
    assert check_protocol("rdma", "mlx5_0")[0].level == "ok"


def test_a_missing_device_is_reported_with_the_existing_ones(device: Path) -> None:
    (finding,) = check_protocol("rdma", "mlx5_0,mlx5_9")
    assert (finding.level, finding.text) == ("fail", "this machine has no RDMA device mlx5_9")
    assert finding.remedy == "rdma_devices must name some of mlx5_0"


def test_a_port_that_is_down_is_reported(device: Path) -> None:
    device.write_text("1: DOWN\n")
    assert check_protocol("rdma")[0].text == "no port of mlx5_0 is active"


def test_memory_that_may_not_be_locked_is_reported(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    (finding,) = check_protocol("rdma")
    assert finding.text == "RDMA must lock 1.125 GiB of memory; this user may lock 64 KiB"
    assert "ulimit -l unlimited" in finding.remedy


def test_tcp_is_a_warning_if_the_machine_has_an_rdma_device(device: Path) -> None:
    (finding,) = check_protocol("tcp")
    assert finding.level == "warn"
    assert "mlx5_0" in finding.text


def test_ascend_is_accepted_with_a_warning() -> None:
    assert check_protocol("ascend")[0].level == "warn"


@pytest.mark.parametrize(
    ("local_hostname", "master", "level"),
    [
        ("", "10.0.0.1:15001", "ok"),
        ("127.0.0.1", "127.0.0.1:15001", "ok"),
        ("127.0.0.1", "etcd://127.0.0.1:2379", "ok"),
        ("localhost", "10.0.0.1:15001", "warn"),
        ("192.0.2.1", "10.0.0.1:15001", "fail"),
        ("x" * 64, "10.0.0.1:15001", "fail"),
    ],
)
def test_the_local_hostname_is_checked(local_hostname: str, master: str, level: str) -> None:
    settings = MooncakeSettings(master, "P2PHANDSHAKE", local_hostname=local_hostname, protocol="tcp")
    assert [finding.level for finding in checks.check_hostname(settings)] == [level]


def check_ssd(path: Path | str, environ: dict[str, str] | None = None, **settings: Any) -> Finding:
    """Return the last finding."""
    made = MooncakeSettings(
        "127.0.0.1:1", "P2PHANDSHAKE", enable_ssd_offload=True, ssd_offload_path=str(path), **settings
    )
    return list(checks.check_ssd(made, environ or {}))[-1]


def test_the_used_and_the_allowed_bytes_of_an_ssd_folder_are_reported(tmp_path: Path) -> None:
    (tmp_path / "1.bucket").write_bytes(bytes(5000))
    limited = {"MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(1 << 20)}
    finding = check_ssd(tmp_path, limited, global_segment_size=1 << 20)
    assert finding.level == "ok"
    assert finding.text.startswith(f"{tmp_path} has 8 KiB, and may have 1 MiB; ")


@pytest.mark.parametrize(("limit", "levels"), [("", ["ok"]), ("1", ["ok"]), ("500", ["warn", "ok"])])
def test_buckets_that_lose_blocks_are_a_warning(tmp_path: Path, limit: str, levels: list[str]) -> None:
    settings = MooncakeSettings("127.0.0.1:1", "P2PHANDSHAKE", enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    environ = {"MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": limit, "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": "1"}
    assert [finding.level for finding in checks.check_ssd(settings, environ)] == levels


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere", "does not exist"),
        ("file", "is not a folder"),
        ("link", "is a symbolic link"),
        ("../there", "is not an absolute path without .."),
    ],
)
def test_a_folder_that_mooncake_would_refuse_fails(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    finding = check_ssd(f"{tmp_path}/{name}")
    assert (finding.level, finding.text) == ("fail", f"{tmp_path}/{name} {reason}, so Mooncake would not start")


def test_a_disk_that_is_smaller_than_the_memory_of_the_client_is_a_warning(tmp_path: Path) -> None:
    finding = check_ssd(tmp_path, global_segment_size=1 << 60)
    assert finding.level == "warn"
    assert "less than the memory of this client" in finding.text


def test_a_disk_that_is_full_before_mooncake_evicts_is_a_warning(tmp_path: Path) -> None:
    finding = check_ssd(tmp_path, {"MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(1 << 60)}, global_segment_size=1)
    assert finding.level == "warn"
    assert "writes will fail before Mooncake begins to evict" in finding.text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"--enable_kv_events", "publishes no KV events, although it accepts --enable_kv_events"),
        (b"--enable_kv_events\0kv_events: zmq_bind failed for ", "can publish KV events (--enable_kv_events)"),
        (b"an older master", "publishes no KV events"),
    ],
)
def test_the_support_of_kv_events_in_a_build_of_mooncake_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, text: str
) -> None:
    program = tmp_path / "mooncake_master"
    program.write_bytes(content)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (finding,) = checks.check_events()
    assert (finding.level, finding.subject) == ("ok", "KV events")
    assert finding.text.startswith(f"the master in this machine's build of Mooncake {text}")


def test_kv_events_are_not_reported_without_a_master_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert list(checks.check_events()) == []
