"""Calls from a test to a process: lines of JSON over a Unix socket, one for a call and one for its result."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["VARIABLE", "Caller", "serve"]

VARIABLE = "TEST_FASTDEPLOY_SOCKET"


class Caller:
    """The test's end of the socket. It calls methods of the process at the other end."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rw")
        connection.close()  # when the lines are closed
        self.role = str(json.loads(self._lines.readline()))

    def __call__(self, method: str, *arguments: object) -> Any:
        """Call a method; return its result.

        Raises:
            AssertionError: the method raised an exception.
        """
        self._lines.write(json.dumps([method, arguments]) + "\n")
        self._lines.flush()
        answer, error = json.loads(self._lines.readline() or '[null, "the process ended"]')
        assert not error, f"{method} of the {self.role}: {error}"
        return answer

    def close(self) -> None:
        """End the process at the other end."""
        self._lines.close()


def serve(role: str, methods: dict[str, Callable[..., Any]]) -> None:
    """Send the role of this process, answer calls until the test closes its end, and end this process."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[VARIABLE])
        lines = connection.makefile("rw")
        print(json.dumps(role), file=lines, flush=True)
        for line in lines:
            method, arguments = json.loads(line)
            try:
                answer, error = methods[method](*arguments), ""
            except Exception:
                answer, error = None, traceback.format_exc()
            print(json.dumps([answer, error]), file=lines, flush=True)
    os._exit(0)  # without its master, Mooncake's client needs a long time to end
