"""Common ground of the wrappers: ``Stack``, the type of an assembled stack, and classes that pass calls on.

::

    StorageBackend          a store
    ├── Wrapper             around any backend; passes on all that is not its concern
    │   └── StackWrapper    around a stack, so a stack itself
    └── Stack               can be waited for: until it is ready, has no late call, has written all
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_backend.backend import Health, Status, StorageBackend, StoreStats, Value, check_keys

__all__ = ["Stack", "StackWrapper", "Wrapper", "as_stack"]


class Stack(StorageBackend):
    """A backend as ``open_backend`` assembles it: calls may be given up, and writes may come later.

    As it stands here it does neither, so that it is always ready and there is nothing to wait for.
    """

    @property
    def is_ready(self) -> bool:
        """False while calls are answered ``FAILED`` without being made, so that callers may spare themselves."""
        return True

    def wait_for_late_calls(self, seconds: float) -> bool:
        """Wait until no call that was given up touches callers' memory any more.

        After a put or get answered ``FAILED``, its memory may be used for something else once this is true. Only
        stacks that give up on calls (``guarded.py``) ever have to wait.

        Returns:
            False if some call still runs after ``seconds``.
        """
        return True

    def flush_writes(self, seconds: float) -> bool:
        """Wait until other clients of the pool can read every value put so far, or it has been given up.

        Only stacks that write later (``write_behind.py``) ever have to wait.

        Returns:
            False if ``seconds`` were not enough.
        """
        return True

    def exists_for_all(self, keys: Sequence[str]) -> list[Status]:
        """``exists`` as another instance would be answered: without the copies that only this one has.

        Raises:
            ValueError: an empty key.
        """
        check_keys(keys)
        return self._exists_for_all(keys)

    def drop_own_copies(self, prefix: str) -> bool:
        """Drop what only this process has of the keys that begin with ``prefix``: copies, and writes on their way.

        The pool that others share is left as it is; a write that is being sent goes on.

        Returns:
            False if some copies may be left.
        """
        return True

    def _exists_for_all(self, keys: Sequence[str]) -> list[Status]:
        """``exists_for_all``, of keys that were checked."""
        return self._exists(keys)

    def _get_for_all(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        """``get`` without the copies that only this instance has, and without leaving one; of checked arguments."""
        return self._get(keys, targets)


class Wrapper(StorageBackend):
    """A backend around ``store``, which it owns: closing the wrapper closes the store."""

    _store: StorageBackend

    def __init__(self, store: StorageBackend) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        self._store.register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        self._store.unregister(address, nbytes)

    def health(self) -> Health:
        return self._store.health()

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()

    def _put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return self._store._put(keys, values)

    def _keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        return self._store._keep(keys, values, seconds)

    def _get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return self._store._get(keys, targets)

    def _exists(self, keys: Sequence[str]) -> list[Status]:
        return self._store._exists(keys)

    def _remove(self, keys: Sequence[str], *, force: bool) -> list[Status]:
        return self._store._remove(keys, force=force)

    def _clear(self, prefix: str) -> Status:
        return self._store._clear(prefix)


class StackWrapper(Wrapper, Stack):
    """A stack around a stack, or around a bare store."""

    _store: Stack

    def __init__(self, store: StorageBackend) -> None:
        super().__init__(as_stack(store))

    @property
    def is_ready(self) -> bool:
        return self._store.is_ready

    def wait_for_late_calls(self, seconds: float) -> bool:
        return self._store.wait_for_late_calls(seconds)

    def flush_writes(self, seconds: float) -> bool:
        return self._store.flush_writes(seconds)

    def drop_own_copies(self, prefix: str) -> bool:
        return self._store.drop_own_copies(prefix)

    def _exists_for_all(self, keys: Sequence[str]) -> list[Status]:
        return self._store._exists_for_all(keys)

    def _get_for_all(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return self._store._get_for_all(keys, targets)


class _BareStack(Wrapper, Stack):
    """A store alone, as a stack."""

    def __repr__(self) -> str:
        return repr(self._store)


def as_stack(backend: StorageBackend) -> Stack:
    """``backend`` itself if it is a stack, else a stack of nothing but it."""
    return backend if isinstance(backend, Stack) else _BareStack(backend)
