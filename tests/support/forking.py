"""A child that is forked in the middle of a test, as engines fork them: with all memory, and without the threads."""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable

__all__ = ["in_forked_child"]


def in_forked_child(call: Callable[[], str], deadline_s: float = 30.0) -> str:
    """The answer of ``call`` in a forked child, or what it raised there; the child ends with it.

    Raises:
        AssertionError: the child did not answer within ``deadline_s``.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: there are threads, as is meant
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
