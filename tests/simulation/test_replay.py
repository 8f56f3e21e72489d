"""The replay of a flight recorder's files in a world of the router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulation.replay import RecordingError, read_plan
from simulation.router_world import RouterWorld
from simulation.run import main, run_forked

STATE = {"role": "mixed", "engine": "fastdeploy", "connector": "", "healthy": True, "why": "", "draining": False}
STATE |= {"paused": False, "breaker": "closed", "weight": 1.0}
SETTINGS = {"splitwise": False, "policy": "round_robin", "port": 9000, "request_timeout_secs": 5.0}
BEGIN = {"kind": "begin", "time": 1000.0, "format": "kvrouter flight 1", "version": "1.0", "process": "router"}
BEGIN |= {"port": 9000, "settings": SETTINGS, "instances": {"10.0.0.1:1": STATE, "10.0.0.2:1": STATE}}


def make_request(number: int, at: float, *attempts: tuple[str, str, int], **members: Any) -> dict[str, Any]:
    """Return the entry of a request. Each attempt is its end, the instance, and the status."""
    entry = {"kind": "request", "time": at, "id": f"r{number}", "method": "POST", "path": "/v1/completions"}
    entry |= {"client": "", "model": "m", "status": 200, "error": "", "streamed": True, "queued_us": 0}
    entry |= {"first_byte_us": 20_000, "total_us": 500_000, "bytes_sent": 99, "prompt_tokens": 8}
    entry |= {"completion_tokens": 12, "cached_tokens": 4, "predicted_cached_tokens": None}
    entry["attempts"] = [
        {"ended": end, "began_us": 1000 * order, "ended_us": 1000 * order + 900}
        | {"choices": [[instance, 8.0, 0, {}]], "legs": [[instance, "mixed", status, 1, 0, 900]]}
        for order, (end, instance, status) in enumerate(attempts)
    ]
    return {**entry, **members}


def make_change(at: float, key: str, **members: Any) -> dict[str, Any]:
    return {"kind": "instance", "time": at, "instance": key, **STATE, **members}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return path


GOOD = ("answered", "10.0.0.1:1", 200)
RECORDED = (
    make_request(0, 1001.0, GOOD),
    make_request(1, 1002.0, ("error", "10.0.0.2:1", 500), GOOD),
    make_request(2, 1003.0, ("death", "10.0.0.2:1", 0), GOOD),
    make_change(1003.1, "10.0.0.2:1", healthy=False),
    make_request(3, 1004.0, GOOD, status=499),
    make_change(1005.0, "10.0.0.2:1"),
    make_change(1006.0, "10.0.0.1:1", draining=True),
    {"kind": "running", "time": 1007.0, "id": "r4", "method": "POST", "path": "/v1/chat/completions", "client": ""}
    | {"model": "m", "attempt": 1, "sent_us": 100, "instances": ["10.0.0.2:1"]},
    make_request(5, 1007.0, GOOD, path="/tokenize"),
)


def test_the_plan_has_the_recorded_instances_requests_orders_and_failures(tmp_path: Path) -> None:
    plan = read_plan([write(tmp_path / "flight-1.jsonl", BEGIN, *RECORDED)])
    assert plan.settings["roles"] == ["mixed", "mixed"]
    assert plan.settings["router"] == {"policy": "round_robin"}
    events = [(round(event.at, 1), event.kind, event.details.get("id", event.target)) for event in plan.events]
    assert events == [
        (6.0, "request", "r0"),
        (7.0, "mood", "mixed1"),
        (7.0, "request", "r1"),
        (8.0, "mood", "mixed1"),
        (8.0, "request", "r2"),
        (8.1, "kill", "mixed1"),
        (9.0, "request", "r3"),
        (11.0, "order", "mixed0"),
        (12.0, "request", "r4"),
    ]
    by_id = {event.details.get("id"): event.details for event in plan.events}
    assert (by_id["r0"]["body"]["max_tokens"], by_id["r3"]["leaves_after"]) == (12, 0.5)
    assert [event.details["seconds"] for event in plan.events if event.kind == "kill"] == [1.9]


def test_a_change_that_several_processes_recorded_occurs_once(tmp_path: Path) -> None:
    for number in range(2):
        drains = make_change(1001.0 + number, "10.0.0.1:1", draining=True)
        write(tmp_path / f"flight-1-{number}.jsonl", BEGIN, drains, make_change(1003.0 + number, "10.0.0.1:1"))
    plan = read_plan([tmp_path])
    assert [event.details["path"] for event in plan.events] == ["/admin/drain", "/admin/resume"]


def test_the_replay_of_a_recording_has_no_failure_and_is_reproducible(tmp_path: Path) -> None:
    plan = read_plan([write(tmp_path / "flight-1.jsonl", BEGIN, *RECORDED)])
    first, second = (run_forked(RouterWorld, 0, plan) for _ in range(2))
    assert first.failures == []
    assert first.trace == second.trace
    assert first.trace.count("ends: right 200") >= 4
    assert "mixed instance mixed0:8000 drains" in first.trace


def test_the_program_prints_the_timeline_of_a_recording(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    path = write(tmp_path / "flight-1.jsonl", BEGIN, *RECORDED)
    assert main(["--replay", str(path)]) == 0
    assert "request 0 ends: right 200" in capfd.readouterr().out


def test_a_recording_without_instances_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "flight-1.jsonl", {**BEGIN, "instances": {}}, make_request(0, 1001.0))
    with pytest.raises(RecordingError, match="names no instance"):
        read_plan([path])
