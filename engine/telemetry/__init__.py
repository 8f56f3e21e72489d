"""Telemetry: metrics, logs and spans.

logs.py     the instance's log file, and the lines that an operator must see
metrics.py  Prometheus metrics, under FastDeploy's names where it has them
trace.py    the steps of a request in the log, for debugging
tracing.py  spans for OpenTelemetry: a request and its phases, under the client's span
"""
