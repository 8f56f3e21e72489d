"""A process with a store whose calls of one kind never return: ``python -m tests.faults.hanging CALL``. It must end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from kvstore_backend.backend import Span, Status, Value
from kvstore_backend.pool import BlockPool
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.transfers import DirectMemory, Transfers
from kvstore_backend.wrappers import parts
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.write_behind import WriteBehindBackend
from tests.faults.blocks import NAMESPACE, conversation
from tests.support.memory import Memory

__all__ = ["CALLS"]

COUNT, SIZE = 16, 1000
HASHES = conversation(0, COUNT)
KEYS = [NAMESPACE.key(each) for each in HASHES]
BRIEF = Deadlines(0.2, 0.2, clear_seconds=0.2, register_seconds=0.2)


class HangingStore(MemoryStore):
    """A store in which the calls with one name never return."""

    def __init__(self, hangs: str) -> None:
        super().__init__(1 << 24)
        self.hangs = hangs
        self.hanging = threading.Event()

    def _hang_in(self, name: str) -> None:
        if self.hangs == name:
            self.hanging.set()
            threading.Event().wait()

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self._hang_in("put")
        return super().put(keys, values)

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        self._hang_in("get")
        return super().get(keys, targets)

    def exists(self, keys: Sequence[str]) -> list[Status]:
        self._hang_in("exists")
        return super().exists(keys)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        self._hang_in("remove")
        return super().remove(keys, force=force)

    def clear(self, prefix: str) -> Status:
        self._hang_in("clear")
        return super().clear(prefix)

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Hang, or do nothing."""
        self._hang_in("register")

    def unregister(self, address: int, nbytes: int) -> None:
        """Hang, or do nothing."""
        self._hang_in("unregister")

    def close(self) -> None:
        """Hang, or close."""
        self._hang_in("close")
        super().close()


def values(memory: Memory) -> list[Value]:
    """Return the memory of all blocks."""
    return [(Span(memory.address + i * SIZE, SIZE),) for i in range(COUNT)]


def open_guard(hangs: str) -> GuardedBackend:
    """Open a stack over a store that hangs in one kind of call. The memory of headers is registered already."""
    store = HangingStore("")
    checked = CheckedBackend(store)
    memory = Memory(COUNT * SIZE)
    assert all(checked.put(KEYS, values(memory)))
    store.hangs = hangs
    guard = GuardedBackend(lambda: checked, BRIEF)
    assert guard.wait_ready(30)
    return guard


def in_parts(call: str) -> None:
    """Call a batch in parts, which hang in threads of their own."""
    parts._PART_BYTES, parts._THREADS, parts._PARTS, parts._QUICK, parts._SLOW = SIZE, 4, 8, 0.0, 0.0
    guard, memory = open_guard(""), Memory(COUNT * SIZE)
    checked = guard._store
    assert isinstance(checked, CheckedBackend)
    store = checked._store
    assert isinstance(store, HangingStore)
    assert all(guard.get(KEYS, values(memory)))  # the later calls are fast
    assert all(guard.put([f"{key}+" for key in KEYS], values(memory)))
    store.hangs = call
    answer = (
        guard.get(KEYS, values(memory)) if call == "get" else guard.put([f"{key}-" for key in KEYS], values(memory))
    )
    assert answer == [Status.FAILED] * COUNT


def register_and_take_back(guard: GuardedBackend, memory: Memory) -> None:
    """Register memory, then unregister it, which hangs."""
    guard.register(memory.address, memory.nbytes)
    guard.unregister(memory.address, memory.nbytes)


def at_once(call: str) -> None:
    """Make one call of the guard, and wait for its end."""
    guard, memory = open_guard(call), Memory(COUNT * SIZE)
    ask: dict[str, Callable[[], object]] = {
        "put": lambda: guard.put(["a"], [memory.value]),
        "get": lambda: guard.get(KEYS, values(memory)),
        "exists": lambda: guard.exists(KEYS),
        "remove": lambda: guard.remove(KEYS),
        "clear": lambda: guard.clear("kv1-"),
        "register": lambda: guard.register(memory.address, memory.nbytes),
        "unregister": lambda: register_and_take_back(guard, memory),
        "close": lambda: None,
    }
    ask[call]()
    if call != "close":
        assert not guard.is_ready
    guard.close()


def opening() -> None:
    """Open a store, which hangs."""
    guard = GuardedBackend(lambda: threading.Event().wait() and HangingStore(""), BRIEF)  # type: ignore[arg-type,return-value]
    assert guard.exists(["a"]) == [Status.FAILED]
    guard.close()


def writing_behind() -> None:
    """Write in the background."""
    behind, memory = WriteBehindBackend(open_guard("put"), arena_bytes=1 << 16, flush_seconds=0.1), Memory(100)
    assert behind.put(["a"], [memory.value]) == [Status.OK]
    assert not behind.flush_writes(1.0)
    behind.close()


def transferring(kind: str) -> None:
    """Start a load or a save with a pool without a deadline, so that it never ends."""
    memory = Memory(COUNT * SIZE)
    store = HangingStore(kind)
    begun = store.hanging
    direct = DirectMemory(lambda blocks: [values(memory)[block] for block in blocks], lambda blocks: None)
    transfers = Transfers(BlockPool(store, NAMESPACE), direct, lambda callback: callback())
    begin = transfers.load if kind == "get" else transfers.save
    begin(HASHES, range(COUNT), lambda outcome: None, lambda: None)
    assert begun.wait(30)
    transfers.close(0.1)


CALLS: dict[str, Callable[[], None]] = {
    **{
        call: lambda call=call: at_once(call)  # type: ignore[misc]
        for call in ("put", "get", "exists", "remove", "clear", "register", "unregister", "close")
    },
    "put in parts": lambda: in_parts("put"),
    "get in parts": lambda: in_parts("get"),
    "open": opening,
    "write behind": writing_behind,
    "load": lambda: transferring("get"),
    "save": lambda: transferring("put"),
}
"""The functions that hang, by the argument of the command line."""


if __name__ == "__main__":
    CALLS[sys.argv[1]]()
    print("to the end", flush=True)
