"""Stores that accept only registered memory, as Mooncake does over RDMA. Over TCP, Mooncake accepts any memory.

The rules are those of Mooncake's transfer engine. Each span of a value must be in one registered region during the
whole call; otherwise the value fails (-800). Memory that overlaps a registered region cannot be registered again. A
region is unregistered with the address that was registered.

``StrictStore`` wraps any store. ``StrictClient`` wraps Mooncake's native client, which transfers the bytes over TCP.
``use_strict_stores`` applies one of the two wherever a store is opened. ``Announcing`` registers the memory of each
call, for tests that do not register memory themselves.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore_backend import pool
from kvstore_backend.backend import Span, Status, StorageBackend, Value
from kvstore_backend.stores import holdings, mooncake, mooncake_joining
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.wrapper import Wrapper

__all__ = ["Announcing", "Registered", "StrictClient", "StrictStore", "use_strict_stores"]

_UNREACHABLE, _OVERLAPPED, _NOT_REGISTERED = -800, -600, -600


class Registered:
    """The registered regions of one client."""

    def __init__(self) -> None:
        self.regions: dict[int, int] = {}
        """The sizes of the regions, by address."""
        self.complaints: list[str] = []
        """The uses that RDMA would have refused, in their order. A test asserts that there are none."""
        self._lock = threading.Lock()

    def add(self, address: int, nbytes: int) -> bool:
        """Register a region; return False if it overlaps another one."""
        with self._lock:
            for start, size in self.regions.items():
                if address < start + size and start < address + nbytes:
                    self._complain(f"registered {nbytes} bytes at {address:#x}, which overlap {size} at {start:#x}")
                    return False
            self.regions[address] = nbytes
            return True

    def drop(self, address: int) -> bool:
        """Unregister a region; return False if none begins at this address."""
        with self._lock:
            if self.regions.pop(address, None) is None:
                self._complain(f"unregistered {address:#x}, where no region begins")
                return False
            return True

    def holds(self, value: Sequence[tuple[int, int]], call: str) -> bool:
        """Return whether each span of ``value`` is in one region. If not, add a complaint about ``call``."""
        with self._lock:
            for address, nbytes in value:
                if nbytes and not any(
                    start <= address and address + nbytes <= start + size for start, size in self.regions.items()
                ):
                    self._complain(f"{call} of {nbytes} bytes at {address:#x}, which are not registered")
                    return False
            return True

    def _complain(self, complaint: str) -> None:
        self.complaints.append(complaint)


class StrictStore(Wrapper):
    """A wrapper that returns ``FAILED`` for values outside registered memory."""

    def __init__(self, store: StorageBackend, registered: Registered | None = None) -> None:
        super().__init__(store)
        self.registered = registered or Registered()

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Record the region, then register it at the store."""
        if self.registered.add(address, nbytes):
            super().register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        """Remove the region, then unregister it at the store."""
        if self.registered.drop(address):
            super().unregister(address, nbytes)

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        return self._move("put", keys, values, super().put)

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        keep = super().keep
        return self._move("keep", keys, values, lambda keys, values: keep(keys, values, seconds))

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return self._move("get", keys, targets, super().get)

    def _move(
        self,
        name: str,
        keys: Sequence[str],
        values: Sequence[Value],
        move: Callable[[Sequence[str], Sequence[Value]], list[Status]],
    ) -> list[Status]:
        held = [i for i, value in enumerate(values) if self.registered.holds(value, name)]
        answers = move([keys[i] for i in held], [values[i] for i in held])
        statuses = [Status.FAILED] * len(keys)
        for i, status in zip(held, answers, strict=True):
            is_still_held = self.registered.holds(values[i], f"{name}, at its end,")
            statuses[i] = status if is_still_held else Status.FAILED
        return statuses


