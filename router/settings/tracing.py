"""find_trace_receiver: whether OpenTelemetry's standard variables enable spans.

The SDK itself reads the other variables: names, samplers, headers, certificates, limits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["find_trace_receiver"]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def find_trace_receiver(environ: Mapping[str, str] | None = None) -> str:
    """Return the receiver of spans, as the operator wrote it; "" if spans are disabled.

    Args:
        environ: the environment variables; those of the process by default.
    """
    environ = os.environ if environ is None else environ
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return ""
    return next((environ[name].strip() for name in _ENDPOINTS if environ.get(name, "").strip()), "")
