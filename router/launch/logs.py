"""Where the router's own log goes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

from router.settings import RouterSettings, SettingsError

__all__ = ["LOG_FILE", "open_log"]

# As of FastDeploy's Go router: under the folder it is started in.
LOG_FILE = Path("logs/router.log")
LOG_FILES_KEPT = 4


def open_log(settings: RouterSettings) -> None:
    """Let all that this process logs go where ``log.output`` says.

    Raises:
        SettingsError: the log file cannot be written.
    """
    logging.basicConfig(
        level="INFO" if settings.log_level == "debug" else settings.log_level.upper(),
        handlers=[_make_handler(settings)],
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=True,
    )
    logging.getLogger("router").setLevel(settings.log_level.upper())  # the libraries' details tell nobody anything
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def send_log(send: Callable[[int, str, str], None]) -> None:
    """Let another process write this one's log: a file that several rotate loses lines.

    Args:
        send: takes level, logger and text.
    """
    logging.getLogger().handlers[:] = [_Sender(send)]


class _Sender(logging.Handler):
    def __init__(self, send: Callable[[int, str, str], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        self._send(record.levelno, record.name, self.format(record))


def _make_handler(settings: RouterSettings) -> logging.Handler:
    if settings.log_output != "file":
        return logging.StreamHandler(sys.stderr if settings.log_output == "stderr" else sys.stdout)
    try:
        LOG_FILE.parent.mkdir(exist_ok=True)
        # The file and its predecessors share the space that logs may take.
        size = settings.log_max_total_size_mb * 1_000_000 // (LOG_FILES_KEPT + 1)
        return RotatingFileHandler(LOG_FILE, maxBytes=size, backupCount=LOG_FILES_KEPT)
    except OSError as exc:
        raise SettingsError(f"log.output is 'file', but {LOG_FILE} cannot be written: {exc.strerror}") from exc
