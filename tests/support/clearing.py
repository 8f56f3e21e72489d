"""Clears of a pool as instances detect them, without the command."""

from __future__ import annotations

import pytest

from kvstore_backend.backend import Status, StorageBackend
from kvstore_backend.clear_marks import ClearMarks, make_mark, mark_key
from kvstore_backend.wrappers.checked import HEADER_BYTES
from tests.support.memory import Memory
from tests.support.waiting import wait_until

__all__ = ["leave_mark", "looks", "wait_for_a_look"]


def leave_mark(backend: StorageBackend, digest: str) -> None:
    """Write the mark of a new clear to the pool, through an instance's backend."""
    key = mark_key(digest)
    memory = Memory(make_mark(key)[HEADER_BYTES:].tobytes())
    backend.remove([key], force=True)
    assert backend.put([key], [memory.value]) == [Status.OK]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """Return a list that gets the result of each search for a clear. Use it before an instance starts to search."""
    told: list[bool | None] = []
    look = ClearMarks.look

    def note(marks: ClearMarks) -> bool | None:
        told.append(look(marks))
        return told[-1]

    monkeypatch.setattr(ClearMarks, "look", note)
    return told


def wait_for_a_look(looks: list[bool | None]) -> None:
    """Wait until the instance has checked its blocks, and then searched for a clear, after this call.

    An instance detects a loss only if an earlier check has found the blocks.
    """
    first = len(looks)
    wait_until(lambda: len(looks) >= first + 2, "two looks, the first of which may have begun before")
