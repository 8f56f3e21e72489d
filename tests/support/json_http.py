"""A small HTTP server with JSON bodies, for simulated instances and routers."""

from __future__ import annotations

import json
from collections.abc import Callable
from email.message import Message
from typing import Any, NamedTuple

from tests.support.threaded_http import QuietHandler, ThreadedServer

__all__ = ["Asked", "JsonServer"]


class Asked(NamedTuple):
    """A request. Its body is None if it has none."""

    path: str
    headers: Message
    body: Any


class JsonServer(ThreadedServer):
    """A server that responds to GET and POST until it is stopped, or its block ends.

    Args:
        answer: returns the status and the JSON body of a response; called in a thread of the request.
        port: the port of the server; 0 for a free one.
    """

    def __init__(self, answer: Callable[[Asked], tuple[int, object]], port: int = 0) -> None:
        class Handler(QuietHandler):
            protocol_version = "HTTP/1.0"  # each connection ends with its response, so none remains after the server

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"null"))

            def _answer(self, body: Any) -> None:
                status, content = answer(Asked(self.path, self.headers, body))
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        super().__init__(Handler, port)
        self.address = f"127.0.0.1:{self.server_port}"
        self.start()
