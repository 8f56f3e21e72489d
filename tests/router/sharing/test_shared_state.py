"""Several routers share their state over a real Redis, which also dies, hangs and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest

from router.access import Admission
from router.fleet import Role
from router.policies.cache_aware import CacheAware
from router.settings import RouterSettings, SettingsError
from router.sharing import Link, PrefixSync, shared_state
from router.sharing.admission_server import AdmissionServer
from router.sharing.channels import pack
from router.sharing.hub import Hub
from router.sharing.records import STALE_SECONDS
from router.sharing.shared_state import SharedState
from tests.router.sharing.links import LinkedHub, make_record, until
from tests.support.redis import RedisServer, needs_redis

pytestmark = needs_redis


class ClosingHub(LinkedHub):
    """A hub that is closed at the end of a block."""

    async def __aenter__(self) -> ClosingHub:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Router:
    """A hub with one worker, connected to other routers."""

    def __init__(self, link: Link, hub: Hub, shared: SharedState, connecting: asyncio.Future[None]) -> None:
        self.link, self.hub, self.shared, self.connecting = link, hub, shared, connecting
        self.received: list[Any] = []
        self.records: dict[str, Any] = {}
        self.gone: list[str] = []
        link.subscribe_to_topic("news", lambda sender, content: self.received.append((sender, content)))
        link.subscribe_to_records(self.records.__setitem__)
        link.subscribe_to_departures(self.gone.append)


def make_shared(url: str, hub: Hub) -> SharedState:
    return SharedState(url, hub.name, functools.partial(hub.on_message, ""), hub.list_records)


@asynccontextmanager
async def router(name: str, url: str) -> AsyncIterator[Router]:
    linked = LinkedHub(name)
    linked.hub.routers = shared = make_shared(url, linked.hub)
    connecting = asyncio.ensure_future(shared.keep_connection())
    try:
        yield Router(await linked.join(f"{name}-0"), linked.hub, shared, connecting)
    finally:
        linked.hub.forget_worker(f"{name}-0")
        await shared.disconnect(connecting)
        await linked.close()


def run_two(redis: RedisServer, work: Callable[[Router, Router], Any]) -> None:
    """Run ``work`` with two routers that know each other."""

    async def run() -> None:
        async with router("a", redis.url) as first, router("b", redis.url) as second:
            await until(lambda: first.shared.list_routers() == ["b"] and second.shared.list_routers() == ["a"])
            await work(first, second)

    asyncio.run(run())


def test_events_of_one_router_reach_the_other_in_order(redis: RedisServer) -> None:
    async def work(first: Router, second: Router) -> None:
        for number in range(200):
            first.link.publish_event("news", number)
        await until(lambda: second.received == [("a-0", number) for number in range(200)])
        assert first.received == []

    run_two(redis, work)


def test_a_router_that_starts_later_gets_the_records(redis: RedisServer) -> None:
    async def work(first: Router, second: Router) -> None:
        first.link.keep_record("one", make_record(1))
        second.link.keep_record("two", make_record(2))
        await until(lambda: "one" in second.records and "two" in first.records)
        async with router("c", redis.url) as third:
            await until(lambda: set(third.records) == {"one", "two"})

    run_two(redis, work)


def test_fleets_in_two_databases_of_one_redis_are_separate(redis: RedisServer) -> None:
    async def work(first: Router, second: Router) -> None:
        async with router("other", redis.url.removesuffix("/0") + "/1") as other:
            await until(lambda: not other.link.trouble)
            other.link.keep_record("theirs", make_record(9))
            other.link.publish_event("news", "theirs")
            first.link.keep_record("ours", make_record(1))
            first.link.publish_event("news", "ours")
            await until(lambda: bool(second.received) and "ours" in second.records)
            async with router("later", redis.url.removesuffix("/0") + "/1") as later:
                await until(lambda: "theirs" in later.records and "later" in other.shared.list_routers())
                assert set(other.records) | set(later.records) == {"theirs"}
                assert ("a-0", "ours") not in other.received + later.received
            assert set(second.records) == {"ours"}
            assert second.received == [("a-0", "ours")]
            assert set(first.shared.list_routers()) == {"b"}

    run_two(redis, work)


def test_a_router_starts_although_redis_has_invalid_records(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with router("a", redis.url) as first:
            first.link.keep_record("good", make_record(1))
            await first.shared.wait_for_records()
            client: Any = first.shared._redis
            old = {"written_at": 1e9, "is_news": True, "fields": {}, "draining": False}
            await client.hset("kvrouter:1:fleet", "10.0.0.1:80", msgpack.packb(old))
            for key, data in ((b"old", msgpack.packb(old)), (b"broken", b"\xc1"), (b"text", b"\xa1a")):
                await client.set(first.shared._record.encode() + key, data)
                await client.sadd(first.shared._instances, key)
            await client.sadd(first.shared._instances, b"\xff gone")
            await client.publish(first.shared._channel, b"\xc1")
            await client.publish(first.shared._channel, msgpack.packb(["x", 1, [["keep", 5, None], [], ["what"]]]))
            async with router("b", redis.url) as second:
                await second.shared.wait_for_records()
                await until(lambda: set(second.records) == {"good"})
                assert not second.link.trouble
            assert set(await client.smembers(first.shared._instances)) == {b"good", b"old", b"broken", b"text"}

    asyncio.run(run())
    assert "in Redis cannot be read and is ignored" in caplog.text
    assert "an invalid record of instance old is ignored" in caplog.text


def test_invalid_messages_change_nothing(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def work(first: Router, second: Router) -> None:
        settings = RouterSettings(max_concurrent_requests=1)
        admission = Admission(settings, {})
        second.hub.admission = AdmissionServer(admission, second.hub.send_limits)
        client: Any = first.shared._redis
        invalid = ["x", 1, [["enter", 1, "client", 0, 1], ["state", "none"], ["leave"]]]
        for batch in (invalid, [["x"], 1, []], ["x", "1", []], ["x", 2, 5], ["x", []], 5):
            await client.publish(first.shared._channel, pack(batch))
        first.link.publish_event("news", 1)
        await until(lambda: second.received == [("a-0", 1)])
        assert "a" in second.shared.list_routers()
        assert second.link.trouble == ""
        assert admission.running == 0
        assert "begins anew" not in caplog.text

    run_two(redis, work)


def test_a_record_without_renewals_expires_in_redis_and_a_router_then_removes_its_key(redis: RedisServer) -> None:
    async def run() -> None:
        async with router("a", redis.url) as first:
            first.link.keep_record("one", make_record(1))
            client: Any = first.shared._redis
            members, record = first.shared._instances, first.shared._record + "one"
            while not await client.exists(record):
                await asyncio.sleep(0.01)
            assert STALE_SECONDS - 60 < await client.ttl(record) <= STALE_SECONDS
            await client.delete(record)
            async with ClosingHub() as linked:
                late = make_shared(redis.url, linked.hub)
                await late._exchange_records()
                await late._redis.aclose()
            assert await client.smembers(members) == set()

    asyncio.run(run())


def test_a_new_router_receives_the_running_requests_of_others_at_once(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: dict[str, dict[str, int]] = {}

    def note(router: str, running_there: dict[str, int], charged_there: dict[str, int]) -> None:
        running[router] = running_there

    async def work(first: Router, second: Router) -> None:
        server = AdmissionServer(Admission(RouterSettings(max_concurrent_requests=5)), first.hub.send_limits)
        first.hub.admission = server
        is_admitted = asyncio.Event()
        server.admit_request("a-0", 1, "client", 0, 10, lambda *_: is_admitted.set())
        await is_admitted.wait()
        async with router("c", redis.url) as third:
            third.hub.admission = AdmissionServer(Admission(RouterSettings()), lambda *_: None)
            monkeypatch.setattr(third.hub.admission, "note_elsewhere", note)
            await until(lambda: running.get("a") == {"client": 1})

    run_two(redis, work)


def test_a_router_that_was_silent_is_queried_again_for_its_running_requests(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[dict[str, int]] = []

    async def work(first: Router, second: Router) -> None:
        second.hub.admission = AdmissionServer(Admission(RouterSettings()), lambda *_: None)
        monkeypatch.setattr(second.hub.admission, "note_elsewhere", lambda _, counts, __: running.append(counts))
        server = AdmissionServer(Admission(RouterSettings(max_concurrent_requests=5)), first.hub.send_limits)
        first.hub.admission = server
        server.admit_request("a-0", 1, "client", 0, 10, lambda *_: None)
        await until(lambda: running == [{"client": 1}])
        second.shared._forget_router("a")  # as after GONE_SECONDS without a message
        await until(lambda: running == [{"client": 1}, {}, {"client": 1}])

    run_two(redis, work)


def test_a_late_query_of_a_router_that_was_silent_is_ignored(redis: RedisServer) -> None:
    async def work(first: Router, second: Router) -> None:
        queries: list[Any] = []
        second.link.answer_topic("abort", queries.append)
        for _ in range(2):
            await first.link.ask_peers("abort", len(queries), everywhere=True)
            second.shared._forget_router("a")  # as after GONE_SECONDS without a message
            first.shared.send_message("ask", "a-0", 100, "abort", "late")  # as from a network that was interrupted
            await until(lambda: second.shared.list_routers() == ["a"])
        assert queries == [0, 1]

    run_two(redis, work)


class Prefixes:
    """The prefixes that a router's only worker knows."""

    def __init__(self, router: Router, *chains: range) -> None:
        self.router = router
        self.policy = CacheAware()
        self.sync = PrefixSync(router.link, {Role.MIXED: self.policy})
        for chain in chains:
            self.policy.note_chain(chain, "10.0.0.1:1")

    async def fetch(self) -> int:
        """Fetch the prefixes of other routers as at a start, and return the number of known chunks."""
        await self.router.shared.wait_for_records()
        await self.router.hub.share_prefixes(await self.router.shared.fetch_prefixes())
        return self.policy.num_chunks


