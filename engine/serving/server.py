"""The HTTP server of an instance: starts it, and stops it in steps."""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from engine.serving.endpoints import create_app
from engine.serving.http_server import InstanceProtocol
from engine.serving.instance import Instance
from kvcommon.output import announce
from kvcommon.shutdown import count_requests, report_progress

__all__ = ["InstanceServer"]

log = logging.getLogger(__name__)

_GRACE_SECONDS = 3
# Time after which an idle connection is closed. It is longer than the time of clients (90 s in Go), so that the client
# closes it first. If the server closed it, a request that arrives at the same moment would be lost.
KEEP_ALIVE_SECONDS = 120


class InstanceServer(uvicorn.Server):
    """The HTTP server. When it stops, it waits a short time for running responses, and then aborts them."""

    def __init__(self, instance: Instance) -> None:
        # At its time-out uvicorn closes connections, and logs a traceback for each. So all must have ended before.
        timeout = 2 * _GRACE_SECONDS
        super().__init__(
            uvicorn.Config(
                create_app(instance),
                http=InstanceProtocol,
                log_config=None,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=timeout,
            )
        )
        self._generations = instance.generations
        self._core = instance.core

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._generations.abort_all)
        progress = asyncio.ensure_future(report_progress(self._report_progress))
        await super().shutdown(sockets)
        progress.cancel()

    def _report_progress(self) -> None:
        """Log what the server waits for while it stops."""
        if count := self._generations.num_live:
            what = count_requests(count)
        elif count := len(self.server_state.connections):
            what = "1 connection to close" if count == 1 else f"{count} connections to close"
        else:
            what = self._core.holds_stop_up
        log.info("stopping: waiting for %s", what)
        announce(f"engine.api_server: stopping: waiting for {what}")
