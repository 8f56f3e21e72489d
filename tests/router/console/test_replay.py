"""kvrouter replay: the timeline of a flight recorder's files."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from router.console.replay import main

STATE = {"role": "mixed", "engine": "fastdeploy", "connector": "", "healthy": True, "why": "", "draining": False}
STATE |= {"paused": False, "breaker": "closed", "weight": 1.0}
BEGIN = {"kind": "begin", "time": 1000.0, "format": "kvrouter flight 1", "version": "1.0", "process": "router"}
BEGIN |= {"port": 9000, "settings": {}, "instances": {"i:1": STATE}}
HEAD = {"method": "POST", "path": "/v1/completions", "client": "", "model": "m"}
REQUEST = {"kind": "request", "time": 1001.5, "id": "job-1", **HEAD, "status": 200, "error": "", "streamed": True}
REQUEST |= {"queued_us": 0, "first_byte_us": 20_000, "total_us": 500_000, "bytes_sent": 99, "prompt_tokens": 8}
REQUEST |= {"completion_tokens": 3, "cached_tokens": 4, "predicted_cached_tokens": None, "trace_id": "t1"}
LEG = ["i:1", "mixed", 200, 1_000, 20_000, 499_000]
REQUEST["attempts"] = [
    {"ended": "death", "began_us": 500, "ended_us": 900, "choices": [["i:2", 8.0, 0, {"policy": "p"}]], "legs": []},
    {"ended": "answered", "began_us": 1_000, "ended_us": 500_000, "legs": [LEG]}
    | {"choices": [["i:1", 4.0, 4, {"policy": "p", "cost": 2.5, "queued": 0.0}]]},
]
RUNNING = {"kind": "running", "time": 1002.0, "id": "job-2", **HEAD, "attempt": 1, "sent_us": 250_000}
RUNNING |= {"instances": ["i:1"]}
STOP = {"kind": "stop", "time": 1010.0}


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return path


def show(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """Return the lines of a timeline after the first one, without the times."""
    assert main([str(each) for each in arguments]) == 0
    return [line[14:] for line in capsys.readouterr().out.splitlines()[1:]]


def test_a_request_has_its_arrival_attempts_and_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "flight-1.jsonl", BEGIN, REQUEST, STOP)
    assert main([str(path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"second 0 is 1970-01-01T\d\d:16:40\.000000[+-]\d\d:\d\d", head)
    assert lines == [
        "     0.000000 router         the recording begins: version 1.0, port 9000",
        "     0.000000 router         mixed instance i:1 is known: fastdeploy",
        "     0.000000 router         mixed instance i:1 is healthy",
        "     1.500000 router         request job-1 arrives: POST /v1/completions model=m",
        "     1.500500 router         request job-1 attempt 1 goes to i:2 because policy=p work=8",
        "     1.500900 router         request job-1 attempt 1 ends: death",
        "     1.501000 router         request job-1 attempt 2 goes to i:1 because policy=p cost=2.5 work=4 cached=4",
        "     2.000000 router         request job-1 attempt 2 ends: answered; mixed i:1 200 (sent at 1 ms, first byte "
        "at 20 ms, ended at 499 ms)",
        "     2.000000 router         request job-1 ends: 200; tokens: 8 prompt, 4 cached, 3 generated; first byte "
        "after 20 ms; 99 bytes in 500 ms",
        "    10.000000 router         the process stops",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"healthy": False, "why": "refused a connection"}, "is unhealthy: refused a connection"),
        ({"draining": True}, "drains"),
        ({"paused": True}, "is paused"),
        ({"breaker": "open"}, "has the breaker state open"),
        ({"weight": 0.25}, "has weight 0.25"),
    ],
)
def test_a_change_of_an_instance_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    entry = {"kind": "instance", "time": 1001.0, "instance": "i:1", **STATE, **change}
    path = write(tmp_path / "flight-1.jsonl", BEGIN, entry, {**entry, "time": 1002.0}, STOP)
    assert show(capsys, path)[3:-1] == [f"router         mixed instance i:1 {message}"]


def test_a_change_between_two_files_of_a_ring_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "flight-1.old.jsonl", BEGIN)
    later = {**BEGIN, "time": 1005.0, "instances": {"i:1": {**STATE, "draining": True}}}
    write(tmp_path / "flight-1.jsonl", later, {"kind": "gone", "time": 1006.0, "instance": "i:1"}, STOP)
    lines = show(capsys, tmp_path)
    assert [line[15:] for line in lines[3:5]] == ["mixed instance i:1 drains", "instance i:1 was removed"]


def test_the_timeline_of_a_killed_process_has_the_requests_that_had_not_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = {**RUNNING, "time": 1001.5, "id": "job-1"}
    path = write(tmp_path / "flight-1.jsonl", BEGIN, ended, REQUEST, RUNNING, {"kind": "alive", "time": 1009.0})
    assert main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "job-2" in line] == [
        "     2.000000 router         request job-2 arrives: POST /v1/completions model=m",
        "     2.250000 router         request job-2 attempt 1 goes to i:1",
        "     9.000000 router         request job-2 had not ended",
    ]
    assert lines[-1] == "     9.000000 router         the recording ends here: the process still runs, or was killed"
    assert len([line for line in lines if "job-1 arrives" in line]) == 1


def test_several_processes_are_one_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "flight-1-a.jsonl", {**BEGIN, "process": "a", "instances": {}}, {**STOP, "time": 1003.0})
    write(tmp_path / "flight-1-b.jsonl", {**BEGIN, "process": "b", "time": 1002.0, "instances": {}}, STOP)
    assert [line.split()[0] for line in show(capsys, tmp_path)] == ["a", "b", "a", "b"]


@pytest.mark.parametrize("name", ["job-1", "chatcmpl-job-1", "t1"])
def test_one_request_is_found_by_any_of_its_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = write(tmp_path / "flight-1.jsonl", BEGIN, REQUEST, {**REQUEST, "id": "job-9", "trace_id": "t9"}, STOP)
    lines = show(capsys, path, "--request", name)
    assert len(lines) == 6
    assert all("request job-1 " in line for line in lines)


def test_an_id_that_the_recording_does_not_have_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "flight-1.jsonl", BEGIN, REQUEST, STOP)
    assert main([str(path), "--request", "another"]) == 0
    assert capsys.readouterr().err == "kvrouter replay: the recording has no entries of this time and request\n"


@pytest.mark.parametrize(("since", "count"), [("9s", 8), ("0.1m", 1), ("8.2s", 3), ("1970-01-01T00:16:42Z", 3)])
def test_since_shows_only_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], since: str, count: int) -> None:
    path = write(tmp_path / "flight-1.jsonl", BEGIN, REQUEST, STOP)
    lines = show(capsys, path, "--since", since)
    assert len(lines) == count - (count == 8)


@pytest.mark.parametrize("since", ["yesterday", "-5m", "5", "", "1e9s"])
def test_an_invalid_time_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], since: str) -> None:
    path = write(tmp_path / "flight-1.jsonl", BEGIN, STOP)
    assert main([str(path), f"--since={since}"]) == 2
    message = f"kvrouter replay: --since is {since!r}; it must be a time such as 90s, 5m, 2h or 2026-11-23T17:40:00\n"
    assert capsys.readouterr().err == message


def test_an_incomplete_last_line_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "flight-1.jsonl", BEGIN, REQUEST)
    path.write_text(path.read_text() + json.dumps(REQUEST)[:-7])
    assert main([str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"kvrouter replay: {path}: 1 damaged line was skipped\n"
    assert "request job-1 ends: 200" in printed.out


@pytest.mark.parametrize(
    "change",
    [
        *({"attempts": 7}, {"attempts": [[]]}, {"total_us": "x"}, {"id": 1}, {"client_ids": []}, {"path": None}),
        *({name: each} for name in ("total_us", "sent_us") for each in (10**400, math.inf, math.nan, 1e300)),
    ],
)
def test_an_entry_with_invalid_fields_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    path = write(tmp_path / "flight-1.jsonl", BEGIN, {**REQUEST, **change}, {**RUNNING, **change}, REQUEST, STOP)
    assert main([str(path)]) == 0
    assert "request job-1 ends: 200" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "flight-1.jsonl", BEGIN, STOP)
    other = tmp_path / "flight-2.jsonl"
    other.write_text("hello\n")
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"kvrouter replay: {other} has no entry of a flight recorder\n"
    assert "the process stops" in printed.out


def test_the_error_for_a_missing_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "x")]) == 1
    assert capsys.readouterr().err == f"kvrouter replay: {tmp_path / 'x'} cannot be read: No such file or directory\n"


def test_control_characters_of_clients_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b]0;owned\x07\r\n\u202e\x9b31m\ud800"
    path = write(tmp_path / "flight-1.jsonl", BEGIN, {**REQUEST, "id": text, "path": text, "client": text}, STOP)
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07\\r\\n\\u202e\\x9b31m\\ud800" in printed
    assert all(each.isprintable() or each == "\n" for each in printed)


def test_a_pipe_that_closes_early_causes_no_traceback(tmp_path: Path) -> None:
    path = write(tmp_path / "flight-1.jsonl", BEGIN, *(5000 * [REQUEST]), STOP)
    code = "import sys; from router.console import main; sys.exit(main(['replay', sys.argv[1]]))"
    command = f'{sys.executable} -c "{code}" {path} | head -1'
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (len(ended.stdout.splitlines()), ended.stderr) == (1, "")


def test_the_error_for_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "flight-1.jsonl", BEGIN, REQUEST, STOP)
    code = "import sys; from router.console import main; sys.exit(main(['replay', sys.argv[1]]))"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code, str(path)], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    sentence = "kvrouter: the output could not be written completely: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, sentence)
