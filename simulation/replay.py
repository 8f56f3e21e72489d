"""Makes a plan of the world ``router`` from a flight recorder's files: instances, arrivals, orders and failures.

Prompts and answers are not recorded; the world makes up its own ones of the recorded sizes. The plan thus repeats the
requests and their times, not the router's decisions. docs/simulation.md lists the other losses.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from router.telemetry import RecordingError, find_recordings, find_ring, read_recording
from simulation.router_world import BEGIN_SECONDS, PATHS
from simulation.world import Event, Plan

__all__ = ["RecordingError", "read_plan"]

# The time of a world and of a run is limited. Of a longer recording, only the last part is used.
MAX_SECONDS, MAX_REQUESTS = 600.0, 2000
# The most tokens of an answer and words of a prompt in the world; the hash of a longer prompt would take long.
MAX_TOKENS, MAX_WORDS = 40, 4000
# For each recorded end of an attempt, the mood of its instance meanwhile. Failures of an instance that are less than a
# second apart are joined.
MOODS = {"error": "answers_500", "death": "closes_unasked", "stall": "hangs_in_stream"}
JOINED_SECONDS = 1.0
SETTINGS = (
    *("policy", "prefill_policy", "decode_policy", "dialect", "max_concurrent_requests", "max_queued_requests"),
    *("stream_stall_secs", "sse_keepalive_secs", "stream_resume_count", "preempt_retry_count"),
    *("preempt_retry_exclude_decode", "health_failure_threshold", "health_success_threshold"),
)
NEW = {"healthy": True, "draining": False, "paused": False, "weight": 1.0}

Entry = dict[str, Any]


class _Change(NamedTuple):
    """A change of one member of an instance's state at ``time``."""

    time: float
    key: str
    member: str
    value: Any


def read_plan(paths: Iterable[Path]) -> Plan:
    """Return the plan of a recording.

    Raises:
        RecordingError: a file cannot be read, or no instance is recorded.
    """
    rings: dict[str, list[Entry]] = {}
    for path in find_recordings(paths):
        rings.setdefault(find_ring(path), []).extend(read_recording(path)[0])
    entries = [entry for ring in rings.values() for entry in ring]
    states = {key: state for entry in entries for key, state in _list_states(entry)}
    recorded: Entry = next((entry["settings"] for entry in entries if entry["kind"] == "begin"), {})
    if not states:
        raise RecordingError("the recording names no instance, so it cannot be replayed")
    roles = sorted((state["role"], key) for key, state in states.items())
    names = {key: f"{role}{number}" for number, (role, key) in enumerate(roles)}
    requests = _take_requests(entries)
    end = max(entry["time"] + entry.get("total_us", 0) / 1e6 for entry in entries)
    start = max(end - MAX_SECONDS, min(entry["time"] for entry in entries))
    events = [
        *(_make_request(number, entry, start) for number, entry in enumerate(requests) if entry["time"] >= start),
        *_make_moods(requests, names, start),
        *_make_faults(_list_changes(rings.values()), names, start, end),
    ]
    # All instances of a world have the same engine and connector: the most common ones.
    engine, connector = Counter((state["engine"], state["connector"]) for state in states.values()).most_common(1)[0][0]
    speeds = [
        (entry["total_us"] - entry["first_byte_us"]) / 1e6 / min(entry["completion_tokens"], MAX_TOKENS)
        for entry in requests
        if entry.get("completion_tokens") and entry["streamed"] and not entry["error"]
    ]
    settings = {
        "splitwise": bool(recorded.get("splitwise")),
        "engine": engine,
        "connector": connector,
        "roles": [role for role, _ in roles],
        "split": 0.0,
        "latency": 0.0005,
        "jitter": 0.0,
        "idle_seconds": 60.0,
        "token_seconds": min(1.0, max(0.001, statistics.median(speeds))) if speeds else 0.02,
        "router": {name: value for name, value in recorded.items() if name in SETTINGS},
        "has_keys": False,
        "buffer_bytes": 262144,
    }
    return Plan(settings, sorted(events, key=lambda event: event.at))


def _list_states(entry: Entry) -> list[tuple[str, Entry]]:
    """Return the instances that an entry names, with their states."""
    if entry["kind"] == "begin":
        return list(entry["instances"].items())
    return [(entry["instance"], entry)] if entry["kind"] == "instance" else []


def _take_requests(entries: list[Entry]) -> list[Entry]:
    """Return the last requests to paths of the world, in the order of their arrival, including unfinished ones."""
    found: dict[tuple[float, str], Entry] = {}
    for kind in ("running", "request"):
        found.update({(each["time"], each["id"]): each for each in entries if each["kind"] == kind})
    return [found[key] for key in sorted(found) if found[key]["path"] in PATHS][-MAX_REQUESTS:]


