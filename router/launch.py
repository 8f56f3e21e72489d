"""Starts the router: ``python -m router.launch --port 52700 --splitwise``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop

from router.app import RouterApp
from router.http import ListenerContext, RouterProtocol
from router.settings import RouterSettings, SettingsError, load_certificate, load_settings

__all__ = ["main"]

_log = logging.getLogger("router.launch")

# Requests that still run get so long; then they are ended with an error. Kubernetes kills 30 s after its SIGTERM.
GRACE_SECONDS = {signal.SIGTERM: 25.0, signal.SIGINT: 1.0}
# Stopping that takes longer is explained, and explained again after each further so long.
QUIET_SECONDS, PROGRESS_SECONDS = 2.0, 5.0
# A client that has not taken its response's end by then is cut off.
FLUSH_SECONDS = 1.0
# Longer than the clients' own limits (5 s in httpx, 60 s in many load balancers), so that they close first.
CLIENT_IDLE_SECONDS = 65
# The collector need not look often: requests leave no circles (tests/router/serving/test_fault_table.py).
GC_THRESHOLDS = (20_000, 10, 10)
# As of FastDeploy's Go router: under the folder it is started in.
LOG_FILE = Path("logs/router.log")
LOG_FILES_KEPT = 4


class _Server(uvicorn.Server):
    """uvicorn, whose shutdown also ends the router's requests in progress."""

    def __init__(self, config: uvicorn.Config, router: RouterApp, tls: ListenerContext | None) -> None:
        config.load()
        config.ssl = tls
        super().__init__(config)
        self._router = router
        self._ends_requests_at = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop, and let running requests end in their time; told so again, at once."""
        grace = 0.0 if self.should_exit else GRACE_SECONDS[signal.Signals(sig)]
        self._ends_requests_at = time.monotonic() + grace
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing new; wait for requests that run, or end them."""
        meanwhile = [asyncio.ensure_future(self._end_requests()), asyncio.ensure_future(self._tell_progress())]
        await super().shutdown(sockets)
        for task in meanwhile:
            task.cancel()

    async def _tell_progress(self) -> None:
        """Say why it takes long to stop, if it does."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until SIGTERM or SIGINT; return the exit status."""
    try:
        settings = load_settings(sys.argv[1:] if argv is None else argv)
        tls = _make_tls_context(settings)
        handler = _make_log_handler(settings)
        listener = _open_listener(settings.host, settings.port)
        settings = dataclasses.replace(settings, port=listener.getsockname()[1])
        logging.basicConfig(
            level="INFO" if settings.log_level == "debug" else settings.log_level.upper(),
            handlers=[handler],
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        logging.getLogger("router").setLevel(settings.log_level.upper())  # the libraries' details tell nobody anything
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        router = RouterApp(settings)
    except SettingsError as exc:
        print(f"router: {exc}", file=sys.stderr)
        return 2
    for sentence in settings.without_effect:
        _log.warning("%s", sentence)
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
        timeout_graceful_shutdown=int(max(GRACE_SECONDS.values()) + 2 * FLUSH_SECONDS),
    )
    server = _Server(config, router, tls)

    # uvicorn handles both signals while it serves and raises them again afterwards; here they mean a good end.
    def stop(*_: object) -> None:
        server.should_exit = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    _log.info("%s", _format_startup_line(settings))
    # The records kept to be explained would be looked through again and again for garbage that is not there.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    _open_more_files()
    uvloop.run(server.serve(sockets=[listener]))
    _log.info("the router has stopped")
    return 0


def _make_tls_context(settings: RouterSettings) -> ListenerContext | None:
    """The TLS of clients' connections; None where they speak plain HTTP.

    Raises:
        SettingsError: certificate or key cannot be used.
    """
    if not settings.ssl_certfile:
        return None
    context = ListenerContext()
    load_certificate(context, settings.ssl_certfile, settings.ssl_keyfile)
    return context


def _make_log_handler(settings: RouterSettings) -> logging.Handler:
    """The handler that writes the log where ``log.output`` says.

    Raises:
        SettingsError: the log file cannot be written.
    """
    if settings.log_output != "file":
        return logging.StreamHandler(sys.stderr if settings.log_output == "stderr" else sys.stdout)
    try:
        LOG_FILE.parent.mkdir(exist_ok=True)
        # The file and its predecessors share the space that logs may take.
        size = settings.log_max_total_size_mb * 1_000_000 // (LOG_FILES_KEPT + 1)
        return RotatingFileHandler(LOG_FILE, maxBytes=size, backupCount=LOG_FILES_KEPT)
    except OSError as exc:
        raise SettingsError(f"log.output is 'file', but {LOG_FILE} cannot be written: {exc.strerror}") from exc


def _open_listener(host: str, port: int) -> socket.socket:
    """A socket bound to ``host:port``.

    Raises:
        SettingsError: it cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as exc:
        raise SettingsError(f"--host {host} is not an address of this machine: {exc.strerror}") from exc
    except ValueError as exc:  # no possible name, such as one with two dots together
        raise SettingsError(f"--host {host} is not an address of this machine: {exc}") from exc
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            raise SettingsError(f"port {port} of {host} is already in use; choose another with --port") from exc
        raise SettingsError(f"cannot listen at {host}:{port}: {exc.strerror}") from exc
    return listener


def _open_more_files() -> None:
    """Take as many descriptors as the system gives: a request needs three, and the usual limit is 1,024."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says "unlimited", and does not mean it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _format_startup_line(settings: RouterSettings) -> str:
    if settings.splitwise:
        mode = f"prefill by {settings.prefill_policy}, decode by {settings.decode_policy}"
    else:
        mode = f"mixed by {settings.policy}"
    scheme = "https" if settings.ssl_certfile else "http"
    return f"router listens at {scheme}://{settings.host}:{settings.port}, {mode}; waiting for instances to register"


if __name__ == "__main__":
    sys.exit(main())
