"""Where an instance's log goes: ``$FD_LOG_DIR/api_server.log`` and, for warnings and errors, the console."""

from __future__ import annotations

import logging
from pathlib import Path

__all__ = ["set_up"]

_FORMAT = "%(levelname)-8s %(asctime)s %(process)d %(name)s] %(message)s"


def set_up(folder: Path, level: str) -> None:
    """Log to ``folder``/api_server.log what is of this level or a higher one; warnings also to standard error.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(folder / "api_server.log")
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, format=_FORMAT, handlers=[file, console], force=True)
    for name in ("engine", "kvstore_backend"):
        logging.getLogger(name).setLevel(level.upper())
    # Its INFO line for each heartbeat and health probe would bury ours.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
