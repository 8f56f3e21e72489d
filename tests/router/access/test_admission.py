"""Admission: limits on what runs at once, and a line in which clients take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.access.admission import Admission, AdmissionClient
from router.http.api_error import Refused
from router.settings import RouterSettings


def admission(**settings: Any) -> Admission:
    return Admission(RouterSettings(api_keys_file="unread", **settings))


class Guests:
    """Requests that ask to be let in, on an event loop that runs only when told."""

    def __init__(self, gate: Admission) -> None:
        self.gate = gate
        self.order: list[str] = []
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> Guests:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()

    def ask(self, client: str, name: str = "", priority: int = 0, tokens: int = 0) -> asyncio.Task[None]:
        """A request of ``client`` asks; ``order`` gets its name when it is let in."""

        async def enter() -> None:
            await self.gate.enter(client, priority, tokens)
            self.order.append(name or client)

        task = self.loop.create_task(enter())
        self.settle()
        return task

    def leave(self, client: str) -> None:
        self.gate.leave(client)
        self.settle()

    def settle(self) -> None:
        """Let everybody act who can."""
        for _ in range(4):
            self.run(asyncio.sleep(0))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)


def refusal(task: asyncio.Task[None]) -> Refused:
    error = task.exception()
    assert isinstance(error, Refused)
    return error


def test_without_limits_everybody_enters() -> None:
    gate = admission()
    assert all(gate.try_enter("a") for _ in range(10_000))


def test_no_more_enter_than_the_limit() -> None:
    gate = admission(max_concurrent_requests=2)
    assert [gate.try_enter(client) for client in "abc"] == [True, True, False]
    gate.leave("a")
    assert gate.try_enter("c")


def test_no_more_of_one_client_enter_than_its_limit() -> None:
    gate = admission(max_concurrent_requests_per_key=1)
    assert [gate.try_enter(client) for client in "aab"] == [True, False, True]


def test_requests_that_run_at_other_routers_count_until_those_are_gone() -> None:
    gate = admission(max_concurrent_requests=3)
    gate.note_elsewhere("second", {"a": 1})
    gate.note_elsewhere("third", {"b": 1})
    assert [gate.try_enter(client) for client in "ab"] == [True, False]
    gate.note_elsewhere("second", {})
    assert [gate.try_enter(client) for client in "ab"] == [True, False]


def test_a_clients_requests_at_other_routers_count_for_that_client() -> None:
    gate = admission(max_concurrent_requests_per_key=2)
    gate.note_elsewhere("second", {"a": 1})
    gate.note_elsewhere("third", {"a": 1})
    assert [gate.try_enter(client) for client in "abbb"] == [False, True, True, False]


def test_a_request_that_names_no_priority_waits_with_the_usual_one() -> None:
    with Guests(admission(max_concurrent_requests=1)) as guests:
        guests.gate.try_enter("a")
        waiting = guests.loop.create_task(guests.gate.enter("a"))
        guests.run(asyncio.sleep(0))
        assert guests.gate.waiting_by_priority == {0: 1}
        guests.gate.leave("a")
        guests.run(_ended(waiting))


def test_who_is_refused_where_others_wait_for_moments_is_told_to_come_back_in_a_second() -> None:
    with Guests(admission(max_concurrent_requests=1, max_queued_requests=1)) as guests:
        guests.ask("a")
        for _ in range(20):
            guests.ask("a")
            guests.leave("a")
        guests.ask("a")
        assert refusal(guests.ask("a")).headers == [(b"retry-after", b"1")]


def test_who_is_refused_where_others_wait_for_long_is_told_to_come_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with Guests(admission(max_concurrent_requests=1, max_queued_requests=1)) as guests:
        now = 0.0
        monkeypatch.setattr(guests.loop, "time", lambda: now)
        guests.ask("a")
        for _ in range(20):
            guests.ask("a")
            now += 30.0
            guests.leave("a")
        guests.ask("a")
        ((name, seconds),) = refusal(guests.ask("a")).headers
        assert name == b"retry-after"
        assert 20 < int(seconds) <= 30


def test_clients_take_turns_and_each_ones_requests_keep_their_order() -> None:
    with Guests(admission(max_concurrent_requests=1)) as guests:
        guests.ask("x")
        for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
            guests.ask(name[0], name)
        for client in "xabcab":
            guests.leave(client)
        assert guests.order == ["x", "a1", "b1", "c1", "a2", "b2", "a3"]


def test_who_waits_for_its_own_client_keeps_nobody_else_out() -> None:
    with Guests(admission(max_concurrent_requests=3, max_concurrent_requests_per_key=1)) as guests:
        for client in ("a", "a", "b"):
            guests.ask(client)
        assert (guests.order, guests.gate.waiting) == (["a", "b"], 1)
        guests.leave("a")
        assert guests.order == ["a", "b", "a"]


def test_one_too_many_in_line_is_told_when_to_come_back() -> None:
    with Guests(admission(max_concurrent_requests=1, max_queued_requests=1)) as guests:
        guests.ask("a")
        guests.ask("a")
        refused = refusal(guests.ask("a"))
        assert (refused.error.status, refused.error.code, refused.headers) == (
            429,
            "queue_full",
            [(b"retry-after", b"1")],
        )
        assert guests.gate.refused == {"queue_full": 1, "queue_timeout": 0}


def test_a_client_cannot_keep_the_line_to_itself() -> None:
    with Guests(admission(max_concurrent_requests=1, max_queued_requests=3)) as guests:
        guests.ask("a")
        waiting = [guests.ask("a", f"a{number}") for number in range(3)]
        guests.ask("b")
        assert refusal(waiting[2]).error.code == "queue_full"
        guests.leave("a")
        guests.leave("a")
        assert guests.order == ["a", "a0", "b"]


def test_who_waits_too_long_is_refused_and_leaves_the_line() -> None:
    with Guests(admission(max_concurrent_requests=1, queue_timeout_secs=0.01)) as guests:
        guests.ask("a")
        waiting = guests.ask("b")
        guests.run(_ended(waiting))
        assert (refusal(waiting).error.code, guests.gate.waiting) == ("queue_timeout", 0)


def test_a_higher_priority_is_let_in_first() -> None:
    with Guests(admission(max_concurrent_requests=1)) as guests:
        guests.ask("x")
        guests.ask("a", "low")
        guests.ask("b", "high", priority=3)
        assert guests.gate.waiting_by_priority == {0: 1, 3: 1}
        for client in "xba":
            guests.leave(client)
        assert guests.order == ["x", "high", "low"]


def test_a_full_line_has_room_for_a_higher_priority() -> None:
    with Guests(admission(max_concurrent_requests=1, max_queued_requests=1)) as guests:
        guests.ask("x")
        low = guests.ask("a")
        guests.ask("a", "high", priority=1)
        assert "a request of higher priority arrived" in refusal(low).error.message
        guests.leave("x")
        assert guests.order == ["x", "high"]


def test_who_has_used_its_tokens_is_told_when_there_are_more() -> None:
    with Guests(admission(max_tokens_per_sec_per_key=10)) as guests:
        guests.ask("a", tokens=100)
        refused = refusal(guests.ask("a", tokens=1))
        assert (refused.error.status, refused.error.code) == (429, "rate_limit_exceeded")
        assert refused.headers == [(b"retry-after", b"1")]
        guests.ask("b", tokens=1)
        guests.gate.leave("a", 490)
        assert refusal(guests.ask("a")).headers == [(b"retry-after", b"50")]
        assert guests.gate.refused["rate_limit_exceeded"] == 2
        guests.leave("b")
        assert guests.gate.running == 0


def test_a_clients_own_rate_comes_from_its_entry() -> None:
    gate = Admission(RouterSettings(api_keys_file="unread"), {"slow": 1.0})
    with Guests(gate) as guests:
        for _ in range(3):
            guests.ask("other", tokens=10_000)
        guests.ask("slow", tokens=1000)
        assert refusal(guests.ask("slow", tokens=1)).error.code == "rate_limit_exceeded"
        assert guests.order == ["other", "other", "other", "slow"]


def test_who_is_not_let_in_is_charged_no_tokens() -> None:
    limits = admission(max_concurrent_requests=1, max_tokens_per_sec_per_key=10, queue_timeout_secs=0.01)
    with Guests(limits) as guests:
        guests.ask("a", tokens=10)
        waiting = guests.ask("b", tokens=1000)
        guests.run(_ended(waiting))
        assert refusal(waiting).error.code == "queue_timeout"
        guests.leave("a")
        guests.ask("b", "b again", tokens=1)
        assert guests.order == ["a", "b again"]


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})


def test_who_is_cancelled_just_as_it_is_let_in_takes_no_place() -> None:
    with Guests(admission(max_concurrent_requests=1)) as guests:
        guests.ask("a")
        waiting = guests.ask("b")
        guests.gate.leave("a")
        waiting.cancel()
        guests.settle()
        assert (guests.gate.running, guests.gate.waiting) == (0, 0)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Requests come, end and give up in any order."""

    LIMIT, PER_CLIENT, LINE = 3, 2, 4
    clients = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        gate = admission(
            max_concurrent_requests=self.LIMIT,
            max_concurrent_requests_per_key=self.PER_CLIENT,
            max_queued_requests=self.LINE,
        )
        self.guests = Guests(gate)
        self.inside: list[str] = []
        self.line: list[tuple[str, asyncio.Task[None]]] = []

    @property
    def gate(self) -> Admission:
        return self.guests.gate

    @rule(client=clients, priority=st.integers(-1, 1))
    def comes(self, client: str, priority: int) -> None:
        self.line.append((client, self.guests.ask(client, priority=priority)))
        self._look()

    @rule(client=clients)
    def comes_in_a_hurry(self, client: str) -> None:
        if self.gate.try_enter(client):
            self.inside.append(client)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.inside))
        events: list[Callable[[], object]] = [lambda: self.gate.leave(client)]
        if data.draw(st.booleans()) and self.line:  # at the same moment another gives up, perhaps whose turn it is
            events.append(data.draw(st.sampled_from(self.line))[1].cancel)
        events = data.draw(st.permutations(events))
        self.inside.remove(client)
        for event in events:
            event()
        self.guests.settle()
        self._look()

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def gives_up(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.line))[1].cancel()
        self.guests.settle()
        self._look()

    def _look(self) -> None:
        """Note who has come in, and who has gone."""
        self.inside += [client for client, task in self.line if _entered(task)]
        self.line = [(client, task) for client, task in self.line if not task.done()]

    @invariant()
    def limits_hold_and_the_counts_are_right(self) -> None:
        assert self.gate.running == len(self.inside) <= self.LIMIT
        assert self.gate.waiting == len(self.line) <= self.LINE
        assert all(self.inside.count(client) <= self.PER_CLIENT for client in "abc")

    @invariant()
    def nobody_waits_without_need(self) -> None:
        if len(self.inside) < self.LIMIT:
            assert all(self.inside.count(client) == self.PER_CLIENT for client, _ in self.line)

    def teardown(self) -> None:
        """When all have gone, nothing is left."""
        with self.guests:
            while self.inside:
                self.guests.leave(self.inside.pop())
                self._look()
            assert (self.gate.running, self.gate.waiting) == (0, 0)
            assert not self.line


