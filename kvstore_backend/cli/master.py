"""Start a Mooncake master with sensible flags, and say how clients join it."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from kvstore_backend.backend import ConfigError, PoolUnavailable
from kvstore_backend.stores.mooncake import INSTALL

__all__ = ["add_arguments", "command_line", "run"]

_PROGRAM = "mooncake_master"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``kvstore master`` takes."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="where to listen; others reach 0.0.0.0, so only on a network you trust")
    add("--port", type=int, default=15001, help="for clients")
    add("--metadata-port", type=int, default=15002, help="for the metadata server; 0: none, clients use P2PHANDSHAKE")
    add("--metrics-port", type=int, default=15003, help="for metrics and health")
    add("--lease", default="10s", metavar="TIME", help="how long a block that was looked up is kept from eviction")
    add("--eviction-watermark", type=float, default=0.9, metavar="SHARE", help="evict when so much is used")
    add("--eviction-ratio", type=float, default=0.05, metavar="SHARE", help="so much is evicted then")
    add(
        "--rpc-threads", type=int, default=max(4, min(16, os.cpu_count() or 4)), metavar="N", help="threads for clients"
    )
    add("--tenants", metavar="FILE", help="keep tenants apart, with the quotas in this file (default: one tenant)")
    add("--ssd", action="store_true", help="let clients keep on SSD what memory has no room for")
    add("--etcd", metavar="HOST:PORT[;HOST:PORT]", help="one of several masters, the leader elected through etcd")
    add("--cluster-id", default="mooncake_cluster", help="which masters belong together, with --etcd")
    add("--print", action="store_true", help="only print what would be started")


def run(arguments: argparse.Namespace) -> int:
    """Become the master; does not return where it can be started.

    Raises:
        PoolUnavailable: the program is missing or a port is taken.
    """
    command = command_line(arguments)
    print(f"# {shlex.join(command)}")
    for line in _client_lines(arguments):
        print(line)
    if not arguments.print:
        for port in (arguments.port, arguments.metadata_port, arguments.metrics_port):
            _check_free(arguments.host, port)
        sys.stdout.flush()
        os.execv(command[0], command)
    return 0


def command_line(arguments: argparse.Namespace) -> list[str]:
    """The program with its flags.

    Raises:
        PoolUnavailable: it is not installed.
        ConfigError: a flag's value cannot be used.
    """
    beside = Path(sys.executable).with_name(_PROGRAM)
    program = str(beside) if beside.exists() else shutil.which(_PROGRAM)
    if program is None:
        raise PoolUnavailable(f"{_PROGRAM} is not installed: {INSTALL}")
    for name in ("eviction_watermark", "eviction_ratio"):
        if not 0 < getattr(arguments, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {getattr(arguments, name)}; it must be a share between 0 and 1")
    flags = {
        "rpc_address": arguments.host,
        "rpc_port": arguments.port,
        "rpc_thread_num": arguments.rpc_threads,
        "metrics_host": arguments.host,
        "metrics_port": arguments.metrics_port,
        "default_kv_lease_ttl": arguments.lease,
        "eviction_high_watermark_ratio": arguments.eviction_watermark,
        "eviction_ratio": arguments.eviction_ratio,
    }
    if arguments.metadata_port and not arguments.etcd:
        flags["enable_http_metadata_server"] = "true"
        flags["http_metadata_server_host"] = arguments.host
        flags["http_metadata_server_port"] = arguments.metadata_port
    if arguments.tenants:
        flags["enable_multi_tenants"] = "true"
        flags["tenant_quota_connector_uri"] = arguments.tenants
    if arguments.ssd:
        flags["enable_offload"] = "true"
    if arguments.etcd:
        flags["enable_ha"] = "true"
        flags["etcd_endpoints"] = ";".join(f"http://{each}" for each in arguments.etcd.split(";"))
        flags["cluster_id"] = arguments.cluster_id
    return [program, *(f"--{name}={value}" for name, value in flags.items())]


def _client_lines(arguments: argparse.Namespace) -> Iterator[str]:
    """What a client's environment must say."""
    host = arguments.host if arguments.host != "0.0.0.0" else socket.gethostname()
    if arguments.etcd:
        yield f"export MOONCAKE_MASTER_SERVER_ADDR='etcd://{arguments.etcd}'"
        yield f"export MC_STORE_CLUSTER_ID={arguments.cluster_id}"
    else:
        yield f"export MOONCAKE_MASTER_SERVER_ADDR={host}:{arguments.port}"
    if arguments.metadata_port and not arguments.etcd:
        yield f"export MOONCAKE_METADATA_SERVER=http://{host}:{arguments.metadata_port}/metadata"
    else:
        yield "export MOONCAKE_METADATA_SERVER=P2PHANDSHAKE"
    yield f"# health: curl http://{host}:{arguments.metrics_port}/health"


def _check_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise PoolUnavailable(
                f"port {port} of {host} cannot be had ({exc.strerror}); ss -tlnp shows what uses it"
            ) from exc
