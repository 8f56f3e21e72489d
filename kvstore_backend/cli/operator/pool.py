"""Pool of an operator's command: its arguments, and its opened holdings."""

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
    parser.add_argument("config", nargs="?", help="a configuration file in any dialect, or a URL; else the environment")
    parser.add_argument("--tenant", metavar="NAME", help="the owner of the blocks, where the master separates tenants")
    parser.add_argument("--master-metrics", metavar="HOST:PORT", help="where the master's --metrics_port is")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")


def read_pool_config(arguments: argparse.Namespace) -> PoolConfig:
    """Read the configuration that the arguments name, for the tenant that they name.

    Raises:
        ConfigError: the configuration cannot be used, has no pool, or its store has no tenants.
    """
    config = find_pool(arguments.config, getattr(arguments, "instances", []))
    if arguments.tenant is None:
        return config
    if not isinstance(config.store, MooncakeSettings):
        raise ConfigError(f"--tenant is {arguments.tenant!r}, but the store {config.backend} knows no tenants")
    try:
        return replace(config, store=replace(config.store, tenant_id=parse_tenant(arguments.tenant)))
    except ValueError as exc:
        raise ConfigError(f"--tenant is {arguments.tenant!r}; {exc}") from None


def find_pool(source: str | None, instances: Sequence[str]) -> PoolConfig:
    """Read the pool that ``source`` or the environment names; without both, the pool of the first instance.

    Raises:
        ConfigError: the configuration cannot be used, or has no pool.
        PoolUnavailable: the instance does not report its pool.
    """
    if source is None and instances and not names_pool():
        source = find_pool_url(instances[0])
    config = read_config(source)
    if config is None:
        raise ConfigError("the configuration says that there is no pool")
    return config


@contextlib.contextmanager
def open_holdings(arguments: argparse.Namespace) -> Iterator[Holdings]:
    """Open the holdings of the pool, and close them at the end of the block.

    Raises:
        ConfigError: as ``read_pool_config``; or only the pool's own process can list it.
        PoolUnavailable: no server answers, or it is not a pool.
    """
    with _silence_log(), contextlib.closing(_find_holdings(arguments)) as holdings:
        yield holdings


@contextlib.contextmanager
def _silence_log() -> Iterator[None]:
    """Silence the log of this package during the block; the commands' messages contain everything that matters."""
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
            raise ConfigError("memory is each process's own: only that process can list what it holds")
