"""Runs a function in a forked child process, which has the memory of the test but not its threads."""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable

__all__ = ["in_forked_child"]


def in_forked_child(call: Callable[[], str], deadline_s: float = 30.0) -> str:
    """Run ``call`` in a forked child; return its result, or the text of the exception that it raised.

    Raises:
        AssertionError: the child returned nothing within ``deadline_s``.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since Python 3.12, a fork with threads gives a warning
        pid = os.fork()
    if pid == 0:
        try:
            answer = call()
        except BaseException as exc:
            answer = f"raised {exc!r}"
        os.write(writing, answer.encode() or b" ")
        os._exit(0)
    os.close(writing)
    try:
        assert select.select([reading], [], [], deadline_s)[0], "the forked child hangs"
        return os.read(reading, 1 << 16).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
