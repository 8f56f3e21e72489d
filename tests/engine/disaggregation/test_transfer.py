"""The choice of TransferEngine's protocol. Other files test transfers, with both sides of a hand-over."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.disaggregation import Transfer, choose_protocol, list_protocols
from kvstore_backend.config import values


@pytest.fixture
def rdma_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in place of /sys/class/infiniband, so these tests do not depend on the machine."""
    monkeypatch.setattr(values, "DEVICES_FOLDER", tmp_path)
    return tmp_path


def test_rdma_is_chosen_if_it_is_listed_and_there_is_a_device(rdma_devices: Path) -> None:
    (rdma_devices / "mlx5_0").mkdir()
    assert choose_protocol(["ipc", "rdma"]) == "rdma"
    assert choose_protocol(["ipc", "tcp"]) == "tcp"


def test_tcp_is_chosen_with_a_warning_if_there_is_no_rdma_device(
    rdma_devices: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_protocol(["ipc", "rdma"]) == "tcp"
    assert caplog.messages == ["--cache-transfer-protocol ipc,rdma: this machine has no RDMA device; using tcp"]


def test_ipc_is_tcp_over_loopback(rdma_devices: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_protocol(["ipc"]) == "tcp"
    assert not caplog.messages


def test_the_pools_protocol_takes_precedence(rdma_devices: Path, caplog: pytest.LogCaptureFixture) -> None:
    (rdma_devices / "mlx5_0").mkdir()
    assert choose_protocol(["rdma"], "tcp") == "tcp"
    assert choose_protocol(["rdma"], "rdma") == "rdma"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("requested", "chosen", "listed"),
    [
        (["rdma"], "tcp", ["tcp"]),
        (["ipc", "rdma"], "tcp", ["ipc", "tcp"]),
        (["rdma", "tcp"], "tcp", ["tcp"]),
        (["ipc", "rdma"], "rdma", ["ipc", "rdma"]),
        (["ipc"], "tcp", ["ipc"]),
    ],
)
def test_the_list_of_protocols_has_no_rdma_without_a_device(
    requested: list[str], chosen: str, listed: list[str]
) -> None:
    assert list_protocols(requested, chosen) == listed


@pytest.mark.parametrize(("protocol", "devices"), [("rdma", "mlx5_0,mlx5_1"), ("tcp", "")])
def test_the_transfer_engine_gets_the_rdma_devices(
    monkeypatch: pytest.MonkeyPatch, protocol: str, devices: str
) -> None:
    started: list[tuple[str, ...]] = []

    class TransferEngine:
        """Replaces Mooncake's class, which refuses rdma without a device."""

        def initialize(self, *arguments: str) -> int:
            started.append(arguments)
            return 0

        def register_memory(self, *_: int) -> int:
            return 0

        def get_rpc_port(self) -> int:
            return 1

    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=TransferEngine))
    Transfer("127.0.0.1", protocol, "mlx5_0,mlx5_1")
    assert started == [("127.0.0.1", "P2PHANDSHAKE", protocol, devices)]
