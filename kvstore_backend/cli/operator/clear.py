"""Remove the blocks of namespaces, or of a prefix, from a pool."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore_backend.backend import ConfigError, PoolUnavailable
from kvstore_backend.clear_marks import ALL, make_mark, mark_key
from kvstore_backend.cli.operator.asking import (
    CacheState,
    clear_cache,
    clear_caches_of_router,
    is_address,
    list_instances,
    read_cache,
)
from kvstore_backend.cli.operator.pool import add_pool_arguments, open_holdings
from kvstore_backend.cli.operator.scope import Scope, add_scope_arguments, find_scope, names_prefix, read_catalogue
from kvstore_backend.cli.report import print_json
from kvstore_backend.namespace import BLOCK_PREFIX, key_prefix
from kvstore_backend.stores.holdings import Holdings

__all__ = ["add_arguments", "run"]

# Instances need less time to find a mark (``refill.py``) and to write their queued blocks.
_SETTLE_SECONDS = 6.0
# Seconds of the longest pin that a Mooncake master grants by default.
_MARK_KEPT_SECONDS = 86400.0
_MAX_TRIES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore clear``."""
    add_pool_arguments(parser)
    add_scope_arguments(parser, verb="remove")
    add = parser.add_argument
    add(
        "--all",
        action="store_true",
        help="remove the blocks of all namespaces (of the tenant); keys of other software stay",
    )
    add("--dry-run", action="store_true", help="only print what would be removed")
    add(
        "--yes",
        action="store_true",
        help="do not ask for confirmation on a terminal (without a terminal, the command never asks)",
    )
    add(
        "--instances",
        nargs="+",
        default=[],
        metavar="HOST:PORT",
        help="instances that report how many blocks their own caches still have; write CONFIG before this flag",
    )
    add("--router", metavar="HOST:PORT", help="router whose instances all report their own caches, as with --instances")
    add("--token-file", type=Path, metavar="FILE", help="file with the router's admin token, if it has one")
    add(
        "--caches",
        action="store_true",
        help="also clear the own caches of the instances in --instances and --router completely",
    )
    parser.epilog = (
        "The blocks of a prefix belong to all prompts that begin with it. After the removal the command waits six "
        "seconds, and then removes the blocks that arrived meanwhile. Instances do not save their cached blocks again, "
        "but they still use their own caches; --caches with --instances or --router clears these."
    )


