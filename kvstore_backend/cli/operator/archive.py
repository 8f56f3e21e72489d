"""A namespace in a folder, as ``kvstore export`` writes it and ``kvstore import`` reads it.

::

    namespace.json            of whose blocks these are, how many, and the pool's manifest of the namespace
    blocks.jsonl              a line each: hash, bytes, SHA-256
    blocks/ab/ab01...ef.block as they are stored: a header that names the block, and its bytes

``namespace.json`` is written last: a folder without it is no whole export. A folder that was exported to before is
added to: what the pool has now replaces what the folder had under the same name, and what it does not have stays.

Every block is checked twice, against its line and against its own header, before it goes into a pool. That finds damage
and mistakes; whoever wrote the folder wrote all three, and can make any block say anything. What a folder may do is
bounded: only regular files are opened, none is read beyond the size that its line says, and no line says too much.
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
# Of one block: all layers of 1,024 tokens of a large model, and more than a Mooncake client moves at once.
_MAX_BLOCK_BYTES = 1 << 30


@dataclass(frozen=True)
class ArchivedBlock:
    """A line of the index.

    Attributes:
        name: the block's hash, 64 hex digits.
        nbytes: of its file.
        sha256: of its file, in hex digits.
    """

    name: str
    nbytes: int
    sha256: str


class ArchiveWriter:
    """Writes one namespace; blocks that the folder has already, with the same bytes, are not written again."""

    def __init__(self, folder: Path, digest: str) -> None:
        """Begin, or go on with an export to this folder.

        Raises:
            ConfigError: the folder has something else in it, or an index that cannot be read.
            PoolUnavailable: it cannot be written to.
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
        """Write one block, whole or not at all.

        Raises:
            PoolUnavailable: the folder cannot be written to.
        """
        data = value.tobytes()
        block = ArchivedBlock(key.removeprefix(key_prefix(self._digest)), len(data), hashlib.sha256(data).hexdigest())
        path = _block_path(self._folder, block.name)
        if _read_regular(path, len(data), len(data)) != data:
            if block.name in self._blocks:
                self._retract_summary()  # until the index tells of the new bytes
            self._write_file(path, data)
        self._blocks[block.name] = block

    def finish(self, tenant: str, manifest: Manifest | None) -> dict[str, Any]:
        """Write the index and the summary, which is returned; lines of files that are gone are left out."""
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
    """Reads a folder that ``ArchiveWriter`` has finished.

    Attributes:
        digest: the namespace.
        tenant: whose it was.
        blocks: its index.
        manifest: of the namespace, from the pool that it came from.
    """

    def __init__(self, folder: Path) -> None:
        """Read summary and index.

        Raises:
            ConfigError: the folder is no whole export.
        """
        self._folder = folder
        summary = self._read_summary()
        self.digest: str = summary["namespace"]
        self.tenant: str = summary.get("tenant", DEFAULT_TENANT)
        self.manifest = _read_manifest(summary.get("manifest"), self.digest)
        self.blocks = list(_read_index(folder / _INDEX, summary["blocks"] + 1))
        if len(self.blocks) != summary["blocks"]:
            count = f"more than {summary['blocks']}" if len(self.blocks) > summary["blocks"] else len(self.blocks)
            told = f"{count} blocks, where {_SUMMARY} says {summary['blocks']}"
            raise ConfigError(f"{folder / _INDEX} lists {told}: export it again")

    def read_block(self, block: ArchivedBlock) -> tuple[str, StoredBytes] | str:
        """The key and the value of a block; or, in a few words, why it cannot be used."""
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
    """The lines of an index, ``most`` at most.

    Raises:
        ConfigError: it cannot be read, or has a line that is none.
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
    """The bytes of a regular file whose size is in this range; None: there is none, or it cannot be read."""
    file = _open_regular(path)
    if file is None:
        return None
    with file, contextlib.suppress(OSError):
        if least <= os.fstat(file.fileno()).st_size <= most:
            data = file.read(most + 1)
            return data if least <= len(data) <= most else None
    return None


def _open_regular(path: Path) -> BinaryIO | None:
    """The file, if it is a regular one; a link, pipe or device is not opened, or not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    return None


def _read_manifest(told: object, digest: str) -> Manifest | None:
    """The manifest, where there is one and it is true."""
    with contextlib.suppress(ManifestError):
        manifest = parse_manifest(told)
        return manifest if manifest.digest == digest else None
    return None


def _block_path(folder: Path, name: str) -> Path:
    return folder / "blocks" / name[:2] / f"{name}.block"
