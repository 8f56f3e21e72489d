"""Threads of the pool have a lower priority than threads that compute."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from engine.pool.background import in_background

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_threads_of_a_background_call_have_a_lower_priority() -> None:
    priorities: list[int] = []

    def open_something() -> str:
        thread = threading.Thread(target=lambda: priorities.append(niceness()))
        thread.start()
        thread.join()
        return "opened"

    before = niceness()
    assert in_background(open_something) == "opened"
    assert priorities[0] > before
    assert niceness() == before


def test_an_error_of_a_background_call_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0)
