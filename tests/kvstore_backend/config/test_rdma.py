from __future__ import annotations

from pathlib import Path

from kvstore_backend.config import has_active_port, list_rdma_devices


def test_a_machine_without_the_folder_of_devices_has_no_device() -> None:
    assert list_rdma_devices() == []


def test_a_machine_with_an_empty_folder_has_no_device(rdma_devices: Path) -> None:
    rdma_devices.mkdir()
    assert list_rdma_devices() == []


def test_devices_are_listed_by_name(rdma_devices: Path) -> None:
    for name in ("mlx5_1", "mlx5_0"):
        (rdma_devices / name).mkdir(parents=True)
    assert list_rdma_devices() == ["mlx5_0", "mlx5_1"]


def test_one_active_port_of_several_is_sufficient(rdma_devices: Path) -> None:
    for port, state in (("1", "1: DOWN\n"), ("2", "4: ACTIVE\n")):
        (rdma_devices / "mlx5_0" / "ports" / port).mkdir(parents=True)
        (rdma_devices / "mlx5_0" / "ports" / port / "state").write_text(state)
    assert has_active_port("mlx5_0")
    (rdma_devices / "mlx5_0" / "ports" / "2" / "state").write_text("1: DOWN\n")
    assert not has_active_port("mlx5_0")
    assert not has_active_port("mlx5_9")
