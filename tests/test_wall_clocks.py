"""Who reads the time of day: machines' clocks differ and are set back, so nothing is decided by it.

Two processes' clocks are never compared. What two processes do in an order has versions
(``router/sharing/records.py``); how long ago something was, each process measures itself, by ``time.monotonic``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvcommon", "router", "kvstore_backend", "engine")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Who may read it, how often, and why.
READERS = {
    "engine/telemetry/kv_events.py": (1, "the time of a batch of events, which vLLM's format has"),
    "engine/protocol.py": (1, "the member created of answers"),
    "kvcommon/spans.py": (1, "when a span began, for its receiver"),
    "kvstore_backend/cli/certify/command.py": (1, "when the cases were run, as text"),
    "kvstore_backend/namespace.py": (1, "when files changed since this process began, whose times the kernel gives"),
    "kvstore_backend/manifest_keeper.py": (1, "when a manifest was written, as text"),
    "kvstore_backend/stores/file/ledger.py": (1, "the modification times of files, which the kernel gives, too"),
    "kvstore_backend/stores/file/store.py": (1, "the modification times of files, which the kernel gives, too"),
    "router/console/dashboard/collector.py": (1, "the time that a chart shows"),
    "router/console/dashboard/views/frame.py": (1, "how long ago this program itself has looked"),
    "router/console/dashboard/views/request.py": (1, "how long ago a request was, as text"),
    "router/telemetry/flight_recorder.py": (3, "when something happened, for a person, and the name of a file"),
    "router/fleet/snapshot.py": (1, "the age of a file of another start of the machine, where no other clock lasts"),
    "router/serving/proxy.py": (1, "when a request came, for logs"),
    "router/serving/timeline.py": (1, "when a request came, for logs"),
}
WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "CLOCK_REALTIME"),
    *(("datetime", name) for name in ("now", "utcnow", "today")),
    ("date", "today"),
}


def readings(source: str) -> Iterator[int]:
    """The lines at which the time of day is read, or what reads it is named."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in WALL_CLOCKS:
                yield node.lineno
            case ast.Attribute(value=ast.Attribute(attr=owner), attr=name) if (owner, name) in WALL_CLOCKS:
                yield node.lineno
            case ast.ImportFrom(module="time", names=names) if {each.name for each in names} & {"time", "time_ns"}:
                yield node.lineno
            # Without a time of their own these tell the present one.
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="time"), attr="gmtime" | "localtime" | "ctime"), args=[]
            ):
                yield node.lineno


def test_the_time_of_day_is_read_only_where_nothing_is_decided_by_it() -> None:
    found = {str(file.relative_to(ROOT)): list(readings(file.read_text())) for file in FILES}
    assert {name: len(lines) for name, lines in found.items() if lines} == {
        name: count for name, (count, _) in READERS.items()
    }, (
        "Clocks of two processes differ: measure time with time.monotonic(), and order what processes do by versions "
        "(router/sharing/records.py). If it is only shown or logged, add it to READERS here, with its reason."
    )


@pytest.mark.parametrize(
    "source",
    [
        *("time.time()", "time.time_ns()", "clock = time.time", "time.clock_gettime(time.CLOCK_REALTIME)"),
        *("datetime.now()", "datetime.datetime.utcnow()", "datetime.date.today()", "from time import time"),
        *("time.gmtime()", "def f(clock=time.time): pass"),
    ],
)
def test_each_way_to_read_it_is_found(source: str) -> None:
    assert len(list(readings(source))) == 1


@pytest.mark.parametrize("source", ["time.monotonic()", "time.perf_counter()", "time.gmtime(0)", "at.time()", "now()"])
def test_other_clocks_are_not_taken_for_it(source: str) -> None:
    assert list(readings(source)) == []