def _entered(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = hypothesis_settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_request_that_is_let_in_runs_until_it_leaves_with_its_tokens() -> None:
    asked: list[Any] = []

    async def let_in(*request: Any) -> None:
        asked.append(request)

    admission = AdmissionClient(let_in, lambda *ended: asked.append(ended))
    assert not admission.try_enter("c", 7)
    asyncio.run(admission.enter("c", 3, 7))
    assert (admission.running, admission.waiting) == (1, 0)
    admission.leave("c", 2)
    assert asked == [("c", 3, 7), ("c", 2)]
    assert admission.running == 0


def test_a_refusal_of_the_other_process_is_raised_and_counted_here() -> None:
    async def refuse(*_: Any) -> list[Any]:
        return [429, "the queue is full", "queue_full", 4]

    admission = AdmissionClient(refuse, lambda *_: None)
    with pytest.raises(Refused, match="the queue is full") as refused:
        asyncio.run(admission.enter("c"))
    assert (refused.value.error.status, refused.value.retry_after) == (429, 4)
    assert (admission.running, admission.waiting, admission.refused) == (0, 0, {"queue_full": 1, "queue_timeout": 0})


def test_requests_in_line_are_counted_by_priority_for_as_long_as_they_wait() -> None:
    async def work() -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        admission = AdmissionClient(lambda *_: asyncio.shield(turn), lambda *_: None)
        entering = [asyncio.ensure_future(admission.enter("c", priority)) for priority in (0, 0, 5)]
        await asyncio.sleep(0)
        assert admission.waiting_by_priority == {0: 2, 5: 1}
        entering[2].cancel()
        await asyncio.wait(entering[2:])
        assert dict(admission.waiting_by_priority) == {0: 2}
        turn.set_result(None)
        await asyncio.gather(*entering[:2])
        assert (admission.waiting, admission.running) == (0, 2)

    asyncio.run(work())


def make_shared(gate: Admission) -> AdmissionClient:
    """A process that asks ``gate``, which is in another one."""

    async def ask(client: str, priority: int, tokens: int) -> None:
        await gate.enter(client, priority, tokens)

    return AdmissionClient(ask, lambda client, tokens: gate.leave(client, tokens))


@pytest.mark.parametrize("is_shared", [False, True])
def test_bodies_of_waiting_requests_have_a_bounded_size(is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.access.admission.MAX_WAITING_BYTES", 100)
    own = admission(max_concurrent_requests=1)
    gate = make_shared(own) if is_shared else own
    with Guests(own) as guests:
        guests.ask("a")
        tasks = [guests.loop.create_task(gate.enter("b", body_bytes=size)) for size in (101, 1, 0)]
        guests.settle()
        with pytest.raises(Refused) as refused:
            guests.run(tasks[1])  # type: ignore[arg-type]
        assert refused.value.error.status == 429
        assert refused.value.error.code == "queue_full"
        assert refused.value.error.message == (
            "1 requests are queued, with bodies of 101 bytes, and the body of this request has 1 bytes; the bodies of "
            "queued requests may have 100 bytes in total"
        )
        assert refused.value.retry_after >= 1
        assert gate.refused["queue_full"] == 1
        assert (gate.waiting, gate.waiting_bytes) == (2, 101)
        tasks[0].cancel()
        guests.settle()
        assert (gate.waiting, gate.waiting_bytes) == (1, 0)
        fitting = guests.loop.create_task(gate.enter("b", body_bytes=100))
        guests.leave("a")
        guests.leave("b")
        guests.run(fitting)  # type: ignore[arg-type]
        assert (gate.waiting, gate.waiting_bytes) == (0, 0)
