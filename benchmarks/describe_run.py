"""Describes how a program of this folder measured, for ``scripts/results``."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvcommon.versions import find_version

__all__ = ["describe_run"]

_LIBRARIES = {"Mooncake": "mooncake-transfer-engine-non-cuda", "PyTorch": "torch"}


def describe_run(program: str, argv: Sequence[str] | None, begun: time.struct_time, load: float) -> dict[str, str]:
    """Return how a program of this folder measured, for ``scripts/results``.

    Args:
        program: name of the file.
        argv: the program's arguments; None for those of this process.
        begun: time at which it began, in UTC.
        load: the machine's load at that time.
    """
    libraries = [f"{name} {version(package)}" for name, package in _LIBRARIES.items()]
    # The folder shows how Python was built: pyenv builds it without optimizations, Debian (/usr) with them.
    python = f"Python {platform.python_version()} in {sys.base_prefix}"
    return {
        "date": time.strftime("%Y-%m-%d", begun),
        "command": shlex.join(["python", f"benchmarks/{program}", *(sys.argv[1:] if argv is None else argv)]),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, load {load:.1f} at the start",
        "versions": ", ".join([f"kvstore {find_version()}", python, *libraries]),
    }
