"""A page in Debian's Chromium. Its script sends its result to the test."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import child

__all__ = ["Page", "find_chromium", "open_page"]

PROGRAMS = ("chromium-headless-shell", "chromium")
HTML = """<!doctype html><meta charset="utf-8"><script type="module">
async function find() { %s }
const found = await find().catch(error => ({failed: String(error)}));
await fetch("/found", {method: "POST", body: JSON.stringify(found)});
</script>"""


def find_chromium() -> str:
    """Return the path of Chromium; skip the test if it is not installed."""
    for program in PROGRAMS:
        if path := shutil.which(program):
            return path
    pytest.skip("Chromium is not on this machine: apt-get install chromium-headless-shell")


class Page:
    """A page with one script. A server of its own serves it."""

    def __init__(self) -> None:
        self.script = ""
        self.found: Any = None
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer((HTML % page.script).encode())

            def do_POST(self) -> None:
                page.found = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.answer(b"")

            def answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def origin(self) -> str:
        """The scheme, host and port of the page."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def run(self, script: str, folder: Path, *flags: str) -> Any:
        """Run the body of an asynchronous function in the page; return the function's result."""
        self.script = script
        command = [find_chromium(), "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--no-proxy-server", "--disable-background-networking", "--disable-component-update"]
        # Without a port for debugging, Chromium ends immediately.
        command += ["--headless", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", *flags]
        with child([*command, self.origin], folder / "chromium.log") as browser:
            browser.wait_for(lambda: self.found is not None, "the page's script")
        return self.found

    def close(self) -> None:
        """Stop the server of the page."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def open_page() -> Iterator[Page]:
    """Yield a page that is served during the block."""
    page = Page()
    try:
        yield page
    finally:
        page.close()
