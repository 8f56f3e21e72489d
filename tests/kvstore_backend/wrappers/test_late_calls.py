from __future__ import annotations

import threading

import pytest

from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers import wrapper
from kvstore_backend.wrappers.wrapper import Wrapper, call_after_late_calls


class Late(Wrapper):
    """Has a late call until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(1))
        self.has_ended = threading.Event()

    def wait_for_late_calls(self, seconds: float) -> bool:
        return self.has_ended.wait(seconds)


@pytest.fixture
def taken_back() -> threading.Event:
    return threading.Event()


def test_memory_is_taken_back_when_the_late_call_has_ended_and_not_before(taken_back: threading.Event) -> None:
    stack = Late()
    call_after_late_calls(stack, taken_back.set)
    assert not taken_back.wait(0.1)
    stack.has_ended.set()
    assert taken_back.wait(30)


def test_a_call_that_stays_late_is_told_of_again_and_again(
    taken_back: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wrapper, "_WARN_AFTER_SECONDS", 0.01)
    stack = Late()
    call_after_late_calls(stack, taken_back.set)
    assert not taken_back.wait(0.2)
    stack.has_ended.set()
    assert taken_back.wait(30)
    assert caplog.text.count("running for over 0.01 s") > 1


def test_memory_for_which_no_thread_can_wait_is_never_used_again(
    taken_back: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kept: list[object] = []
    monkeypatch.setattr(wrapper, "_NEVER_CALLED", kept)
    monkeypatch.setattr(threading.Thread, "start", fail)
    call_after_late_calls(Late(), taken_back.set)
    assert kept == [taken_back.set]
    assert not taken_back.is_set()
    assert "is never used again: can't start new thread" in caplog.text


def test_what_taking_back_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    stack, called = Late(), threading.Event()
    stack.has_ended.set()

    def fail() -> None:
        called.set()
        raise OSError("gone")

    call_after_late_calls(stack, fail)
    assert called.wait(30)
    for thread in threading.enumerate():
        if thread.name == "pool-late-calls":
            thread.join(30)
    assert "could not be made usable again" in caplog.text
