"""Sender of OpenTelemetry spans, which logs when the receiver is not available."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import SamplingResult
    from opentelemetry.trace import SpanContext

__all__ = [
    "CONTEXT_HEADERS",
    "LoggingExporter",
    "SpanSender",
    "find_trace_receiver",
    "measure_epoch",
    "open_sender",
]

CONTEXT_HEADERS = (b"traceparent", b"tracestate")
"""The headers with a client's span."""

_RECEIVERS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_Sender = TypeVar("_Sender")

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


class SpanSender:
    """Base of a program's tracer: OpenTelemetry's SDK, which sends spans on its own thread.

    Spans are passed to it complete, when they have ended: that costs a third of starting and ending one.
    """

    def __init__(self, receiver: str, service: str, scope: str, log: logging.Logger) -> None:
        """Set up the SDK.

        Args:
            receiver: the receiver as the operator wrote it, for the log.
            service: name of the service, unless the environment names it.
            scope: name of the program's part that creates the spans.
            log: the program's logger.

        Raises:
            ModuleNotFoundError: OpenTelemetry's packages are missing.
        """
        # Imported only if spans are enabled.
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        self._api = trace
        self._span_type, self._event_type = ReadableSpan, Event
        self._resource, self._scope = resource, InstrumentationScope(scope)
        # The only access to the sampler that the standard variables name.
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._propagator = TraceContextTextMapPropagator()
        self._exporter = LoggingExporter(OTLPSpanExporter(), receiver, log)
        self._processor = BatchSpanProcessor(cast("SpanExporter", self._exporter))

    def close(self) -> None:
        """Give the receiver ``CLOSING_SECONDS`` to take the last spans."""
        closing = threading.Thread(target=self._processor.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)
        if closing.is_alive():
            self._exporter.give_up()

    def _sample(self, headers: Iterable[tuple[bytes, bytes]], name: str) -> tuple[SpanContext, int, SamplingResult]:
        """Return the client's span, which may be invalid, the id of the trace, and whether it is sampled."""
        sent: dict[str, list[str]] = {}
        for key, value in headers:
            if key in CONTEXT_HEADERS:
                sent.setdefault(key.decode(), []).append(value.decode("latin-1"))
        told = self._propagator.extract(sent)
        parent = self._api.get_current_span(told).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else random.getrandbits(128) or 1
        return parent, trace_id, self._sampler.should_sample(told, trace_id, name, self._api.SpanKind.SERVER)

    def _add_span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Mapping[str, Any],
        *,
        kind: Any = None,
        trouble: str = "",
        events: Sequence[tuple[str, float]] = (),
    ) -> None:
        """Pass an ended span to the SDK.

        Args:
            times: its beginning and end, in seconds since 1970, as the times of ``events``.
            attributes: those with None or "" are left out.
            kind: default: internal.
            trouble: why it is an error; "" if it is none.
        """
        api = self._api
        span = self._span_type(
            name,
            context,
            parent,
            self._resource,
            {key: value for key, value in attributes.items() if value not in (None, "")},
            [self._event_type(what, timestamp=int(moment * 1e9)) for what, moment in events],
            kind=api.SpanKind.INTERNAL if kind is None else kind,
            status=api.Status(api.StatusCode.ERROR, trouble) if trouble else api.Status(),
            start_time=int(times[0] * 1e9),
            end_time=int(times[1] * 1e9),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)


def find_trace_receiver(environ: Mapping[str, str]) -> str:
    """Return the receiver of spans, as the operator wrote it in OpenTelemetry's variables; "" if spans are disabled.

    The SDK itself reads the other variables: names, samplers, headers, certificates, limits.
    """
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return ""
    return next((environ[name].strip() for name in _RECEIVERS if environ.get(name, "").strip()), "")


def open_sender(make: Callable[[str], _Sender], receiver: str, log: logging.Logger) -> _Sender | None:
    """Return the tracer that ``make`` makes; None if OpenTelemetry's packages are missing, which is logged.

    Args:
        make: takes the receiver.
        receiver: as the operator wrote it, for the log.
    """
    try:
        return make(receiver)
    except ModuleNotFoundError as exc:
        log.warning(
            "no spans are sent to %s, as the package %s is missing: pip install '/path/to/this/repository[tracing]'",
            *(receiver, exc.name),
        )
        return None


def measure_epoch(clock: Callable[[], float]) -> float:
    """Return the time when ``clock`` was 0, in seconds since 1970.

    Takes the best of several readings, because a thread may be suspended between the readings of the two clocks.
    """
    readings = [(clock(), time.time(), clock()) for _ in range(3)]
    before, now, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return now - (before + after) / 2
