"""A receiver of spans on a loopback port: OTLP over HTTP in protobuf, as in a collector."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from tests.support.threaded_http import QuietHandler, ThreadedServer
from tests.support.waiting import wait_until

__all__ = [
    "NAMES_OF_OPENTELEMETRY",
    "OtlpReceiver",
    "ReceivedSpan",
    "hide_opentelemetry",
    "list_genai_names",
    "receive_spans",
]

NAMES_OF_OPENTELEMETRY = frozenset(
    value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_") and isinstance(value, str)
)
"""The attributes in OpenTelemetry's semantic conventions for GenAI, from its own package."""


class ReceivedSpan(NamedTuple):
    """A received span."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    start: float
    end: float
    """Seconds since 1970."""
    attributes: dict[str, Any]
    events: dict[str, float]
    error: str | None
    """The message of the status, if the status is an error."""


class OtlpReceiver:
    """Stores the received spans. A test may replace ``answer``, for slow responses or refusals."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.answer: Callable[[], int] = lambda: 200
        receiver = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = receiver.answer()
                if status == 200:
                    receiver.take(body)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

        self._server = ThreadedServer(Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._server.start()

    def close(self) -> None:
        """Stop the receiver."""
        self._server.stop()

    def take(self, body: bytes) -> None:
        """Store the spans in a request."""
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _read_attributes(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans += [_read_span(span, str(resource["service.name"])) for span in scope.spans]

    def find(self, **wanted: Any) -> list[ReceivedSpan]:
        """Return the spans with these fields or attributes (with _ for .), sorted by their start."""
        found = [span for span in list(self.spans) if all(_get(span, name) == wanted[name] for name in wanted)]
        return sorted(found, key=lambda span: span.start)

    def wait_for(self, count: int, **wanted: Any) -> list[ReceivedSpan]:
        """Wait until ``find`` returns at least this number of spans, and return them."""
        wait_until(lambda: len(self.find(**wanted)) >= count, f"{count} spans of {wanted}")
        return self.find(**wanted)


@contextlib.contextmanager
def receive_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """Yield a receiver that gets the spans of this process's tracers soon after their ends."""
    receiver = OtlpReceiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield receiver
    receiver.close()


def list_genai_names(span: ReceivedSpan) -> set[str]:
    """Return the names of the span's attributes for GenAI."""
    return {name for name in span.attributes if name.startswith("gen_ai.")}


def hide_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make imports of OpenTelemetry's packages fail, as if they were not installed."""
    find_module = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return find_module(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)


def _get(span: ReceivedSpan, name: str) -> Any:
    if name in span._fields:
        return getattr(span, name)
    return {key.replace(".", "_"): value for key, value in span.attributes.items()}.get(name)


def _read_span(span: WireSpan, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        _read_attributes(span.attributes),
        {event.name: event.time_unix_nano / 1e9 for event in span.events},
        span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
    )


def _read_attributes(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
