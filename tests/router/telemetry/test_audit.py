"""The access log, and the records of the last requests."""

from __future__ import annotations

import asyncio
import json
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.policies import Decision
from router.settings import RouterSettings, SettingsError
from router.telemetry import audit
from router.telemetry.audit import Audit
from router.telemetry.records import AttemptRecord, RequestRecord
from tests.router.calls import list_router_calls
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Received, Responder, answers, cuts, streams
from tests.support.waiting import wait_until


def make_record(request_id: str = "r", **changes: Any) -> RequestRecord:
    return RequestRecord("POST", "/v1/chat/completions", 1760000000.1239, request_id, **changes)


def run(work: Callable[[], None]) -> None:
    """Call ``work`` in an event loop that ends at once, before its timers fire."""

    async def main() -> None:
        work()

    asyncio.run(main())


def add_records(log: Audit, *records: RequestRecord) -> None:
    """Add ``records`` in an event loop that ends at once, before its timers fire."""

    async def main() -> None:
        for each in records:
            log.add_record(each)

    asyncio.run(main())


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_each_request_is_one_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = Audit(RouterSettings(access_log=str(path)))
    add_records(log, make_record(status=200, prefill="p:1", decode="d:1", first_byte_ms=1.239, cached_tokens=64))
    log.close()
    (line,) = read_lines(path)
    expected = {"time": 1760000000.124, "method": "POST", "path": "/v1/chat/completions", "status": 200}
    expected |= {"request_id": "r", "prefill": "p:1", "decode": "d:1", "first_byte_ms": 1.24, "cached_tokens": 64}
    assert expected.items() <= line.items()


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "headers", "ids"),
    [
        ({}, {"X_BD_LOGID": "log-1"}, {"x_bd_logid": "log-1"}),
        ({"req_id": "q"}, {"X-Session-Id": "h"}, {"req_id": "q", "session_id": "h"}),
        ({"session_id": "s", "user": "ann"}, {}, {"session_id": "s"}),
        ({"extra_body": {"session_id": "e"}}, {"X_BD_LOGID": "l"}, {"session_id": "e", "x_bd_logid": "l"}),
        ({"extra_body": {"top_k": 1}, "user": "ann", "req_id": 7}, {}, {}),
    ],
)
def test_the_line_of_a_request_has_the_ids_that_fastdeploys_users_search_for(
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    tmp_path: Path,
    body: dict[str, Any],
    headers: dict[str, str],
    ids: dict[str, str],
) -> None:
    path = tmp_path / "access.log"
    instance = stand_in()
    router = make_router(instance, access_log=str(path))
    router.client.post(CHAT, json={"messages": [], "request_id": "r", **body}, headers=headers)
    assert instance.received[0].header("x_bd_logid") == headers.get("X_BD_LOGID")  # in the instances' logs, too
    wait_until(lambda: len(read_lines(path)) == 1, "the line")
    (line,) = read_lines(path)
    names = {"x_bd_logid", "req_id", "session_id"}
    assert {name: line[name] for name in names & line.keys()} == ids
    assert ids.items() <= router.client.get("/admin/explain/r").json().items()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"req_id": "i" * 5000, "session_id": "i" * 5000}, {"X_BD_LOGID": "i" * 5000}),
        ({"req_id": "i" * 5000, "extra_body": {"session_id": "i" * 5000}}, {"X_BD_LOGID": "i" * 5000}),
        ({"req_id": "i" * 129}, {"X-Session-Id": "i" * 129, "X_BD_LOGID": "i" * 129}),
    ],
)
def test_128_characters_of_a_clients_ids_are_stored_and_written(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path, body: dict[str, Any], headers: dict[str, str]
) -> None:
    path = tmp_path / "access.log"
    router, records = make_router(stand_in(), access_log=str(path)), list[RequestRecord]()
    router.app.audit.subscribe_to_batches(records.extend)
    router.client.post(CHAT, json={"messages": [], "request_id": "r", **body}, headers=headers)
    wait_until(lambda: bool(records) and len(read_lines(path)) == 1, "the line")
    ids = dict.fromkeys(("session_id", "req_id", "x_bd_logid"), "i" * 128)
    assert records[0].client_ids == ids
    assert ids.items() <= read_lines(path)[0].items()
    assert ids.items() <= router.client.get("/admin/explain/r").json().items()


