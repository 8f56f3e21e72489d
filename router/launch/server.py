"""RouterServer: uvicorn with a shutdown that also ends the router's running requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import resource
import signal
import socket
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from kvcommon.shutdown import count_requests, report_progress
from router.app import RouterApp
from router.http import ListenerContext, RouterProtocol
from router.settings import ServedCertificate
from router.sharing import LEAVING

if TYPE_CHECKING:
    from router.epp import Picker

__all__ = ["RouterServer", "prepare_process"]

_log = logging.getLogger("router.launch")

# When the server stops, clients may read the end of their responses for this time. Then they are disconnected.
FLUSH_SECONDS = 1.0
# An idle connection of a client is closed after this time. It is longer than the limits of clients (5 s in httpx, 60 s
# in many load balancers), so that clients close first.
CLIENT_IDLE_SECONDS = 65
# The first number is small, because a collection delays all requests by 0.3 microseconds for each new object. Older
# objects are collected rarely: requests leave no reference cycles (tests/router/serving/test_fault_table.py).
GC_THRESHOLDS = (2_000, 100, 10)
# Maximum number of digits of a parsed number: the lowest limit that Python accepts.
MAX_DIGITS = 640


class RouterServer(uvicorn.Server):
    """The uvicorn server of one process, with the router as its application."""

    def __init__(self, router: RouterApp) -> None:
        """
        Raises:
            SettingsError: the certificate or its key cannot be used.
        """
        settings = router.settings
        self._graces = settings.graces
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_to_stop = asyncio.Event()
        self._is_leaving = False  # whether the server will stop after a delay
        self._ends_requests_at = 0.0
        self._renewal: asyncio.Future[None] | None = None
        self._picker: Picker | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: stop (after SIGTERM, with the configured delay), and wait for running requests.

        A second signal ends all waiting.
        """
        delay, grace = self._router.settings.shutdown_delay_secs, self._graces[signal.Signals(sig)]
        if self.should_exit or self._is_leaving:
            self.stop_serving(0.0)
        elif delay and sig == signal.SIGTERM and self._loop is not None:
            _log.info(LEAVING, delay)
            self._router.prepare_to_leave()
            self._is_leaving = True
            # A signal handler may run at any moment, so the timer is set in a callback of the event loop.
            self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._stop_after_delay, grace)
        else:
            self.stop_serving(grace)

    def _stop_after_delay(self, grace: float) -> None:
        if not self.should_exit:
            self.stop_serving(grace)

    def stop_serving(self, grace: float) -> None:
        """Stop the server, and wait up to ``grace`` seconds for running requests."""
        self._router.prepare_to_leave()
        self._ends_requests_at = time.monotonic() + grace
        self.should_exit = True

    @property
    def should_exit(self) -> bool:
        """Whether the server has to stop. Any thread may set this."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # a late signal, after the event loop has ended
                self._loop.call_soon_threadsafe(self._has_to_stop.set)

    async def main_loop(self) -> None:
        """Wait until ``should_exit`` is set. uvicorn's own loop would check it ten times per second."""
        await self.on_tick(0)  # uvicorn prepares the headers of responses there
        await self._has_to_stop.wait()

    def make_protocol(self) -> RouterProtocol:
        """Return a protocol for a connection that the supervisor has accepted. The server must have started."""
        return RouterProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server, and the endpoint picker if it has a port.

        Raises:
            SettingsError: the port of the endpoint picker cannot be used.
        """
        self._loop = asyncio.get_running_loop()
        if self._router.settings.epp_port:
            # Imported only here, because it needs gRPC.
            self._picker = importlib.import_module("router.epp").Picker(self._router)
        await super().startup(sockets)
        if self._picker is not None:
            await self._picker.start()
        if self._certificate is not None:
            self._renewal = asyncio.ensure_future(self._certificate.keep_current())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no new connections, and wait for running requests until their time ends."""
        if self._renewal is not None:
            self._renewal.cancel()
        meanwhile = [
            asyncio.ensure_future(self._end_requests()),
            asyncio.ensure_future(report_progress(self._report_progress)),
        ]
        if self._picker is not None:
            grace = max(0.0, self._ends_requests_at - time.monotonic()) + FLUSH_SECONDS
            stopping = asyncio.ensure_future(self._picker.stop(grace))
            self.server_state.tasks.add(stopping)  # uvicorn waits for these tasks after it has closed its listeners
            stopping.add_done_callback(self.server_state.tasks.discard)
        await super().shutdown(sockets)
        for task in meanwhile:
            task.cancel()

    def _report_progress(self) -> None:
        """Log for which requests or connections the stopping server is waiting."""
        left = max(0.0, self._ends_requests_at - time.monotonic())
        if count := self._router.proxy.num_requests:
            message = "stopping: waiting for %s, for %.0f s at most; a second signal stops the router immediately"
            _log.info(message, count_requests(count), left)
        else:
            _log.info("stopping: waiting for %d connections to close", len(self.server_state.connections))

    async def _end_requests(self) -> None:
        while time.monotonic() < self._ends_requests_at:
            await asyncio.sleep(0.1)
        self._router.proxy.stop()
        await asyncio.sleep(FLUSH_SECONDS)
        if self._picker is not None:
            await self._picker.stop(0.0)  # after a second signal, the first call still waits in ``shutdown``
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def prepare_process() -> None:
    """Set limits of this process for serving requests. Call it after all modules were imported."""
    # The time for parsing a number grows with the square of its length. No engine needs longer numbers.
    sys.set_int_max_str_digits(MAX_DIGITS)
    # Otherwise the garbage collector would scan the loaded modules and stored records repeatedly, and free nothing.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    # A request needs three file descriptors, and the usual limit is 1,024.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the kernel's limit may have become lower than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
