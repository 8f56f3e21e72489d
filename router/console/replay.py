"""kvrouter replay: shows the entries of a router's flight recorder, as a timeline.

kvrouter replay logs                                             # the folder of --flight-recorder-path
kvrouter replay logs/flight-9000-20261123T174316.042-router.jsonl --since 5m
kvrouter replay logs --request job-17
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvcommon.formats import format_event
from router.settings import FlagParser, SettingsError
from router.telemetry import RecordingError, find_recordings, find_ring, read_recording

__all__ = ["main", "make_parser"]

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}
# The assumed previous state of an instance that appears for the first time.
_NEW: Mapping[str, Any] = {"draining": False, "paused": False, "breaker": "closed", "weight": 1.0}
# Exceptions that a damaged entry may raise. OverflowError: a number in JSON may be too large for a float.
_DAMAGES = (AttributeError, KeyError, TypeError, ValueError, OverflowError)


class _Line(NamedTuple):
    time: float
    """Time of the line, in seconds since 1970."""
    process: str
    text: str
    ids: frozenset[str] = frozenset()
    """The ids of the request that the line is about; empty if it is not about a request."""


def main(argv: Sequence[str]) -> int:
    """Print the timeline. Return the exit status: 0; 1 if a file cannot be read; 2 if the flags are wrong."""
    try:
        flags = make_parser().parse_args(argv)
        since = _parse_since(flags.since)
        lines, is_whole = _read_lines(find_recordings(flags.files))
    except SettingsError as exc:
        print(f"kvrouter replay: {exc}", file=sys.stderr)
        return 2
    except RecordingError as exc:
        print(f"kvrouter replay: {exc}", file=sys.stderr)
        return 1
    if lines:
        begins_at = since if since >= 0 else lines[-1].time + since
        shown = [line for line in lines if line.time >= begins_at and (not flags.request or flags.request in line.ids)]
        _print_lines(lines[0].time, shown)
        if not shown:
            print("kvrouter replay: the recording has no entries of this time and request", file=sys.stderr)
    return 0 if is_whole else 1


def make_parser() -> FlagParser:
    """Return the parser of the flags of ``kvrouter replay``."""
    parser = FlagParser(prog="kvrouter replay", description="Shows the entries of a flight recorder, as a timeline.")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="file of a flight recorder, or a folder with its files"
    )
    parser.add_argument("--request", metavar="ID", help="show only the request that has this id (any of its ids)")
    parser.add_argument(
        "--since",
        default="1970-01-01",
        metavar="TIME",
        help="show only the last 90s, 5m or 2h of the recording, or everything since a time such as "
        "2026-11-23T17:40:00 (of this machine's zone)",
    )
    return parser


def _parse_since(text: str) -> float:
    """Return the time in seconds since 1970; or, as a negative number, in seconds before the end of the recording."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text, re.ASCII):
        return -float(found[1]) * _UNIT_SECONDS[found[2]]
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return max(0.0, datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp())
    raise SettingsError(f"--since is {text!r}; it must be a time such as 90s, 5m, 2h or 2026-11-23T17:40:00")


def _print_lines(origin: float, lines: Iterable[_Line]) -> None:
    """Print the timeline. Second 0 is ``origin``, a time in seconds since 1970."""
    began = datetime.fromtimestamp(origin).astimezone().isoformat(timespec="microseconds")
    print(f"second 0 is {began}")
    for line in lines:
        event = format_event(round((line.time - origin) * 1e9), line.process, line.text)
        # Ids and paths come from clients, so they may contain control characters for the terminal.
        print("".join(each if each.isprintable() else ascii(each)[1:-1] for each in event))


