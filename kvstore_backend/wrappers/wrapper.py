"""Base class of wrappers. A wrapper is a backend around another backend, and passes calls to it.

Here ``exists_for_all`` and ``get_for_all`` call the wrapper's own ``exists`` and ``get``, not those of the inner
backend. So a wrapper that changes values needs to override only ``exists`` and ``get``. A wrapper with its own copies
of values overrides all four.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvstore_backend.backend import Health, Status, StorageBackend, Value

__all__ = ["Wrapper", "call_after_late_calls"]


class Wrapper(StorageBackend):
    """Backend that passes every call to ``store``. ``close`` also closes the store."""

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

    def count_late_calls(self) -> int:
        return self._store.count_late_calls()

    def flush_writes(self, seconds: float) -> bool:
        return self._store.flush_writes(seconds)

    def drop_own_copies(self, prefix: str) -> bool:
        return self._store.drop_own_copies(prefix)

    def health(self) -> Health:
        return self._store.health()

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
# Functions that no thread will call. Each keeps memory alive that a late call may still use.
_NEVER_CALLED: list[Callable[[], None]] = []


def call_after_late_calls(stack: StorageBackend, take_back: Callable[[], None]) -> None:
    """Call ``take_back`` on a new thread as soon as ``stack`` has no late call.

    A late call has missed its deadline, but still runs and may use its caller's memory. ``take_back`` gives this memory
    back to its owner. Until then, a reference to ``take_back`` keeps the memory alive. If a late call never ends, or no
    thread can be started, ``take_back`` is never called.
    """

    def wait() -> None:
        while not stack.wait_for_late_calls(_WARN_AFTER_SECONDS):
            logger.warning(
                "A call to the pool that missed its deadline has been running for over %g s; until it ends, the memory "
                "of its blocks cannot be used",
                _WARN_AFTER_SECONDS,
            )
        try:
            take_back()
        except Exception:
            logger.exception(
                "The memory of a call to the pool that missed its deadline could not be released after the call"
            )

    try:
        threading.Thread(target=wait, name="pool-late-calls", daemon=True).start()
    except RuntimeError as exc:
        _NEVER_CALLED.append(take_back)
        logger.error(
            "No thread can be started to wait for a call to the pool that missed its deadline, so the memory of its "
            "blocks stays reserved until this process ends; check the limit of threads: %s",
            exc,
        )
