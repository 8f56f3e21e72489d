"""A stand-in for an instance whose speed is known."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator

__all__ = ["timed_instance"]


@contextlib.contextmanager
def timed_instance(token_seconds: float, *, context: int = 600, tokens_per_word: int = 1) -> Iterator[str]:
    """The URL of a stand-in that takes so long for a token, and a while for each request.

    Args:
        context: tokens of the longest prompt that it takes.
        tokens_per_word: many let the noise of a busy machine vanish.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (body["model"], body["max_tokens"]) == ("model", 2)
            tokens = tokens_per_word * len(body["prompt"].split())
            if tokens > context:
                self._answer(400, {"error": {"message": "too long"}})
                return
            time.sleep(0.01 + tokens * token_seconds)
            self._answer(200, {"usage": {"prompt_tokens": tokens}})

        def _answer(self, status: int, content: object) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
