"""Starts the router: ``python -m router.launch --port 52700 --splitwise``, or ``kvrouter``.

program.py    main, fd_router: read the settings, open log and port, run one process or several
server.py     RouterServer: uvicorn with a shutdown that also ends the router's running requests
worker.py     run_worker: runs one of several worker processes
forkserver_preload.py  is loaded into the process from which workers are forked
logs.py       open_log: opens the destination of the router's log
__main__.py   the entry point of python -m router.launch
"""

from router.launch.program import fd_router, main

__all__ = ["fd_router", "main"]
