"""Report how many blocks a pool has, and how many look-ups find blocks."""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NoReturn

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvcommon.formats import format_bytes
from kvstore_backend.backend import ConfigError, KVStoreError, PoolUnavailable
from kvstore_backend.clear_marks import MARK_PREFIX
from kvstore_backend.cli import checks
from kvstore_backend.cli.operator.pool import find_pool
from kvstore_backend.cli.report import format_table, print_json
from kvstore_backend.config import FileSettings, MemorySettings, MooncakeSettings, PoolConfig
from kvstore_backend.manifest import MANIFEST_PREFIX
from kvstore_backend.namespace import parse_key
from kvstore_backend.stores.file.ledger import find_size
from kvstore_backend.stores.holdings import FolderHoldings
from kvstore_backend.stores.mooncake_admin import MasterAdmin, TenantAccount, find_ended_clients

__all__ = ["add_arguments", "run"]

_WATCH_SECONDS = 2.0


@dataclass
class _PoolFigures:
    """Measurements of a pool. A measurement is None if the pool does not report it.

    Attributes:
        backend: ``mooncake`` or ``file``.
        keys: number of values in the pool.
        used_bytes: bytes of all values.
        capacity_bytes: bytes at which the pool evicts values.
        clients: number of connected clients that give memory to the pool.
        clients_gone: number of clients that have ended, but that the master counts for ten more seconds.
        evicted_keys: number of values that were evicted since the master's start.
        refused_writes: number of writes for which the pool had no memory.
        reads: number of reads.
        reads_found: number of reads that found a value.
        keys_by_namespace: number of values of each namespace, by its digest.
        tenants: memory of each tenant, by its name.
        instances: counters of each instance, by its address.
    """

    backend: str
    keys: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    clients: int | None = None
    clients_gone: int | None = None
    evicted_keys: int | None = None
    refused_writes: int | None = None
    reads: int | None = None
    reads_found: int | None = None
    keys_by_namespace: dict[str, int] = field(default_factory=dict)
    tenants: dict[str, TenantAccount] = field(default_factory=dict)
    instances: dict[str, dict[str, float]] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore stats``."""
    parser.add_argument(
        "config", nargs="?", help="URL of the pool, or a configuration file of any engine; default: the environment"
    )
    parser.add_argument(
        "--master-metrics", metavar="HOST:PORT", help="address of the master's metrics (its --metrics_port)"
    )
    parser.add_argument(
        "--instances",
        nargs="+",
        default=[],
        metavar="HOST:PORT",
        help="instances whose hit rates are shown; without CONFIG, also the pool of the first instance; write CONFIG "
        "before this flag",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_parse_seconds,
        const=_WATCH_SECONDS,
        metavar="SECONDS",
        help=f"read again every SECONDS (default {_WATCH_SECONDS:g}), and show rates, until Ctrl-C",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the measurements of a pool and of instances; with ``--watch``, print them repeatedly.

    Raises:
        ConfigError: the configuration cannot be used, or turns the pool off; an instance is not HOST:PORT; or
            ``--watch`` is combined with ``--json``.
        PoolUnavailable: the pool or an instance does not answer, or a server in ``--instances`` is not an instance with
            a pool.
    """
    logging.getLogger("kvstore_backend").setLevel(logging.CRITICAL)
    for each in arguments.instances:
        host, _, port = each.rpartition(":")
        if not host or "/" in host or not port.isdecimal():
            raise ConfigError(
                f"--instances has {each!r}, which is not HOST:PORT; write the configuration before the instances: "
                "kvstore stats CONFIG --instances HOST:PORT ..."
            )
    if arguments.json and arguments.watch:
        raise ConfigError("--watch shows tables repeatedly and --json writes one document; leave out one of the two")
    config = find_pool(arguments.config, arguments.instances)
    if arguments.watch:
        _watch_figures(config, arguments)
    figures = _read_figures(config, arguments)
    if arguments.json:
        print_json(figures)
    else:
        print("\n".join(_describe_figures(figures)))
    return 0


def _read_figures(config: PoolConfig, arguments: argparse.Namespace) -> _PoolFigures:
    """Read the measurements of the pool and of the instances.

    Raises:
        ConfigError: the pool is the memory of another process, which this process cannot read.
        PoolUnavailable: the pool or an instance does not answer, or a server in ``--instances`` is not an instance with
            a pool.
    """
    match config.store:
        case MooncakeSettings() as store:
            figures = _figures_of_mooncake(store, arguments.master_metrics)
        case FileSettings() as store:
            figures = _figures_of_folder(store)
        case MemorySettings():
            raise ConfigError(
                "a memory pool belongs to one process; only that process can list its blocks; give another pool"
            )
    figures.instances = {address: _figures_of_instance(address) for address in arguments.instances}
    return figures


