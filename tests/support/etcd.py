"""A real etcd on loopback, installed or fetched by ``examples/cache_storage/run_ha.sh``."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.processes import child
from tests.support.waiting import port_answers

__all__ = ["running_etcd"]

_FETCHED = Path(__file__).parents[2] / ".cache" / "etcd" / "usr" / "bin" / "etcd"


@contextlib.contextmanager
def running_etcd(folder: Path) -> Iterator[str]:
    """Run etcd, and yield its ``host:port``; skip the test if this machine has no etcd."""
    program = shutil.which("etcd") or (str(_FETCHED) if _FETCHED.exists() else None)
    if program is None:
        pytest.skip("etcd is not installed")
    port, peer_port = free_ports(2)
    client, peer = (f"http://127.0.0.1:{number}" for number in (port, peer_port))
    flags = [f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}"]
    flags += [f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"]
    with child([program, f"--data-dir={folder}/etcd", *flags], folder / "etcd.log") as server:
        server.wait_for(lambda: port_answers(port), "answering")
        yield f"127.0.0.1:{port}"
