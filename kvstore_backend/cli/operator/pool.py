"""Reads the arguments that select the pool of an operator's command, and opens the pool's holdings."""

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

__all__ = ["add_pool_arguments", "find_pool", "open_holdings", "read_pool_config"]


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that select the pool, the tenant and the output format."""
    parser.add_argument("config", nargs="?", help="configuration file of any engine, or URL; default: the environment")
    parser.add_argument("--tenant", metavar="NAME", help="tenant of the blocks, if the master separates tenants")
    parser.add_argument(
        "--master-metrics", metavar="HOST:PORT", help="address of the master's metrics (its --metrics_port)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")


def read_pool_config(arguments: argparse.Namespace) -> PoolConfig:
    """Read the configuration of the pool and the tenant that the arguments select.

    Raises:
        ConfigError: the configuration cannot be used or has no pool, or the pool has no tenants.
    """
    config = find_pool(arguments.config, getattr(arguments, "instances", []))
    if arguments.tenant is None:
        return config
    if not isinstance(config.store, MooncakeSettings):
        raise ConfigError(f"--tenant is {arguments.tenant!r}, but a {config.backend} pool has no tenants")
    try:
        return replace(config, store=replace(config.store, tenant_id=parse_tenant(arguments.tenant)))
    except ValueError as exc:
        raise ConfigError(f"--tenant is {arguments.tenant!r}; {exc}") from None


def find_pool(source: str | None, instances: Sequence[str]) -> PoolConfig:
    """Read the configuration of a pool: from ``source``, else from the environment, else from the first instance.

    Raises:
        ConfigError: the configuration cannot be used, or has no pool.
        PoolUnavailable: the instance does not report its pool.
    """
    if source is None and instances and not names_pool():
        source = find_pool_url(instances[0])
    config = read_config(source)
    if config is None:
        raise ConfigError('the configuration turns the pool off ("backend": ""); name a pool')
    return config


@contextlib.contextmanager
def open_holdings(arguments: argparse.Namespace) -> Iterator[Holdings]:
    """Open the holdings of the pool, and close them at the end of the ``with`` block.

    Raises:
        ConfigError: the configuration cannot be used or has no pool, or only the pool's own process can list it.
        PoolUnavailable: the pool does not answer.
    """
    with _silence_log(), contextlib.closing(_find_holdings(arguments)) as holdings:
        yield holdings


@contextlib.contextmanager
def _silence_log() -> Iterator[None]:
    """Silence the log of this package in the ``with`` block, because the command's own messages report errors."""
    logger = logging.getLogger("kvstore_backend")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _find_holdings(arguments: argparse.Namespace) -> Holdings:
    config = read_pool_config(arguments)
    match config.store:
        case MooncakeSettings() as store:
            return MooncakeHoldings(store, checks.require_admin(store, arguments.master_metrics))
        case FileSettings() as store:
            return FolderHoldings(store)
        case MemorySettings():
            raise ConfigError("a memory pool belongs to one process; only that process can list its blocks")
