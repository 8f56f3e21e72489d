"""Telemetry: the requests as operators see them.

records.py   RequestRecord: what is known of one request at its end
audit.py     Audit: one record a request, its line in the access log, and its explanation
metrics.py   RouterMetrics: figures for Prometheus
tracing.py   Tracer: spans for OpenTelemetry
merge.py     the figures of several processes as one
why_miss.py  why a request was a miss, asked of the instances on demand
need.py      InstancesNeeded: how many instances the traffic needs, for autoscalers
"""

from router.telemetry.audit import MAX_RECORDS, Audit
from router.telemetry.merge import add_counts
from router.telemetry.metrics import CONTENT_TYPE, RouterMetrics
from router.telemetry.need import InstancesNeeded
from router.telemetry.records import AttemptRecord, LegRecord, RequestRecord, RequestTrace
from router.telemetry.tracing import Tracer, open_tracer
from router.telemetry.why_miss import explain_miss

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
    "explain_miss",
    "open_tracer",
]