def test_lone_surrogates_in_a_clients_ids_do_not_hide_its_request(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    path = tmp_path / "access.log"
    router = make_router(stand_in(), access_log=str(path))
    router.client.post(
        CHAT, content=b'{"messages": [], "request_id": "r", "req_id": "a\\ud800", "session_id": "\\udfff"}'
    )
    wait_until(lambda: len(read_lines(path)) == 1, "the line")
    ids = {"req_id": "a?", "session_id": "?"}
    assert ids.items() <= read_lines(path)[0].items()
    assert ids.items() <= router.client.get("/admin/explain/r").json().items()


def test_the_line_of_an_invalid_body_has_the_log_id_of_its_header(make_router: MakeRouter, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    make_router(access_log=str(path)).client.post(CHAT, content=b"x", headers={"X_BD_LOGID": "log-1"})
    wait_until(lambda: len(read_lines(path)) == 1, "the line")
    assert read_lines(path)[0]["x_bd_logid"] == "log-1"


def test_a_line_break_in_a_request_id_does_not_begin_a_second_line(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = Audit(RouterSettings(access_log=str(path)))
    add_records(log, make_record('x"\n{"status":200}\r\u2028'))
    log.close()
    assert [line["request_id"] for line in read_lines(path)] == ['x"\n{"status":200}\r\u2028']


def test_lines_are_written_in_order_before_the_log_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = Audit(RouterSettings(access_log=str(path)))

    async def main() -> None:
        for number in range(3 * audit.BATCH_RECORDS + 1):
            log.add_record(make_record(str(number)))
        await asyncio.to_thread(wait_until, lambda: len(read_lines(path)) == 3 * audit.BATCH_RECORDS + 1, "all lines")

    asyncio.run(main())
    log.close()
    assert [line["request_id"] for line in read_lines(path)] == [str(n) for n in range(3 * audit.BATCH_RECORDS + 1)]


def test_subscribers_get_each_record_once_in_order_and_in_bounded_batches() -> None:
    log, batches = Audit(RouterSettings(access_log="off")), list[list[RequestRecord]]()
    log.subscribe_to_batches(lambda batch: batches.append(list(batch)))
    ended = [make_record(str(number)) for number in range(3 * audit.BATCH_RECORDS + 1)]

    async def main() -> None:
        for entry in ended:
            log.add_record(entry)
            await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: sum(map(len, batches)) == len(ended), "the last batch")

    asyncio.run(main())
    assert [entry for batch in batches for entry in batch] == ended
    assert max(map(len, batches)) <= audit.BATCH_RECORDS + 1


def test_a_close_writes_all_records(tmp_path: Path) -> None:
    path, counted = tmp_path / "access.log", list[RequestRecord]()
    log = Audit(RouterSettings(access_log=str(path)))
    log.subscribe_to_batches(counted.extend)
    add_records(log, *(make_record(str(number)) for number in range(10)))
    assert (counted, read_lines(path)) == ([], [])
    log.close()
    assert [entry.request_id for entry in counted] == [line["request_id"] for line in read_lines(path)]
    assert len(counted) == 10


def test_an_early_flush_of_the_records_changes_no_line(tmp_path: Path) -> None:
    path, counted = tmp_path / "access.log", list[RequestRecord]()
    log = Audit(RouterSettings(access_log=str(path)))
    log.subscribe_to_batches(counted.extend)
    for number in range(6):
        add_records(log, make_record(str(number)))
        if number % 2:
            log.flush_records()
            assert len(counted) == number + 1
    log.close()
    assert [line["request_id"] for line in read_lines(path)] == [str(number) for number in range(6)]


def test_adding_a_record_makes_one_call() -> None:
    log, called = Audit(RouterSettings(access_log="off")), list[str]()
    log.subscribe_to_batches(lambda batch: None)
    entry = make_record()
    run(lambda: called.extend(list_router_calls(lambda: log.add_record(entry))))
    assert called == ["add_record"]


def test_a_lone_surrogate_and_a_number_of_65_bits_are_written(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = Audit(RouterSettings(access_log=str(path)))
    add_records(log, make_record("\ud800", prompt_tokens=1 << 64))
    log.close()
    assert read_lines(path)[0]["prompt_tokens"] == 1 << 64


def test_lines_are_appended_to_an_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.write_text("{}\n")
    log = Audit(RouterSettings(access_log=str(path)))
    add_records(log, make_record())
    log.close()
    assert len(read_lines(path)) == 2


def test_a_log_that_cannot_be_opened_is_refused_with_one_sentence() -> None:
    with pytest.raises(
        SettingsError, match=r"log.access-log is '/no/such/file', which cannot be opened: No such file or directory"
    ):
        Audit(RouterSettings(access_log="/no/such/file"))


@pytest.mark.parametrize("long_line", [False, True])
def test_the_log_does_not_wait_for_a_reader_that_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_line: bool
) -> None:
    """A pipe holds 64 KiB. Further lines are stored up to a limit, then dropped and counted; lines stay whole."""
    monkeypatch.setattr(audit, "MAX_BACKLOG_LINES", 500)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = Audit(RouterSettings(access_log=str(pipe)))
    written = [make_record(str(number), client="c" * 3000 * long_line) for number in range(2000)]

    async def main() -> None:
        for entry in written:
            log.add_record(entry)
            await asyncio.sleep(0)

    asyncio.run(main())
    log.close()
    received = os.read(reader, 1 << 20)
    os.close(reader)
    assert received.endswith(b"\n")
    numbers = [json.loads(line)["request_id"] for line in received.splitlines()]
    assert numbers == [str(number) for number in range(len(numbers))]
    assert 0 < len(numbers) < 2000
    assert log.lost_lines > 0


def test_a_line_with_a_long_path_and_a_long_id_fits_into_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = Audit(RouterSettings(access_log=str(path)))
    add_records(log, RequestRecord("POST", "\x01" * 9000, 0.0, request_id="\x01" * 9000))
    log.close()
    assert path.stat().st_size <= select.PIPE_BUF


def test_a_pipe_without_a_reader_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match="pipe', which cannot be opened: No such device or address"):
        Audit(RouterSettings(access_log=str(tmp_path / "pipe")))


def test_lines_to_a_closed_reader_are_counted_as_lost(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = Audit(RouterSettings(access_log=str(pipe)))
    os.close(reader)
    add_records(log, make_record())
    log.close()
    assert log.lost_lines == 1


def test_a_request_is_explained_with_each_attempt_and_its_reasons() -> None:
    log = Audit(RouterSettings(access_log="off"))
    first = AttemptRecord((Decision("p:1", {"cost": 3.0}, 100.0, 64), Decision("d:1", {"requests": 0}, 0.0)), "429")
    second = AttemptRecord((Decision("p:2", {"cost": 4.0}, 100.0), Decision("d:1", {"requests": 0}, 0.0)), "answered")
    add_records(log, make_record(status=200, prefill="p:2", decode="d:1", cached_tokens=0, attempts=[first, second]))
    found = log.explain_request("r")
    assert found is not None
    assert [attempt["ended"] for attempt in found["attempts"]] == ["429", "answered"]
    assert found["attempts"][0]["decisions"][0] == {
        "instance": "p:1",
        "reasons": {"cost": 3.0},
        "work": 100.0,
        "predicted_cached_tokens": 64,
    }
    assert (found["status"], found["prefill"], found["cached_tokens"]) == (200, "p:2", 0)


@pytest.mark.parametrize("request_id", ["r", "chatcmpl-r", "cmpl-r"])
def test_a_request_is_found_by_its_id_or_by_the_engines_id(request_id: str) -> None:
    log = Audit(RouterSettings(access_log="off"))
    add_records(log, make_record("r"))
    assert log.explain_request(request_id) is not None


def test_the_last_of_two_requests_with_one_id_is_explained() -> None:
    log = Audit(RouterSettings(access_log="off"))
    add_records(log, make_record(status=429), make_record(status=200))
    assert log.explain_request("r")["status"] == 200  # type: ignore[index]


def test_the_oldest_records_are_dropped() -> None:
    log = Audit(RouterSettings(access_log="off"))
    add_records(log, *(make_record(str(number)) for number in range(audit.MAX_RECORDS + 1)))
    assert (log.explain_request("0"), len(log.records)) == (None, audit.MAX_RECORDS)
    assert log.explain_request("1") is not None


def test_the_last_requests_are_listed_the_newest_first(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in())
    for name in ("a", "b", "c"):
        router.chat(request_id=name)
    listed = router.client.get("/admin/requests?count=2").json()["requests"]
    assert [(each["request_id"], each["status"]) for each in listed] == [("c", 200), ("b", 200)]
    refused = router.client.get("/admin/requests?count=many")
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "count is 'many'; it must be a number from 1 to 1000",
    )


def test_predicted_cached_tokens_are_scaled_to_the_engines_tokens(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    answer = {"choices": [], "usage": {"prompt_tokens": 300, "completion_tokens": 1}}
    router = make_router(stand_in(behave=answers(200, json.dumps(answer).encode())))
    for _ in range(2):
        router.chat(messages=[{"role": "user", "content": "word " * 2000}])
    listed = router.client.get("/admin/requests").json()["requests"]
    assert [each["predicted_cached_tokens"] for each in listed] == [291, 0]  # 19 of 19.6 chunks


def test_cached_tokens_of_the_instance_are_reported_separately(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    details = {"cached_tokens": 192, "own_cached_tokens": 128, "pool_cached_tokens": 64}
    answer = {"choices": [], "usage": {"prompt_tokens": 200, "completion_tokens": 1, "prompt_tokens_details": details}}
    router = make_router(stand_in(behave=answers(200, json.dumps(answer).encode())))
    router.chat(request_id="r")
    found = router.client.get("/admin/explain/r").json()
    assert (found["prompt_tokens"], found["cached_tokens"], found["own_cached_tokens"]) == (200, 192, 128)


def test_a_sessions_figures_are_sums_over_its_requests(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    usage = {"prompt_tokens": 200, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 128}}
    instance = stand_in(behave=answers(200, json.dumps({"choices": [], "usage": usage}).encode()))
    router = make_router(instance)
    turns = [("1", "s", ""), ("2", "s", ""), ("3", "child", "s"), ("4", "other", "")]
    for request_id, session, parent in turns:
        headers = {"X-Session-Id": session, "X-Parent-Session-Id": parent}
        router.client.post(CHAT, json={"messages": [], "request_id": request_id}, headers=headers)
    assert router.client.get("/admin/explain/1").json()["session"] == {
        "requests": 2,
        "prompt_tokens": 400,
        "cached_tokens": 256,
        "completion_tokens": 6,
        "instances": {f"127.0.0.1:{instance.port}": 2},
        "children": ["child"],
    }
    assert router.client.get("/admin/explain/3").json()["parent_session_id"] == "s"


def test_requests_are_explained_over_http(make_router: MakeRouter) -> None:
    router = make_router()
    router.thread.run(add_one_record(router.app.audit))
    assert router.client.get("/admin/explain/a/b").json()["status"] == 200
    unknown = router.client.get("/admin/explain/z")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_request")
    assert "no request with the id 'z' is among the last 10000 requests that have ended" in unknown.text


def test_each_attempt_and_its_legs_have_their_times(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode", streams("a", "b"))
    bad = stand_in("decode", answers(500, b""))
    router = make_router(prefill, decode, bad, splitwise=True, decode_policy="round_robin")
    for number in range(2):
        with router.stream(request_id=f"r{number}") as response:
            response.read()
    (retried,) = [got.json["request_id"] for got in bad.received]
    found = explain(router, retried)
    assert [attempt["ended"] for attempt in found["attempts"]] == [f"{bad.key} answered with 500", "answered"]
    moments = []
    for attempt, answering in zip(found["attempts"], (bad, decode), strict=True):
        assert [(leg["instance"], leg["role"]) for leg in attempt["legs"]] == [
            (prefill.key, "prefill"),
            (answering.key, "decode"),
        ]
        moments += [attempt["began_ms"], attempt["ended_ms"]]
        for leg in attempt["legs"]:
            assert attempt["began_ms"] <= leg["sent_ms"] <= leg["ended_ms"] <= attempt["ended_ms"]
    assert moments == sorted(moments)
    assert 0 <= moments[0] <= moments[-1] <= found["total_ms"]
    last = found["attempts"][1]["legs"][1]
    assert last["sent_ms"] <= last["first_byte_ms"] <= last["ended_ms"]


def test_a_leg_without_a_response_has_no_time_of_its_first_byte(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    gone = stand_in("mixed", cuts())
    router = make_router(gone)
    router.chat(request_id="r")
    found = explain(router, "r")
    (leg,) = found["attempts"][0]["legs"]
    assert leg["first_byte_ms"] is None
    assert 0 <= leg["sent_ms"] <= leg["ended_ms"]


def test_a_prefill_leg_that_ends_late_gets_its_end_time_later(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    goes_on = asyncio.Event()

    async def linger(request: Received, respond: Responder) -> None:
        await goes_on.wait()
        await respond.answer(200, b"{}")

    prefill, decode = stand_in("prefill", linger), stand_in("decode")
    router = make_router(prefill, decode, splitwise=True)
    router.chat(request_id="r")
    found = explain(router, "r")
    assert [leg["ended_ms"] is None for leg in found["attempts"][0]["legs"]] == [True, False]
    router.thread.loop.call_soon_threadsafe(goes_on.set)

    def find_end() -> float | None:
        end: float | None = explain(router, "r")["attempts"][0]["legs"][0]["ended_ms"]
        return end

    assert wait_until(find_end, "prefill's end")


def explain(router: RouterUnderTest, request_id: str) -> dict[str, Any]:
    """Wait for the request's record, which the router makes after the last byte of the response."""
    found = wait_until(lambda: router.app.audit.explain_request(request_id), "the record")
    assert found is not None
    return found


async def add_one_record(log: Audit) -> None:
    log.add_record(make_record("a/b", status=200))
