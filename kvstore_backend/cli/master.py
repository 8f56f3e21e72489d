"""Start a Mooncake master with tested flags, and print the environment variables for its clients."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from kvcommon.hints import list_flags, suggest_name
from kvstore_backend.backend import ConfigError, PoolUnavailable
from kvstore_backend.config import hide_password, parse_master_address, parse_switch, set_snapshot_folder
from kvstore_backend.stores.mooncake_joining import INSTALL, find_missing_coordinator

__all__ = ["add_arguments", "build_command", "list_native_flags", "parse_native_flags", "run"]

_PROGRAM = "mooncake_master"
# A master answers within one or two seconds after its start, and logs its start for some seconds more.
_READY_SECONDS, _QUIET_SECONDS, _POLL_SECONDS = 60.0, 3.0, 0.1
_LEASE = re.compile(r"\d+(ms|s|m|h)?", re.ASCII)  # as Mooncake reads it; a number without a unit means milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore master``."""
    _add_addresses(parser.add_argument)
    _add_eviction(parser.add_argument)
    _add_behaviour(parser.add_argument)
    _add_keeping(parser.add_argument)
    parser.add_argument("--print", action="store_true", help="only print the command that would be started")
    parser.epilog = "Flags of mooncake_master are also accepted and passed to it."
    parser.set_defaults(native=[], own_flags=sorted(list_flags(parser)))


def _add_addresses(add: Callable[..., object]) -> None:
    add(
        "--host",
        "--rpc_address",
        default="127.0.0.1",
        help="address to listen at (default %(default)s); 0.0.0.0 lets other machines connect: only on a "
        "trusted network",
    )
    add("--port", "--rpc_port", type=int, default=15001, help="port for clients (default %(default)s)")
    add(
        "--metadata-port",
        "--http_metadata_server_port",
        type=int,
        default=15002,
        help="port of the metadata server (default %(default)s); 0: no metadata server, clients use P2PHANDSHAKE",
    )
    add(
        "--enable_http_metadata_server",
        type=parse_switch,
        nargs="?",
        const=True,
        default=True,
        metavar="BOOL",
        help="whether there is a metadata server; false is the same as --metadata-port 0",
    )
    add(
        "--metrics-port",
        "--metrics_port",
        type=int,
        default=15003,
        help="port for metrics and health (default %(default)s)",
    )


def _add_eviction(add: Callable[..., object]) -> None:
    add(
        "--lease",
        "--default_kv_lease_ttl",
        default="10s",
        metavar="TIME",
        help="how long a block that was looked up is protected from eviction (default %(default)s)",
    )
    add(
        "--eviction-watermark",
        "--eviction_high_watermark_ratio",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="fraction of the pool's memory in use at which eviction begins (default %(default)s)",
    )
    add(
        "--eviction-ratio",
        "--eviction_ratio",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="fraction of the pool's memory that an eviction frees (default %(default)s)",
    )


def _add_behaviour(add: Callable[..., object]) -> None:
    add(
        "--rpc-threads",
        "--rpc_thread_num",
        type=int,
        default=max(4, min(16, os.cpu_count() or 4)),
        metavar="N",
        help="number of threads for clients (default %(default)s)",
    )
    add(
        "--tenants",
        "--tenant_quota_connector_uri",
        metavar="FILE",
        help="file with the quotas of tenants, which are then separated (default: one tenant)",
    )
    add("--ssd", action="store_true", help="let clients store blocks on their SSDs when the memory is full")
    add(
        "--etcd",
        "--etcd_endpoints",
        type=lambda text: text.replace("http://", ""),
        metavar="HOST:PORT[;HOST:PORT]",
        help="etcd servers through which several masters elect a leader (default: one master)",
    )
    add(
        "--ha-backend-type",
        "--ha_backend_type",
        choices=("etcd", "redis", "k8s"),
        default="etcd",
        help="service that elects the leader of several masters, with --ha-backend-connstring (default %(default)s)",
    )
    add(
        "--ha-backend-connstring",
        "--ha_backend_connstring",
        default="",
        metavar="WHERE",
        help="address of the service that elects: redis://host:port, namespace/lease of k8s, or as in --etcd",
    )
    add(
        "--cluster-id",
        "--cluster_id",
        default="mooncake_cluster",
        help="name that all masters of one pool have in common (default %(default)s)",
    )


