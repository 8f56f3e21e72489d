"""Exporter of OpenTelemetry spans that logs when the receiver is not available."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["LoggingExporter", "close_spans", "measure_epoch"]

# Time that the receiver has to take the last spans when the process stops.
CLOSING_SECONDS = 1.0


class LoggingExporter:
    """Wrapper of the SDK's exporter, for logs.

    It logs once when the receiver takes no spans, and once when it takes them again.
    """

    def __init__(self, exporter: Any, receiver: str, log: logging.Logger) -> None:
        """Wrap an exporter.

        Args:
            exporter: the SDK's exporter.
            receiver: the receiver as the operator wrote it, for the log.
        """
        self._exporter = exporter
        self._receiver = receiver
        self._log = log
        self._lost = 0
        self._is_over = False
        # These loggers would repeat the message for each batch, with messages of the libraries below them.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        """Send spans. The SDK calls this on its own thread."""
        result = self._exporter.export(spans)
        if not result.value:
            if self._lost:
                self._log.info("%s takes spans again; %d were lost", self._receiver, self._lost)
            self._lost = 0
        elif not self._is_over:
            if not self._lost:
                text = "%s does not take the spans sent to it by OTLP over HTTP (usually port 4318); they are dropped"
                self._log.warning(text, self._receiver)
            self._lost += len(spans)
        return result

    def give_up(self) -> None:
        """Stop without the last spans, because the receiver did not take them in time."""
        if not self._lost:
            text = "%s did not take the last spans within %g s; they are lost"
            self._log.warning(text, self._receiver, CLOSING_SECONDS)
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the exporter, and drop spans that wait for another try."""
        if not self._is_over:
            self._is_over = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: this exporter buffers nothing."""
        return True


def close_spans(processor: Any, exporter: LoggingExporter) -> None:
    """Give the receiver ``CLOSING_SECONDS`` to take the last spans."""
    closing = threading.Thread(target=processor.shutdown, name="tracing-close", daemon=True)
    closing.start()
    closing.join(CLOSING_SECONDS)
    if closing.is_alive():
        exporter.give_up()


def measure_epoch(clock: Callable[[], float]) -> float:
    """Return the time when ``clock`` was 0, in seconds since 1970.

    Takes the best of several readings, because a thread may be suspended between the readings of the two clocks.
    """
    readings = [(clock(), time.time(), clock()) for _ in range(3)]
    before, now, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return now - (before + after) / 2
