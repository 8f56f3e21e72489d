"""Telemetry: the requests as operators see them.

audit.py     Audit: one record a request, its line in the access log, and its explanation
metrics.py   RouterMetrics: figures for Prometheus
merge.py     the figures of several processes as one
"""

from router.telemetry.audit import MAX_RECORDS, AttemptRecord, Audit, LegRecord, RequestRecord
from router.telemetry.metrics import CONTENT_TYPE, RouterMetrics

__all__ = ["CONTENT_TYPE", "MAX_RECORDS", "AttemptRecord", "Audit", "LegRecord", "RequestRecord", "RouterMetrics"]
