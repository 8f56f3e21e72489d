"""The standard variables of OpenTelemetry that our programs read themselves."""

from __future__ import annotations

import pytest

from kvcommon.spans import find_trace_receiver

ALL = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("variables", "receiver"),
    [
        ({}, ""),
        ({ALL: ""}, ""),
        ({ALL: "http://c:4318"}, "http://c:4318"),
        ({TRACES: "http://t:4318/v1/traces"}, "http://t:4318/v1/traces"),
        ({ALL: "http://c:4318", TRACES: "http://t:4318/v1/traces"}, "http://t:4318/v1/traces"),
        ({ALL: "http://c:4318", "OTEL_SDK_DISABLED": "True"}, ""),
        ({ALL: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({ALL: "http://c:4318", "OTEL_SERVICE_NAME": "r", "OTEL_TRACES_EXPORTER": "otlp"}, "http://c:4318"),
    ],
)
def test_spans_are_sent_if_a_receiver_is_set_and_tracing_is_enabled(variables: dict[str, str], receiver: str) -> None:
    assert find_trace_receiver(variables) == receiver