def test_a_router_that_starts_later_gets_the_prefixes_of_another(redis: RedisServer) -> None:
    async def work(first: Router, second: Router) -> None:
        knowing, empty = Prefixes(first, range(1, 400)), Prefixes(second)
        async with router("c", redis.url) as third:
            newcomer = Prefixes(third)
            assert await newcomer.fetch() == 399
        assert (knowing.policy.num_chunks, empty.policy.num_chunks) == (399, 0)

    run_two(redis, work)


def test_a_router_with_more_prefixes_keeps_its_own(redis: RedisServer) -> None:
    async def work(first: Router, second: Router) -> None:
        Prefixes(first, range(1, 100))
        assert await Prefixes(second, range(1000, 1200)).fetch() == 200

    run_two(redis, work)


def test_the_first_router_does_not_wait_for_prefixes(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "FIRST_MESSAGE_SECONDS", 1000.0)

    async def run() -> None:
        async with router("a", redis.url) as first:
            assert await Prefixes(first).fetch() == 0
            redis.kill()
            await until(lambda: bool(first.link.trouble))
            assert await Prefixes(first).fetch() == 0

    asyncio.run(run())


def test_a_router_that_knows_another_one_queries_it_at_once(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "FIRST_MESSAGE_SECONDS", 1000.0)

    async def work(first: Router, second: Router) -> None:
        Prefixes(first, range(1, 100))
        assert await asyncio.wait_for(Prefixes(second).fetch(), 10) == 99

    run_two(redis, work)


