"""Links and their hub: what a worker says reaches the others, once and in order."""

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


def test_a_publication_reaches_all_others_in_order_and_not_its_sender() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)
        heard: dict[str, list[Any]] = {"first": [], "second": [], "third": []}
        first.subscribe_to_topic("news", lambda *news: heard["first"].append(news))
        second.subscribe_to_topic("news", lambda *news: heard["second"].append(news))
        third.subscribe_to_topic("news", lambda *news: heard["third"].append(news))
        for number in range(100):
            first.publish_event("news", {"number": number, "bytes": b"\xff"})
        await until(lambda: len(heard["second"]) == len(heard["third"]) == 100)
        assert heard["second"] == [("0", {"number": number, "bytes": b"\xff"}) for number in range(100)]
        assert heard["first"] == []

    run_linked(run)


def test_records_reach_those_that_are_there_and_those_that_come_later() -> None:
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
        await asyncio.sleep(0)  # records may come before anybody in that process has asked for them
        late.subscribe_to_records(known["late"].__setitem__)
        await until(lambda: known["late"] == {"a": make_record(3), "b": make_record(2)})

    run_linked(run)


def test_a_worker_that_knows_less_than_the_others_is_told_by_its_next_renewal() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join_all(hub, 2)
        known: dict[str, Any] = {}
        second.subscribe_to_records(known.__setitem__)
        first.keep_record("a", make_record(3, ordered=5))
        await until(lambda: "a" in known)
        for behind in (make_record(3, ordered=4), make_record(2, ordered=5), make_record(2, ordered=4)):
            known.clear()
            second.keep_record("a", behind)
            await until(lambda: known == {"a": make_record(3, ordered=5)})

    run_linked(run)


def test_a_worker_is_told_its_own_record_again_only_where_its_orders_are_outdated() -> None:
    async def run(hub: LinkedHub) -> None:
        (first,) = await join_all(hub, 1)
        heard: list[Any] = []
        first.subscribe_to_records(lambda key, record: heard.append(record))
        first.keep_record("a", make_record(3, ordered=5))
        first.keep_record("a", make_record(4, ordered=4))
        await until(lambda: bool(heard))
        assert heard == [make_record(4, ordered=5)]

    run_linked(run)


def test_a_record_that_nobody_renews_is_dropped() -> None:
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
def test_a_record_of_another_form_is_left_aside(record: Any, caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub()
    hub.on_message("", ["keep", "a", record])
    assert hub.list_records() == {}
    assert "an invalid record of instance a is ignored" in caplog.text


def test_one_that_comes_later_knows_how_it_stands_with_the_other_routers() -> None:
    async def run(hub: LinkedHub) -> None:
        early = await hub.join("0")
        hub.hub.on_message("", ["state", "Redis is gone"])
        late = await hub.join("1")
        assert late.trouble == "Redis is gone"
        await until(lambda: early.trouble == "Redis is gone")
        hub.hub.on_message("", ["state", ""])
        await until(lambda: not early.trouble and not late.trouble)

    run_linked(run)


def test_a_question_is_answered_by_each_other_process() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)

        async def think(content: int) -> int:
            await asyncio.sleep(0.01)
            return content + 3

        first.answer_topic("sum", lambda content: 1 / 0)
        second.answer_topic("sum", lambda content: content + 2)
        third.answer_topic("sum", think)
        assert sorted(await first.ask_peers("sum", 10)) == [12, 13]

    run_linked(run)


def test_questions_of_one_that_is_alone_have_no_answers() -> None:
    async def run(hub: LinkedHub) -> None:
        (only,) = await join_all(hub, 1)
        assert await only.ask_peers("sum") == []
        assert await Link().ask_peers("sum") == []

    run_linked(run)


