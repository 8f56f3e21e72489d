"""Writes the manifest of a namespace when the pool is opened, and again when the pool has lost it.

A thread checks once a minute whether the pool has the manifest, so no request waits for this. The manifest is written
directly to the store, without the wrappers, so that programs can read it without knowing the headers of blocks.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from kvstore_backend.backend import Span, Status, StorageBackend
from kvstore_backend.manifest import Manifest, encode_manifest, manifest_key

__all__ = ["ManifestKeeper", "write_manifest"]

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 60.0
# Seconds between two tries to write the manifest. The first puts may fail, because a pool may have no space yet, or may
# assign the memory of a client that died.
_RETRY_SECONDS = 5.0


class ManifestKeeper:
    """Keeps the manifest of one namespace in a pool, from the first ``attach_store`` until ``close``.

    Args:
        manifest: the manifest, without a time; each write adds the current time.
        period: seconds between two checks whether the pool has the manifest.
    """

    def __init__(self, manifest: Manifest, period: float = _PERIOD_SECONDS) -> None:
        self.manifest = manifest
        self._period = period
        self._changed = threading.Condition()  # guards the next two attributes
        self._store: StorageBackend | None = None
        self._is_closed = False
        self._is_ready: Callable[[], bool] = lambda: True
        self._thread = threading.Thread(target=self._keep_manifest, name="pool-manifest", daemon=True)

    def attach_store(self, store: StorageBackend) -> None:
        """Write the manifest to ``store`` from now on. ``store`` has no wrappers, and was just opened."""
        with self._changed:
            self._store = store
            if self._thread.ident is None and not self._is_closed:
                self._thread.start()
            self._changed.notify_all()

    def watch_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Set the function that returns whether calls reach the pool.

        While it returns False, the thread makes only one try for each attached store, because a call may hang.
        """
        self._is_ready = is_ready

    def close(self) -> None:
        """Stop the thread without waiting for a running write."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _keep_manifest(self) -> None:
        known: StorageBackend | None = None
        while (store := self._next_store()) is not None:
            is_there = (store is not known or self._is_ready()) and write_manifest(store, self.manifest)
            known = store
            self._pause(store, self._period if is_there else min(_RETRY_SECONDS, self._period))

    def _next_store(self) -> StorageBackend | None:
        """Return the store that was attached last; None after ``close``."""
        with self._changed:
            return None if self._is_closed else self._store

    def _pause(self, store: StorageBackend, seconds: float) -> None:
        """Wait for ``seconds``, or until another store is attached, or until ``close``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._store is not store, seconds)


def write_manifest(store: StorageBackend, manifest: Manifest) -> bool:
    """Write a manifest to a store, unless the store has it; return whether the store has it now. Log errors.

    Args:
        store: a store without wrappers.
        manifest: the manifest; the written one has the current time as ``written_at``.
    """
    key = manifest_key(manifest.digest)
    try:
        status = store.exists([key])[0]
        if status is Status.ABSENT:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            status = _put_bytes(store, key, encode_manifest(replace(manifest, written_at=now)))
            logger.debug("the manifest of namespace %s was put: %s", manifest.digest, status.value)
    except Exception as exc:  # the pool can be used without a manifest
        logger.warning(
            "The manifest (description) of namespace %s cannot be written to the pool, which works without it: %s",
            manifest.digest,
            exc,
        )
        return False
    return status is Status.OK


def _put_bytes(store: StorageBackend, key: str, data: bytes) -> Status:
    memory = ctypes.create_string_buffer(data, len(data))
    span = Span(ctypes.addressof(memory), len(data))
    store.register(*span)
    try:
        return store.put([key], [[span]])[0]
    finally:
        store.unregister(*span)