def _make_request(number: int, entry: Entry, start: float) -> Event:
    path, tokens = entry["path"], entry.get("completion_tokens")
    text = f"request-{number} " + "word " * min(MAX_WORDS, _count_prompt(entry))
    body: dict[str, Any] = {"model": "m"}
    if path in ("/v1/chat/completions", "/v1/messages"):
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt" if path == "/v1/completions" else "input"] = text
    if path != "/v1/embeddings":
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body |= {"temperature": 0, limit: min(tokens or MAX_TOKENS, MAX_TOKENS), "stream": entry.get("streamed", True)}
    details: dict[str, Any] = {"number": number, "path": path, "body": body}
    if entry["id"].isascii() and entry["id"].isprintable():
        details["id"] = entry["id"]
    if entry.get("status") == 499:
        details["leaves_after"] = entry["total_us"] / 1e6
    return Event(_place(entry["time"], start), "request", "client", details)


def _count_prompt(entry: Entry) -> int:
    """Return the number of tokens of a prompt, as the engine counted them or else a policy estimated them."""
    choices = [choice for attempt in entry.get("attempts", ()) for choice in attempt["choices"]]
    estimated = max((round(work) + cached for _, work, cached, _ in choices), default=20)
    return int(entry.get("prompt_tokens") or estimated)


def _make_moods(requests: list[Entry], names: dict[str, str], start: float) -> list[Event]:
    """Return the times in which instances failed requests, as events that set their ``Instance.mood``."""
    spans: dict[tuple[str, str], list[list[float]]] = {}
    for entry in requests:
        for attempt in entry.get("attempts", ()):
            # The first leg is the one with an error; else the one without an answer; else the one that answered.
            legs = sorted(attempt["legs"], key=lambda leg: (leg[2] < 400, leg[2] > 0))
            if attempt["ended"] in MOODS and legs and legs[0][0] in names and entry["time"] >= start:
                times = [_place(entry["time"], start) + attempt[end] / 1e6 for end in ("began_us", "ended_us")]
                joined = spans.setdefault((names[legs[0][0]], MOODS[attempt["ended"]]), [])
                if joined and times[0] < joined[-1][1] + JOINED_SECONDS:
                    joined[-1][1] = max(times[1], joined[-1][1])
                else:
                    joined.append(times)
    return [
        Event(began - 0.01, "mood", name, {"seconds": round(ended - began + 0.02, 3), "mood": mood})
        for (name, mood), joined in spans.items()
        for began, ended in joined
    ]


def _list_changes(rings: Iterable[list[Entry]]) -> list[_Change]:
    """Return the changes of instances. A change that several processes of a router noticed is returned once."""
    changes = []
    for ring in rings:
        known: dict[tuple[str, str], Any] = {}
        for entry in ring:
            for key, state in _list_states(entry):
                for member, value in NEW.items():
                    if known.get((key, member), value) != state[member]:
                        changes.append(_Change(entry["time"], key, member, state[member]))
                    known[key, member] = state[member]
    latest: dict[tuple[str, str], Any] = {}
    once = []
    for change in sorted(changes, key=lambda change: change.time):
        if latest.get((change.key, change.member)) != change.value:
            once.append(change)
        latest[change.key, change.member] = change.value
    return once


def _make_faults(changes: list[_Change], names: dict[str, str], start: float, end: float) -> list[Event]:
    """Return operators' orders and, for each time in which an instance was unhealthy, a kill with a later restart."""
    events = []
    for number, change in enumerate(changes):
        at, name, body = _place(change.time, start), names[change.key], {"instance": f"{names[change.key]}:8000"}
        if change.member == "healthy":
            if not change.value:
                later = [each.time for each in changes[number + 1 :] if each[1:3] == change[1:3]]
                events.append(
                    Event(at, "kill", name, {"seconds": round(max(0.1, (later or [end])[0] - change.time), 3)})
                )
            continue
        path = {"draining": "/admin/drain", "paused": "/admin/pause", "weight": "/admin/weight"}[change.member]
        if change.member == "weight":
            body |= {"weight": change.value}
        elif not change.value:
            path = "/admin/resume"
        events.append(Event(at, "order", name, {"path": path, "body": body}))
    return events


def _place(moment: float, start: float) -> float:
    """Return the world's time for a recorded time; a time before ``start`` becomes one just before the requests."""
    return round(max(BEGIN_SECONDS - 1.0, BEGIN_SECONDS + moment - start), 6)
