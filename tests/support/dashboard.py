"""A dashboard in its own process, connected to a router and a master of the test, and Chromium to show it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.browser import find_chromium
from tests.support.processes import Child, child

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Request

    from tests.router.stand_in import LoopThread

__all__ = ["PICTURES", "Dashboard", "Switch", "note_requests", "open_browser", "running_dashboard"]

PICTURES = Path(__file__).parents[2] / ".cache" / "pictures"
"""Folder for the screenshots of tests."""

START_SECONDS = 60.0


class Switch:
    """A TCP proxy. A test can change its target; with target 0 it accepts no connections."""

    def __init__(self, thread: LoopThread) -> None:
        self.target = 0
        self._thread = thread
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = thread.run(self._start())
        self.port: int = self._server.sockets[0].getsockname()[1]

    def lead_to(self, port: int) -> None:
        """Change the target, and close the present connections."""
        self.target = port
        self._thread.run(self._cut_all())

    def close(self) -> None:
        """Stop the proxy."""

        async def close() -> None:
            self._server.close()
            await self._cut_all()
            await self._server.wait_closed()

        self._thread.run(close())

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._pass_on, "127.0.0.1", 0)

    async def _cut_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        self._writers.add(writer)
        try:
            if self.target:
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
                writers.append(there_writer)
                self._writers.add(there_writer)
                await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
        except OSError:
            pass
        finally:
            for each in writers:
                self._writers.discard(each)
                each.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


class Dashboard:
    """A running dashboard, and the proxies between it and the router and the master."""

    def __init__(self, process: Child, router: Switch, master: Switch) -> None:
        self.process = process
        self.router = router
        self.master = master
        self.url = process.output.partition(" is at ")[2].split()[0]


@contextlib.contextmanager
def running_dashboard(thread: LoopThread, folder: Path, *flags: str) -> Iterator[Dashboard]:
    """Run ``kvrouter dashboard`` with the flags that it needs and these."""
    router, master = Switch(thread), Switch(thread)
    code = "import sys; from router.console import main; sys.exit(main())"
    argv = [sys.executable, "-c", code, "dashboard", "--port", "0", "--interval", "0.5"]
    argv += ["--router", f"127.0.0.1:{router.port}", "--pool", f"127.0.0.1:{master.port}", *flags]
    try:
        with child(argv, folder / "dashboard.log") as process:
            process.wait_for(lambda: " is at http://" in process.output, "its address", START_SECONDS)
            yield Dashboard(process, router, master)
    finally:
        router.close()
        master.close()


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Run Debian's Chromium, which connects only to this machine; skip the test if it is not installed."""
    program = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


def note_requests(context: BrowserContext, origin: str, elsewhere: list[str]) -> None:
    """Append to ``elsewhere`` the requests of pages to servers other than ``origin``."""

    def note(request: Request) -> None:
        if not request.url.startswith((origin, "data:", "blob:")):
            elsewhere.append(request.url)

    def watch(page: Page) -> None:
        page.on("websocket", lambda socket: elsewhere.append(socket.url) if not is_ours(socket.url) else None)

    def is_ours(url: str) -> bool:
        return url.startswith(origin.replace("http", "ws", 1))

    context.on("request", note)
    context.on("page", watch)