def _read_lines(paths: Iterable[Path]) -> tuple[list[_Line], bool]:
    """Return the lines of all files, sorted by time, and whether all files could be read."""
    rings: dict[str, _Ring] = {}
    lines, is_whole = list[_Line](), True
    for path in paths:
        try:
            entries, num_damaged = read_recording(path)
        except RecordingError as exc:
            print(f"kvrouter replay: {exc}", file=sys.stderr)
            is_whole = False
            continue
        ring = rings.setdefault(find_ring(path), _Ring(path.stem))
        for entry in entries:
            try:
                lines += list(ring.describe(entry))
            except _DAMAGES:
                num_damaged += 1
        if num_damaged:
            what = "1 damaged line was" if num_damaged == 1 else f"{num_damaged} damaged lines were"
            print(f"kvrouter replay: {path}: {what} skipped", file=sys.stderr)
    for ring in rings.values():
        lines += ring.describe_end()
    return sorted(lines, key=lambda line: line.time), is_whole


class _Ring:
    """Converts the entries of one process, from its two files, to lines of the timeline."""

    def __init__(self, name: str) -> None:
        self._process = name
        self._fleet: dict[str, Mapping[str, Any]] = {}
        self._running: dict[tuple[float, str], dict[str, Any]] = {}
        self._last = 0.0  # the time of the last entry
        self._has_stopped = False

    def describe(self, entry: dict[str, Any]) -> Iterator[_Line]:
        """Yield the lines for an entry.

        Raises:
            KeyError, TypeError, ValueError, AttributeError, OverflowError: the entry is damaged.
        """
        moment = entry["time"]
        match entry["kind"]:
            case "begin":
                yield from self._begin(entry)
            case "instance":
                yield from self._compare(moment, entry["instance"], entry)
            case "gone":
                self._fleet.pop(entry["instance"], None)
                yield _Line(moment, self._process, f"instance {entry['instance']} was removed")
            case "running":
                began, moment = moment, moment + _to_seconds(entry["sent_us"])
                self._running[began, entry["id"]] = entry
            case "request":
                self._running.pop((moment, entry["id"]), None)
                yield from _describe_request(self._process, entry)
                moment += _to_seconds(entry["total_us"])
            case "lost":
                yield _Line(moment, self._process, f"{entry['entries']} entries are lost: the disk was too slow")
            case "stop":
                self._has_stopped = True
                yield _Line(moment, self._process, "the process stops")
        self._last = max(self._last, moment)

    def describe_end(self) -> Iterator[_Line]:
        """Yield the lines about requests that had not ended at the end of the recording."""
        for entry in self._running.values():
            try:
                yield from _describe_running(self._process, entry, self._last)
            except _DAMAGES:
                continue
        if not self._has_stopped:
            text = "the recording ends here: the process still runs, or was killed"
            yield _Line(self._last, self._process, text)

    def _begin(self, entry: dict[str, Any]) -> Iterator[_Line]:
        """Yield the lines for the first entry of a file: the recording begins, and how each instance has changed."""
        self._process = str(entry["process"])
        if not self._last:
            text = f"the recording begins: version {entry['version']}, port {entry['port']}"
            yield _Line(entry["time"], self._process, text)
        for key, state in entry["instances"].items():
            yield from self._compare(entry["time"], key, state)

    def _compare(self, moment: float, key: str, state: Mapping[str, Any]) -> Iterator[_Line]:
        """Yield the lines about changes of one instance since its last entry."""
        before = self._fleet.get(key, _NEW)
        self._fleet[key] = state
        name = f"{state['role']} instance {key}"
        changes = []
        if before is _NEW:
            changes.append(f"is known: {' '.join(filter(None, (state['engine'], state['connector'])))}")
        if before.get("healthy") != state["healthy"]:
            changes.append("is healthy" if state["healthy"] else f"is unhealthy: {state['why']}")
        if before["draining"] != state["draining"]:
            changes.append("drains" if state["draining"] else "takes requests again")
        if before["paused"] != state["paused"]:
            changes.append("is paused" if state["paused"] else "is no longer paused")
        if before["breaker"] != state["breaker"]:
            changes.append(f"has the breaker state {state['breaker']}")
        if before["weight"] != state["weight"]:
            changes.append(f"has weight {state['weight']:g}")
        for change in changes:
            yield _Line(moment, self._process, f"{name} {change}")


