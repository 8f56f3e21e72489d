"""Checks with which files of a LoRA adapter vLLM computes, so that blocks of different files get different names.

vLLM's block hashes contain only the name and path of an adapter, not its weights. vLLM reads the files of an adapter
when it loads the adapter. It reads them again, without notice, after it had to drop the adapter (``--max-cpu-loras``),
or on request (``load_inplace``). The adapter's tensors may also be views of the files. So a worker compares sizes and
times of the files just before and just after vLLM reads them, and computes a digest of the files on a thread of its own
(``LoadedAdapters``). Requests with an adapter use the pool only if every rank has reported the same digest
(``KnownAdapters``). If the files of an adapter have changed, or may have changed, its requests never use the pool
again, because vLLM's own cache may have blocks of the old and of the new files.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

__all__ = ["Adapter", "KnownAdapters", "LoadedAdapters", "name_adapter", "name_blocks"]

logger = logging.getLogger(__name__)

Adapter = tuple[str, str]
"""Name and path of a LoRA adapter, which identify it in vLLM's block hashes."""

_Marks = tuple[tuple[str | int, ...], ...]
_CHUNK = 1 << 20
# Values of ``os.stat`` that show a change of a file: st_ctime_ns changes with every write, and no program can set it.
_STAT_FIELDS = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


def name_adapter(lora: Any) -> Adapter:
    """Return name and path of the LoRA adapter in ``lora``, a ``LoRARequest`` of vLLM."""
    return lora.lora_name, lora.lora_path


