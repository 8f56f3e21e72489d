"""Remove blocks from a pool: those of namespaces, or of a prefix; nothing that is not named."""

from __future__ import annotations

import argparse

from kvstore_backend.backend import ConfigError, PoolUnavailable, Status
from kvstore_backend.cli.operator.catalogue import read_catalogue
from kvstore_backend.cli.operator.pool import add_pool_arguments, open_holdings
from kvstore_backend.cli.operator.scope import Scope, add_scope_arguments, find_scope, names_prefix
from kvstore_backend.cli.report import print_json
from kvstore_backend.namespace import BLOCK_PREFIX, key_prefix
from kvstore_backend.stores.holdings import Holdings

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore clear``."""
    add_pool_arguments(parser)
    add_scope_arguments(parser, verb="remove")
    parser.add_argument(
        "--all", action="store_true", help="remove all namespaces (of the tenant); keys of other software stay"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.epilog = (
        "A prefix's blocks are those of everybody whose prompts begin alike. Instances keep what is in their own "
        "caches: kvrouter or POST /clear_prefix_cache empties those."
    )


def run(arguments: argparse.Namespace) -> int:
    """Remove the blocks that are named, and print how many these were.

    Raises:
        ConfigError: the arguments do not tell which.
        PoolUnavailable: the pool cannot be reached, or did not do all of it.
    """
    with open_holdings(arguments) as holdings:
        if arguments.all and not holdings.is_listed and not arguments.dry_run:
            removed = {"all": holdings.remove_prefix(BLOCK_PREFIX)}
        else:
            removed = {
                scope.digest: _count_blocks(scope, holdings) if arguments.dry_run else _clear_scope(scope, holdings)
                for scope in _find_scopes(arguments, holdings)
            }
    if arguments.json:
        print_json({"dry_run": arguments.dry_run, "removed": removed})
        return 0
    verb = "would be removed" if arguments.dry_run else "removed"
    for digest, count in removed.items():
        print(f"{count} blocks {verb} of {'all namespaces' if digest == 'all' else f'namespace {digest}'}")
    if not removed:
        print("the pool has no namespace: nothing to remove")
    return 0


def _find_scopes(arguments: argparse.Namespace, holdings: Holdings) -> list[Scope]:
    if not arguments.all:
        return find_scope(arguments, holdings)
    if arguments.namespace or names_prefix(arguments):
        raise ConfigError("--all is everything: leave it out, or leave out what else is named")
    return [Scope(digest, None) for digest in read_catalogue(holdings).namespaces]


def _count_blocks(scope: Scope, holdings: Holdings) -> int:
    if scope.keys is None:
        return len(scope.name_keys(holdings))
    return sum(size is not None for size in holdings.find_sizes(scope.keys))


def _clear_scope(scope: Scope, holdings: Holdings) -> int:
    """Remove the blocks; how many there were.

    Raises:
        PoolUnavailable: some of them are still there, or may be.
    """
    if scope.keys is None:
        return holdings.remove_prefix(key_prefix(scope.digest))
    statuses = holdings.remove_keys(scope.keys)
    removed, failed = statuses.count(Status.OK), statuses.count(Status.FAILED)
    if failed:
        raise PoolUnavailable(f"{removed} blocks removed, but {failed} could not be: they may be in the pool still")
    return removed
