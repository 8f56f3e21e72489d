from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_backend.config import values


@pytest.fixture(autouse=True)
def rdma_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for /sys/class/infiniband, so that no test depends on the machine; not created yet."""
    folder = tmp_path / "infiniband"
    monkeypatch.setattr(values, "DEVICES_FOLDER", folder)
    return folder
