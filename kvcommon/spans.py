"""The exporter of OpenTelemetry's spans, with a log line where the receiver is gone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["LoggingExporter", "close_spans", "measure_epoch"]

# The receiver gets so long to take the last spans when the process stops.
CLOSING_SECONDS = 1.0


class LoggingExporter:
    """The SDK's exporter, which logs once that the receiver takes no spans, and once that it does again."""

    def __init__(self, exporter: Any, receiver: str, log: logging.Logger) -> None:
        """
        Args:
            exporter: the SDK's own.
            receiver: as the operator wrote it, for the log.
        """
        self._exporter = exporter
        self._receiver = receiver
        self._log = log
        self._lost = 0
        self._is_over = False
        # These would log the same for each batch, with the messages of the libraries below them.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        """Send spans; on the SDK's thread."""
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
        """The process stops, and the receiver has not taken the last spans in time."""
        if not self._lost:
            text = "%s did not take the last spans within %g s; they are lost"
            self._log.warning(text, self._receiver, CLOSING_SECONDS)
        self.shutdown()

    def shutdown(self) -> None:
        """End, and drop spans that wait to be sent again."""
        if not self._is_over:
            self._is_over = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is held here."""
        return True


def close_spans(processor: Any, exporter: LoggingExporter) -> None:
    """Give the receiver ``CLOSING_SECONDS`` to take the last spans."""
    closing = threading.Thread(target=processor.shutdown, name="tracing-close", daemon=True)
    closing.start()
    closing.join(CLOSING_SECONDS)
    if closing.is_alive():
        exporter.give_up()


def measure_epoch(clock: Callable[[], float]) -> float:
    """The moment when ``clock`` was 0, in seconds since 1970.

    The best of several readings, as a thread may be suspended between one clock and the other.
    """
    readings = [(clock(), time.time(), clock()) for _ in range(3)]
    before, now, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return now - (before + after) / 2
