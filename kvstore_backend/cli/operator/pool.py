"""Reads the arguments of an operator's command that select the pool, and gives access to the values in this pool."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvstore_backend.backend import ConfigError
from kvstore_backend.cli import checks
from kvstore_backend.cli.operator.asking import find_pool_url
from kvstore_backend.config import (
    FileSettings,
    MemorySettings,
    MooncakeSettings,
    PoolConfig,
    names_pool,
    parse_tenant,
    read_config,
)
from kvstore_backend.stores.holdings import FolderHoldings, Holdings, MooncakeHoldings

__all__ = ["add_pool_arguments", "find_pool", "open_holdings"]


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that select the pool, the tenant and the output format."""
    parser.add_argument(
        "config", nargs="?", help="URL of the pool, or a configuration file of any engine; default: the environment"
    )
    parser.add_argument("--tenant", metavar="NAME", help="tenant of the blocks, if the master separates tenants")
    parser.add_argument(
        "--master-metrics", metavar="HOST:PORT", help="address of the master's metrics (its --metrics_port)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")


def find_pool(source: str | None, instances: Sequence[str]) -> PoolConfig:
    """Read the configuration of a pool: from ``source``, else from the environment, else from the first instance.

    Raises:
        ConfigError: the configuration cannot be used, or turns the pool off.
        PoolUnavailable: the first instance does not answer, or does not report which pool it uses.
    """
    if source is None and instances and not names_pool():
        source = find_pool_url(instances[0])
    config = read_config(source)
    if config is None:
        raise ConfigError('the configuration turns the pool off ("backend": ""); give a URL or another file')
    return config


@contextlib.contextmanager
def open_holdings(arguments: argparse.Namespace) -> Iterator[Holdings]:
    """Give access to the values in the pool that the arguments select, for the ``with`` block.

    The log of this package is silent in the block, because the command's own messages report errors.

    Raises:
        ConfigError: the configuration cannot be used or has no pool, the arguments have a tenant but the pool has no
            tenants, or only the process that owns the pool can list its blocks.
        PoolUnavailable: the pool does not answer.
    """
    logger = logging.getLogger("kvstore_backend")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.closing(_find_holdings(arguments)) as holdings:
            yield holdings
    finally:
        logger.setLevel(level)


def _find_holdings(arguments: argparse.Namespace) -> Holdings:
    config = find_pool(arguments.config, getattr(arguments, "instances", []))
    if arguments.tenant is not None and not isinstance(config.store, MooncakeSettings):
        raise ConfigError(f"--tenant is {arguments.tenant!r}, but a {config.backend} pool has no tenants")
    match config.store:
        case MooncakeSettings() as store:
            try:
                tenant = store.tenant_id if arguments.tenant is None else parse_tenant(arguments.tenant)
            except ValueError as exc:
                raise ConfigError(f"--tenant is {arguments.tenant!r}; {exc}") from None
            return MooncakeHoldings(
                replace(store, tenant_id=tenant), checks.require_admin(store, arguments.master_metrics)
            )
        case FileSettings() as store:
            return FolderHoldings(store)
        case MemorySettings():
            raise ConfigError(
                "a memory pool belongs to one process; only that process can list its blocks; give another pool"
            )
