"""Pin blocks, which protects them from eviction for a time, or unpin them: ``kvstore pin`` and ``kvstore unpin``.

Mooncake sets and removes pins only in a write. So both commands read each block and write the same bytes again in the
same place. During this write, other clients do not find the block.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvstore_backend.backend import ConfigError, PoolUnavailable, Status, split_by_size
from kvstore_backend.cli.operator.pool import add_pool_arguments, open_holdings
from kvstore_backend.cli.operator.scope import Scope, add_scope_arguments, find_scope
from kvstore_backend.cli.report import print_json, show_progress
from kvstore_backend.stores.holdings import Holdings, StoredBytes
from kvstore_backend.wrappers.checked import find_fault

__all__ = ["add_pin_arguments", "add_unpin_arguments", "parse_duration", "pin", "unpin"]

_DURATION = re.compile(r"(\d{1,9})(s|m|h|d)?", re.ASCII)
_BATCH_BYTES = 32 << 20
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_pin_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore pin``."""
    add_pool_arguments(parser)
    add_scope_arguments(parser, verb="pin")
    parser.add_argument(
        "--for",
        dest="seconds",
        type=parse_duration,
        default="30m",
        metavar="TIME",
        help="duration: 90s, 30m, 1h, 1d (default 30m); the maximum is the master's --max_kv_soft_pin_ttl, one day",
    )
    _add_dry_run(parser)
    parser.epilog = (
        "A pin is Mooncake's soft pin: pinned blocks are evicted last. Reading a block does not renew its pin, and a "
        "restart of the master removes all pins."
    )


def add_unpin_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore unpin``."""
    add_pool_arguments(parser)
    add_scope_arguments(parser, verb="unpin")
    _add_dry_run(parser)


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only print how many blocks would be selected")


def pin(arguments: argparse.Namespace) -> int:
    """Pin the blocks that the arguments select.

    Raises:
        ConfigError: the arguments select no blocks, or the pool cannot pin blocks.
        PoolUnavailable: the pool cannot be reached, or not all blocks could be read and written.
    """
    return _change_pins(arguments, arguments.seconds, "pinned")


def unpin(arguments: argparse.Namespace) -> int:
    """Unpin the blocks that the arguments select. Raises the same errors as ``pin``."""
    return _change_pins(arguments, 0.0, "unpinned")


def parse_duration(text: str) -> float:
    """Parse ``90s``, ``30m``, ``1h``, ``1d`` to seconds; a number without a unit means seconds."""
    match = _DURATION.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 90s, 30m, 1h or 1d")
    return float(int(match[1]) * _UNITS[match[2] or "s"])


def _change_pins(arguments: argparse.Namespace, seconds: float, verb: str) -> int:
    with open_holdings(arguments) as holdings:
        if not holdings.can_keep:
            raise ConfigError("a file pool cannot pin blocks; only Mooncake can")
        results = {}
        for scope in find_scope(arguments, holdings):
            results[scope.digest] = _change_scope(scope, holdings, seconds, is_dry=arguments.dry_run)
    if arguments.json:
        print_json({"dry_run": arguments.dry_run, "seconds": seconds, "namespaces": results})
    else:
        for digest, counts in results.items():
            would = "would be " if arguments.dry_run else ""
            print(f"{counts['done']} blocks of namespace {digest} {would}{verb}{_tell_rest(counts)}")
    if seconds and not any(counts["done"] or counts["failed"] for counts in results.values()):
        raise PoolUnavailable("the pool has none of the selected blocks, or they are damaged, so nothing is pinned")
    if not seconds and any(counts["damaged"] for counts in results.values()):
        raise PoolUnavailable(
            "damaged blocks are not written again, so they stay pinned; remove them with kvstore clear"
        )
    if any(counts["failed"] for counts in results.values()):
        raise PoolUnavailable(
            f"not all blocks were {verb}: some could not be read, another client was reading or writing some, or --for "
            "is longer than the master allows (--max_kv_soft_pin_ttl); try again"
        )
    return 0


def _change_scope(scope: Scope, holdings: Holdings, seconds: float, *, is_dry: bool) -> dict[str, int]:
    """Pin the blocks of a scope, or unpin them if ``seconds`` is 0.

    Returns the numbers of blocks: ``done``, ``absent``, ``damaged`` and ``failed``. With ``is_dry``, no block changes,
    and the present blocks count as ``done``.
    """
    named = scope.name_keys(holdings)
    found = [(key, size) for key, size in zip(named, holdings.find_sizes(named), strict=True) if size is not None]
    keys, sizes = [key for key, _ in found], [size for _, size in found]
    counts = Counter(done=0, absent=len(scope.keys) - len(keys) if scope.keys else 0, damaged=0, failed=0)
    if is_dry:
        counts["done"] = len(keys)
        return dict(counts)
    with show_progress("pin" if seconds else "unpin", len(keys)) as tell:
        for part in split_by_size(sizes, _BATCH_BYTES):
            batch = _read_batch(holdings, keys[part], sizes[part])
            stored = holdings.keep_values(batch.keys, batch.values, seconds).count(Status.OK)
            failed = len(batch.keys) - stored + batch.unread
            counts.update(done=stored, failed=failed, absent=batch.gone, damaged=batch.damaged)
            tell(sum(counts.values()))
    return dict(counts)


def _tell_rest(counts: dict[str, int]) -> str:
    rest = {"absent": "not in the pool", "damaged": "damaged, so not changed", "failed": "could not be read or written"}
    parts = [f"{counts[name]} {text}" for name, text in rest.items() if counts[name]]
    return f" ({', '.join(parts)})" if parts else ""


class _Batch(NamedTuple):
    """Result of one read from the pool: the blocks that were read, and the numbers of the other blocks, by reason.

    Attributes:
        keys: keys of the blocks that were read and passed the check.
        values: values of these blocks, with their headers.
        gone: number of blocks that the pool has lost since they were looked up, for example by eviction.
        unread: number of blocks that could not be read although the pool has them, for example because a lease ended.
        damaged: number of blocks that failed the check.
    """

    keys: list[str]
    values: list[StoredBytes]
    gone: int
    unread: int
    damaged: int


def _read_batch(holdings: Holdings, keys: Sequence[str], sizes: Sequence[int]) -> _Batch:
    read = list(zip(keys, holdings.read_values(keys, sizes), strict=True))
    arrived = [(key, value) for key, value in read if value is not None]
    missing = [key for key, value in read if value is None]
    unread = sum(size is not None for size in holdings.find_sizes(missing)) if missing else 0
    whole = [(key, value) for key, value in arrived if find_fault(key, value) is None]
    return _Batch(
        [key for key, _ in whole],
        [value for _, value in whole],
        gone=len(missing) - unread,
        unread=unread,
        damaged=len(arrived) - len(whole),
    )
