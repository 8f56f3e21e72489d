"""No decision depends on the time of day, because the clocks of machines differ and can be set back.

Processes never compare their clocks. Versions order the changes of several processes (``router/sharing/records.py``).
Each process measures durations with ``time.monotonic``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvcommon", "router", "kvstore_backend", "engine")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# The modules that may read the time of day: the number of readings, and the reason.
READERS = {
    "engine/telemetry/kv_events.py": (1, "the time in a batch of events, as in vLLM's format"),
    "engine/protocol.py": (1, "the member ``created`` of responses"),
    "kvcommon/spans.py": (1, "the start of a span, for its receiver"),
    "kvstore_backend/cli/certify/command.py": (1, "the time of a run, as text"),
    "kvstore_backend/namespace.py": (1, "compared with the modification times of files, which come from the kernel"),
    "kvstore_backend/manifest_keeper.py": (1, "the time of a manifest, as text"),
    "kvstore_backend/stores/file/ledger.py": (
        1,
        "compared with the modification times of files, which come from the kernel",
    ),
    "kvstore_backend/stores/file/store.py": (
        1,
        "compared with the modification times of files, which come from the kernel",
    ),
    "kvstore_backend/stores/mooncake.py": (2, "the duration of a transfer, which Mooncake measures so, too"),
    "router/console/dashboard/collector.py": (1, "the time that a chart shows"),
    "router/console/dashboard/views/frame.py": (1, "the age of the figures, which this process has read"),
    "router/console/dashboard/views/request.py": (1, "the age of a request, as text"),
    "router/telemetry/flight_recorder.py": (3, "the times of records, for people, and the name of a file"),
    "router/fleet/snapshot.py": (1, "the age of a file from before a restart of the machine"),
    "router/serving/proxy.py": (1, "the arrival of a request, for logs"),
    "router/serving/timeline.py": (1, "the arrival of a request, for logs"),
}
WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "CLOCK_REALTIME"),
    *(("datetime", name) for name in ("now", "utcnow", "today")),
    ("date", "today"),
}


def find_readings(source: str) -> Iterator[int]:
    """Yield the lines that read the time of day, or name a function that reads it."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in WALL_CLOCKS:
                yield node.lineno
            case ast.Attribute(value=ast.Attribute(attr=owner), attr=name) if (owner, name) in WALL_CLOCKS:
                yield node.lineno
            case ast.ImportFrom(module="time", names=names) if {each.name for each in names} & {"time", "time_ns"}:
                yield node.lineno
            # Without an argument, these functions return the present time.
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="time"), attr="gmtime" | "localtime" | "ctime"), args=[]
            ):
                yield node.lineno


def test_only_listed_modules_read_the_time_of_day() -> None:
    found = {str(file.relative_to(ROOT)): list(find_readings(file.read_text())) for file in FILES}
    assert {name: len(lines) for name, lines in found.items() if lines} == {
        name: count for name, (count, _) in READERS.items()
    }, (
        "Clocks of two processes differ: measure time with time.monotonic(), and order changes with versions "
        "(router/sharing/records.py). If the time is only shown or logged, add the module to READERS, with the reason."
    )


@pytest.mark.parametrize(
    "source",
    [
        *("time.time()", "time.time_ns()", "clock = time.time", "time.clock_gettime(time.CLOCK_REALTIME)"),
        *("datetime.now()", "datetime.datetime.utcnow()", "datetime.date.today()", "from time import time"),
        *("time.gmtime()", "def f(clock=time.time): pass"),
    ],
)
def test_each_way_to_read_the_time_of_day_is_found(source: str) -> None:
    assert len(list(find_readings(source))) == 1


@pytest.mark.parametrize("source", ["time.monotonic()", "time.perf_counter()", "time.gmtime(0)", "at.time()", "now()"])
def test_readings_of_other_clocks_are_not_reported(source: str) -> None:
    assert list(find_readings(source)) == []
