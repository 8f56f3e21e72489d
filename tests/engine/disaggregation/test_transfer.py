"""The choice of TransferEngine's protocol; its transfers are tested with both sides of a hand-over."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.disaggregation import Transfer, choose_protocol, list_protocols
from kvstore_backend.config import values


@pytest.fixture
def rdma_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands in for /sys/class/infiniband, so that these tests say the same on every machine; empty at first."""
    monkeypatch.setattr(values, "DEVICES_FOLDER", tmp_path)
    return tmp_path


def test_rdma_is_chosen_where_it_is_wanted_and_there(rdma_devices: Path) -> None:
    (rdma_devices / "mlx5_0").mkdir()
    assert choose_protocol(["ipc", "rdma"]) == "rdma"
    assert choose_protocol(["ipc", "tcp"]) == "tcp"


def test_tcp_is_chosen_where_there_is_no_device_and_that_is_said(
    rdma_devices: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_protocol(["ipc", "rdma"]) == "tcp"
    assert caplog.messages == ["--cache-transfer-protocol ipc,rdma: this machine has no RDMA device; using tcp"]


def test_shared_memory_of_one_machine_is_tcp_over_loopback(
    rdma_devices: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_protocol(["ipc"]) == "tcp"
    assert not caplog.messages


def test_the_variable_that_says_tcp_settles_it_for_the_hand_over_too(
    rdma_devices: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (rdma_devices / "mlx5_0").mkdir()
    assert choose_protocol(["rdma"], "tcp") == "tcp"
    assert choose_protocol(["rdma"], "rdma") == "rdma"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("wanted", "chosen", "listed"),
    [
        (["rdma"], "tcp", ["tcp"]),
        (["ipc", "rdma"], "tcp", ["ipc", "tcp"]),
        (["rdma", "tcp"], "tcp", ["tcp"]),
        (["ipc", "rdma"], "rdma", ["ipc", "rdma"]),
        (["ipc"], "tcp", ["ipc"]),
    ],
)
def test_no_rdma_is_told_of_that_this_machine_has_not(wanted: list[str], chosen: str, listed: list[str]) -> None:
    assert list_protocols(wanted, chosen) == listed


@pytest.mark.parametrize(("protocol", "told"), [("rdma", "mlx5_0,mlx5_1"), ("tcp", "")])
def test_the_devices_that_are_named_reach_the_transfer_engine(
    monkeypatch: pytest.MonkeyPatch, protocol: str, told: str
) -> None:
    started: list[tuple[str, ...]] = []

    class TransferEngine:
        """Stands in for Mooncake's, which refuses rdma where there is none."""

        def initialize(self, *arguments: str) -> int:
            started.append(arguments)
            return 0

        def register_memory(self, *_: int) -> int:
            return 0

        def get_rpc_port(self) -> int:
            return 1

    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=TransferEngine))
    Transfer("127.0.0.1", protocol, "mlx5_0,mlx5_1")
    assert started == [("127.0.0.1", "P2PHANDSHAKE", protocol, told)]
