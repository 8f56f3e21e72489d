"""A page in Debian's Chromium, whose script tells the test what it has found."""

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
    """Chromium's program; without it the test that asks is skipped."""
    for program in PROGRAMS:
        if path := shutil.which(program):
            return path
    pytest.skip("Chromium is not on this machine: apt-get install chromium-headless-shell")


class Page:
    """A page with one script, served at an origin of its own."""

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
        """Its scheme, host and port."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def run(self, script: str, folder: Path, *flags: str) -> Any:
        """Open the page in Chromium with the body of an asynchronous function; return what that function returns."""
        self.script = script
        command = [find_chromium(), "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--no-proxy-server", "--disable-background-networking", "--disable-component-update"]
        # Without a port for debugging, it would end with its start.
        command += ["--headless", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", *flags]
        with child([*command, self.origin], folder / "chromium.log") as browser:
            browser.wait_for(lambda: self.found is not None, "the page's script")
        return self.found

    def close(self) -> None:
        """Serve it no longer."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def open_page() -> Iterator[Page]:
    """A ``Page`` that is served while the block runs."""
    page = Page()
    try:
        yield page
    finally:
        page.close()