def test_too_large_prefixes_are_not_sent(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_state, "MAX_PREFIXES_BYTES", 100)

    async def work(first: Router, second: Router) -> None:
        Prefixes(first, range(1, 100))
        assert await Prefixes(second).fetch() == 0

    run_two(redis, work)
    assert "are too large to send to a new router" in caplog.text


def test_a_new_router_waits_a_limited_time_for_a_router_that_does_not_answer(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "PREFIXES_SECONDS", 0.1)

    async def work(first: Router, second: Router) -> None:
        monkeypatch.setattr(first.hub, "_ask", lambda *_: None)
        assert await Prefixes(second).fetch() == 0

    run_two(redis, work)


def test_a_query_for_all_routers_reaches_them(redis: RedisServer) -> None:
    async def work(first: Router, second: Router) -> None:
        second.link.answer_topic("sum", lambda content: content + 1)
        assert await first.link.ask_peers("sum", 1, everywhere=True) == [2]
        assert await first.link.ask_peers("sum", 1) == []

    run_two(redis, work)


def test_the_end_and_the_death_of_a_router_are_detected(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "GONE_SECONDS", 2.0)

    async def run() -> None:
        async with router("a", redis.url) as first:
            async with router("b", redis.url) as ending:
                await until(lambda: first.shared.list_routers() == ["b"])
                ending.link.publish_event("news", 1)
                await until(lambda: bool(first.received))
            await until(lambda: first.gone[:1] == ["b-0"])
            async with router("c", redis.url) as dying:
                await until(lambda: "c" in first.shared.list_routers())
                dying.link.publish_event("news", 1)
                await until(lambda: len(first.received) == 2)
                dying.connecting.cancel()  # it sends no more messages, as after a kill
                dying.shared._is_up = False
                await until(lambda: first.gone == ["b-0", "b", "c-0", "c"])

    monkeypatch.setattr(shared_state, "ALIVE_SECONDS", 0.5)
    asyncio.run(run())


