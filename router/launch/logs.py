"""The destination of the router's own log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

from router.settings import RouterSettings, SettingsError

__all__ = ["LOG_FILE", "open_log"]

# As in FastDeploy's Go router: below the folder in which it is started.
LOG_FILE = Path("logs/router.log")
LOG_FILES_KEPT = 4


def open_log(settings: RouterSettings) -> None:
    """Send everything that this process logs to the destination in ``log.output``.

    Raises:
        SettingsError: the log file cannot be written.
    """
    logging.basicConfig(
        level="INFO" if settings.log_level == "debug" else settings.log_level.upper(),
        handlers=[_make_handler(settings)],
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=True,
    )
    logging.getLogger("router").setLevel(settings.log_level.upper())  # the libraries' details are not useful
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def send_log(send: Callable[[int, str, str], None]) -> None:
    """Have another process write this one's log: if several processes rotated one file, lines would be lost.

    Args:
        send: takes level, logger and text.
    """
    logging.getLogger().handlers[:] = [_Sender(send)]


class _Sender(logging.Handler):
    def __init__(self, send: Callable[[int, str, str], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a log record; called by ``logging``."""
        self._send(record.levelno, record.name, self.format(record))


def _make_handler(settings: RouterSettings) -> logging.Handler:
    if settings.log_output != "file":
        return logging.StreamHandler(sys.stderr if settings.log_output == "stderr" else sys.stdout)
    try:
        LOG_FILE.parent.mkdir(exist_ok=True)
        # The limit of the total size is divided between the file and its predecessors.
        size = settings.log_max_total_size_mb * 1_000_000 // (LOG_FILES_KEPT + 1)
        return RotatingFileHandler(LOG_FILE, maxBytes=size, backupCount=LOG_FILES_KEPT)
    except OSError as exc:
        raise SettingsError(f"log.output is 'file', but {LOG_FILE} cannot be written: {exc.strerror}") from exc
