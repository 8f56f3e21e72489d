"""A clear as instances see it, without the command."""

from __future__ import annotations

import pytest

from kvstore_backend.backend import Status, StorageBackend
from kvstore_backend.clear_marks import ClearMarks, make_mark, mark_key
from kvstore_backend.wrappers.checked import HEADER_BYTES
from tests.support.memory import Memory

__all__ = ["leave_mark", "looks"]


def leave_mark(backend: StorageBackend, digest: str) -> None:
    """Leave the mark of a new clear by way of ``backend``, as instances have it: with its headers, if it has any."""
    key = mark_key(digest)
    memory = Memory(make_mark(key)[HEADER_BYTES:].tobytes())
    backend.remove([key], force=True)
    assert backend.put([key], [memory.value]) == [Status.OK]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """Result of each look for a clear. Made before an instance, or a look that began earlier could find a mark."""
    told: list[bool | None] = []
    look = ClearMarks.look

    def note(marks: ClearMarks) -> bool | None:
        told.append(look(marks))
        return told[-1]

    monkeypatch.setattr(ClearMarks, "look", note)
    return told