class LoadedAdapters:
    """LoRA adapters that vLLM has read in this worker, and digests of their files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: dict[Adapter, _Marks | None] = {}  # None if the files have changed, or cannot be read
        self._kinds: dict[Adapter, bytes] = {}
        self._new_digests: dict[Adapter, bytes | None] = {}
        self._unread: queue.SimpleQueue[Adapter] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, manager: Any) -> None:
        """Wrap the method of vLLM's class ``manager`` that reads LoRA adapters, so that this object sees every read.

        If this version of vLLM has no such method, requests with an adapter do not use the pool.
        """
        read = getattr(manager, "_load_adapter", None)
        if read is None:
            logger.warning(
                "This version of vLLM loads LoRA adapters in a way that the connector does not know; requests with an "
                "adapter do not use the pool"
            )
            return

        @wraps(read)
        def watched(this: Any, lora: Any) -> Any:
            before = _read_marks(lora.lora_path)
            adapter = read(this, lora)
            self._note_read(lora, before, _read_marks(lora.lora_path))
            return adapter

        manager._load_adapter = watched

    def is_unchanged(self, adapter: Adapter) -> bool:
        """Return whether an adapter's files have not changed since vLLM read them.

        If they have changed, requests with the adapter never use the pool again.
        """
        with self._lock:
            marks = self._marks.get(adapter)
        if marks is not None and _read_marks(adapter[1]) == marks:
            return True
        self._exclude(adapter)
        return False

    def take_digests(self) -> dict[Adapter, bytes | None]:
        """Return the digests that were computed since the last call, by adapter.

        The value is None for an adapter whose files have changed.
        """
        with self._lock:
            digests, self._new_digests = self._new_digests, {}
        return digests

    def _note_read(self, lora: Any, before: _Marks | None, after: _Marks | None) -> None:
        adapter = name_adapter(lora)
        # vLLM interprets the bytes of a file according to this flag.
        kind = repr(getattr(lora, "is_3d_lora_weight", False)).encode()
        with self._lock:
            is_new = adapter not in self._marks
            is_same = before == after and kind == self._kinds.setdefault(adapter, kind)
            if is_same and after is not None and not getattr(lora, "load_inplace", False):
                if is_new:
                    self._marks[adapter] = after
                    self._begin_digest(adapter)
                    return
                if self._marks[adapter] == after:
                    return
        self._exclude(adapter)

    def _exclude(self, adapter: Adapter) -> None:
        """Exclude an adapter: requests with this adapter never use the pool again."""
        with self._lock:
            if self._marks.get(adapter, ()) is not None:
                logger.warning(
                    "LoRA adapter %s (%s) is not a folder on this machine, or its files have changed; requests with it "
                    "do not use the pool",
                    *adapter,
                )
                self._new_digests[adapter] = None
            self._marks[adapter] = None

    def _begin_digest(self, adapter: Adapter) -> None:
        """Begin to compute the digest of an adapter's files on another thread. The caller holds the lock.

        That thread is a daemon, because a file system that hangs must not prevent the end of the process.
        """
        self._unread.put(adapter)
        if self._thread is None:
            self._thread = threading.Thread(target=self._digest_all, name="adapter-digest", daemon=True)
            self._thread.start()

    def _digest_all(self) -> None:
        while True:
            adapter = self._unread.get()
            digest = _digest_files(adapter[1], self._kinds[adapter])
            if digest is not None and self.is_unchanged(adapter):
                with self._lock:
                    if self._marks[adapter] is not None:
                        self._new_digests[adapter] = digest
            else:
                self._exclude(adapter)


class KnownAdapters:
    """Digests of LoRA adapters' files, as all ranks report them. Used only on the scheduler's thread."""

    def __init__(self) -> None:
        self._digests: dict[Adapter, list[bytes | None]] = {}
        self._excluded: set[Adapter] = set()

    def add_digests(self, reported: Mapping[Adapter, Iterable[bytes | None]]) -> None:
        """Record the digests that ranks report for each adapter.

        A rank reports None if the adapter's files have changed there.
        """
        for adapter, digests in reported.items():
            self._digests.setdefault(adapter, []).extend(digests)

    def find_digest(self, lora: Any, num_ranks: int) -> bytes | None:
        """Return the digest of an adapter's files, or None if requests with the adapter do not use the pool now.

        Args:
            lora: vLLM's ``LoRARequest``.
            num_ranks: number of ranks that must have reported the same digest.
        """
        adapter = name_adapter(lora)
        if getattr(lora, "load_inplace", False):
            self._excluded.add(adapter)
        digests = self._digests.get(adapter, [])
        if adapter in self._excluded or len(digests) != num_ranks or len(set(digests)) != 1:
            return None
        return digests[0]


def _read_marks(path: str) -> _Marks | None:
    """Return name and ``_STAT_FIELDS`` of each file in a folder, to detect a change; None if there is no folder."""
    try:
        files = [(file.name, file.stat()) for file in sorted(Path(path).expanduser().iterdir()) if file.is_file()]
    except OSError:
        return None
    return tuple((name, *(getattr(stat, field) for field in _STAT_FIELDS)) for name, stat in files)


def _digest_files(path: str, kind: bytes) -> bytes | None:
    """Return a digest of the names and bytes of all files in a folder; None if a file cannot be read."""
    digest = hashlib.sha256(kind)
    try:
        for file in sorted(file for file in Path(path).expanduser().iterdir() if file.is_file()):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as opened:
                while chunk := opened.read(_CHUNK):
                    digest.update(chunk)
    except OSError:
        return None
    return digest.digest()


_TAG = b"kvstore.vllm.v1\0"
_GROUP_TAG = b"kvstore.vllm.group.v1\0"


def name_blocks(
    block_hashes: Sequence[bytes], adapter: bytes = b"", epoch: bytes = b"", group: bytes = b""
) -> list[bytes]:
    """Return the names that blocks have in the pool, each of 32 bytes.

    Args:
        block_hashes: vLLM's hashes of the blocks, each of 32 bytes.
        adapter: digest of the request's LoRA adapter; empty if the request has no adapter.
        epoch: random bytes that give this instance's blocks other names after its weights were changed in place; empty
            if the weights were not changed.
        group: bytes that identify the KV cache group; empty if the model has one group, with full attention.
    """
    if not adapter and not epoch and not group:
        return list(block_hashes)
    root = hashlib.sha256(_TAG + len(adapter).to_bytes(1, "little") + adapter + epoch)
    if group:
        root = hashlib.sha256(_GROUP_TAG + len(group).to_bytes(1, "little") + group + root.digest())
    return [_extend_hash(root, block_hash) for block_hash in block_hashes]


def _extend_hash(root: hashlib._Hash, block_hash: bytes) -> bytes:
    digest = root.copy()
    digest.update(block_hash)
    return digest.digest()
