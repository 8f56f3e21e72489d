"""Writer of a namespace's manifest: writes it when the pool is opened, and again when the pool has lost it.

It checks once a minute on its own thread, so no request ever waits for it. It writes to the store without the wrappers,
because operators and programs that know nothing of headers read a manifest.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from kvstore_backend.backend import Span, Status, StorageBackend
from kvstore_backend.manifest import (
    MANIFEST_BYTES,
    Manifest,
    ManifestError,
    decode_manifest,
    encode_manifest,
    manifest_key,
)

__all__ = ["ManifestKeeper", "read_manifest", "write_manifest"]

logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 60.0
# Seconds until it is written: a pool that was just joined may have no space yet, or memory of a client that died.
_RETRY_SECONDS = 5.0


class ManifestKeeper:
    """Writer that maintains one manifest in one pool, from the first ``attach_store`` until ``close``.

    Args:
        manifest: the namespace's manifest; the time of its first write is filled in.
        period: seconds between two checks that it is still present.
    """

    def __init__(self, manifest: Manifest, period: float = _PERIOD_SECONDS) -> None:
        self.manifest = manifest
        self._period = period
        self._changed = threading.Condition()  # guards the next two
        self._store: StorageBackend | None = None
        self._is_closed = False
        self._is_ready: Callable[[], bool] = lambda: True
        self._thread = threading.Thread(target=self._keep_manifest, name="pool-manifest", daemon=True)

    def attach_store(self, store: StorageBackend) -> None:
        """Write to ``store`` from now on; it was just opened, and has no wrappers."""
        with self._changed:
            self._store = store
            if self._thread.ident is None and not self._is_closed:
                self._thread.start()
            self._changed.notify_all()

    def watch_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Make no calls to a store that was opened earlier while ``is_ready`` returns False: a call may hang."""
        self._is_ready = is_ready

    def close(self) -> None:
        """Stop writing; a running write is not waited for."""
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
        """Return the store to check now; None after ``close``."""
        with self._changed:
            return None if self._is_closed else self._store

    def _pause(self, store: StorageBackend, seconds: float) -> None:
        """Wait for ``seconds``, or until there is another store, or ``close``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._store is not store, seconds)


def write_manifest(store: StorageBackend, manifest: Manifest) -> bool:
    """Put a manifest if there is none yet; return whether there is one now. Does not raise; the log has the reason.

    Args:
        store: a store without wrappers.
        manifest: its ``written_at`` becomes now.
    """
    key = manifest_key(manifest.digest)
    try:
        status = store.exists([key])[0]
        if status is Status.ABSENT:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            status = _move_bytes(store, store.put, key, encode_manifest(replace(manifest, written_at=now)))[0]
            logger.debug("manifest of namespace %s: %s", manifest.digest, status.value)
    except Exception as exc:  # the pool's keys are useful without it
        logger.warning("The manifest of namespace %s cannot be written: %s", manifest.digest, exc)
        return False
    return status is Status.OK


def read_manifest(store: StorageBackend, digest: str) -> Manifest | None:
    """Read the manifest of the namespace ``digest``; None if the pool has none.

    Args:
        store: a store without wrappers.

    Raises:
        ManifestError: the value is not a manifest, or the pool does not answer.
    """
    key = manifest_key(digest)
    status, data = _move_bytes(store, store.get, key, bytes(MANIFEST_BYTES))
    if status is Status.ABSENT and store.exists([key])[0] is Status.ABSENT:
        return None
    if status is not Status.OK:  # a value of another size is present, and cannot be read as these bytes
        raise ManifestError(f"the pool did not give the {MANIFEST_BYTES} bytes that a manifest has")
    return decode_manifest(data, digest)


def _move_bytes(
    store: StorageBackend, call: Callable[..., list[Status]], key: str, data: bytes
) -> tuple[Status, bytes]:
    """Put or get one value through memory that begins as ``data``.

    Returns the status, and the memory's bytes at the end.
    """
    memory = ctypes.create_string_buffer(data, len(data))
    address = ctypes.addressof(memory)
    store.register(address, len(data))
    try:
        status = call([key], [[Span(address, len(data))]])[0]
    finally:
        store.unregister(address, len(data))
    return status, memory.raw
