"""A real ``mooncake_master`` on loopback, with its metadata server and its metrics."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from kvstore_backend.config import PoolConfig, load_config
from tests.support.ports import free_ports
from tests.support.processes import Child, child
from tests.support.waiting import port_answers

__all__ = ["MooncakeMaster", "find_master", "mooncake_master"]


class MooncakeMaster:
    """A running master, and the addresses that a client needs."""

    def __init__(self, process: Child, rpc_port: int, metadata_port: int, metrics_port: int) -> None:
        self.process = process
        self.address = f"127.0.0.1:{rpc_port}"
        self.metadata_server = f"http://127.0.0.1:{metadata_port}/metadata"
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"

    def settings(self, **changes: object) -> dict[str, object]:
        """Return values for ``load_config("mooncake", explicit=...)``, or for a ``mooncake_config.json``."""
        return {
            "master_server_addr": self.address,
            "metadata_server": self.metadata_server,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": "64MiB",
            "local_buffer_size": "16MiB",
            **changes,
        }

    def config(self, **changes: object) -> PoolConfig:
        """Return a configuration of a client of this master."""
        return load_config("mooncake", explicit=self.settings(**changes), environ={})

    def kill(self) -> None:
        """Kill the master, as a crash does."""
        self.process.kill()


@contextlib.contextmanager
def mooncake_master(log: Path, *flags: str) -> Iterator[MooncakeMaster]:
    """Run a master, with ``flags`` such as ``--default_kv_lease_ttl=200`` added to its command line."""
    rpc_port, metadata_port, metrics_port = free_ports(3)
    argv = [
        find_master(),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={rpc_port}",
        "--enable_http_metadata_server=true",
        "--http_metadata_server_host=127.0.0.1",
        f"--http_metadata_server_port={metadata_port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
        *flags,
    ]
    with child(argv, log) as process:
        process.wait_for(lambda: port_answers(rpc_port) and port_answers(metadata_port), "answering")
        yield MooncakeMaster(process, rpc_port, metadata_port, metrics_port)


def find_master() -> str:
    """Return the path of ``mooncake_master``: in the folder of this Python, in its wheel, or on the PATH."""
    beside = Path(sys.executable).with_name("mooncake_master")
    found = str(beside) if beside.exists() else shutil.which("mooncake_master")
    assert found, "mooncake_master is not installed; pip install '/path/to/this/repository[mooncake]'"
    return found
