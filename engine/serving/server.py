"""The HTTP server of an instance: start and stop."""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from engine.serving.endpoints import create_app
from engine.serving.http_server import InstanceProtocol
from engine.serving.instance import Instance

__all__ = ["InstanceServer"]

log = logging.getLogger(__name__)

_GRACE_SECONDS = 3
# Idle connections stay open longer than in the pools of clients (Go's: 90 s), so that the client closes them: if the
# server closes one, a request that arrives at that moment is lost.
KEEP_ALIVE_SECONDS = 120
# If stopping takes longer than this, the reason is logged, and again after each further interval.
_QUIET_SECONDS, _PROGRESS_SECONDS = 2.0, 5.0


class InstanceServer(uvicorn.Server):
    """When stopped, gives running responses a moment to end, then ends them with finish reason ``abort``."""

    def __init__(self, instance: Instance) -> None:
        # uvicorn cuts connections at its own time-out, with a traceback for each: by then none must be left.
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
        telling = asyncio.ensure_future(self._tell_progress())
        await super().shutdown(sockets)
        telling.cancel()

    async def _tell_progress(self) -> None:
        """Log why it takes long to stop, if it does."""
        await asyncio.sleep(_QUIET_SECONDS)
        while True:
            if count := self._generations.num_live:
                what = "1 request that runs" if count == 1 else f"{count} requests that run"
            elif count := len(self.server_state.connections):
                what = "1 connection to close" if count == 1 else f"{count} connections to close"
            else:
                what = self._core.holds_stop_up
            log.info("stopping: waiting for %s", what)
            print(f"engine.api_server: stopping: waiting for {what}", flush=True)
            await asyncio.sleep(_PROGRESS_SECONDS)