def run(arguments: argparse.Namespace) -> int:
    """Remove the blocks that the arguments select, and print how many were removed.

    Raises:
        ConfigError: the arguments select no blocks, or contradict each other.
        PoolUnavailable: the pool or the router cannot be reached, or did not remove all blocks; or an instance did
            not answer, or did not clear its cache.
    """
    if arguments.caches and not (arguments.instances or arguments.router):
        raise ConfigError("--caches clears the own caches of instances; name them with --instances or --router")
    for each in arguments.instances:
        if not is_address(each):
            raise ConfigError(
                f"--instances has {each!r}, which is not HOST:PORT; write the configuration before the instances: "
                "kvstore clear CONFIG --instances HOST:PORT ..."
            )
    with open_holdings(arguments) as holdings:
        is_whole = arguments.all and not holdings.is_listed and not arguments.dry_run
        scopes = [] if is_whole else _find_scopes(arguments, holdings)
        if arguments.dry_run:
            _report(arguments, _count_all(scopes, holdings), 0, [])
            return 0
        instances = _find_instances(arguments)
        may_ask = not arguments.yes and not arguments.json and _is_terminal()
        if may_ask and not _is_confirmed(_count_all(scopes, holdings)):
            print("nothing was removed")
            return 1
        cleared = [ALL] if arguments.all else [scope.digest for scope in scopes]
        are_marked = [_write_mark(holdings, mark_key(digest)) for digest in cleared]
        troubles = _clear_caches(arguments) if arguments.caches else []
        removed = _remove(holdings, scopes, is_whole=is_whole)
        time.sleep(_SETTLE_SECONDS)
        late = sum(_remove(holdings, scopes, is_whole=is_whole).values())
    states = []
    for address in instances:
        try:
            states.append(read_cache(address))
        except PoolUnavailable as exc:
            troubles.append(str(exc))
    _report(arguments, removed, late, [each for each in states if is_whole or _may_hold(each, scopes, arguments)])
    if not all(are_marked):
        troubles.append(
            "the pool did not store the mark that tells instances of this removal, so they may store the removed "
            "blocks again; repeat the command"
        )
    if troubles:
        raise PoolUnavailable("; ".join(troubles))
    return 0


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _is_confirmed(counts: dict[str, int]) -> bool:
    """Print how many blocks would be removed, and ask for confirmation; return whether the answer is yes."""
    for digest, count in counts.items():
        print(f"{count} blocks of namespace {digest}")
    if not counts:
        print("all blocks of all namespaces")
    try:
        return input("remove them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _find_scopes(arguments: argparse.Namespace, holdings: Holdings) -> list[Scope]:
    if not arguments.all:
        return find_scope(arguments, holdings)
    if arguments.namespace or names_prefix(arguments):
        raise ConfigError("--all removes the blocks of all namespaces; leave out --all, or --namespace and the prefix")
    if holdings.has_other_tenants:
        raise ConfigError(
            "the master does not separate tenants, so --all would remove the blocks of all tenants; name the tenant's "
            "namespaces with --namespace (kvstore ls shows digests), or give --tenant default to remove them all"
        )
    return [Scope(digest, None) for digest in read_catalogue(holdings).namespaces]


def _write_mark(holdings: Holdings, key: str) -> bool:
    """Write a mark from which instances learn that blocks were removed; return whether the pool stored the mark."""
    mark = make_mark(key)
    for _ in range(_MAX_TRIES):  # another operator may write the same mark at the same time
        holdings.remove_keys([key])
        if not all(holdings.keep_values([key], [mark], _MARK_KEPT_SECONDS)):
            holdings.write_values([key], [mark])
        [stored] = holdings.read_values([key], [mark.nbytes])
        if stored is not None and stored.tobytes() == mark.tobytes():
            return True
    return False


def _remove(holdings: Holdings, scopes: Sequence[Scope], *, is_whole: bool) -> dict[str, int]:
    if is_whole:
        return {ALL: holdings.remove_prefix(BLOCK_PREFIX)}
    return {scope.digest: _clear_scope(scope, holdings) for scope in scopes}


def _count_all(scopes: Sequence[Scope], holdings: Holdings) -> dict[str, int]:
    return {scope.digest: _count_blocks(scope, holdings) for scope in scopes}


def _count_blocks(scope: Scope, holdings: Holdings) -> int:
    if scope.keys is None:
        return len(scope.name_keys(holdings))
    return sum(size is not None for size in holdings.find_sizes(scope.keys))


def _clear_scope(scope: Scope, holdings: Holdings) -> int:
    """Remove the blocks of a scope; return how many were removed.

    Raises:
        PoolUnavailable: some blocks could not be removed.
    """
    if scope.keys is None:
        return holdings.remove_prefix(key_prefix(scope.digest))
    return holdings.remove_and_count(scope.keys)


def _find_instances(arguments: argparse.Namespace) -> list[str]:
    """Return the addresses of the instances in ``--instances``, and of the instances of ``--router``."""
    listed = list_instances(arguments.router, arguments.token_file) if arguments.router else []
    return list(dict.fromkeys([*arguments.instances, *listed]))


def _clear_caches(arguments: argparse.Namespace) -> list[str]:
    """Clear the own caches of the instances in the arguments; return a sentence for each failure."""
    troubles = []
    if arguments.router:
        troubles += clear_caches_of_router(arguments.router, arguments.token_file)
    for address in arguments.instances:
        try:
            clear_cache(address)
        except PoolUnavailable as exc:
            troubles.append(str(exc))
    return troubles


def _may_hold(state: CacheState, scopes: Sequence[Scope], arguments: argparse.Namespace) -> bool:
    """Return whether the own cache of an instance may have blocks that this command removed from the pool."""
    return arguments.all or state.digest in ("", *(scope.digest for scope in scopes))


def _report(arguments: argparse.Namespace, removed: dict[str, int], late: int, states: Sequence[CacheState]) -> None:
    if arguments.json:
        cached: dict[str, Any] = {each.address: each.num_blocks for each in states}
        print_json({"dry_run": arguments.dry_run, "removed": removed, "removed_late": late, "cached_blocks": cached})
        return
    verb = "would be removed" if arguments.dry_run else "removed"
    for digest, count in removed.items():
        print(f"{count} blocks {verb} of {'all namespaces' if digest == ALL else f'namespace {digest}'}")
    if not removed:
        print("the pool has no blocks of this software, so nothing was removed")
    if late:
        print(f"{late} more blocks, which instances stored during the removal, were also removed")
    for each in states:
        print(each.sentence)
