"""Writes the output of programs: what happens if nobody reads it any more, or the disk is full."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

__all__ = ["announce", "run_program"]


def run_program(name: str, main: Callable[[], int]) -> int:
    """Call ``main``, write the output that is still in buffers, and return the exit status.

    If no reader is left, as in ``kvstore ls | head``, the program ends silently; on a full disk, with one sentence. The
    exit status is 1 in both cases.

    Args:
        name: name of the program, for the sentence.
        main: runs the program, and returns its exit status.
    """
    try:
        try:
            status = main()
        except SystemExit:  # argparse raises this after --help
            _flush()
            raise
        _flush()
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"{name}: the output could not be written completely: {exc.strerror}", file=sys.stderr)
        _drop_output()
        return 1
    return status


def announce(sentence: str) -> None:
    """Print what a server does, for whoever started it. An output that cannot be written does not stop the server."""
    try:
        print(sentence, flush=True)
    except OSError:
        _drop_output()


def _flush() -> None:
    if sys.stdout is not None:  # a shell may close it: >&-
        sys.stdout.flush()


def _drop_output() -> None:
    """Discard all later output, and what standard output's buffer holds, which Python would write when it exits."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