def _add_keeping(add: Callable[..., object]) -> None:
    add(
        "--snapshot-dir",
        metavar="FOLDER",
        help="write the places of all blocks to this folder, and read them at the next start: for pools with clients "
        "that check the blocks that they read, as ours do (docs/pool_survival.md); default: a restarted master knows "
        "no blocks",
    )
    add(
        "--snapshot-interval",
        "--snapshot_interval_seconds",
        type=int,
        default=10,
        metavar="SECONDS",
        help="time between two snapshots with --snapshot-dir (default %(default)s)",
    )
    add(
        "--oplog",
        "--enable_oplog",
        type=parse_switch,
        nargs="?",
        const=True,
        default=False,
        metavar="BOOL",
        help="with --etcd: write the places of all blocks to etcd, so that the next leader knows them; etcd's entries "
        "are never removed, and when etcd is full the pool accepts no more blocks (docs/pool_survival.md)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by a Mooncake master. With ``--print``, only print the command and return 0.

    Raises:
        PoolUnavailable: the program mooncake_master is missing, or a port is in use.
        ConfigError: the value of a flag cannot be used.
    """
    if not arguments.enable_http_metadata_server:
        arguments.metadata_port = 0
    command = build_command(arguments)
    if not arguments.print:
        # A program from another folder may be another build than the installed library.
        is_ours = Path(command[0]).parent == Path(sys.executable).parent
        named = f"--ha_backend_type is {arguments.ha_backend_type}"
        if is_ours and (missing := find_missing_coordinator(arguments.ha_backend_type, named)):
            raise PoolUnavailable("; ".join(missing))
        for port in (arguments.port, arguments.metadata_port, arguments.metrics_port):
            _check_port(arguments.host, port)
    environ = set_snapshot_folder(arguments.snapshot_dir) if arguments.snapshot_dir else {}
    print(f"# {shlex.join([*(f'{name}={value}' for name, value in environ.items()), *command])}")
    lines = list(_client_lines(arguments))
    print("\n".join(lines))
    if not arguments.print:
        sys.stdout.flush()
        if sys.stdout.isatty():
            _print_when_ready(lines, arguments.host, arguments.metrics_port)
        os.execv(command[0], command)
    return 0


def _print_when_ready(lines: Sequence[str], host: str, port: int) -> None:
    """Start a process that waits until the master has logged its start, prints ``lines`` again, and ends."""
    if os.fork():
        os.wait()  # the first child ends immediately, and init waits for the second one
        return
    if os.fork() == 0:
        address = "127.0.0.1" if host == "0.0.0.0" else host
        give_up_at = time.monotonic() + _READY_SECONDS
        while time.monotonic() < give_up_at:
            with contextlib.suppress(OSError), socket.create_connection((address, port), 1.0):
                time.sleep(_QUIET_SECONDS)
                print("\n".join(["", "The master is ready. Set in its clients:", *lines]), flush=True)
                break
            time.sleep(_POLL_SECONDS)
    os._exit(0)


def build_command(arguments: argparse.Namespace) -> list[str]:
    """Return the command that starts the master: the program and its flags.

    Raises:
        PoolUnavailable: the program mooncake_master is not installed.
        ConfigError: the value of a flag cannot be used.
    """
    beside = Path(sys.executable).with_name(_PROGRAM)
    program = str(beside) if beside.exists() else shutil.which(_PROGRAM)
    if program is None:
        raise PoolUnavailable(f"{_PROGRAM} is not installed: {INSTALL}")
    _check_values(arguments)
    coordinator = _find_coordinator(arguments)
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
    if arguments.metadata_port and not coordinator:
        flags["enable_http_metadata_server"] = "true"
        flags["http_metadata_server_host"] = arguments.host
        flags["http_metadata_server_port"] = arguments.metadata_port
    if arguments.tenants:
        flags["enable_multi_tenants"] = "true"
        flags["tenant_quota_connector_uri"] = arguments.tenants
    if arguments.ssd:
        flags["enable_offload"] = "true"
    if coordinator:
        flags["enable_ha"] = "true"
        flags |= _name_coordinator(coordinator)
        flags["cluster_id"] = arguments.cluster_id
        if arguments.oplog:
            flags["enable_oplog"] = "true"
    if arguments.snapshot_dir:
        flags["enable_snapshot"] = flags["enable_snapshot_restore"] = "true"
        flags["snapshot_object_store_type"] = "local"
        flags["snapshot_interval_seconds"] = arguments.snapshot_interval
    if arguments.native:
        flags |= parse_native_flags(arguments.native, list_native_flags(program), arguments.own_flags)
    return [program, *(f"--{name}={value}" for name, value in flags.items())]


def _find_coordinator(arguments: argparse.Namespace) -> str:
    """Return the URL of the service at which clients find the leading master, such as ``etcd://h1:2379;h2:2379``.

    The URL is empty if there is only one master.
    """
    backend, where = arguments.ha_backend_type, arguments.ha_backend_connstring
    if not where and backend != "etcd":
        raise ConfigError(f"--ha_backend_type {backend} needs --ha_backend_connstring with the address of this service")
    if where and arguments.etcd:
        raise ConfigError(
            "--etcd and --ha_backend_connstring both name the service that elects the leader; give one of them"
        )
    flag = "--ha_backend_connstring" if where else "--etcd"
    if not (where := where or arguments.etcd):
        return ""
    try:
        return parse_master_address(f"{backend}://{where.removeprefix(f'{backend}://')}")
    except ValueError as exc:
        raise ConfigError(f"{flag} is {hide_password(where)!r}; {exc}") from None


def _name_coordinator(coordinator: str) -> dict[str, str]:
    """Return the flags of mooncake_master for ``coordinator``, the URL of the service that elects the leader."""
    backend, _, where = coordinator.partition("://")
    if backend == "etcd":
        return {"etcd_endpoints": ";".join(f"http://{each}" for each in where.split(";"))}
    return {"ha_backend_type": backend, "ha_backend_connstring": coordinator if backend == "redis" else where}


def _check_values(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for a value that Mooncake would refuse only in its log, or with which it would crash."""
    for name, least in (("port", 1), ("metadata_port", 0), ("metrics_port", 1)):
        if not least <= (port := getattr(arguments, name)) < 65536:
            raise ConfigError(f"{_flag_of(name)} is {port}; it must be from {least} to 65535")
    for name in ("eviction_watermark", "eviction_ratio"):
        if not 0 < (share := getattr(arguments, name)) < 1:
            raise ConfigError(f"{_flag_of(name)} is {share}; it must be a number between 0 and 1")
    if not _LEASE.fullmatch(arguments.lease):
        raise ConfigError(f"--lease is {arguments.lease!r}; it must be a whole number of ms, s, m or h, such as 10s")
    if arguments.oplog and not _find_coordinator(arguments).startswith("etcd://"):
        raise ConfigError(
            "--oplog needs --etcd, which stores the operation log; with a single master use --snapshot-dir"
        )
    if arguments.snapshot_dir and _find_coordinator(arguments):
        raise ConfigError(
            "--snapshot-dir has no effect with --etcd or --ha_backend_connstring: the next leader does not read "
            "the folder; use --oplog"
        )
    if arguments.snapshot_dir and Path(arguments.snapshot_dir).exists() and not Path(arguments.snapshot_dir).is_dir():
        raise ConfigError(f"--snapshot-dir is {arguments.snapshot_dir!r}, which is not a folder")
    if arguments.rpc_threads < 0:  # 0: as many as Mooncake's --max_threads
        raise ConfigError(f"--rpc-threads is {arguments.rpc_threads}; it must be at least 0")
    if arguments.snapshot_interval < 1:
        raise ConfigError(f"--snapshot-interval is {arguments.snapshot_interval}; it must be at least one second")
    tenants = arguments.tenants
    if tenants and not (Path(tenants).is_file() and os.access(tenants, os.R_OK)):
        raise ConfigError(f"--tenants is {tenants!r}; it must be a readable file with quotas")


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _client_lines(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines that set the environment variables of the master's clients, and comments on them."""
    host = arguments.host if arguments.host != "0.0.0.0" else socket.gethostname()
    coordinator = _find_coordinator(arguments)
    if coordinator:
        yield f"export MOONCAKE_MASTER_SERVER_ADDR='{coordinator}'"
        yield f"export MC_STORE_CLUSTER_ID={arguments.cluster_id}"
    else:
        yield f"export MOONCAKE_MASTER_SERVER_ADDR={host}:{arguments.port}"
    if arguments.metadata_port and not coordinator:
        yield f"export MOONCAKE_METADATA_SERVER=http://{host}:{arguments.metadata_port}/metadata"
    else:
        yield "export MOONCAKE_METADATA_SERVER=P2PHANDSHAKE"
    if arguments.host.startswith("127.") and any("server_host" in word for word in arguments.native):
        yield "# clients on other machines need --host 0.0.0.0, mooncake_master's own default, on a network you trust"
    if arguments.metadata_port and not coordinator and arguments.host != "0.0.0.0":
        yield (
            "# Mooncake's metadata server listens on all addresses, whatever --host is: close port "
            f"{arguments.metadata_port} to other machines, or turn it off with --metadata-port 0"
        )
    yield f"# health: curl http://{host}:{arguments.metrics_port}/health"


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise PoolUnavailable(
                f"port {port} of {host} is not available ({exc.strerror}); ss -tlnp shows which process uses it"
            ) from exc


_HELP_SECONDS = 20.0
# This matches " -rpc_port (Port for RPC server ...) type: int32 default: 0", over several lines.
_FLAG = re.compile(r"^ +-(\w+) \(.*?\)\s+type: (\w+)\s+default:", re.MULTILINE | re.DOTALL)


def list_native_flags(program: str) -> dict[str, bool]:
    """Return the flags of the program mooncake_master: name -> whether the flag is a switch.

    Raises:
        PoolUnavailable: the program cannot be run.
    """
    try:
        shown = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=_HELP_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise PoolUnavailable(f"{program} --help cannot be run: {exc}") from exc
    return {name: kind == "bool" for name, kind in _FLAG.findall(shown.stdout)}


def parse_native_flags(words: Sequence[str], native: dict[str, bool], own: Collection[str]) -> dict[str, str]:
    """Parse flags of mooncake_master, ``--name value``, ``--name=value`` or ``--switch``; return the values by name.

    Args:
        words: words of the command line that are no flags of ``kvstore master``.
        native: flags of mooncake_master: name -> whether the flag is a switch.
        own: flags of ``kvstore master``, for the message about an unknown flag.

    Raises:
        ConfigError: a word is not a flag, or a flag has no value.
    """
    values: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(
                f"{word!r} is not a flag of kvstore master; each flag begins with two dashes and has at most one value"
            )
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name.startswith("no") and native.get(name[2:]) and not equals:
            name, value = name[2:], "false"
        elif name not in native:
            raise _refuse_flag(name, native, own)
        elif not equals:
            value = "true" if native[name] else _take_value(name, rest)
        values[name] = value
    return values


def _take_value(name: str, rest: list[str]) -> str:
    """Remove the value of the flag ``name`` from ``rest``, the words after the flag, and return the value."""
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"--{name} of mooncake_master needs a value: --{name}=VALUE")
    return rest.pop(0)


def _refuse_flag(name: str, native: dict[str, bool], own: Collection[str]) -> ConfigError:
    """Return the error for a flag that neither kvstore master nor mooncake_master has.

    Args:
        name: the flag, without its dashes.
        native: the flags of mooncake_master.
        own: the flags of kvstore master, with their dashes.
    """
    near = suggest_name(f"--{name}", [*own, *(f"--{each}" for each in native)])
    hint = near if "did you mean" in near else ": kvstore master --help and mooncake_master --help list them"
    return ConfigError(f"--{name} is not a flag of kvstore master, nor of mooncake_master{hint}")
