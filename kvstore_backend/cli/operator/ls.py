"""Show the namespaces of a pool, or how many blocks of a prefix the pool has."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kvcommon.formats import format_bytes
from kvstore_backend.cli.operator.pool import add_pool_arguments, open_holdings
from kvstore_backend.cli.operator.scope import (
    NamespaceEntry,
    Scope,
    add_scope_arguments,
    find_scope,
    names_prefix,
    read_catalogue,
)
from kvstore_backend.cli.report import print_json, print_table
from kvstore_backend.stores.holdings import Holdings

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore ls``."""
    add_pool_arguments(parser)
    add_scope_arguments(parser, verb="show")


def run(arguments: argparse.Namespace) -> int:
    """Print the namespaces of a pool, or how many blocks of the prefix in the arguments the pool has.

    Raises:
        ConfigError: the arguments select no blocks, or cannot be used.
        PoolUnavailable: the pool cannot be reached, or cannot list its keys.
    """
    with open_holdings(arguments) as holdings:
        if names_prefix(arguments):
            return _show_prefix(find_scope(arguments, holdings), holdings, is_json=arguments.json)
        catalogue = read_catalogue(holdings)
        shown = list(catalogue.namespaces.values())
        if arguments.namespace:
            wanted = [scope.digest for scope in find_scope(arguments, holdings)]
            shown = [catalogue.namespaces.get(digest, NamespaceEntry(digest)) for digest in wanted]
        rows = [_describe_entry(each, holdings) for each in sorted(shown, key=lambda each: -len(each.keys))]
        figures = {"namespaces": rows, "other_keys": catalogue.others, "kept_keys": holdings.count_pins()}
    if arguments.json:
        print_json(figures)
    else:
        _print_namespaces(figures, in_full=bool(arguments.namespace))
    return 0


def _print_namespaces(figures: dict[str, Any], *, in_full: bool) -> None:
    rows, others, kept = figures["namespaces"], figures["other_keys"], figures["kept_keys"]
    if rows:
        heads = ("namespace", "blocks", "size", "tokens", "model", "dtype", "rank")
        print_table(heads, [_row_of(each) for each in rows])
    else:
        print("the pool has no blocks of this software" if others else "the pool is empty")
    for each in rows if in_full else ():
        _print_manifest(each)
    if others:
        print(f"the pool has {others} keys of other software")
    if kept:
        print(f"{kept} keys are pinned, which protects them from eviction")


def _describe_entry(entry: NamespaceEntry, holdings: Holdings) -> dict[str, Any]:
    manifest = entry.manifest
    size = manifest.block_size if manifest else 0
    return {
        "namespace": entry.digest,
        "blocks": len(entry.keys),
        "bytes": entry.measure(holdings),
        "tokens": len(entry.keys) * size if size else None,
        "manifest": manifest.to_json() if manifest else None,
    }


def _row_of(row: dict[str, Any]) -> tuple[object, ...]:
    size = "?" if row["bytes"] is None else format_bytes(row["bytes"])
    tokens = "?" if row["tokens"] is None else row["tokens"]
    if row["manifest"] is None:
        return row["namespace"], row["blocks"], size, tokens, "?", "?", "?"
    fields, facts = row["manifest"]["fields"], row["manifest"]["facts"]
    rank = f"{fields.get('tp_rank', 0)}/{fields.get('tp_size', 1)}"
    return row["namespace"], row["blocks"], size, tokens, facts.get("name", "?"), fields.get("kv_dtype", "?"), rank


def _print_manifest(row: dict[str, Any]) -> None:
    if row["manifest"] is None:
        print(f"\nthe pool has no manifest (description) of namespace {row['namespace']}")
        return
    print(f"\nmanifest of namespace {row['namespace']}, first written {row['manifest']['written_at'] or '(unknown)'}")
    for name, value in {**row["manifest"]["facts"], **row["manifest"]["fields"]}.items():
        print(f"  {name}: {value}")


def _show_prefix(scopes: Sequence[Scope], holdings: Holdings, *, is_json: bool) -> int:
    rows: list[dict[str, Any]] = []
    for scope in scopes:
        keys = scope.name_keys(holdings)
        sizes = holdings.find_sizes(keys)
        leading = next((i for i, size in enumerate(sizes) if size is None), len(sizes))
        found = [size for size in sizes if size is not None]
        rows.append(
            {
                "namespace": scope.digest,
                "blocks": len(keys),
                "tokens": scope.num_tokens,
                "found": len(found),
                "leading": leading,
                "leading_tokens": leading * scope.num_tokens // len(keys),
                "bytes": sum(found),
                "keys": dict(zip(keys, sizes, strict=True)),
            }
        )
    if is_json:
        print_json({"prefixes": rows})
        return 0
    for row in rows:
        print(
            f"namespace {row['namespace']}: the pool has {row['found']} of {row['blocks']} blocks of the prefix "
            f"({format_bytes(row['bytes'])}); the {row['leading']} leading blocks can be used: "
            f"{row['leading_tokens']} of {row['tokens']} tokens"
        )
    return 0
