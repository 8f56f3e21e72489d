"""Small HTTP servers of the standard library in threads of their own, without logs."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["QuietHandler", "ThreadedServer"]


class QuietHandler(BaseHTTPRequestHandler):
    """A handler with persistent connections and without logs."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Write no log."""


class ThreadedServer(ThreadingHTTPServer):
    """A server that listens on loopback at once, and responds after ``start``."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler: type[QuietHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)

    def start(self) -> None:
        """Start to respond, in a thread."""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stop the server."""
        self.shutdown()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def handle_error(self, *request: Any) -> None:
        """Ignore that a client has left."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*request)
