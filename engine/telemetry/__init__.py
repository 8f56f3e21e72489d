"""Telemetry: metrics, logs, spans, and why a request was a miss.

logs.py     the instance's log file, and the lines that an operator must see
metrics.py  Prometheus metrics, under FastDeploy's names where it has them
trace.py    a request's way in the log, for a person debugging
tracing.py  spans for OpenTelemetry: a request and its phases, under the span of who asked
why_miss/   why a request that is over was a miss, told from the requests that the instance remembers
"""
