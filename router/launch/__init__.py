"""Starts the router: ``python -m router.launch --port 52700 --splitwise``, or ``kvrouter``.

program.py    main, fd_router: read the settings, open log and port, run one process or several
server.py     RouterServer: uvicorn with a shutdown that also ends the router's running requests
worker.py     run_worker: runs one of several worker processes
forkserver_preload.py  is loaded into the process from which workers are forked
logs.py       open_log: opens the destination of the router's log
__main__.py   the entry point of python -m router.launch
"""

# The modules of this package are loaded when the router starts: __main__ must run before, so that Ctrl-C during their
# import shows no traceback.
from __future__ import annotations

import importlib
import signal
from collections.abc import Sequence

__all__ = ["fd_router", "main"]


def fd_router(argv: Sequence[str] | None = None) -> int:
    """Run the router as ``fd-router``. Return the exit status."""
    _load_program()
    from router.launch import program

    return program.fd_router(argv)


def main(argv: Sequence[str] | None = None, *, epp_port: int = 0) -> int:
    """Run the router until SIGTERM or SIGINT. Return the exit status.

    Args:
        argv: the flags, or None for those of this process.
        epp_port: the default of the setting with this name.
    """
    _load_program()
    from router.launch import program

    return program.main(argv, epp_port=epp_port)


def _load_program() -> None:
    """Import ``program``. Meanwhile, Ctrl-C ends the process without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module("router.launch.program")
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
