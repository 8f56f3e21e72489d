"""Workers' links that meet in one hub, as those of one supervisor's workers do; all in one process."""

from __future__ import annotations

import socket
from typing import Any

from router.sharing import WorkerLink
from router.sharing.hub import Hub
from router.sharing.wire import open_wire

__all__ = ["LinkedHub", "open_links"]


class LinkedHub:
    """A hub, and links to it; ``leave`` is the death of a worker."""

    def __init__(self) -> None:
        self.hub = Hub(lambda name, figures: self.counts.update({name: figures}))
        self.counts: dict[str, dict[str, int]] = {}

    async def join(self, name: str) -> WorkerLink:
        """A new worker's link."""
        ours, theirs = socket.socketpair()
        link = WorkerLink(name, is_first=name == "0", is_late=False)

        def on_message(message: list[Any]) -> None:
            self.hub.on_message(name, message)

        self.hub.add_worker(name, await open_wire(ours, on_message, lambda: self.hub.remove_worker(name)))
        await link.open(theirs)
        return link


async def open_links(count: int) -> list[WorkerLink]:
    """The links of ``count`` workers."""
    linked = LinkedHub()
    return [await linked.join(str(number)) for number in range(count)]