def test_an_answer_under_way_is_held_by_its_link_and_not_lost_to_the_garbage_collector() -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join_all(hub, 2)
        asked, may_answer = asyncio.Event(), asyncio.Event()

        async def answer(content: Any) -> Any:
            asked.set()
            await may_answer.wait()
            return content

        second.answer_topic("question", answer)
        answers = asyncio.ensure_future(first.ask_peers("question", 7))
        await asked.wait()
        assert len(second._answering) == 1
        may_answer.set()
        assert await answers == [7]
        await until(lambda: not second._answering)

    run_linked(run)


def test_one_that_fails_to_answer_is_left_out_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)
        second.answer_topic("sum", lambda content: 1 / 0)
        third.answer_topic("sum", lambda content: 3)
        assert await first.ask_peers("sum") == [3]

    run_linked(run)
    assert "the query 'sum' of another process could not be answered" in caplog.text


def test_one_that_hangs_is_left_out_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.hub.ANSWER_SECONDS", 0.1)

    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)
        second.answer_topic("sum", lambda content: asyncio.Event().wait())
        third.answer_topic("sum", lambda content: 3)
        assert await first.ask_peers("sum") == [3]

    run_linked(run)


def test_one_that_dies_holds_no_question_up_and_the_others_learn_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sharing.hub.ANSWER_SECONDS", 1000.0)
    monkeypatch.setattr(link_module, "ANSWER_SECONDS", 1000.0)

    async def run(hub: LinkedHub) -> None:
        first, second, third = await join_all(hub, 3)
        asked = asyncio.Event()

        async def die(_: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

        second.answer_topic("sum", die)
        third.answer_topic("sum", lambda content: 3)
        gone: list[str] = []
        third.subscribe_to_departures(gone.append)
        answers = asyncio.ensure_future(first.ask_peers("sum"))
        await asked.wait()
        second.disconnect()
        assert await answers == [3]
        await until(lambda: gone == ["1"])

    run_linked(run)


def test_a_message_that_is_none_is_logged_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def run(hub: LinkedHub) -> None:
        first, second = await join_all(hub, 2)
        heard: list[Any] = []
        second.subscribe_to_topic("news", lambda _, content: heard.append(content))
        first.publish_event("news", 1)
        first.send_message("nonsense", 7)
        first.publish_event("news", 2)
        await until(lambda: heard == [1, 2])

    run_linked(run)
    assert "an invalid message" in caplog.text


@pytest.mark.parametrize("said_before", [True, False])
def test_a_stop_is_heard_whenever_it_was_said(said_before: bool) -> None:
    async def run(hub: LinkedHub) -> None:
        (link,) = await join_all(hub, 1)
        graces: list[float] = []
        if not said_before:
            link.subscribe_to_stop(graces.append)
        hub.hub.send_to_workers("stop", 25.0)
        if said_before:
            await until(lambda: link._grace is not None)
            link.subscribe_to_stop(graces.append)
        await until(lambda: graces == [25.0])

    run_linked(run)


def test_a_worker_whose_supervisor_is_gone_stops_at_once(caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_router_of_one_process_is_alone_and_the_first_and_has_replaced_none() -> None:
    link = Link()
    assert (link.is_alone, link.is_first, link.is_replacement, link.num_replaced) == (True, True, False, 0)


def test_a_worker_sends_its_supervisor_events_records_and_ends_of_requests() -> None:
    heard: list[list[Any]] = []

    async def run() -> None:
        ours, theirs = socket.socketpair()
        channel = await open_channel(ours, heard.append, lambda: None)
        channel.send_message("state", "")
        link = Link("0")
        await link.connect(theirs)
        link.send_message("log", 20, "router", "text")
        link.publish_event("news", 7)
        link.keep_record("a", make_record(1))
        link.report_end("client", 5)
        await until(lambda: len(heard) == 4)
        link.disconnect()
        channel.close()

    asyncio.run(run())
    assert heard == [
        ["log", 20, "router", "text"],
        ["publish", "0", "news", 7],
        ["keep", "a", make_record(1)],
        ["leave", "client", 5],
    ]