def _watch_figures(config: PoolConfig, arguments: argparse.Namespace) -> NoReturn:
    """Read and show the measurements repeatedly. On a terminal, a new table replaces the one before.

    Raises:
        KVStoreError: the measurements could not be read the first time. A later error is shown, and the next try
            follows.
    """
    console = Console(highlight=False)
    figures, read_at = _read_figures(config, arguments), time.monotonic()
    lines = _describe_figures(figures)
    with Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            if live is not None:
                live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
            else:
                print("\n".join([*lines, ""]), flush=True)
            time.sleep(arguments.watch)
            try:
                now, now_at = _read_figures(config, arguments), time.monotonic()
            except KVStoreError as exc:
                lines = [f"{exc}; the measurements are read again every {arguments.watch:g} s"]
            else:
                lines = _describe_figures(now, figures, now_at - read_at)
                figures, read_at = now, now_at


def _figures_of_mooncake(settings: MooncakeSettings, metrics_address: str | None) -> _PoolFigures:
    admin = checks.require_admin(settings, metrics_address)
    try:
        metrics = admin.fetch_metrics()
        names = Counter(_namespace_of(key) for key in admin.stream_keys())
        tenants = {account.name: account for account in admin.fetch_accounts()}
        clients, gone = _count_clients(admin, settings, int(metrics["master_active_clients"]))
        return _PoolFigures(
            "mooncake",
            keys=int(metrics["master_key_count"]),
            used_bytes=int(metrics["master_allocated_bytes"]),
            capacity_bytes=int(metrics["master_total_capacity_bytes"]),
            clients=clients,
            clients_gone=gone,
            evicted_keys=int(metrics["master_evicted_key_count"]),
            refused_writes=int(metrics["master_put_start_alloc_failures_total"]),
            reads=int(metrics["total_get_nums_"]),
            reads_found=int(metrics["valid_get_nums_"]),
            keys_by_namespace=dict(names.most_common()),
            tenants=tenants,
        )
    except (httpx.HTTPError, ValueError) as exc:
        raise PoolUnavailable(f"the metrics of the master at {admin.address} cannot be read: {exc}") from exc
    except KeyError as exc:
        raise PoolUnavailable(
            f"the metrics of the master at {admin.address} lack {exc}; this version of Mooncake may not be supported"
        ) from exc


def _count_clients(admin: MasterAdmin, settings: MooncakeSettings, active: int) -> tuple[int, int | None]:
    """Return the number of connected clients, and the number of ended clients that the master still counts.

    If the master does not list its clients, return ``active``, the master's own count, and None.
    """
    try:
        segments = admin.list_segments()
    except (httpx.HTTPError, ValueError):
        return active, None
    listed = {segment.client for segment in segments}
    ended = find_ended_clients(segments, settings.metadata_server)
    # The list has no clients that left in order, but ``active`` counts them for some time.
    return len(listed - ended), len(ended) + max(0, active - len(listed))


def _figures_of_folder(settings: FileSettings) -> _PoolFigures:
    """Read the measurements of a pool's folder from its files. (Opening a store would create a missing folder.)"""
    blocks = FolderHoldings(settings).scan()
    names = Counter(map(_namespace_of, blocks))
    used = sum(block.nbytes for block in blocks.values())
    return _PoolFigures(
        "file", len(blocks), used, find_size(settings.path, settings.size), keys_by_namespace=dict(names.most_common())
    )


def _namespace_of(key: str) -> str:
    """Return the digest of the namespace in a block's key; for other keys, return the key's type in parentheses."""
    if key.startswith(MANIFEST_PREFIX):
        return "(manifests)"
    if key.startswith(MARK_PREFIX):
        return "(marks of kvstore clear)"
    try:
        digest, _ = parse_key(key)
    except ValueError:
        return "(not ours)"
    return digest.hex()


def _figures_of_instance(address: str) -> dict[str, float]:
    """Read an instance's counters: prompt tokens by the source of their KV, and blocks looked up in the pool."""
    try:
        page = httpx.get(f"http://{address}/metrics", timeout=5, trust_env=False).raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        reason = str(exc).partition("\n")[0]
        raise PoolUnavailable(f"the metrics of the instance at {address} cannot be read: {reason}") from exc
    try:
        families = list(text_string_to_metric_families(page))
    except ValueError:  # a page of other software
        families = []
    if not any(family.name.startswith("kvstore_") for family in families):
        raise PoolUnavailable(
            f"the server at {address} is not an instance with a pool: no metric in its /metrics begins with kvstore_; "
            "give the addresses of instances, not of their router"
        )
    values: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if not sample.labels:
                values[sample.name] = sample.value
            elif sample.name == "kvstore_blocks_total" and sample.labels.get("operation") == "exists":
                values[f"looked up {sample.labels['status']}"] = sample.value
    return {
        "prompt_tokens": values.get("fastdeploy:prompt_tokens_total", 0.0),
        "own_cached_tokens": values.get("fastdeploy:prefix_gpu_cache_token_num_total", 0.0),
        "pool_cached_tokens": values.get("kvstore_pool_cached_tokens_total", 0.0),
        "blocks_found": values.get("looked up ok", 0.0),
        "blocks_absent": values.get("looked up absent", 0.0),
        "blocks_unknown": values.get("looked up failed", 0.0),
    }


