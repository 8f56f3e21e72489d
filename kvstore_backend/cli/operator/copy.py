"""Copy a namespace to a folder, and from a folder into a pool: ``kvstore export`` and ``kvstore import``."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvcommon.formats import format_bytes
from kvstore_backend.backend import ConfigError, PoolUnavailable, Status, split_by_size
from kvstore_backend.cli.operator.archive import ArchivedBlock, ArchiveReader, ArchiveWriter
from kvstore_backend.cli.operator.catalogue import find_manifests
from kvstore_backend.cli.operator.pool import add_pool_arguments, find_tenant, open_holdings
from kvstore_backend.cli.operator.scope import add_scope_arguments, find_scope
from kvstore_backend.cli.operator.values import find_present, read_batches
from kvstore_backend.cli.progress import show_progress
from kvstore_backend.cli.report import print_json
from kvstore_backend.manifest import encode_manifest, manifest_key
from kvstore_backend.stores.holdings import Holdings, StoredBytes, wrap_bytes

__all__ = ["add_export_arguments", "add_import_arguments", "export_blocks", "import_blocks"]

_BATCH_BYTES = 32 << 20


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore export``."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to: a new folder, or one to go on with")
    add_pool_arguments(parser)
    add_scope_arguments(parser, verb="copy")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be copied")
    parser.epilog = (
        "Nothing is taken out of the pool. In a folder with an earlier export, blocks that changed are written again, "
        "and those that the pool has no more stay."
    )


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore import``."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what kvstore export wrote")
    add_pool_arguments(parser)
    parser.add_argument("--namespace", metavar="DIGEST", help="only if the folder has this namespace")
    parser.add_argument("--dry-run", action="store_true", help="check the folder, and only say what would be stored")
    parser.epilog = (
        "Every block is checked before it is stored; blocks that the pool has stay as they are. Checks find damage, "
        "not forgery: who wrote the folder decides what these blocks say for their prompts. Import only what you trust."
    )


def export_blocks(arguments: argparse.Namespace) -> int:
    """Copy the blocks that the arguments name.

    Raises:
        ConfigError: the arguments do not name blocks, or the folder cannot be used.
        PoolUnavailable: the pool or the folder cannot be reached, or not all blocks arrived.
    """
    with open_holdings(arguments) as holdings:
        scopes = find_scope(arguments, holdings)
        if len(scopes) != 1:
            raise ConfigError(f"{len(scopes)} namespaces are named; a folder has one: export them one by one")
        keys, sizes = find_present(scopes[0], holdings)
        digest, total = scopes[0].digest, sum(sizes)
        counts = Counter(blocks=len(keys), bytes=total, gone=0, damaged=0)
        if not arguments.dry_run and keys:
            writer = ArchiveWriter(arguments.folder, digest)
            counts = _export_values(holdings, keys, sizes, writer)
            writer.finish(find_tenant(arguments), find_manifests(holdings, [digest]).get(digest))
    if arguments.json:
        print_json({"dry_run": arguments.dry_run, "namespace": digest, "folder": str(arguments.folder), **counts})
    elif not keys:
        print(f"the pool has no such blocks of namespace {digest}: nothing to export")
    else:
        verb = "would be copied" if arguments.dry_run else "copied"
        print(f"{counts['blocks']} blocks ({format_bytes(counts['bytes'])}) of namespace {digest} {verb}")
    if counts["gone"] or counts["damaged"]:
        raise PoolUnavailable(
            f"{counts['gone']} blocks were evicted meanwhile or did not arrive, {counts['damaged']} are damaged: the "
            "folder is whole without them; export again to it for those that are back"
        )
    return 0


def _export_values(holdings: Holdings, keys: list[str], sizes: list[int], writer: ArchiveWriter) -> Counter[str]:
    """Write the values to the folder.

    Returns the number of ``blocks`` and ``bytes`` that arrived, and of blocks ``gone`` or ``damaged``.
    """
    counts = Counter(blocks=0, bytes=0, gone=0, damaged=0)
    with show_progress("export", sum(sizes)) as tell:
        for batch in read_batches(holdings, keys, sizes):
            for key, value in zip(batch.keys, batch.values, strict=True):
                writer.add(key, value)
            nbytes = sum(value.nbytes for value in batch.values)
            counts.update(blocks=len(batch.keys), bytes=nbytes, gone=batch.gone, damaged=batch.damaged)
            tell(counts["bytes"])
    return counts


def import_blocks(arguments: argparse.Namespace) -> int:
    """Store a folder's blocks.

    Raises:
        ConfigError: the folder is not a complete export, or has another namespace.
        PoolUnavailable: the pool cannot be reached, or not all blocks could be stored.
    """
    archive = ArchiveReader(arguments.folder)
    if arguments.namespace is not None and arguments.namespace != archive.digest:
        raise ConfigError(f"{arguments.folder} has namespace {archive.digest}, and {arguments.namespace} is asked for")
    if (tenant := find_tenant(arguments)) != archive.tenant:
        raise ConfigError(
            f"{arguments.folder} has blocks of tenant {archive.tenant!r}, which those of tenant {tenant!r} could not "
            f"find: say --tenant {archive.tenant}"
        )
    counts = Counter(stored=0, present=0, damaged=0, refused=0)
    with open_holdings(arguments) as holdings, show_progress("import", len(archive.blocks)) as tell:
        for part in split_by_size([block.nbytes for block in archive.blocks], _BATCH_BYTES):
            counts.update(_import_part(archive, archive.blocks[part], holdings, is_dry=arguments.dry_run))
            tell(sum(counts.values()))
        if archive.manifest is not None and not arguments.dry_run:
            holdings.write_values([manifest_key(archive.digest)], [wrap_bytes(encode_manifest(archive.manifest))])
    _print_import(arguments, archive, counts)
    if counts["damaged"] or counts["refused"]:
        raise PoolUnavailable(
            f"{counts['damaged']} blocks of the folder are damaged and were left out; {counts['refused']} found no "
            "room in the pool, or it did not answer: import again for those"
        )
    return 0


def _print_import(arguments: argparse.Namespace, archive: ArchiveReader, counts: Counter[str]) -> None:
    if arguments.json:
        print_json({"dry_run": arguments.dry_run, "namespace": archive.digest, **counts})
        return
    verb = "would be stored" if arguments.dry_run else "stored"
    print(f"{counts['stored']} blocks of namespace {archive.digest} {verb}, {counts['present']} were there already")
    print("they were checked for damage, not for forgery: who wrote the folder is trusted with this model's answers")


def _import_part(
    archive: ArchiveReader, blocks: list[ArchivedBlock], holdings: Holdings, *, is_dry: bool
) -> dict[str, int]:
    """Store some blocks; return how many were ``stored``, ``present``, ``damaged`` and ``refused``."""
    read = list(_read_sound(archive, blocks))
    there = holdings.find_sizes([key for key, _ in read])
    missing = [pair for pair, size in zip(read, there, strict=True) if size is None]
    stored = len(missing)
    if missing and not is_dry:
        stored = holdings.write_values([key for key, _ in missing], [value for _, value in missing]).count(Status.OK)
    return {
        "stored": stored,
        "present": len(read) - len(missing),
        "damaged": len(blocks) - len(read),
        "refused": len(missing) - stored,
    }


def _read_sound(archive: ArchiveReader, blocks: list[ArchivedBlock]) -> Iterator[tuple[str, StoredBytes]]:
    for block in blocks:
        read = archive.read_block(block)
        if not isinstance(read, str):
            yield read
