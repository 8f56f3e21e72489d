"""The limits of a router apply to all of its workers together."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest

from router.access import Admission, AdmissionClient
from router.http import Refused
from router.settings import RouterSettings
from router.sharing import Link, admission_server
from router.sharing.admission_server import AdmissionServer
from tests.router.sharing.links import LinkedHub, join_all, run_linked, until


class Limited:
    """Two workers of one admission server."""

    def __init__(self, hub: LinkedHub, links: list[Link], admission: Admission) -> None:
        self.hub = hub
        self.links = links
        self.admission = admission
        self.workers = [AdmissionClient(link.wait_for_entry, link.report_end) for link in links]

    @classmethod
    async def start(cls, hub: LinkedHub, limit: int, **settings: float) -> Limited:
        admission = Admission(RouterSettings(max_concurrent_requests=limit, **settings))  # type: ignore[arg-type]
        hub.hub.admission = AdmissionServer(admission, hub.hub.send_limits)
        return cls(hub, await join_all(hub, 2), admission)

    def enter(self, worker: int, client: str = "c") -> asyncio.Task[None]:
        return asyncio.ensure_future(self.workers[worker].enter(client))


def test_a_limit_applies_exactly_to_all_workers_together() -> None:
    async def run(hub: LinkedHub) -> None:
        limited = await Limited.start(hub, 5)
        entering = [limited.enter(number % 2) for number in range(20)]
        await until(lambda: limited.admission.waiting == 15)
        await until(lambda: sum(each.running for each in limited.workers) == 5)
        assert sum(each.done() for each in entering) == 5
        assert sum(each.waiting for each in limited.workers) == 15
        while not all(each.done() for each in entering):
            worker = max(limited.workers, key=lambda each: each.running)
            worker.leave("c")
            await asyncio.sleep(0.001)
            assert limited.admission.running <= 5
        await asyncio.gather(*entering)

    run_linked(run)


def test_clients_of_all_workers_take_turns() -> None:
    async def run(hub: LinkedHub) -> None:
        limited = await Limited.start(hub, 1)
        await limited.enter(0, "greedy")
        greedy = [limited.enter(0, "greedy") for _ in range(5)]
        await until(lambda: limited.admission.waiting == 5)
        modest = limited.enter(1, "modest")
        await until(lambda: limited.admission.waiting == 6)
        for _ in range(2):
            limited.workers[0].leave("greedy")
            await asyncio.sleep(0.01)
            if modest.done():
                break
        await modest
        for each in greedy:
            each.cancel()

    run_linked(run)


def test_a_refusal_is_the_same_as_that_of_one_process() -> None:
    async def run(hub: LinkedHub) -> None:
        limited = await Limited.start(hub, 1, queue_timeout_secs=0.05)
        await limited.enter(0)
        with pytest.raises(
            Refused, match=r"this request waited in the queue for 0.05 s; 1 requests are running"
        ) as refused:
            await limited.enter(1)
        assert (refused.value.error.status, refused.value.error.code) == (429, "queue_timeout")
        assert refused.value.retry_after == 1
        assert +limited.workers[1].refused == Counter({"queue_timeout": 1})

    run_linked(run)


def test_a_request_that_leaves_the_queue_does_not_delay_the_next_one() -> None:
    async def run(hub: LinkedHub) -> None:
        limited = await Limited.start(hub, 1)
        await limited.enter(0)
        leaving, staying = limited.enter(0), limited.enter(1)
        await until(lambda: limited.admission.waiting == 2)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        await until(lambda: limited.admission.waiting == 1)
        limited.workers[0].leave("c")
        await staying
        assert limited.admission.running == 1
        assert limited.workers[0].waiting == 0

    run_linked(run)


def test_a_request_that_is_admitted_while_it_leaves_holds_no_place() -> None:
    async def run(hub: LinkedHub) -> None:
        limited = await Limited.start(hub, 1)
        for _ in range(50):
            entering = limited.enter(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            entering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await entering
                limited.workers[0].leave("c")
        await until(lambda: limited.admission.running == limited.admission.waiting == 0)

    run_linked(run)


def test_the_requests_of_a_dead_worker_hold_no_place() -> None:
    async def run(hub: LinkedHub) -> None:
        limited = await Limited.start(hub, 2)
        await asyncio.gather(limited.enter(0), limited.enter(0))
        waiting = [limited.enter(0), limited.enter(1)]
        await until(lambda: limited.admission.waiting == 2)
        limited.links[0].disconnect()
        await waiting[1]
        await until(lambda: limited.admission.running == 1)
        assert limited.admission.waiting == 0
        waiting[0].cancel()

    run_linked(run)


def test_requests_at_another_router_count_until_they_end() -> None:
    async def run(hub: LinkedHub) -> None:
        limited = await Limited.start(hub, 3)
        hub.hub.on_message("", ["limits", "other", {"c": 2}, {}])
        await limited.enter(0)
        second = limited.enter(1)
        await until(lambda: limited.admission.waiting == 1)
        hub.hub.on_message("", ["limits", "other", {}, {}])
        await second

    run_linked(run)


def test_other_routers_receive_the_requests_of_all_workers_and_each_token_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_server, "SEND_SECONDS", 0.05)
    sent: list[tuple[dict[str, int], dict[str, int]]] = []

    async def run(hub: LinkedHub) -> None:
        limited = await Limited.start(hub, 5)
        hub.hub.admission = AdmissionServer(limited.admission, lambda *counts: sent.append(counts))
        await asyncio.gather(limited.workers[0].enter("c", 0, 7), limited.workers[1].enter("c", 0, 20))
        await until(lambda: bool(sent) and sent[-1][0] == {"c": 2})
        limited.workers[0].leave("c", 3)
        await until(lambda: sent[-1][0] == {"c": 1})
        limited.workers[1].leave("c")
        await until(lambda: sent[-1] == ({}, {}))
        assert sum(charged.get("c", 0) for _, charged in sent) == 30

    run_linked(run)
