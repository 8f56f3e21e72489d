"""Folder with a namespace, as ``kvstore export`` writes it and ``kvstore import`` reads it.

::

    namespace.json            the namespace and tenant, the number of blocks, and the pool's manifest of the namespace
    blocks.jsonl              a line each: hash, bytes, SHA-256
    blocks/ab/ab01...ef.block as they are stored: a header that names the block, and its bytes

``namespace.json`` is written last: a folder without it is an incomplete export. An export to an earlier export's folder
adds to it: blocks that the pool has now replace those of the same name; blocks that the pool lacks stay.

Every block is checked twice before it is put into a pool: against its line, and against its own header. This finds
damage and mistakes, but not forgery: the writer of the folder wrote the line, the header and the block, and can put any
contents into any block. The effect of a folder is limited: only regular files are opened, no file is read beyond the
size in its line, and the size in a line is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvstore_backend.backend import ConfigError, PoolUnavailable
from kvstore_backend.config import DEFAULT_TENANT
from kvstore_backend.manifest import Manifest, ManifestError, parse_manifest
from kvstore_backend.namespace import key_prefix
from kvstore_backend.stores.holdings import StoredBytes, wrap_bytes
from kvstore_backend.wrappers.checked import find_fault

__all__ = ["ArchiveReader", "ArchiveWriter", "ArchivedBlock"]

_FORMAT = "kvstore-export-1"
_SUMMARY, _INDEX = "namespace.json", "blocks.jsonl"
_HASH = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_SUMMARY_BYTES = 1 << 20
_MAX_LINE_BYTES = 512
# Size of one block: all layers of 1,024 tokens of a large model, and more than a Mooncake client moves in one call.
_MAX_BLOCK_BYTES = 1 << 30


@dataclass(frozen=True)
class ArchivedBlock:
    """Line of the index.

    Attributes:
        name: the block's hash, 64 hex digits.
        nbytes: size of its file.
        sha256: SHA-256 of its file, in hex digits.
    """

    name: str
    nbytes: int
    sha256: str


class ArchiveWriter:
    """Writer of one namespace; it does not write blocks that the folder already has with the same bytes."""

    def __init__(self, folder: Path, digest: str) -> None:
        """Begin an export to this folder, or continue one.

        Raises:
            ConfigError: the folder contains other files, or an index that cannot be read.
            PoolUnavailable: the folder cannot be written to.
        """
        self._folder = folder
        self._digest = digest
        try:
            folder.mkdir(parents=True, exist_ok=True)
            strange = sorted({path.name for path in folder.iterdir()} - {_SUMMARY, _INDEX, "blocks"})
        except OSError as exc:
            raise PoolUnavailable(f"folder {folder} cannot be made or read: {exc.strerror}") from exc
        if strange:
            raise ConfigError(f"folder {folder} holds {', '.join(strange[:3])}: name a new or an empty one")
        if (folder / _SUMMARY).exists() and (other := ArchiveReader(folder).digest) != digest:
            raise ConfigError(f"folder {folder} has namespace {other}: name another folder for {digest}")
        is_begun = (folder / _INDEX).exists()
        self._blocks = {block.name: block for block in _read_index(folder / _INDEX)} if is_begun else {}

    def add(self, key: str, value: StoredBytes) -> None:
        """Write one block completely or not at all.

        Raises:
            PoolUnavailable: the folder cannot be written to.
        """
        data = value.tobytes()
        block = ArchivedBlock(key.removeprefix(key_prefix(self._digest)), len(data), hashlib.sha256(data).hexdigest())
        path = _block_path(self._folder, block.name)
        if _read_regular(path, len(data), len(data)) != data:
            if block.name in self._blocks:
                self._retract_summary()  # until the index has the new checksum
            self._write_file(path, data)
        self._blocks[block.name] = block

    def finish(self, tenant: str, manifest: Manifest | None) -> dict[str, Any]:
        """Write the index and the summary, and return the summary; blocks without a file are left out."""
        self._blocks = {name: block for name, block in self._blocks.items() if self._has_file(block)}
        lines = "".join(json.dumps(vars(block)) + "\n" for block in self._blocks.values())
        self._write_file(self._folder / _INDEX, lines.encode())
        summary = {
            "format": _FORMAT,
            "namespace": self._digest,
            "tenant": tenant,
            "blocks": len(self._blocks),
            "bytes": sum(block.nbytes for block in self._blocks.values()),
            "exported_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "manifest": manifest.to_json() if manifest else None,
        }
        self._write_file(self._folder / _SUMMARY, json.dumps(summary, indent=2).encode())
        return summary

    def _has_file(self, block: ArchivedBlock) -> bool:
        try:
            found = _block_path(self._folder, block.name).lstat()
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == block.nbytes

    def _retract_summary(self) -> None:
        try:
            (self._folder / _SUMMARY).unlink(missing_ok=True)
        except OSError as exc:
            raise PoolUnavailable(f"folder {self._folder} cannot be written to: {exc.strerror}") from exc

    def _write_file(self, path: Path, data: bytes) -> None:
        draft = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(data)
            draft.replace(path)
        except OSError as exc:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise PoolUnavailable(f"folder {self._folder} cannot be written to: {exc.strerror}") from exc


class ArchiveReader:
    """Reader of a folder that ``ArchiveWriter`` has finished.

    Attributes:
        digest: the namespace.
        tenant: the tenant of the pool that it came from.
        blocks: its index.
        manifest: manifest of the namespace, from the pool that it came from.
    """

    def __init__(self, folder: Path) -> None:
        """Read summary and index.

        Raises:
            ConfigError: the folder is not a complete export.
        """
        self._folder = folder
        summary = self._read_summary()
        self.digest: str = summary["namespace"]
        self.tenant: str = summary.get("tenant", DEFAULT_TENANT)
        self.manifest = _read_manifest(summary.get("manifest"), self.digest)
        self.blocks = list(_read_index(folder / _INDEX, summary["blocks"] + 1))
        if len(self.blocks) != summary["blocks"]:
            count = f"more than {summary['blocks']}" if len(self.blocks) > summary["blocks"] else len(self.blocks)
            mismatch = f"{count} blocks, where {_SUMMARY} says {summary['blocks']}"
            raise ConfigError(f"{folder / _INDEX} lists {mismatch}: export it again")

    def read_block(self, block: ArchivedBlock) -> tuple[str, StoredBytes] | str:
        """Return the key and the value of a block, or a few words that say why it cannot be used."""
        key = key_prefix(self.digest) + block.name
        data = _read_regular(_block_path(self._folder, block.name), block.nbytes, block.nbytes)
        if data is None:
            return f"is no file of {block.nbytes} bytes that can be read"
        if hashlib.sha256(data).hexdigest() != block.sha256:
            return "is not what the index says"
        value = wrap_bytes(data)
        fault = find_fault(key, value)
        return (key, value) if fault is None else f"has a wrong {fault} in its header"

    def _read_summary(self) -> Mapping[str, Any]:
        path = self._folder / _SUMMARY
        if not os.path.lexists(path):
            raise ConfigError(f"{self._folder} is no whole export: it has no {_SUMMARY}")
        if (data := _read_regular(path, 0, _MAX_SUMMARY_BYTES)) is None:
            raise ConfigError(f"{path} is no file of at most {_MAX_SUMMARY_BYTES} bytes that can be read")
        try:
            summary = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{path} cannot be read: {exc}") from None
        if not isinstance(summary, dict) or summary.get("format") != _FORMAT:
            raise ConfigError(f"{self._folder / _SUMMARY} does not say that it is of format {_FORMAT}")
        is_named = isinstance(summary.get("namespace"), str) and _DIGEST.fullmatch(summary["namespace"])
        if not is_named or not isinstance(summary.get("tenant", ""), str) or not _is_count(summary.get("blocks")):
            raise ConfigError(f"{self._folder / _SUMMARY} does not name a namespace, a tenant and a number of blocks")
        return summary


def _read_index(path: Path, most: int | None = None) -> Iterator[ArchivedBlock]:
    """Read the lines of an index, ``most`` at most.

    Raises:
        ConfigError: the index cannot be read, or has an invalid line.
    """
    file = _open_regular(path)
    if file is None:
        raise ConfigError(f"{path} is no file that can be read")
    with file:
        lines = iter(lambda: file.readline(_MAX_LINE_BYTES), b"")
        for number, line in enumerate(itertools.islice(lines, most), 1):
            try:
                block = ArchivedBlock(**json.loads(line))
                is_sound = _HASH.fullmatch(block.name) and _HASH.fullmatch(block.sha256) and _is_count(block.nbytes)
            except (ValueError, TypeError, RecursionError, OSError):
                is_sound = None
            if not is_sound or block.nbytes > _MAX_BLOCK_BYTES:
                raise ConfigError(f"line {number} of {path} is no line of an index")
            yield block


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _read_regular(path: Path, least: int, most: int) -> bytes | None:
    """Read a regular file with a size in this range; None if there is no such file or it cannot be read."""
    file = _open_regular(path)
    if file is None:
        return None
    with file, contextlib.suppress(OSError):
        if least <= os.fstat(file.fileno()).st_size <= most:
            data = file.read(most + 1)
            return data if least <= len(data) <= most else None
    return None


def _open_regular(path: Path) -> BinaryIO | None:
    """Open a regular file; return None for a link, pipe or device, without waiting for it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    return None


def _read_manifest(value: object, digest: str) -> Manifest | None:
    """Return the manifest if it is present and matches the digest."""
    with contextlib.suppress(ManifestError):
        manifest = parse_manifest(value)
        return manifest if manifest.digest == digest else None
    return None


def _block_path(folder: Path, name: str) -> Path:
    return folder / "blocks" / name[:2] / f"{name}.block"
