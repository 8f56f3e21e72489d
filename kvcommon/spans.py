"""Sends OpenTelemetry spans to a receiver, and logs when the receiver does not accept them."""

from __future__ import annotations

import logging
import os
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
    "emits_latest_names",
    "find_trace_receiver",
    "measure_epoch",
    "open_sender",
]

CONTEXT_HEADERS = (b"traceparent", b"tracestate")
"""Request headers in which a client sends its span."""

_RECEIVERS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_Sender = TypeVar("_Sender")

# Time in which the receiver must accept the last spans when the process stops.
CLOSING_SECONDS = 1.0


class LoggingExporter:
    """Wraps the exporter of OpenTelemetry's SDK.

    Logs once when the receiver stops accepting spans, and once when the receiver accepts them again.
    """

    def __init__(self, exporter: Any, receiver: str, log: logging.Logger) -> None:
        """Wrap an exporter.

        Args:
            exporter: the SDK's exporter.
            receiver: the receiver's URL as the operator wrote it, for the log.
        """
        self._exporter = exporter
        self._receiver = receiver
        self._log = log
        self._lost = 0
        self._is_over = False
        # These loggers would log a failure for each batch of spans.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        """Send spans. The SDK calls this on its own thread."""
        result = self._exporter.export(spans)
        if not result.value:
            if self._lost:
                self._log.info("%s accepts spans again; %d spans were lost", self._receiver, self._lost)
            self._lost = 0
        elif not self._is_over:
            if not self._lost:
                text = "%s does not accept spans by OTLP over HTTP (usually port 4318); they are dropped"
                self._log.warning(text, self._receiver)
            self._lost += len(spans)
        return result

    def give_up(self) -> None:
        """Drop the last spans, which the receiver did not accept in time, and stop the exporter."""
        if not self._lost:
            text = "%s did not accept the last spans within %g s; they are lost"
            self._log.warning(text, self._receiver, CLOSING_SECONDS)
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the exporter, and drop the spans that it would send again."""
        if not self._is_over:
            self._is_over = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True, because this exporter buffers no spans."""
        return True


class SpanSender:
    """Base class of a program's tracer. OpenTelemetry's SDK sends the spans on its own thread.

    A subclass passes each span to the SDK once, when the span has ended. This takes a third of the time of the SDK's
    own calls to start and to end a span.
    """

    def __init__(self, receiver: str, service: str, scope: str, log: logging.Logger) -> None:
        """Set up the SDK.

        Args:
            receiver: the receiver's URL as the operator wrote it, for the log.
            service: name of the service, used if the environment does not name the service.
            scope: name of the part of the program that creates the spans.
            log: the program's logger.

        Raises:
            ModuleNotFoundError: OpenTelemetry's packages are missing.
        """
        # Imported here, because a program without spans does not need these packages.
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
        self._service = service
        self._span_type, self._event_type = ReadableSpan, Event
        self._resource, self._scope = resource, InstrumentationScope(scope)
        # Only a provider gives access to the sampler that OTEL_TRACES_SAMPLER selects.
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._propagator = TraceContextTextMapPropagator()
        self._exporter = LoggingExporter(OTLPSpanExporter(), receiver, log)
        self._processor = BatchSpanProcessor(cast("SpanExporter", self._exporter))
        self._emits_latest = emits_latest_names(os.environ)

    def close(self) -> None:
        """Send the last spans. Spans that the receiver has not accepted after ``CLOSING_SECONDS`` are lost."""
        closing = threading.Thread(target=self._processor.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)
        if closing.is_alive():
            self._exporter.give_up()

    def _name_usage(
        self, input_tokens: int | None, output_tokens: int | None, cached_tokens: int | None, operation: str
    ) -> dict[str, Any]:
        """Return a span's attributes for token counts, as opentelemetry.io/docs/specs/semconv/gen-ai names them.

        ``cached_tokens`` (a part of ``input_tokens``) and ``operation`` (such as ``chat``) are attributes only if the
        operator has opted in to the newest names.
        """
        named = {"gen_ai.usage.input_tokens": input_tokens, "gen_ai.usage.output_tokens": output_tokens}
        if not self._emits_latest:
            return named
        return {
            **named,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": self._service,
            "gen_ai.usage.cache_read.input_tokens": cached_tokens,
        }

    def _sample(self, headers: Iterable[tuple[bytes, bytes]], name: str) -> tuple[SpanContext, int, SamplingResult]:
        """Decide whether to sample a request.

        Args:
            headers: headers of the request, which may name the client's span.
            name: name of the new span.

        Returns:
            The client's span, which is invalid if the headers name none; the id of the trace; and the decision.
        """
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
            times: beginning and end of the span, in seconds since 1970; the times of ``events`` have the same unit.
            attributes: attributes of the span; an attribute with the value None or "" is omitted.
            kind: type of the span, or None for an internal one.
            trouble: reason why the operation failed; "" if it succeeded.
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


def emits_latest_names(environ: Mapping[str, str]) -> bool:
    """Return whether the operator has opted in to the newest names of the semantic conventions for GenAI."""
    return "gen_ai_latest_experimental" in map(str.strip, environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(","))


def find_trace_receiver(environ: Mapping[str, str]) -> str:
    """Read from OpenTelemetry's variables the URL to which spans are sent; return "" if spans are disabled.

    The SDK itself reads the other variables: names, samplers, headers, certificates, limits.
    """
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return ""
    return next((environ[name].strip() for name in _RECEIVERS if environ.get(name, "").strip()), "")


def open_sender(make: Callable[[str], _Sender], receiver: str, log: logging.Logger) -> _Sender | None:
    """Return the tracer that ``make`` creates. If OpenTelemetry's packages are missing, log a warning and return None.

    Args:
        make: called with ``receiver``.
        receiver: the receiver's URL as the operator wrote it.
    """
    try:
        return make(receiver)
    except ModuleNotFoundError as exc:
        log.warning(
            "no spans are sent to %s because the package %s is missing; run pip install "
            "'/path/to/this/repository[tracing]'",
            *(receiver, exc.name),
        )
        return None


def measure_epoch(clock: Callable[[], float]) -> float:
    """Return the time at which ``clock`` was 0, in seconds since 1970.

    Reads ``clock`` and the system's time three times and uses the fastest try, because the thread may be suspended
    between two reads.
    """
    readings = [(clock(), time.time(), clock()) for _ in range(3)]
    before, now, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return now - (before + after) / 2
