"""RouterServer: uvicorn with a shutdown that also ends the router's requests in progress."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
import time
from types import FrameType

import uvicorn

from router.app import RouterApp
from router.http import ListenerContext, RouterProtocol
from router.settings import RouterSettings, ServedCertificate
from router.sharing import LEAVING

__all__ = ["INTERRUPT_GRACE_SECONDS", "RouterServer", "list_graces", "prepare_process"]

_log = logging.getLogger("router.launch")

# After Ctrl-C, running requests get this time; then they end with an error.
INTERRUPT_GRACE_SECONDS = 1.0
# If stopping takes longer than the first time, log why, and log it again periodically.
QUIET_SECONDS, PROGRESS_SECONDS = 2.0, 5.0
# A client that has not taken the end of its response by then is disconnected.
FLUSH_SECONDS = 1.0
# Longer than the clients' own limits (5 s in httpx, 60 s in many load balancers), so that they close first.
CLIENT_IDLE_SECONDS = 65
# The garbage collector may run rarely: requests leave no reference cycles (tests/router/serving/test_fault_table.py).
GC_THRESHOLDS = (20_000, 10, 10)
# The minimum that Python accepts.
MAX_DIGITS = 640


class RouterServer(uvicorn.Server):
    """Serves ``router`` to clients."""

    def __init__(self, router: RouterApp) -> None:
        """
        Raises:
            SettingsError: the certificate or its key cannot be used.
        """
        settings = router.settings
        self._graces = list_graces(settings)
        config = uvicorn.Config(
            router,
            http=RouterProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=CLIENT_IDLE_SECONDS,
            timeout_graceful_shutdown=int(max(self._graces.values()) + 2 * FLUSH_SECONDS) + 1,
        )
        config.load()
        self._certificate = None
        if settings.ssl_certfile:
            config.ssl = ListenerContext()
            self._certificate = ServedCertificate(config.ssl, settings.ssl_certfile, settings.ssl_keyfile)
        super().__init__(config)
        self._router = router
        self._stops_at: float | None = None  # time of the end, if the server stops with a delay
        self._ends_requests_at = 0.0
        self._renewal: asyncio.Future[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop, possibly after a delay, and give running requests time to end; at a second signal, stop immediately."""
        delay = self._router.settings.shutdown_delay_secs
        if self.should_exit or self._stops_at is not None:
            self.stop_serving(0.0)
        elif delay and sig == signal.SIGTERM:
            _log.info(LEAVING, delay)
            self._router.prepare_to_leave()
            self._stops_at = time.monotonic() + delay
        else:
            self.stop_serving(self._graces[signal.Signals(sig)])

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop now; called by uvicorn ten times per second."""
        if self._stops_at is not None and time.monotonic() >= self._stops_at and not self.should_exit:
            self.stop_serving(self._graces[signal.SIGTERM])
        return await super().on_tick(counter)

    def stop_serving(self, grace: float) -> None:
        """Stop, and give running requests ``grace`` seconds to end."""
        self._router.prepare_to_leave()
        self._ends_requests_at = time.monotonic() + grace
        self.should_exit = True

    def make_protocol(self) -> RouterProtocol:
        """Return the protocol of a connection that was accepted elsewhere. The server must have started."""
        return RouterProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve."""
        await super().startup(sockets)
        if self._certificate is not None:
            self._renewal = asyncio.ensure_future(self._certificate.keep_current())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no new connections; wait for running requests, or end them."""
        if self._renewal is not None:
            self._renewal.cancel()
        meanwhile = [asyncio.ensure_future(self._end_requests()), asyncio.ensure_future(self._tell_progress())]
        await super().shutdown(sockets)
        for task in meanwhile:
            task.cancel()

    async def _tell_progress(self) -> None:
        """Log why stopping takes long, if it does."""
        await asyncio.sleep(QUIET_SECONDS)
        while True:
            requests = self._router.proxy.num_requests
            left = max(0.0, self._ends_requests_at - time.monotonic())
            if requests:
                what = "1 request that runs" if requests == 1 else f"{requests} requests that run"
                _log.info("stopping: waiting for %s, for %.0f s at most; a second signal ends that at once", what, left)
            else:
                _log.info("stopping: waiting for %d connections to close", len(self.server_state.connections))
            await asyncio.sleep(PROGRESS_SECONDS)

    async def _end_requests(self) -> None:
        while time.monotonic() < self._ends_requests_at:
            await asyncio.sleep(0.1)
        self._router.proxy.stop()
        await asyncio.sleep(FLUSH_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def list_graces(settings: RouterSettings) -> dict[signal.Signals, float]:
    """Return the seconds that running requests get, for each signal that ends the router."""
    return {signal.SIGTERM: settings.shutdown_grace_secs, signal.SIGINT: INTERRUPT_GRACE_SECONDS}


def prepare_process() -> None:
    """Prepare a process that serves requests, once all modules are loaded."""
    # The time to parse a number grows with the square of its length. No engine has longer ones.
    sys.set_int_max_str_digits(MAX_DIGITS)
    # Otherwise the collector would scan the retained records again and again without finding garbage.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    # A request needs three file descriptors, and the usual limit is 1,024.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS reports "unlimited", but refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
