"""A router's registration endpoint, and nothing else of a router: it records what instances tell it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Router"]


class Router:
    """Takes registrations; answers 400 while ``refuses``."""

    def __init__(self, port: int = 0) -> None:
        self.registered: list[tuple[str, Any]] = []
        self.refuses = False
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                router.registered.append((self.path, body))
                answer = b'{"detail": "no such role"}' if router.refuses else b'{"status": "success"}'
                self.send_response(400 if router.refuses else 200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
