"""open_log: opens the destination of the router's log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

from router.settings import RouterSettings, SettingsError

__all__ = ["LOG_FILE", "open_log"]

# In the folder in which the router is started, as with FastDeploy's Go router.
LOG_FILE = Path("logs/router.log")
LOG_FILES_KEPT = 4


def open_log(settings: RouterSettings) -> None:
    """Send all log messages of this process to the destination in the setting ``log.output``.

    Raises:
        SettingsError: the log file cannot be written.
    """
    logging.basicConfig(
        level="INFO" if settings.log_level == "debug" else settings.log_level.upper(),
        handlers=[_make_handler(settings)],
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=True,
    )
    logging.getLogger("router").setLevel(settings.log_level.upper())  # but no debug messages of libraries
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def send_log(send: Callable[[int, str, str], None]) -> None:
    """Send this process's log messages to another process, which writes them.

    If several processes rotated the same log file, lines would be lost.

    Args:
        send: called with level, logger name and text of each message.
    """
    logging.getLogger().handlers[:] = [_Sender(send)]


class _Sender(logging.Handler):
    def __init__(self, send: Callable[[int, str, str], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a log message. ``logging`` calls this."""
        self._send(record.levelno, record.name, self.format(record))


def _make_handler(settings: RouterSettings) -> logging.Handler:
    if settings.log_output != "file":
        return logging.StreamHandler(sys.stderr if settings.log_output == "stderr" else sys.stdout)
    try:
        LOG_FILE.parent.mkdir(exist_ok=True)
        # The maximum total size is divided among the present file and the rotated files.
        size = settings.log_max_total_size_mb * 1_000_000 // (LOG_FILES_KEPT + 1)
        return RotatingFileHandler(LOG_FILE, maxBytes=size, backupCount=LOG_FILES_KEPT)
    except OSError as exc:
        raise SettingsError(f"log.output is 'file', but {LOG_FILE} cannot be written: {exc.strerror}") from exc