class Announcing(Wrapper):
    """A wrapper that registers the memory of each put, keep and get during the call, unless it is registered."""

    def __init__(self, store: StorageBackend) -> None:
        super().__init__(store)
        self._lock = threading.Lock()  # guards the next two
        self._callers: dict[int, int] = {}  # the sizes of the regions that the caller registered, by address
        self._in_use: Counter[Span] = Counter()

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Record that the caller registers this memory itself."""
        with self._lock:
            self._callers[address] = nbytes
        super().register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        """Record that calls must register this memory again."""
        with self._lock:
            self._callers.pop(address, None)
        super().unregister(address, nbytes)

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        with self._announce(values):
            return super().put(keys, values)

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        with self._announce(values):
            return super().keep(keys, values, seconds)

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        with self._announce(targets):
            return super().get(keys, targets)

    @contextlib.contextmanager
    def _announce(self, values: Sequence[Value]) -> Iterator[None]:
        with self._lock:
            regions = [region for region in _join_spans(values) if not self._is_callers(region)]
            for region in regions:
                self._in_use[region] += 1
                if self._in_use[region] == 1:
                    self._store.register(*region)
        try:
            yield
        finally:
            with self._lock:
                for region in regions:
                    self._in_use[region] -= 1
                    if not self._in_use[region]:
                        self._store.unregister(*region)

    def _is_callers(self, region: Span) -> bool:
        return any(start <= region.address < start + size for start, size in self._callers.items())


def _join_spans(values: Sequence[Value]) -> list[Span]:
    """Return the memory of ``values`` as separate regions."""
    joined: list[Span] = []
    for address, nbytes in sorted(span for value in values for span in value if span[1]):
        if joined and address <= joined[-1].address + joined[-1].nbytes:
            start, size = joined.pop()
            joined.append(Span(start, max(size, address + nbytes - start)))
        else:
            joined.append(Span(address, nbytes))
    return joined


class StrictClient:
    """A wrapper of Mooncake's native client that refuses unregistered memory."""

    def __init__(self, native: Any, registered: Registered) -> None:
        self._native = native
        self._registered = registered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def register_buffer(self, address: int, nbytes: int) -> int:
        """Return 0, or a negative code."""
        if not self._registered.add(address, nbytes):
            return _OVERLAPPED
        return int(self._native.register_buffer(address, nbytes))

    def unregister_buffer(self, address: int) -> int:
        """Return 0, or a negative code."""
        return int(self._native.unregister_buffer(address)) if self._registered.drop(address) else _NOT_REGISTERED

    def batch_put_from_multi_buffers(self, keys: Any, addresses: Any, sizes: Any, *config: Any) -> list[int]:
        """Return the native client's codes, or -800 for each key if a value is not in registered memory."""
        put = self._native.batch_put_from_multi_buffers
        return self._move("put", put, keys, addresses, sizes, *config)

    def batch_get_into_multi_buffers(self, keys: Any, addresses: Any, sizes: Any) -> list[int]:
        """Return the native client's codes, or -800 for each key if a target is not in registered memory."""
        return self._move("get", self._native.batch_get_into_multi_buffers, keys, addresses, sizes)

    def batch_upsert_from(self, keys: Any, addresses: Any, sizes: Any, *config: Any) -> list[int]:
        """Return the native client's codes, or -800 for each key if a value is not in registered memory."""
        pieces = [[address] for address in addresses], [[size] for size in sizes]
        if self._hold("keep", *pieces):
            return list(self._native.batch_upsert_from(keys, addresses, sizes, *config))
        return [_UNREACHABLE] * len(keys)

    def _move(
        self, name: str, move: Callable[..., Sequence[int]], keys: Any, addresses: Any, sizes: Any, *rest: Any
    ) -> list[int]:
        if not self._hold(name, addresses, sizes):
            return [_UNREACHABLE] * len(keys)
        codes = list(move(keys, addresses, sizes, *rest))
        return codes if self._hold(f"{name}, at its end,", addresses, sizes) else [_UNREACHABLE] * len(keys)

    def _hold(self, name: str, addresses: Any, sizes: Any) -> bool:
        values = [list(zip(*pair, strict=True)) for pair in zip(addresses, sizes, strict=True)]
        return all(self._registered.holds(value, name) for value in values)


def use_strict_stores(monkeypatch: pytest.MonkeyPatch) -> list[Registered]:
    """Make each store that this process opens from now on refuse unregistered memory.

    Returns:
        The regions of each client, in the order in which they were opened. The list grows.
    """
    opened: list[Registered] = []

    def strict(open_store: Callable[..., StorageBackend]) -> Callable[..., StorageBackend]:
        def open_strict(*arguments: Any) -> StorageBackend:
            opened.append(Registered())
            return StrictStore(open_store(*arguments), opened[-1])

        return open_strict

    join = mooncake_joining.join_cluster

    def join_strictly(settings: Any) -> StrictClient:
        opened.append(Registered())
        return StrictClient(join(settings), opened[-1])

    for module in (pool, holdings):
        monkeypatch.setattr(module, "FileStore", strict(FileStore))
    monkeypatch.setattr(pool, "MemoryStore", strict(MemoryStore))
    monkeypatch.setattr(mooncake, "join_cluster", join_strictly)
    return opened
