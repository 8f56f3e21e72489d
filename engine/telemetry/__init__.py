"""Telemetry of an instance: metrics, logs, spans and KV events.

kv_events.py   sends KV events over ZeroMQ, as vLLM does
logs.py        the log files of an instance
metrics.py     Prometheus metrics, with FastDeploy's names where it has them
trace.py       logs where the KV of a prompt came from, for debugging
tracing.py     spans for OpenTelemetry: a request and its phases
vllm_names.py  metrics with vLLM's names, for --metrics-dialect vllm
"""
