"""A namespace in a folder, as ``kvstore export`` writes it and ``kvstore import`` reads it.

::

    namespace.json            of whose blocks these are, how many, and the pool's manifest of the namespace
    blocks.jsonl              a line each: hash, bytes, SHA-256
    blocks/ab/ab01...ef.block as they are stored: a header that names the block, and its bytes

``namespace.json`` is written last: a folder without it is no whole export. A folder may have come from anywhere, so
every block is checked twice, against its line and against its own header, before it goes into a pool.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Writes one namespace; blocks that the folder has already are not written again."""

    def __init__(self, folder: Path, digest: str) -> None:
        """Begin, or go on with an export that was cut short.

        Raises:
            ConfigError: the folder has something else in it.
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
        self._blocks: dict[str, ArchivedBlock] = {}

    def add(self, key: str, value: StoredBytes) -> None:
        """Write one block, whole or not at all.

        Raises:
            PoolUnavailable: the folder cannot be written to.
        """
        data = value.tobytes()
        block = ArchivedBlock(key.removeprefix(key_prefix(self._digest)), len(data), hashlib.sha256(data).hexdigest())
        path = _block_path(self._folder, block.name)
        if not (path.exists() and path.stat().st_size == len(data)):
            self._write_file(path, data)
        self._blocks[block.name] = block

    def finish(self, tenant: str, manifest: Manifest | None) -> dict[str, Any]:
        """Write the index and the summary, which is returned."""
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
        self.blocks = list(self._read_index())
        if len(self.blocks) != summary["blocks"]:
            told = f"{len(self.blocks)} blocks, where {_SUMMARY} says {summary['blocks']}"
            raise ConfigError(f"{folder / _INDEX} lists {told}: export it again")

    def read_block(self, block: ArchivedBlock) -> tuple[str, StoredBytes] | str:
        """The key and the value of a block; or, in a few words, why it cannot be used."""
        key = key_prefix(self.digest) + block.name
        try:
            data = _block_path(self._folder, block.name).read_bytes()
        except OSError as exc:
            return f"cannot be read: {exc.strerror}"
        if len(data) != block.nbytes or hashlib.sha256(data).hexdigest() != block.sha256:
            return "is not what the index says"
        value = wrap_bytes(data)
        fault = find_fault(key, value)
        return (key, value) if fault is None else f"has a wrong {fault} in its header"

    def _read_summary(self) -> Mapping[str, Any]:
        try:
            summary = json.loads((self._folder / _SUMMARY).read_bytes())
        except FileNotFoundError:
            raise ConfigError(f"{self._folder} is no whole export: it has no {_SUMMARY}") from None
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{self._folder / _SUMMARY} cannot be read: {exc}") from None
        if not isinstance(summary, dict) or summary.get("format") != _FORMAT:
            raise ConfigError(f"{self._folder / _SUMMARY} does not say that it is of format {_FORMAT}")
        is_named = isinstance(summary.get("namespace"), str) and _DIGEST.fullmatch(summary["namespace"])
        if not is_named or not isinstance(summary.get("tenant", ""), str) or type(summary.get("blocks")) is not int:
            raise ConfigError(f"{self._folder / _SUMMARY} does not name a namespace, a tenant and a number of blocks")
        return summary

    def _read_index(self) -> Iterator[ArchivedBlock]:
        try:
            lines = (self._folder / _INDEX).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{self._folder / _INDEX} cannot be read: {exc}") from None
        for number, line in enumerate(lines, 1):
            try:
                block = ArchivedBlock(**json.loads(line))
                is_sound = _HASH.fullmatch(block.name) and type(block.nbytes) is int and _HASH.fullmatch(block.sha256)
            except (ValueError, TypeError):
                is_sound = None
            if not is_sound:
                raise ConfigError(f"line {number} of {self._folder / _INDEX} is no line of an index")
            yield block


def _read_manifest(told: object, digest: str) -> Manifest | None:
    """The manifest, where there is one and it is true."""
    with contextlib.suppress(ManifestError):
        manifest = parse_manifest(told)
        return manifest if manifest.digest == digest else None
    return None


def _block_path(folder: Path, name: str) -> Path:
    return folder / "blocks" / name[:2] / f"{name}.block"
