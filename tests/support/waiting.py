"""Waiting for something to become true, instead of sleeping and hoping."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["port_answers", "wait_until"]

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, deadline_s: float = 60.0, pause_s: float = 0.02) -> T:
    """Call ``condition`` until it answers something true, and return that.

    Raises:
        AssertionError: ``deadline_s`` passed first; the message says ``what`` was waited for.
    """
    give_up_at = time.monotonic() + deadline_s
    while not (answer := condition()):
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(pause_s)
    return answer


def port_answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody accepts TCP connections at ``host:port`` now."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
