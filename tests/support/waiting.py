"""Waits until a condition is true, in place of sleeps."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["port_answers", "wait_until"]

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, deadline_s: float = 60.0, pause_s: float = 0.02) -> T:
    """Call ``condition`` until its result is true, and return the result.

    Raises:
        AssertionError: the result was not true within ``deadline_s``; the message has the text ``what``.
    """
    give_up_at = time.monotonic() + deadline_s
    while not (answer := condition()):
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(pause_s)
    return answer


def port_answers(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether TCP connections to ``host:port`` are accepted now."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
