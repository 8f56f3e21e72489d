"""Helpers that the router, the storage backend and the engine share. This package imports none of these three.

addresses.py     parses HOST:PORT; finds the address at which another host reaches this machine
formats.py       formats numbers of bytes, and lines of a timeline, for display
hints.py         "did you mean": finds the known name that is nearest to a mistyped one
http_limits.py   limits for HTTP requests, and the errors for request heads that exceed them
json_objects.py  parses JSON objects
kv_events.py     KV events of instances, in the format of vLLM and SGLang
mooncake.py      reads the metrics page and the memory segments of a Mooncake master
output.py        writes the output of programs, also if nobody reads it or the disk is full
ports.py         binds a port that a closed connection still holds
request_ids.py   reads and writes the header X-Request-Id
secret_files.py  reads files with one token
shutdown.py      messages of a server that takes long to stop
spans.py         sends OpenTelemetry spans; logs when the receiver does not accept them
versions.py      finds the installed version of this project
waiting.py       waits for an event, with a time limit
"""
