"""Starts the router: ``python -m router.launch --port 52700 --splitwise``, or ``kvrouter``.

program.py    main, fd_router: reads the settings, opens log and port, runs one process or several
server.py     RouterServer: uvicorn with a shutdown that also ends the router's requests in progress
worker.py     run_worker: one process of several
forkserver_preload.py  loaded into the process from which workers are forked
logs.py       open_log: the destination of the router's own log
__main__.py   python -m router.launch
"""

from router.launch.program import fd_router, main
from router.launch.server import INTERRUPT_GRACE_SECONDS

__all__ = ["INTERRUPT_GRACE_SECONDS", "fd_router", "main"]
