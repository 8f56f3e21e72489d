"""OpenTelemetry's standard variables, as far as the programs read them themselves."""

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
def test_spans_are_made_where_a_receiver_is_named_and_nobody_says_no(variables: dict[str, str], receiver: str) -> None:
    assert find_trace_receiver(variables) == receiver
