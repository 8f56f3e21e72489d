"""Telemetry: data about requests for operators.

records.py   RequestRecord: data of one request at its end
audit.py     Audit: one record per request, its line in the access log, and its explanation
metrics.py   RouterMetrics: metrics for Prometheus
tracing.py   Tracer: spans for OpenTelemetry
merge.py     merges the metrics of several processes
need.py      InstancesNeeded: how many instances the traffic needs, for autoscalers
"""

from router.telemetry.audit import MAX_RECORDS, Audit
from router.telemetry.merge import add_counts
from router.telemetry.metrics import CONTENT_TYPE, RouterMetrics
from router.telemetry.need import InstancesNeeded
from router.telemetry.records import AttemptRecord, LegRecord, RequestRecord, RequestTrace
from router.telemetry.tracing import Tracer, open_tracer

__all__ = [
    "CONTENT_TYPE",
    "MAX_RECORDS",
    "AttemptRecord",
    "Audit",
    "InstancesNeeded",
    "LegRecord",
    "RequestRecord",
    "RequestTrace",
    "RouterMetrics",
    "Tracer",
    "add_counts",
    "open_tracer",
]
