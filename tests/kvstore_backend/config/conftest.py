from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_backend.config import values


@pytest.fixture(autouse=True)
def rdma_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands in for /sys/class/infiniband, so that these tests say the same on every machine; empty at first."""
    folder = tmp_path / "infiniband"
    monkeypatch.setattr(values, "DEVICES_FOLDER", folder)
    return folder
