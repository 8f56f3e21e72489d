"""main: reads the settings, opens log and port, and runs the router as one process or as several processes."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop

from kvcommon.output import run_program
from kvcommon.ports import bind_patiently
from router.access import Admission, Auth
from router.launch.logs import open_log
from router.settings import RouterSettings, SettingsError, load_settings
from router.sharing import Supervisor, WorkerTask, start_forkserver

__all__ = ["fd_router", "main"]

_log = logging.getLogger("router.launch")

NO_GRPC = "the endpoint picker needs gRPC, which is not installed: pip install '/path/to/this/repository[epp]'"


def fd_router(argv: Sequence[str] | None = None) -> int:
    """Run the router as ``fd-router``, with the response format of FastDeploy's Go router. Return the exit status."""
    return run_program("fd-router", lambda: main(argv, dialect="go"))


def main(argv: Sequence[str] | None = None, *, dialect: str = "python", epp_port: int = 0) -> int:
    """Run the router until SIGTERM or SIGINT. Return the exit status.

    Args:
        argv: the flags, or None for those of this process.
        dialect, epp_port: defaults of the settings with these names.
    """
    try:
        settings = load_settings(sys.argv[1:] if argv is None else argv, dialect=dialect, epp_port=epp_port)
        if settings.epp_port and importlib.util.find_spec("grpc") is None:
            raise SettingsError(NO_GRPC)
        open_log(settings)
        listener = _open_listener(settings.host, settings.port, "--port")
        if settings.epp_port:
            # This socket cannot share the port with another router's picker; gRPC's socket could, if there are workers.
            _open_listener(settings.host, settings.epp_port, "--epp-port").close()
        settings = dataclasses.replace(settings, port=listener.getsockname()[1])
        for sentence in settings.without_effect:
            _log.warning("%s", sentence)
        if settings.num_workers == 1 and not settings.shared_state:
            _run_alone(settings, listener)
        else:
            _run_workers(settings, listener)
    except SettingsError as exc:
        print(f"router: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the server has started
        return 130
    _log.info("the router has stopped")
    return 0


def _run_alone(settings: RouterSettings, listener: socket.socket) -> None:
    # Imported late, as in ``_run_worker``: this loads FastAPI, which a supervisor does not need.
    from router.app import RouterApp
    from router.launch.server import RouterServer, prepare_process

    server = RouterServer(RouterApp(settings))

    # uvicorn handles both signals while it serves, and raises them again afterwards. Then these handlers run.
    def end_service(*_: object) -> None:
        server.should_exit = True

    signal.signal(signal.SIGTERM, end_service)
    signal.signal(signal.SIGINT, end_service)
    _log.info("%s", _format_startup_line(settings))
    prepare_process()
    uvloop.run(server.serve(sockets=[listener]))


def _run_workers(settings: RouterSettings, listener: socket.socket) -> None:
    """Run the router in several worker processes, which this process supervises."""
    auth = Auth(settings)
    admission = Admission(settings, auth.token_rates)
    start_forkserver("router.launch.forkserver_preload")

    async def run_supervisor() -> str:
        supervisor = Supervisor(settings, listener, _run_worker, settings.graces, admission)
        watching = asyncio.ensure_future(auth.keep_current(is_logged=False))
        try:
            return await supervisor.run_until_signal(lambda: _log.info("%s", _format_startup_line(settings)))
        finally:
            watching.cancel()

    if refusal := uvloop.run(run_supervisor()):
        raise SettingsError(refusal)


def _run_worker(task: WorkerTask) -> None:
    """Run a worker, in its own process."""
    from router.launch.worker import run_worker

    run_worker(task)


def _open_listener(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket that listens on ``host:port``. Messages name ``flag``, which sets the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as exc:
        raise SettingsError(f"--host {host} is not an address of this machine: {exc.strerror}") from exc
    except ValueError as exc:  # an invalid name, for example with two adjacent dots
        raise SettingsError(f"--host {host} is not an address of this machine: {exc}") from exc
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bind_patiently(
            listener,
            address,
            lambda: _log.warning("waiting for port %d, which a closed connection still uses", address[1]),
        )
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            raise SettingsError(f"port {port} of {host} is already in use; choose another with {flag}") from exc
        raise SettingsError(f"cannot listen at {host}:{port}: {exc.strerror}") from exc
    return listener


def _format_startup_line(settings: RouterSettings) -> str:
    if settings.splitwise:
        mode = f"prefill by {settings.prefill_policy}, decode by {settings.decode_policy}"
    else:
        mode = f"mixed by {settings.policy}"
    processes = f", {settings.num_workers} workers" if settings.num_workers > 1 else ""
    scheme = "https" if settings.ssl_certfile else "http"
    address = f"{scheme}://{settings.host}:{settings.port}"
    return f"router listens at {address}{processes}, {mode}; waiting for instances to register"
