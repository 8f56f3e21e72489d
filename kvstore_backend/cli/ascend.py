"""Checks of a machine with Ascend cards: what Mooncake's ascend transport needs for a configuration."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from kvstore_backend.cli.checks import find_wheels
from kvstore_backend.cli.report import Finding, fail, ok, warn
from kvstore_backend.config import ascend_buffer_pool, library_folders

__all__ = ["HCCN_FILE", "LIBRARIES", "check_machine"]

HCCN_FILE = Path("/etc/hccn.conf")
"""File with the addresses of the cards' own network ports."""

LIBRARIES = ("libmooncake_common.so", "libtransfer_engine.so", "libmooncake_store.so")
"""Shared libraries of a Mooncake that was built with ``-DBUILD_SHARED_LIBS=ON``."""

_WHEEL = "mooncake-transfer-engine-npu"
_WITHOUT_ASCEND = "mooncake-transfer-engine-non-cuda"
_BUILD = "build it with -DUSE_ASCEND_DIRECT=ON -DBUILD_SHARED_LIBS=ON (docs/mindie.md)"
_BUFFERS = re.compile(r"(\d+):(\d+)", re.ASCII)


def check_machine(*, needs_buffers: bool) -> Iterator[Finding]:
    """Check Mooncake's build, its libraries, the cards' network, and the buffers that MindIE, for example, needs."""
    yield from _check_build()
    yield from _check_libraries()
    yield from _check_network()
    yield from _check_buffers(needs_buffers)


def _check_build() -> Iterator[Finding]:
    """Check whether the installed Mooncake can have been built for Ascend cards."""
    subject, wheels = "ascend build", find_wheels()
    if _WHEEL in wheels:
        yield ok(subject, f"{_WHEEL} {wheels[_WHEEL]}")
    elif _WITHOUT_ASCEND in wheels:
        yield fail(
            subject,
            f"{_WITHOUT_ASCEND} is installed, which has no ascend transport",
            f"pip uninstall {_WITHOUT_ASCEND}, then pip install {_WHEEL}, or {_BUILD}",
        )
    elif wheels:
        yield warn(
            subject,
            f"{', '.join(wheels)} is installed; it serves Ascend cards only if it was built here for them",
            f"if it came from PyPI: pip install {_WHEEL} instead, or {_BUILD}",
        )
    elif importlib.util.find_spec("mooncake") is None:
        yield fail(subject, "Mooncake is not installed", f"pip install {_WHEEL}, or {_BUILD}")
    else:
        yield ok(subject, "a Mooncake of one's own build")


def _check_libraries() -> Iterator[Finding]:
    """Check whether the loader of shared libraries finds Mooncake's libraries."""
    subject, folders = "LD_LIBRARY_PATH", library_folders()
    missing = [name for name in LIBRARIES if not any((folder / name).is_file() for folder in folders)]
    if not missing:
        yield ok(subject, f"it leads to {', '.join(LIBRARIES)}")
        return
    spec = importlib.util.find_spec("mooncake")
    package = Path((spec.submodule_search_locations or [""])[0]) if spec else None
    if package and all((package / name).is_file() for name in LIBRARIES):
        remedy = f"export LD_LIBRARY_PATH={package}:$LD_LIBRARY_PATH"
    else:
        remedy = (
            f"copy them from where Mooncake was built to {package or 'the folder of its Python package'}, "
            "and name that folder in LD_LIBRARY_PATH"
        )
    yield fail(subject, f"no folder in it has {', '.join(missing)}", f"{remedy}, before the server is started")


def _check_network() -> Iterator[Finding]:
    try:
        is_empty = not HCCN_FILE.read_text(errors="replace").strip()
    except OSError as exc:
        remedy = f"in a container: mount the host's (docker run -v {HCCN_FILE}:{HCCN_FILE}:ro); hccn_tool writes it"
        yield fail("hccn.conf", f"{HCCN_FILE} cannot be read ({exc.strerror}), and the cards' network needs it", remedy)
        return
    if is_empty:
        yield fail("hccn.conf", f"{HCCN_FILE} is empty", "copy the host's, which names an address for each card")
    else:
        yield ok("hccn.conf", f"{HCCN_FILE} is there")


def _check_buffers(needs_buffers: bool) -> Iterator[Finding]:
    """Check the buffers for transfers: ``ASCEND_BUFFER_POOL`` gives their number and their size in MB."""
    subject, value = "ASCEND_BUFFER_POOL", ascend_buffer_pool()
    remedy = "export ASCEND_BUFFER_POOL=4:8 in the environment of the server"
    match = _BUFFERS.fullmatch(value)
    if value and match is None:
        yield fail(subject, f"it is {value!r}; it must be NUMBER:MEGABYTES of buffers, such as 4:8", remedy)
    elif match is None or "0" in match.groups():
        text = f"it is {value or 'not set'}, so transfers have no buffers to go through"
        if needs_buffers:
            yield fail(subject, f"{text}, which MindIE's guide wants", remedy)
        else:
            yield warn(subject, text, remedy)
    else:
        yield ok(subject, f"{match[1]} buffers of {match[2]} MB")
