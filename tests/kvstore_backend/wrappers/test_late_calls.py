from __future__ import annotations

import threading

import pytest

from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers import wrapper
from kvstore_backend.wrappers.wrapper import Wrapper, call_after_late_calls


class Late(Wrapper):
    """Has a late call until ``has_ended`` is set."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(1))
        self.has_ended = threading.Event()

    def wait_for_late_calls(self, seconds: float) -> bool:
        return self.has_ended.wait(seconds)


@pytest.fixture
def is_released() -> threading.Event:
    return threading.Event()


def test_memory_is_released_when_the_late_call_has_ended_and_not_before(is_released: threading.Event) -> None:
    stack = Late()
    call_after_late_calls(stack, is_released.set)
    assert not is_released.wait(0.1)
    stack.has_ended.set()
    assert is_released.wait(30)


def test_a_call_that_stays_late_is_logged_repeatedly(
    is_released: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wrapper, "_WARN_AFTER_SECONDS", 0.01)
    stack = Late()
    call_after_late_calls(stack, is_released.set)
    assert not is_released.wait(0.2)
    stack.has_ended.set()
    assert is_released.wait(30)
    assert caplog.text.count("running for over 0.01 s") > 1


def test_memory_is_never_reused_if_no_thread_can_wait_for_its_late_call(
    is_released: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    never_called: list[object] = []
    monkeypatch.setattr(wrapper, "_NEVER_CALLED", never_called)
    monkeypatch.setattr(threading.Thread, "start", fail)
    call_after_late_calls(Late(), is_released.set)
    assert never_called == [is_released.set]
    assert not is_released.is_set()
    assert "check the limit of threads: can't start new thread" in caplog.text


def test_an_error_in_the_release_is_logged(caplog: pytest.LogCaptureFixture) -> None:
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
    assert "could not be released after the call" in caplog.text
