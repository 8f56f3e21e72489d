"""Wrapper: a backend around a backend, which passes on every call that is not its concern.

``exists_for_all`` and ``get_for_all`` are not passed on: a wrapper that changes values must also change the values of
these calls, so they use its own ``exists`` and ``get``. Wrappers with their own copies override them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvstore_backend.backend import Health, Status, StorageBackend, StoreStats, Value

__all__ = ["Wrapper", "call_after_late_calls"]


class Wrapper(StorageBackend):
    """Backend around ``store``, which it owns: closing the wrapper closes the store."""

    _store: StorageBackend

    def __init__(self, store: StorageBackend) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        self._store.register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        self._store.unregister(address, nbytes)

    @property
    def is_ready(self) -> bool:
        return self._store.is_ready

    def wait_for_late_calls(self, seconds: float) -> bool:
        return self._store.wait_for_late_calls(seconds)

    def flush_writes(self, seconds: float) -> bool:
        return self._store.flush_writes(seconds)

    def drop_own_copies(self, prefix: str) -> bool:
        return self._store.drop_own_copies(prefix)

    def health(self) -> Health:
        return self._store.health()

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return self._store.put(keys, values)

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        return self._store.keep(keys, values, seconds)

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return self._store.get(keys, targets)

    def exists(self, keys: Sequence[str]) -> list[Status]:
        return self._store.exists(keys)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return self._store.remove(keys, force=force)

    def clear(self, prefix: str) -> Status:
        return self._store.clear(prefix)


logger = logging.getLogger(__name__)

_WARN_AFTER_SECONDS = 60.0
# Callables without a thread to wait for them. They refer to memory that a call may still touch, so it is never freed.
_KEPT_FOR_GOOD: list[Callable[[], None]] = []


def call_after_late_calls(stack: StorageBackend, take_back: Callable[[], None]) -> None:
    """Call ``take_back`` when ``stack`` has no late call, on a new thread; it may never be called.

    Until then ``take_back`` stays referenced, and with it the memory that it gives back.
    """

    def wait() -> None:
        while not stack.wait_for_late_calls(_WARN_AFTER_SECONDS):
            logger.warning("A call to the pool has been running for over %g s", _WARN_AFTER_SECONDS)
        try:
            take_back()
        except Exception:
            logger.exception("Memory that a late call had could not be taken back")

    try:
        threading.Thread(target=wait, name="pool-late-calls", daemon=True).start()
    except RuntimeError as exc:
        _KEPT_FOR_GOOD.append(take_back)
        logger.error("Memory that a late call may touch is permanently out of use: %s", exc)
