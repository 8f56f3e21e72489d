"""LoRA adapters: which bytes vLLM computes with, as far as that can be proved.

vLLM reads an adapter's files when it loads the adapter, and again silently after it had to drop it
(``--max-cpu-loras``) or on request (``load_inplace``); the weights may be views of the files while they are in use. Its
block hashes contain only the adapter's name and path. So a worker looks at the files just before and just after vLLM
reads them, and hashes them on its own thread (``LoadedAdapters``). The scheduler caches a request with an adapter only
if every rank has reported the same digest (``KnownAdapters``). Once the files of a name and path have changed, or may
have changed, that name and path is never cached again: vLLM's own cache may have blocks of either contents.
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

_Sight = tuple[tuple[str | int, ...], ...]
_CHUNK = 1 << 20
# Marks that identify a file's contents: st_ctime_ns changes with every write, and no program can set it.
_MARKS = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


def name_adapter(lora: Any) -> Adapter:
    """Return the adapter of vLLM's ``LoRARequest``."""
    return lora.lora_name, lora.lora_path


class LoadedAdapters:
    """Adapters that a worker's engine has read, and the digests of their files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sights: dict[Adapter, _Sight | None] = {}  # None: the files changed, or cannot be seen
        self._kinds: dict[Adapter, bytes] = {}
        self._news: dict[Adapter, bytes | None] = {}
        self._unread: queue.SimpleQueue[Adapter] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, manager: Any) -> None:
        """Observe everything that ``manager``, vLLM's class that reads adapters, reads from now on.

        If a vLLM version has no such method, nothing is observed, so no request with an adapter is cached.
        """
        read = getattr(manager, "_load_adapter", None)
        if read is None:
            logger.warning("This vLLM reads LoRA adapters in another way: requests with one are not cached")
            return

        @wraps(read)
        def watched(this: Any, lora: Any) -> Any:
            before = _look_at(lora.lora_path)
            adapter = read(this, lora)
            self._note_read(lora, before, _look_at(lora.lora_path))
            return adapter

        manager._load_adapter = watched

    def is_unchanged(self, adapter: Adapter) -> bool:
        """Return whether the files are still those that vLLM has read; if not, give the adapter up permanently."""
        with self._lock:
            sight = self._sights.get(adapter)
        if sight is not None and _look_at(adapter[1]) == sight:
            return True
        self._give_up(adapter)
        return False

    def take_news(self) -> dict[Adapter, bytes | None]:
        """Return the digests made since the last call; None: this adapter is never cached again."""
        with self._lock:
            news, self._news = self._news, {}
        return news

    def _note_read(self, lora: Any, before: _Sight | None, after: _Sight | None) -> None:
        adapter = name_adapter(lora)
        # The kind of file determines how vLLM interprets its bytes.
        kind = repr(getattr(lora, "is_3d_lora_weight", False)).encode()
        with self._lock:
            is_new = adapter not in self._sights
            is_same = before == after and kind == self._kinds.setdefault(adapter, kind)
            if is_same and after is not None and not getattr(lora, "load_inplace", False):
                if is_new:
                    self._sights[adapter] = after
                    self._begin_digest(adapter)
                    return
                if self._sights[adapter] == after:
                    return
        self._give_up(adapter)

    def _give_up(self, adapter: Adapter) -> None:
        with self._lock:
            if self._sights.get(adapter, ()) is not None:
                logger.warning("Adapter %s (%s) is no folder here, or has changed: not cached", *adapter)
                self._news[adapter] = None
            self._sights[adapter] = None

    def _begin_digest(self, adapter: Adapter) -> None:
        """Queue the adapter for its digest; the caller holds the lock.

        The thread is a daemon: files that cannot be read now must not prevent the end of the process.
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
                    if self._sights[adapter] is not None:
                        self._news[adapter] = digest
            else:
                self._give_up(adapter)


class KnownAdapters:
    """State of adapters in the scheduler, from its workers' reports; used only on the scheduler's thread."""

    def __init__(self) -> None:
        self._digests: dict[Adapter, list[bytes | None]] = {}
        self._given_up: set[Adapter] = set()

    def take_news(self, news: Mapping[Adapter, Iterable[bytes | None]]) -> None:
        """Record the digests that ranks report for each adapter, None for one given up."""
        for adapter, digests in news.items():
            self._digests.setdefault(adapter, []).extend(digests)

    def find_digest(self, lora: Any, num_ranks: int) -> bytes | None:
        """Return the digest that identifies the adapter; None: a request with it is not cached, or not yet."""
        adapter = name_adapter(lora)
        if getattr(lora, "load_inplace", False):
            self._given_up.add(adapter)
        digests = self._digests.get(adapter, [])
        if adapter in self._given_up or len(digests) != num_ranks or len(set(digests)) != 1:
            return None
        return digests[0]


def _look_at(path: str) -> _Sight | None:
    """Return marks that distinguish a folder's files from later ones; None: no such folder."""
    try:
        files = [(file.name, file.stat()) for file in sorted(Path(path).expanduser().iterdir()) if file.is_file()]
    except OSError:
        return None
    return tuple((name, *(getattr(stat, mark) for mark in _MARKS)) for name, stat in files)


def _digest_files(path: str, kind: bytes) -> bytes | None:
    """Return a digest of all files of a folder, names and bytes; None: they cannot be read."""
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
    """Return a name of 32 bytes for each block.

    Args:
        block_hashes: vLLM's own, of 32 bytes.
        adapter: digest of the request's LoRA adapter; empty: it has none.
        epoch: random bytes that separate this instance's blocks after its weights were changed in place; empty: they
            were not changed.
        group: identifies the KV cache group of a model that has several; empty: it has one, with full attention.
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
