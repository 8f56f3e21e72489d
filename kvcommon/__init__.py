"""Base package: helpers that the router, the storage backend and the engine share. It imports nothing of theirs.

addresses.py     HOST:PORT in flags; this machine's address as another host sees it
formats.py       bytes, and lines of a timeline, as people read them
hints.py         "did you mean": the known name that is nearest to a mistyped one
mooncake.py      the metrics page and the segments of a Mooncake master
ports.py         binding a port that a closed connection still holds
request_ids.py   the header X-Request-Id
secret_files.py  files with one token
spans.py         the exporter of OpenTelemetry's spans, with a log line where the receiver is gone
versions.py      the version of this distribution
"""