def _describe_figures(figures: _PoolFigures, before: _PoolFigures | None = None, seconds: float = 0.0) -> list[str]:
    """Return the lines of all tables.

    Args:
        figures: the measurements.
        before: earlier measurements, to show the growth per second, or None to show no growth.
        seconds: time between ``before`` and ``figures``.
    """
    lines = _describe_pool(figures, before, seconds)
    lines += ["", *format_table(("namespace", "keys"), list(figures.keys_by_namespace.items()) or [("(none)", 0)])]
    if figures.tenants:
        lines += ["", *_describe_tenants(figures.tenants.values())]
    if not figures.instances:
        return [*lines, "", "only instances know their hit rates: kvstore stats --instances HOST:PORT ... shows them"]
    return [*lines, "", *_describe_instances(figures, before, seconds)]


def _describe_pool(figures: _PoolFigures, before: _PoolFigures | None, seconds: float) -> list[str]:
    used, capacity = figures.used_bytes or 0, figures.capacity_bytes or 0
    share = f"{used / capacity if capacity else 0:.0%}"
    rows: list[tuple[str, object, str]] = [
        ("backend", figures.backend, ""),
        ("keys", figures.keys, "keys"),
        ("used", f"{format_bytes(used)} of {format_bytes(capacity)} ({share})", "used_bytes"),
    ]
    if figures.backend == "mooncake":
        reads, found = figures.reads or 0, figures.reads_found or 0
        ended = f", and {figures.clients_gone} that just ended" if figures.clients_gone else ""
        rows += [
            ("clients", f"{figures.clients}{ended}", ""),
            ("evicted keys", figures.evicted_keys, "evicted_keys"),
            ("writes without space", figures.refused_writes, "refused_writes"),
            ("reads", f"{reads}, found {found} ({found / reads if reads else 0:.0%})", "reads"),
        ]
    if before is None:
        return format_table(("pool", ""), [row[:2] for row in rows])

    def tell_growth(name: str) -> str:
        now, then = getattr(figures, name), getattr(before, name)
        return "" if now is None or then is None else _format_growth(then, now, seconds)

    growing = [(title, value, tell_growth(name) if name else "") for title, value, name in rows]
    return format_table(("pool", "", "a second"), growing)


def _describe_instances(figures: _PoolFigures, before: _PoolFigures | None, seconds: float) -> list[str]:
    """Return the lines of the tables of instances, with the arguments of ``_describe_figures``."""
    heads = ("prompt tokens", "own cache", "pool", "blocks found", "absent", "unknown")
    total = [(name, *(f"{each:.0f}" for each in row.values())) for name, row in figures.instances.items()]
    lines = format_table(("instance", *heads), total)
    if before is None:
        return lines
    grown = []
    for name, row in figures.instances.items():
        if earlier := before.instances.get(name):
            pairs = zip(earlier.values(), row.values(), strict=True)
            grown.append((name, *(_format_growth(then, now, seconds) for then, now in pairs)))
    return [*lines, "", *format_table(("a second", *heads), grown)]


def _describe_tenants(accounts: Iterable[TenantAccount]) -> list[str]:
    """Return the lines of the table of tenants, and a line that says whose namespaces the tables above have."""
    heads = ("tenant", "used", "of", "", "quota", "evicted for itself", "writes without space")
    rows = [
        (
            each.name,
            format_bytes(each.used),
            format_bytes(each.granted),
            f"{each.used / each.granted if each.granted else 0:.0%}",
            format_bytes(each.quota),
            format_bytes(each.evicted),
            each.refused,
        )
        for each in accounts
    ]
    return [
        *format_table(heads, rows),
        "the namespaces above are those of the tenant default, because Mooncake lists no keys of other tenants",
    ]


def _format_growth(then: float, now: float, seconds: float) -> str:
    """Return by how much a number grew per second, from ``then`` to ``now`` in ``seconds``, as text with a sign."""
    growth = (now - then) / seconds if seconds > 0 else 0.0
    return f"{growth:+.4g}" if growth else "0"


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from 0.1 to 3600; if it is the configuration, write it before --watch"
        )
    return seconds
