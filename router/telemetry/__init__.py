"""Telemetry."""

from router.telemetry.audit import AttemptRecord, Audit, RequestRecord
from router.telemetry.metrics import RouterMetrics

__all__ = ["AttemptRecord", "Audit", "RequestRecord", "RouterMetrics"]
