"""Telemetry: data about requests for operators.

records.py   RequestRecord: the data of one request at its end
audit.py     Audit: stores the records, writes the access log, and explains requests
flight_recorder.py  FlightRecorder: files to read after a crash: the last minutes of requests and changes of instances
metrics.py   RouterMetrics: metrics for Prometheus
tracing.py   Tracer: spans for OpenTelemetry
merge.py     merges the metrics of several processes
need.py      InstancesNeeded: the number of instances that the traffic needs, for autoscalers
"""

from router.telemetry.audit import MAX_RECORDS, Audit, merge_sessions
from router.telemetry.flight_recorder import FlightRecorder, RecordingError, find_recordings, find_ring, read_recording
from router.telemetry.merge import add_counts
from router.telemetry.metrics import CONTENT_TYPE, RouterMetrics
from router.telemetry.need import InstancesNeeded
from router.telemetry.records import AttemptRecord, LegRecord, RequestRecord, RequestTrace, RunningRequest
from router.telemetry.tracing import Tracer, open_tracer

__all__ = [
    "CONTENT_TYPE",
    "MAX_RECORDS",
    "AttemptRecord",
    "Audit",
    "FlightRecorder",
    "InstancesNeeded",
    "LegRecord",
    "RecordingError",
    "RequestRecord",
    "RequestTrace",
    "RouterMetrics",
    "RunningRequest",
    "Tracer",
    "add_counts",
    "find_recordings",
    "find_ring",
    "merge_sessions",
    "open_tracer",
    "read_recording",
]
