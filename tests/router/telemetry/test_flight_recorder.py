"""The flight recorder's files: their entries, their number, and the failure of a disk."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from router.app import RouterApp
from router.fleet import Registry
from router.settings import RouterSettings, SettingsError
from router.sharing import Link
from router.telemetry import flight_recorder
from router.telemetry.flight_recorder import RecordingError, find_recordings, read_recording
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import StandIn, answers, stalls, streams
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"


def read_entries(folder: Path) -> list[dict[str, Any]]:
    """Read the entries of all files of a folder."""
    return [entry for path in find_recordings([folder]) for entry in read_recording(path)[0]]


def find(folder: Path, kind: str, **members: Any) -> list[dict[str, Any]]:
    """Find the entries of a kind with these members."""
    try:
        found = [entry for entry in read_entries(folder) if entry["kind"] == kind]
    except RecordingError:  # a file was replaced while it was read
        return []
    return [entry for entry in found if members.items() <= entry.items()]


def start_recording(make_router: MakeRouter, folder: Path, *instances: StandIn, **settings: Any) -> RouterUnderTest:
    """Start a router that records, and wait until each of its files has its first entry."""
    options = {"flight_recorder": 5.0, "flight_recorder_path": str(folder), "access_log": "off", **settings}
    router = make_router(*instances, **options)
    count = options.get("workers", 1)
    wait_until(lambda: len(list(folder.iterdir())) == count and all(map(read_size, folder.iterdir())), "the files")
    return router


def read_size(path: Path) -> int:
    return path.stat().st_size


def test_a_request_is_recorded_with_its_decisions_its_attempts_and_its_result(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    failing, good = stand_in("mixed", answers(500)), stand_in()
    router = start_recording(make_router, tmp_path, failing, good, policy="round_robin")
    for number in range(2):
        router.client.post(CHAT, json={"request_id": f"r{number}", "model": "m", "messages": []})
    wait_until(lambda: len(find(tmp_path, "request")) == 2, "the entries")
    entry = next(each for each in find(tmp_path, "request") if len(each["attempts"]) == 2)
    assert (entry["status"], entry["path"], entry["model"], entry["completion_tokens"]) == (200, CHAT, "m", 1)
    first, second = entry["attempts"]
    assert (first["ended"], second["ended"]) == ("error", "answered")
    assert (first["legs"][0][:3], second["legs"][0][:3]) == ([failing.key, "mixed", 500], [good.key, "mixed", 200])
    assert first["choices"][0][3]["policy"] == "round_robin"
    assert 0 < first["ended_us"] <= second["began_us"] <= second["ended_us"] <= entry["total_us"]


def test_no_text_of_a_prompt_a_response_a_key_a_query_or_an_error_is_recorded(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    keys, folder = tmp_path / "keys", tmp_path / "flight"
    keys.write_text("alice: SECRET-key\n")
    error = json.dumps({"error": {"message": "SECRET of the engine"}}).encode()
    echo = b'data: {"error": {"message": "SECRET of the engine"}}\n\n'
    fields = {"kv_connector": "nixl", "engine": "vllm"}
    pair = stand_in("prefill", answers(400, error)), stand_in("decode", streams(echo.decode()))
    for instance in pair:
        instance.extra_fields = fields
    router = start_recording(make_router, folder, *pair, splitwise=True, api_keys_file=str(keys))
    body = {"request_id": "r", "messages": [{"role": "user", "content": "SECRET prompt"}], "metadata": "SECRET"}
    headers = {"authorization": "Bearer SECRET-key", "x-other": "SECRET"}
    router.client.post(f"{CHAT}?q=SECRET", json=body, headers=headers)
    router.client.post(CHAT, json=body, headers={"authorization": "Bearer SECRET-wrong"})
    pair[0].behave = answers(200)
    router.client.post(CHAT, json={**body, "stream": True}, headers=headers)
    wait_until(lambda: len(find(folder, "request")) == 3, "the entries")
    assert {entry["client"] for entry in find(folder, "request")} == {"alice", ""}
    assert b"SECRET" not in b"".join(path.read_bytes() for path in folder.iterdir())


def test_the_settings_in_a_file_have_no_paths_and_no_addresses() -> None:
    settings = RouterSettings(shared_state="redis://:SECRET@127.0.0.1/0", admin_token_file="/SECRET", workers=2)
    assert "SECRET" not in str(settings.plain_values)
    assert settings.plain_values.items() >= {"workers": 2, "policy": "pool_aware", "splitwise": False}.items()


def test_operator_commands_and_health_of_instances_are_recorded_in_each_process(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    instance = stand_in()
    router = start_recording(make_router, tmp_path, instance, workers=2)
    router.client.post("/admin/drain", json={"instance": instance.key})
    wait_until(lambda: len(find(tmp_path, "instance", draining=True)) == 2, "the drain")
    router.client.post("/admin/resume", json={"instance": instance.key})
    router.client.post("/admin/weight", json={"instance": instance.key, "weight": 0.5})
    wait_until(lambda: len(find(tmp_path, "instance", draining=False, weight=0.5)) == 2, "the weight")
    instance.stop()
    router.client.post(CHAT, json={"messages": []})
    wait_until(lambda: bool(find(tmp_path, "instance", healthy=False)), "the failure")


def test_the_removal_of_an_instance_is_recorded(make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path) -> None:
    instance = stand_in()
    router = start_recording(make_router, tmp_path, instance)
    known = router.app.registry.get(instance.key)
    assert known is not None

    async def remove() -> None:
        router.app.registry.remove(known)

    router.thread.run(remove())
    wait_until(lambda: bool(find(tmp_path, "gone", instance=instance.key)), "the entry")


def test_a_running_request_is_recorded_before_its_end(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    instance = stand_in("mixed", stalls("1"))
    router = start_recording(make_router, tmp_path, instance)
    with router.client.stream("POST", CHAT, json={"request_id": "r", "stream": True, "messages": []}):
        wait_until(lambda: bool(find(tmp_path, "running", id="r")), "the entry")
        (entry,) = find(tmp_path, "running", id="r")
        assert (entry["attempt"], entry["instances"]) == (1, [instance.key])
        assert entry["sent_us"] > 0
    wait_until(lambda: bool(find(tmp_path, "request", id="r", status=499)), "the canceled request")


def test_a_stop_is_recorded(make_router: MakeRouter, tmp_path: Path) -> None:
    start_recording(make_router, tmp_path).stop()
    wait_until(lambda: bool(find(tmp_path, "stop")), "the entry")
    assert [entry["kind"] for entry in read_entries(tmp_path)] == ["begin", "stop"]


def test_only_the_user_of_the_router_can_read_its_files(make_router: MakeRouter, tmp_path: Path) -> None:
    start_recording(make_router, tmp_path)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_router_without_the_setting_writes_nothing(
    make_router: MakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    router = make_router()
    assert router.app.recorder is None
    assert list(tmp_path.iterdir()) == []


def test_a_ring_has_two_files_of_bounded_size(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "MAX_FILE_BYTES", 10_000)
    monkeypatch.setattr(flight_recorder, "FLUSH_SECONDS", 0.01)
    router = start_recording(make_router, tmp_path, stand_in())

    def is_replaced() -> bool:
        router.client.post(CHAT, json={"messages": []})
        return len(list(tmp_path.iterdir())) == 2 and bool(find(tmp_path, "begin")) and not find(tmp_path, "instance")

    wait_until(is_replaced, "the removal of the first file")
    router.stop()
    wait_until(lambda: bool(find(tmp_path, "stop")), "the end")
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000
    kinds = [[entry["kind"] for entry in read_recording(path)[0]] for path in tmp_path.iterdir()]
    assert [each[0] for each in kinds] == ["begin", "begin"]
    assert len(find(tmp_path, "begin")[0]["instances"]) == 1


def test_a_second_file_begins_after_the_minutes_of_the_setting(make_router: MakeRouter, tmp_path: Path) -> None:
    router = start_recording(make_router, tmp_path, flight_recorder=0.001)

    def has_two() -> bool:
        router.client.post(CHAT, json={})
        return len(list(tmp_path.iterdir())) == 2

    wait_until(has_two, "two files")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_ends_the_recording_with_one_line_but_no_requests(
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    router = start_recording(make_router, tmp_path, stand_in())
    write = os.write

    def fail(descriptor: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path)):
            raise OSError(code, os.strerror(code))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", fail)
    recorder = router.app.recorder
    assert recorder is not None

    def has_stopped() -> bool:
        assert router.client.post(CHAT, json={"messages": []}).status_code == 200
        return not recorder.is_recording

    wait_until(has_stopped, "the end of the recording")
    assert router.client.post(CHAT, json={"messages": []}).status_code == 200
    router.stop()
    lines = [record.getMessage() for record in caplog.records if "flight recorder" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith(f"cannot be written: {os.strerror(code)}")


def test_entries_that_are_lost_because_of_a_slow_disk_are_counted(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = start_recording(make_router, tmp_path, stand_in())
    recorder = router.app.recorder
    assert recorder is not None
    wait_until(lambda: not recorder._pending, "the start's entries, which would be written with the count")
    monkeypatch.setattr(flight_recorder, "MAX_BACKLOG_BYTES", 0)
    with recorder._one_at_a_time:
        for _ in range(3):
            router.client.post(CHAT, json={"messages": []})
        wait_until(lambda: recorder._num_lost >= 3, "the loss")
    monkeypatch.undo()
    router.client.post(CHAT, json={"messages": []})
    wait_until(lambda: bool(find(tmp_path, "lost")), "the entry")


def test_a_folder_that_cannot_be_written_is_refused_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = RouterSettings(flight_recorder=5.0, flight_recorder_path=str(tmp_path / "file" / "logs"))
    with pytest.raises(SettingsError, match=r"log.flight-recorder-path is .*cannot be written: Not a directory; name"):
        make_recorder(settings)


def make_recorder(settings: RouterSettings) -> flight_recorder.FlightRecorder:
    return flight_recorder.FlightRecorder(settings, Registry(False), "router", lambda _: [])


def test_a_worker_that_replaces_another_serves_without_a_recorder_if_the_folder_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    settings = RouterSettings(flight_recorder=5.0, flight_recorder_path=str(tmp_path / "file" / "x"))
    assert RouterApp(settings, Link(is_replacement=True)).recorder is None
    assert "this worker process runs without a flight recorder" in caplog.text


def test_a_router_starts_with_a_pipe_among_the_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "flight-1-20260101-router.jsonl")
    code = (
        "import sys; from tests.router.telemetry.test_flight_recorder import *\n"
        "make_recorder(RouterSettings(port=1, flight_recorder=5.0, flight_recorder_path=sys.argv[1])).close()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=30)


def test_the_rings_of_the_processes_that_ended_last_remain(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.router.telemetry.test_flight_recorder import *\n"
        "make_recorder(RouterSettings(port=1, flight_recorder=5.0, flight_recorder_path=sys.argv[1])); os._exit(0)"
    )
    for number in range(12):
        ring = tmp_path / f"flight-1-2026{number:02}-router.jsonl"
        for path in (ring, ring.with_name(f"{ring.stem}.old.jsonl")):
            path.write_text("{}\n")
            os.utime(path, (number, number))
    other = tmp_path / "flight-2-20260101-router.jsonl"
    other.write_text("{}\n")
    os.utime(other, (0, 0))
    live = make_recorder(RouterSettings(port=1, flight_recorder=5.0, flight_recorder_path=str(tmp_path)))
    os.utime(live._path, (0, 0))
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    rings = {flight_recorder.find_ring(path) for path in tmp_path.iterdir()}
    ended = {f"flight-1-2026{number:02}-router" for number in range(4, 12)}
    assert {ring for ring in rings if "-2026" in ring and len(ring) < 25} - {other.stem} == ended
    assert other.exists()
    assert live._path.exists()
    live.close()


@pytest.mark.parametrize(
    ("data", "num_entries", "num_damaged"),
    [
        (b'{"kind":"stop","time":1}\n{"kind":"st', 1, 1),
        (b'{"kind":"stop","time":1}\n\xff\x00\x00\n[]\n{"kind":1,"time":1}\n{"kind":"x"}\n', 1, 4),
        (b'{"kind":"stop","time":"now"}\n{"kind":"stop","time":1e300}\n{"kind":"stop","time":2}\n', 1, 2),
        (b'{"kind":"stop","time":1}\n' + 4096 * b"\0", 1, 1),
    ],
)
def test_damaged_lines_are_skipped_and_counted(tmp_path: Path, data: bytes, num_entries: int, num_damaged: int) -> None:
    path = tmp_path / "flight-1.jsonl"
    path.write_bytes(data)
    entries, damaged = read_recording(path)
    assert (len(entries), damaged) == (num_entries, num_damaged)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no entry of a flight recorder"),
        (b"hello\n", "has no entry of a flight recorder"),
        (b'{"kind":"begin","time":1,"format":"kvrouter flight 9"}\n', "the format of .* is 'kvrouter flight 9'"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_one_sentence(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "flight-1.jsonl"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=message):
        read_recording(path)


def test_a_folder_without_recordings_is_refused_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="has no recording"):
        find_recordings([tmp_path])


def test_the_older_file_of_a_ring_comes_first(tmp_path: Path) -> None:
    paths = [tmp_path / "flight-1-a.old.jsonl", tmp_path / "flight-1-a.jsonl"]
    for path in paths:
        path.write_text("")
    assert find_recordings([tmp_path]) == find_recordings([paths[1]]) == find_recordings(reversed(paths)) == paths
