"""Simulates a machine with Ascend cards: its files, its variables, and the name of its Mooncake package."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from kvstore_backend.cli import ascend, checks

__all__ = ["AscendMachine"]


class AscendMachine:
    """A simulated machine with everything that MindIE needs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self._monkeypatch = monkeypatch
        self.hccn_file = folder / "hccn.conf"
        self.hccn_file.write_text("address_0=192.0.2.10\nnetmask_0=255.255.255.0\n")
        self.libraries = folder / "mooncake"
        self.libraries.mkdir()
        for name in ascend.LIBRARIES:
            (self.libraries / name).touch()
        spec = ModuleSpec("mooncake", None, is_package=True)
        spec.submodule_search_locations = [str(self.libraries)]
        monkeypatch.setattr(ascend, "HCCN_FILE", self.hccn_file)
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "mooncake" else find_spec(name))
        monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{self.libraries}")
        monkeypatch.setenv("ASCEND_BUFFER_POOL", "4:8")
        self.install("mooncake-transfer-engine-npu")

    def install(self, wheel: str) -> None:
        """Make this package the only installed package of Mooncake."""
        for module in (ascend, checks):
            self._monkeypatch.setattr(module, "find_wheels", lambda: {wheel: "0.3.13"})

    def set_variable(self, name: str, value: str) -> None:
        """Set an environment variable."""
        self._monkeypatch.setenv(name, value)