def _describe_request(process: str, entry: dict[str, Any]) -> Iterator[_Line]:
    began, name, ids = entry["time"], _name_request(entry), _list_ids(entry)
    yield _Line(began, process, _describe_arrival(entry), ids)
    for number, attempt in enumerate(entry["attempts"], 1):
        if attempt["choices"]:
            goes_to = "; ".join(_describe_choice(*choice) for choice in attempt["choices"])
            text = f"{name} attempt {number} goes to {goes_to}"
            yield _Line(began + _to_seconds(attempt["began_us"]), process, text, ids)
        legs = "".join(f"; {_describe_leg(*leg)}" for leg in attempt["legs"])
        text = f"{name} attempt {number} ends: {attempt['ended']}{legs}"
        yield _Line(began + _to_seconds(attempt["ended_us"]), process, text, ids)
    yield _Line(began + _to_seconds(entry["total_us"]), process, f"{name} ends: {_describe_outcome(entry)}", ids)


def _describe_running(process: str, entry: dict[str, Any], last: float) -> Iterator[_Line]:
    began, name, ids = entry["time"], _name_request(entry), _list_ids(entry)
    yield _Line(began, process, _describe_arrival(entry), ids)
    if entry["sent_us"]:
        text = f"{name} attempt {entry['attempt']} goes to {' and '.join(entry['instances'])}"
        yield _Line(began + _to_seconds(entry["sent_us"]), process, text, ids)
    yield _Line(last, process, f"{name} had not ended", ids)


def _to_seconds(microseconds: float) -> float:
    seconds = microseconds / 1e6
    if not abs(seconds) < 1e11:  # the limit for the times of entries
        raise ValueError(f"a time is {seconds} s")
    return seconds


def _name_request(entry: dict[str, Any]) -> str:
    return f"request {entry['id']}" if entry["id"] else "a request without id"


def _list_ids(entry: dict[str, Any]) -> frozenset[str]:
    """Return the ids by which a request can be found: its own id, its ids at engines, the client's, the trace id."""
    own = entry["id"]
    engines = {f"{prefix}{own}" for prefix in ("", "chatcmpl-", "cmpl-")} if own else set()
    return frozenset({*engines, *entry.get("client_ids", {}).values(), entry.get("trace_id", "")} - {""})


def _describe_arrival(entry: dict[str, Any]) -> str:
    others = {"model": entry["model"], "client": entry["client"], **entry.get("client_ids", {})}
    details = "".join(f" {name}={value}" for name, value in others.items() if value)
    return f"{_name_request(entry)} arrives: {entry['method']} {entry['path']}{details}"


def _describe_choice(instance: str, work: float, cached: int, reasons: Mapping[str, Any]) -> str:
    shown = {**reasons, "work": work, "cached": cached}.items()
    why = " ".join(f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in shown if value)
    return f"{instance} because {why}"


def _describe_leg(instance: str, role: str, status: int, sent: int, first_byte: int, ended: int) -> str:
    times = {"sent": sent, "first byte": first_byte, "ended": ended}
    when = ", ".join(f"{name} at {moment / 1e3:g} ms" for name, moment in times.items() if moment)
    return f"{role} {instance} {status or 'no response'}{f' ({when})' if when else ''}"


def _describe_outcome(entry: dict[str, Any]) -> str:
    parts = [f"{entry['status']}{' ' + entry['error'] if entry['error'] else ''}"]
    if entry["status"] == 499:
        parts.append("the client disconnected")
    counts = {
        "prompt": entry["prompt_tokens"],
        "cached": entry["cached_tokens"],
        "expected in a cache": entry["predicted_cached_tokens"],
        "generated": entry["completion_tokens"],
    }
    counted = [f"{number} {name}" for name, number in counts.items() if number is not None]
    if counted:
        parts.append(f"tokens: {', '.join(counted)}")
    if entry["queued_us"]:
        parts.append(f"queued for {entry['queued_us'] / 1e3:g} ms")
    if entry["first_byte_us"]:
        parts.append(f"first byte after {entry['first_byte_us'] / 1e3:g} ms")
    parts.append(f"{entry['bytes_sent']} bytes in {entry['total_us'] / 1e3:g} ms")
    return "; ".join(parts)
