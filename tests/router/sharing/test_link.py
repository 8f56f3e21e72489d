"""Links and their hub: a worker's messages reach the others, once and in order."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from router.sharing import Link
from router.sharing import link as link_module
from router.sharing.channels import open_channel, pack
from router.sharing.hub import Hub
from router.sharing.records import STALE_SECONDS
from tests.router.sharing.links import LinkedHub, join_all, make_record, run_linked, until


def test_an_event_reaches_all_others_in_order_and_not_its_sender() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)
        received: dict[str, list[Any]] = {"first": [], "second": [], "third": []}
        first.subscribe_to_topic("news", lambda *news: received["first"].append(news))
        second.subscribe_to_topic("news", lambda *news: received["second"].append(news))
        third.subscribe_to_topic("news", lambda *news: received["third"].append(news))
        for number in range(100):
            first.publish_event("news", {"number": number, "bytes": b"\xff"})
        await until(lambda: len(received["second"]) == len(received["third"]) == 100)
        assert received["second"] == [("0", {"number": number, "bytes": b"\xff"}) for number in range(100)]
        assert received["first"] == []

    run_linked(run)


def test_records_reach_the_present_and_the_later_workers() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join_all(hub, 2)
        known: dict[str, dict[str, Any]] = {"early": {}, "late": {}}
        second.subscribe_to_records(known["early"].__setitem__)
        first.keep_record("a", make_record(1))
        first.keep_record("b", make_record(2))
        first.keep_record("a", make_record(3))
        first.keep_record("a", make_record(2, late=True))
        await until(lambda: known["early"] == {"a": make_record(3), "b": make_record(2)})
        late = await hub.join("2")
        await asyncio.sleep(0)  # records may arrive before that process has subscribed to them
        late.subscribe_to_records(known["late"].__setitem__)
        await until(lambda: known["late"] == {"a": make_record(3), "b": make_record(2)})

    run_linked(run)


def test_a_worker_that_sends_an_outdated_record_receives_the_latest_one() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join_all(hub, 2)
        known: dict[str, Any] = {}
        second.subscribe_to_records(known.__setitem__)
        first.keep_record("a", make_record(3, ordered=5))
        await until(lambda: "a" in known)
        for outdated in (make_record(3, ordered=4), make_record(2, ordered=5), make_record(2, ordered=4)):
            known.clear()
            second.keep_record("a", outdated)
            await until(lambda: known == {"a": make_record(3, ordered=5)})

    run_linked(run)


def test_a_worker_receives_its_own_record_only_if_its_commands_are_outdated() -> None:
    async def run(hub: LinkedHub) -> None:
        (first,) = await join_all(hub, 1)
        received: list[Any] = []
        first.subscribe_to_records(lambda key, record: received.append(record))
        first.keep_record("a", make_record(3, ordered=5))
        first.keep_record("a", make_record(4, ordered=4))
        await until(lambda: bool(received))
        assert received == [make_record(4, ordered=5)]

    run_linked(run)


def test_a_record_without_renewals_is_dropped() -> None:
    now = 0.0
    hub = Hub(clock=lambda: now)
    hub.on_message("", ["keep", "a", make_record(1)])
    hub.on_message("", ["keep", "b", make_record(2)])
    now = STALE_SECONDS
    hub.on_message("", ["keep", "b", make_record(2)])
    now += 1
    assert set(hub.list_records()) == {"b"}
    assert not hub._renewed_at.keys() - {"b"}


@pytest.mark.parametrize("record", [None, 7, {}, {"version": 3, "orders": {}}, {"written_at": 4e9, "draining": True}])
def test_an_invalid_record_is_ignored(record: Any, caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub()
    hub.on_message("", ["keep", "a", record])
    assert hub.list_records() == {}
    assert "an invalid record of instance a is ignored" in caplog.text


def test_a_later_worker_knows_whether_other_routers_are_reachable() -> None:
    async def run(hub: LinkedHub) -> None:
        early = await hub.join("0")
        hub.hub.on_message("", ["state", "Redis is gone"])
        late = await hub.join("1")
        assert late.trouble == "Redis is gone"
        await until(lambda: early.trouble == "Redis is gone")
        hub.hub.on_message("", ["state", ""])
        await until(lambda: not early.trouble and not late.trouble)

    run_linked(run)


def test_a_query_is_answered_by_each_other_process() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)

        async def add_slowly(content: int) -> int:
            await asyncio.sleep(0.01)
            return content + 3

        first.answer_topic("sum", lambda content: 1 / 0)
        second.answer_topic("sum", lambda content: content + 2)
        third.answer_topic("sum", add_slowly)
        assert sorted(await first.ask_peers("sum", 10)) == [12, 13]

    run_linked(run)


def test_a_query_without_peers_has_no_answers() -> None:
    async def run(hub: LinkedHub) -> None:
        (only,) = await join_all(hub, 1)
        assert await only.ask_peers("sum") == []
        assert await Link().ask_peers("sum") == []

    run_linked(run)


def test_a_link_holds_references_to_its_running_answers() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join_all(hub, 2)
        is_asked, may_answer = asyncio.Event(), asyncio.Event()

        async def answer(content: Any) -> Any:
            is_asked.set()
            await may_answer.wait()
            return content

        second.answer_topic("question", answer)
        answers = asyncio.ensure_future(first.ask_peers("question", 7))
        await is_asked.wait()
        assert len(second._answering) == 1
        may_answer.set()
        assert await answers == [7]
        await until(lambda: not second._answering)

    run_linked(run)


def test_a_peer_that_fails_to_answer_is_omitted_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)
        second.answer_topic("sum", lambda content: 1 / 0)
        third.answer_topic("sum", lambda content: 3)
        assert await first.ask_peers("sum") == [3]

    run_linked(run)
    assert "the query 'sum' of another process could not be answered" in caplog.text


def test_a_peer_that_hangs_is_omitted_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.hub.ANSWER_SECONDS", 0.1)

    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)
        second.answer_topic("sum", lambda content: asyncio.Event().wait())
        third.answer_topic("sum", lambda content: 3)
        assert await first.ask_peers("sum") == [3]

    run_linked(run)


def test_a_dead_peer_does_not_delay_a_query_and_its_death_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.hub.ANSWER_SECONDS", 1000.0)
    monkeypatch.setattr(link_module, "ANSWER_SECONDS", 1000.0)

    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)
        is_asked = asyncio.Event()

        async def die(_: Any) -> None:
            is_asked.set()
            await asyncio.Event().wait()

        second.answer_topic("sum", die)
        third.answer_topic("sum", lambda content: 3)
        gone: list[str] = []
        third.subscribe_to_departures(gone.append)
        answers = asyncio.ensure_future(first.ask_peers("sum"))
        await is_asked.wait()
        second.disconnect()
        assert await answers == [3]
        await until(lambda: gone == ["1"])

    run_linked(run)


def test_an_invalid_message_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join_all(hub, 2)
        received: list[Any] = []
        second.subscribe_to_topic("news", lambda _, content: received.append(content))
        first.publish_event("news", 1)
        first.send_message("nonsense", 7)
        first.publish_event("news", 2)
        await until(lambda: received == [1, 2])

    run_linked(run)
    assert "an invalid message" in caplog.text


@pytest.mark.parametrize("is_sent_first", [True, False])
def test_a_stop_is_received_before_and_after_the_subscription(is_sent_first: bool) -> None:
    async def run(hub: LinkedHub) -> None:
        (link,) = await join_all(hub, 1)
        graces: list[float] = []
        if not is_sent_first:
            link.subscribe_to_stop(graces.append)
        hub.hub.send_to_workers("stop", 25.0)
        if is_sent_first:
            await until(lambda: link._grace is not None)
            link.subscribe_to_stop(graces.append)
        await until(lambda: graces == [25.0])

    run_linked(run)


def test_a_worker_stops_at_once_if_its_supervisor_has_died(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        ours.sendall(pack(["state", ""]))
        link = Link("0")
        await link.connect(theirs)
        graces: list[float] = []
        link.subscribe_to_stop(graces.append)
        ours.close()
        await until(lambda: graces == [0.0])
        link.disconnect()

    asyncio.run(run())
    assert "the supervisor of worker 0 has died" in caplog.text


def test_the_only_process_of_a_router_is_alone_and_first_and_replaces_none() -> None:
    link = Link()
    assert (link.is_alone, link.is_first, link.is_replacement, link.num_replaced) == (True, True, False, 0)


def test_a_worker_sends_its_supervisor_events_records_and_ends_of_requests() -> None:
    received: list[list[Any]] = []

    async def run() -> None:
        ours, theirs = socket.socketpair()
        channel = await open_channel(ours, received.append, lambda: None)
        channel.send_message("state", "")
        link = Link("0")
        await link.connect(theirs)
        link.send_message("log", 20, "router", "text")
        link.publish_event("news", 7)
        link.keep_record("a", make_record(1))
        link.report_end("client", 5)
        await until(lambda: len(received) == 4)
        link.disconnect()
        channel.close()

    asyncio.run(run())
    assert received == [
        ["log", 20, "router", "text"],
        ["publish", "0", "news", 7],
        ["keep", "a", make_record(1)],
        ["leave", "client", 5],
    ]
