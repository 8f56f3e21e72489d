"""A hub and the links of workers, all in one process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from router.sharing import Link
from router.sharing.channels import open_channel
from router.sharing.hub import Hub

__all__ = ["LinkedHub", "join_all", "make_record", "run_linked", "until"]


class LinkedHub:
    """A hub, and links to it."""

    def __init__(self, name: str = "router") -> None:
        self.hub = Hub(name)
        self._closings: list[Callable[[], None]] = []

    async def join(self, name: str) -> Link:
        """Add a worker, and return its link."""
        ours, theirs = socket.socketpair()
        link = Link(name, is_first=name == "0")

        def on_message(message: list[Any]) -> None:
            self.hub.on_message(name, message)

        channel = await open_channel(ours, on_message, lambda: self.hub.forget_worker(name))
        self.hub.add_worker(name, channel)
        await link.connect(theirs)
        self._closings += [channel.close, link.disconnect]
        return link

    async def close(self) -> None:
        """Close all links and channels, as at a router's end."""
        for close_end in reversed(self._closings):  # links before channels: a link without its hub stops its worker
            close_end()
        await asyncio.sleep(0.001)


def run_linked(work: Callable[[LinkedHub], Awaitable[None]]) -> None:
    """Run ``work`` with a hub in a new event loop."""

    async def run() -> None:
        linked = LinkedHub()
        try:
            await work(linked)
        finally:
            await linked.close()

    asyncio.run(run())


async def join_all(linked: LinkedHub, count: int) -> list[Link]:
    """Add ``count`` workers, and return their links."""
    return [await linked.join(str(number)) for number in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition`` holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition does not become true"
        await asyncio.sleep(0.001)


def make_record(count: int, writer: str = "a", *, ordered: int = 0, **members: Any) -> dict[str, Any]:
    """Return a record with the parts that a hub reads. ``count`` and ``ordered`` are in the versions of its parts."""
    return {"version": [count, writer], "orders": {"version": [ordered, writer if ordered else ""]}, **members}