def test_the_death_of_a_router_that_has_published_nothing_is_detected(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "GONE_SECONDS", 2.0)
    monkeypatch.setattr(shared_state, "ALIVE_SECONDS", 0.5)

    async def work(first: Router, dying: Router) -> None:
        dying.connecting.cancel()
        dying.shared._is_up = False
        await until(lambda: first.gone == ["b"])

    run_two(redis, work)


@pytest.mark.parametrize("fault", ["killed", "hangs"])
def test_routers_continue_while_redis_is_lost_and_have_all_records_afterwards(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(shared_state, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(shared_state, "RETRY_SECONDS", 0.05)

    async def work(first: Router, second: Router) -> None:
        first.link.keep_record("before", make_record(1))
        await until(lambda: "before" in second.records)
        if fault == "killed":
            redis.kill()
        else:
            redis.hang()
        await until(lambda: bool(first.link.trouble and second.link.trouble))
        first.link.keep_record("meanwhile", make_record(2))
        first.link.keep_record("before", make_record(3))
        if fault == "killed":
            redis.start()
        else:
            redis.resume()
        await until(lambda: not first.link.trouble and not second.link.trouble)
        await until(lambda: second.records == {"before": make_record(3), "meanwhile": make_record(2)})
        second.link.publish_event("news", "again")
        await until(lambda: ("b-0", "again") in first.received)

    run_two(redis, work)


def test_a_new_router_can_wait_for_records_and_does_not_wait_if_redis_is_lost(
    redis: RedisServer,
) -> None:
    async def run() -> None:
        async with router("a", redis.url) as first:
            first.link.keep_record("one", make_record(1))
            async with router("b", redis.url) as second:
                await until(lambda: "one" in second.records)
            async with router("c", redis.url) as third:
                await third.shared.wait_for_records()
                await until(lambda: third.link.trouble == "" and "one" in third.records)
            redis.kill()
            async with router("d", redis.url) as fourth:
                await fourth.shared.wait_for_records()
                await until(lambda: bool(fourth.link.trouble))

    asyncio.run(run())


def test_a_redis_that_stores_nothing_counts_as_lost_until_it_does(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_state, "RETRY_SECONDS", 0.02)
    caplog.set_level("INFO", "router.sharing.shared_state")

    async def work(first: Router, second: Router) -> None:
        tries: list[None] = []
        exchange = first.shared._exchange_records

        async def count_tries() -> None:
            tries.append(None)
            await exchange()

        monkeypatch.setattr(first.shared, "_exchange_records", count_tries)
        first.link.keep_record("one", make_record(1))
        await until(lambda: "one" in second.records)
        await first.shared._redis.config_set("maxmemory", 1)
        first.link.keep_record("one", make_record(2))
        await until(lambda: len(tries) > 5)
        assert first.link.trouble
        assert sum("can be reached" in line for line in caplog.messages) == 2  # of each router, at its start
        await first.shared._redis.config_set("maxmemory", 0)
        await until(lambda: second.records["one"] == make_record(2) and not first.link.trouble)

    run_two(redis, work)


def test_messages_that_wait_for_redis_are_sent_in_small_batches_but_no_late_query(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(shared_state, "MAX_BATCH", 2)

    async def work(first: Router, second: Router) -> None:
        queries: list[Any] = []
        second.link.answer_topic("abort", queries.append)
        first.link.keep_record("one", make_record(1))
        await until(lambda: "one" in second.records)
        redis.kill()
        asking = asyncio.ensure_future(first.link.ask_peers("abort", "late", everywhere=True))
        for number in range(9):
            first.link.publish_event("news", number)
        first.link.keep_record("one", make_record(2))
        await until(lambda: bool(first.link.trouble and second.link.trouble))
        await asking
        second.link.keep_record("one", make_record(3))
        redis.start()
        await until(lambda: not first.link.trouble and not second.link.trouble)
        await until(lambda: first.records.get("one") == make_record(3))
        await until(lambda: bool(second.received))  # a query in the first message after the silence would be late
        await first.link.ask_peers("abort", "now", everywhere=True)
        await until(lambda: bool(queries))  # if the first router has received nothing yet, it waits for no answer
        assert queries == ["now"]
        assert second.received == [("a-0", number) for number in range(9)][-len(second.received) :]

    run_two(redis, work)


def test_many_waiting_messages_do_not_fill_the_subscribers_buffers_in_redis(redis: RedisServer) -> None:
    async def work(first: Router, second: Router) -> None:
        await first.shared._redis.config_set("client-output-buffer-limit", "pubsub 4mb 4mb 60")
        await first.shared._redis.client_kill_filter(_type="pubsub")
        await until(lambda: bool(first.link.trouble and second.link.trouble))
        await until(lambda: not second.link.trouble)
        for number in range(3000):
            first.shared.send_message("publish", "a-0", "news", [number, "x" * 20_000])
        await until(lambda: len(second.received) == 3000)
        assert [number for _, (number, _) in second.received] == list(range(3000))

    run_two(redis, work)


def test_tokens_that_were_used_while_redis_was_lost_are_not_charged_afterwards(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "RETRY_SECONDS", 0.05)
    charged: list[dict[str, int]] = []
    running: list[dict[str, int]] = []

    def note(router: str, running_there: dict[str, int], charged_there: dict[str, int]) -> None:
        running.append(running_there)
        charged.append(charged_there)

    async def work(first: Router, second: Router) -> None:
        server = AdmissionServer(Admission(RouterSettings()), lambda *_: None)
        monkeypatch.setattr(server, "note_elsewhere", note)
        second.hub.admission = server
        first.shared.send_message("limits", "a", {"key": 1}, {"key": 50})
        await until(lambda: {"key": 50} in charged)
        redis.kill()
        await until(lambda: bool(first.link.trouble and second.link.trouble))
        first.shared.send_message("limits", "a", {"key": 2}, {"key": 5000})
        redis.start()
        await until(lambda: not first.link.trouble and not second.link.trouble)
        first.shared.send_message("limits", "a", {"key": 3}, {})  # the previous message may be lost
        await until(lambda: {"key": 3} in running)
        assert {"key": 5000} not in charged

    run_two(redis, work)


def test_a_message_that_cannot_be_forwarded_does_not_delay_others(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(first: Router, second: Router) -> None:
        nested: Any = 1
        with contextlib.suppress(ValueError):
            while pack(["publish", "news", [nested]]):  # as deep as a worker's message can be
                nested = [nested]
        first.link.publish_event("news", nested)
        first.link.publish_event("news", "after it")
        await until(lambda: second.received == [("a-0", "after it")])

    run_two(redis, work)
    assert "a message could not be sent to the other routers" in caplog.text


def test_messages_that_could_not_be_sent_are_sent_again(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "RETRY_SECONDS", 0.05)

    async def work(first: Router, second: Router) -> None:
        send = first.shared._redis.pipeline
        failures: list[SharedState] = []

        def fail_once(**options: Any) -> Any:
            if not failures:
                failures.append(first.shared)
                raise ConnectionError("reset by peer")
            return send(**options)

        monkeypatch.setattr(first.shared._redis, "pipeline", fail_once)
        for number in range(3):
            first.link.publish_event("news", number)
        await until(lambda: second.received == [("a-0", number) for number in range(3)])
        assert failures

    run_two(redis, work)


def test_a_late_batch_of_a_lost_connection_changes_nothing(redis: RedisServer) -> None:
    async def work(first: Router, second: Router) -> None:
        published: list[bytes] = []
        take = second.shared._on_batch

        def note(data: bytes) -> None:
            published.append(data)
            take(data)

        second.shared._on_batch = note  # type: ignore[method-assign]
        first.link.publish_event("news", "a request runs")
        await until(lambda: len(second.received) == 1)
        late = [data for data in published if b"a request runs" in data]
        first.hub.forget_worker("a-0")
        await until(lambda: second.gone == ["a-0"])
        await second.shared._redis.publish(second.shared._channel, late[0])
        await second.shared._redis.publish(second.shared._channel, b"the last one")
        await until(lambda: b"the last one" in published)
        assert second.received == [("a-0", "a request runs")]

    run_two(redis, work)


def test_after_missed_messages_of_a_router_its_processes_are_forgotten(redis: RedisServer) -> None:
    """A missed message may be the end of a process. Its requests would then count forever."""

    async def work(first: Router, second: Router) -> None:
        async def publish(number: int, *messages: Any) -> None:
            await first.shared._redis.publish(first.shared._channel, pack(["x", number, messages]))

        await publish(7, ["publish", "x-0", "news", "late"])
        await publish(8, ["publish", "x-1", "news", "in order"])
        await until(lambda: len(second.received) == 2)
        assert second.gone == []
        await publish(11, ["publish", "x-1", "news", "after a gap"])
        await until(lambda: len(second.received) == 3)
        assert sorted(second.gone) == ["x-0", "x-1"]

    run_two(redis, work)


def test_a_router_starts_without_redis_and_connects_later(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "RETRY_SECONDS", 0.05)
    redis.kill()

    async def run() -> None:
        async with router("a", redis.url) as first:
            await until(lambda: bool(first.link.trouble))
            redis.start()
            await until(lambda: not first.link.trouble)

    asyncio.run(run())


def test_a_router_without_shared_state_does_not_import_redis() -> None:
    code = "import sys, router.sharing.shared_state; print('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"False\n"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:6379", "http://127.0.0.1", "redis://127.0.0.1:port", "redis://127.0.0.1:6379/staging"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(
        SettingsError, match=r"server.shared-state is not the address of a Redis server, such as redis://host:6379/0"
    ):
        make_shared(url, Hub("a"))
