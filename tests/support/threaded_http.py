"""Small HTTP servers of the standard library's in threads of their own, which say nothing and end at once."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["QuietHandler", "ThreadedServer"]


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections, and writes no log."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


class ThreadedServer(ThreadingHTTPServer):
    """Listens on loopback from the beginning, and answers once it was started."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler: type[QuietHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)

    def start(self) -> None:
        """Answer, in a thread."""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Listen no more."""
        self.shutdown()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def handle_error(self, *request: Any) -> None:
        """That a client left, or was killed, is told to nobody."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*request)
