"""The choice of TransferEngine's protocol; its transfers are tested with both sides of a hand-over."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.disaggregation import choose_protocol
from kvstore_backend.config import rdma


@pytest.fixture
def rdma_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands in for /sys/class/infiniband, so that these tests say the same on every machine; empty at first."""
    monkeypatch.setattr(rdma, "DEVICES_FOLDER", tmp_path)
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
