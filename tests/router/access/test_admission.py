"""Admission: limits of concurrent requests, and a queue in which clients take turns."""

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


class WaitingRequests:
    """Requests that wait for admission, on an event loop that runs only in ``settle`` and ``run``."""

    def __init__(self, gate: Admission) -> None:
        self.gate = gate
        self.order: list[str] = []
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> WaitingRequests:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()

    def ask(self, client: str, name: str = "", priority: int = 0, tokens: int = 0) -> asyncio.Task[None]:
        """Start a request of ``client``. Its admission adds its name to ``order``."""

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
        """Run all tasks that can run."""
        for _ in range(4):
            self.run(asyncio.sleep(0))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)


def refusal(task: asyncio.Task[None]) -> Refused:
    error = task.exception()
    assert isinstance(error, Refused)
    return error


def test_without_limits_all_requests_are_admitted() -> None:
    gate = admission()
    assert all(gate.try_enter("a") for _ in range(10_000))


def test_the_limit_of_concurrent_requests_holds() -> None:
    gate = admission(max_concurrent_requests=2)
    assert [gate.try_enter(client) for client in "abc"] == [True, True, False]
    gate.leave("a")
    assert gate.try_enter("c")


def test_the_limit_of_a_client_holds() -> None:
    gate = admission(max_concurrent_requests_per_key=1)
    assert [gate.try_enter(client) for client in "aab"] == [True, False, True]


def test_requests_at_other_routers_count_until_those_routers_are_removed() -> None:
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


def test_a_request_without_a_priority_waits_with_priority_0() -> None:
    with WaitingRequests(admission(max_concurrent_requests=1)) as requests:
        requests.gate.try_enter("a")
        waiting = requests.loop.create_task(requests.gate.enter("a"))
        requests.run(asyncio.sleep(0))
        assert requests.gate.waiting_by_priority == {0: 1}
        requests.gate.leave("a")
        requests.run(_wait_for(waiting))


def test_a_refusal_names_a_retry_after_a_second_if_others_wait_briefly() -> None:
    with WaitingRequests(admission(max_concurrent_requests=1, max_queued_requests=1)) as requests:
        requests.ask("a")
        for _ in range(20):
            requests.ask("a")
            requests.leave("a")
        requests.ask("a")
        assert refusal(requests.ask("a")).headers == [(b"retry-after", b"1")]


def test_a_refusal_names_a_later_retry_if_others_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with WaitingRequests(admission(max_concurrent_requests=1, max_queued_requests=1)) as requests:
        now = 0.0
        monkeypatch.setattr(requests.loop, "time", lambda: now)
        requests.ask("a")
        for _ in range(20):
            requests.ask("a")
            now += 30.0
            requests.leave("a")
        requests.ask("a")
        ((name, seconds),) = refusal(requests.ask("a")).headers
        assert name == b"retry-after"
        assert 20 < int(seconds) <= 30


def test_clients_take_turns_and_the_requests_of_each_are_admitted_in_order() -> None:
    with WaitingRequests(admission(max_concurrent_requests=1)) as requests:
        requests.ask("x")
        for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
            requests.ask(name[0], name)
        for client in "xabcab":
            requests.leave(client)
        assert requests.order == ["x", "a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_request_that_waits_for_its_clients_limit_does_not_block_others() -> None:
    with WaitingRequests(admission(max_concurrent_requests=3, max_concurrent_requests_per_key=1)) as requests:
        for client in ("a", "a", "b"):
            requests.ask(client)
        assert (requests.order, requests.gate.waiting) == (["a", "b"], 1)
        requests.leave("a")
        assert requests.order == ["a", "b", "a"]


def test_a_request_that_exceeds_the_queue_is_refused_with_a_time_to_retry() -> None:
    with WaitingRequests(admission(max_concurrent_requests=1, max_queued_requests=1)) as requests:
        requests.ask("a")
        requests.ask("a")
        refused = refusal(requests.ask("a"))
        assert (refused.error.status, refused.error.code, refused.headers) == (
            429,
            "queue_full",
            [(b"retry-after", b"1")],
        )
        assert requests.gate.refused == {"queue_full": 1, "queue_timeout": 0}


def test_a_client_cannot_fill_the_queue_alone() -> None:
    with WaitingRequests(admission(max_concurrent_requests=1, max_queued_requests=3)) as requests:
        requests.ask("a")
        waiting = [requests.ask("a", f"a{number}") for number in range(3)]
        requests.ask("b")
        assert refusal(waiting[2]).error.code == "queue_full"
        requests.leave("a")
        requests.leave("a")
        assert requests.order == ["a", "a0", "b"]


def test_a_request_that_waits_too_long_is_refused_and_leaves_the_queue() -> None:
    with WaitingRequests(admission(max_concurrent_requests=1, queue_timeout_secs=0.01)) as requests:
        requests.ask("a")
        waiting = requests.ask("b")
        requests.run(_wait_for(waiting))
        assert (refusal(waiting).error.code, requests.gate.waiting) == ("queue_timeout", 0)


def test_a_higher_priority_is_admitted_first() -> None:
    with WaitingRequests(admission(max_concurrent_requests=1)) as requests:
        requests.ask("x")
        requests.ask("a", "low")
        requests.ask("b", "high", priority=3)
        assert requests.gate.waiting_by_priority == {0: 1, 3: 1}
        for client in "xba":
            requests.leave(client)
        assert requests.order == ["x", "high", "low"]


def test_a_full_queue_accepts_a_higher_priority() -> None:
    with WaitingRequests(admission(max_concurrent_requests=1, max_queued_requests=1)) as requests:
        requests.ask("x")
        low = requests.ask("a")
        requests.ask("a", "high", priority=1)
        assert "a request of higher priority arrived" in refusal(low).error.message
        requests.leave("x")
        assert requests.order == ["x", "high"]


def test_a_client_without_tokens_is_refused_with_a_time_to_retry() -> None:
    with WaitingRequests(admission(max_tokens_per_sec_per_key=10)) as requests:
        requests.ask("a", tokens=100)
        refused = refusal(requests.ask("a", tokens=1))
        assert (refused.error.status, refused.error.code) == (429, "rate_limit_exceeded")
        assert refused.headers == [(b"retry-after", b"1")]
        requests.ask("b", tokens=1)
        requests.gate.leave("a", 490)
        assert refusal(requests.ask("a")).headers == [(b"retry-after", b"50")]
        assert requests.gate.refused["rate_limit_exceeded"] == 2
        requests.leave("b")
        assert requests.gate.running == 0


def test_a_clients_own_rate_is_from_its_entry() -> None:
    gate = Admission(RouterSettings(api_keys_file="unread"), {"slow": 1.0})
    with WaitingRequests(gate) as requests:
        for _ in range(3):
            requests.ask("other", tokens=10_000)
        requests.ask("slow", tokens=1000)
        assert refusal(requests.ask("slow", tokens=1)).error.code == "rate_limit_exceeded"
        assert requests.order == ["other", "other", "other", "slow"]


def test_a_request_that_is_not_admitted_uses_no_tokens() -> None:
    limits = admission(max_concurrent_requests=1, max_tokens_per_sec_per_key=10, queue_timeout_secs=0.01)
    with WaitingRequests(limits) as requests:
        requests.ask("a", tokens=10)
        waiting = requests.ask("b", tokens=1000)
        requests.run(_wait_for(waiting))
        assert refusal(waiting).error.code == "queue_timeout"
        requests.leave("a")
        requests.ask("b", "b again", tokens=1)
        assert requests.order == ["a", "b again"]


async def _wait_for(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})


def test_a_request_that_is_cancelled_during_its_admission_does_not_count() -> None:
    with WaitingRequests(admission(max_concurrent_requests=1)) as requests:
        requests.ask("a")
        waiting = requests.ask("b")
        requests.gate.leave("a")
        waiting.cancel()
        requests.settle()
        assert (requests.gate.running, requests.gate.waiting) == (0, 0)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Requests arrive, end and are cancelled in any order."""

    LIMIT, PER_CLIENT, QUEUE = 3, 2, 4
    clients = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        gate = admission(
            max_concurrent_requests=self.LIMIT,
            max_concurrent_requests_per_key=self.PER_CLIENT,
            max_queued_requests=self.QUEUE,
        )
        self.requests = WaitingRequests(gate)
        self.inside: list[str] = []
        self.queue: list[tuple[str, asyncio.Task[None]]] = []

    @property
    def gate(self) -> Admission:
        return self.requests.gate

    @rule(client=clients, priority=st.integers(-1, 1))
    def arrive(self, client: str, priority: int) -> None:
        self.queue.append((client, self.requests.ask(client, priority=priority)))
        self._update()

    @rule(client=clients)
    def try_to_enter(self, client: str) -> None:
        if self.gate.try_enter(client):
            self.inside.append(client)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.inside))
        events: list[Callable[[], object]] = [lambda: self.gate.leave(client)]
        if (
            data.draw(st.booleans()) and self.queue
        ):  # another request is cancelled at the same time, perhaps the next one
            events.append(data.draw(st.sampled_from(self.queue))[1].cancel)
        events = data.draw(st.permutations(events))
        self.inside.remove(client)
        for event in events:
            event()
        self.requests.settle()
        self._update()

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.queue))[1].cancel()
        self.requests.settle()
        self._update()

    def _update(self) -> None:
        """Update the lists of admitted and of waiting requests."""
        self.inside += [client for client, task in self.queue if _entered(task)]
        self.queue = [(client, task) for client, task in self.queue if not task.done()]

    @invariant()
    def check_limits_and_counts(self) -> None:
        assert self.gate.running == len(self.inside) <= self.LIMIT
        assert self.gate.waiting == len(self.queue) <= self.QUEUE
        assert all(self.inside.count(client) <= self.PER_CLIENT for client in "abc")

    @invariant()
    def check_that_no_request_waits_without_need(self) -> None:
        if len(self.inside) < self.LIMIT:
            assert all(self.inside.count(client) == self.PER_CLIENT for client, _ in self.queue)

    def teardown(self) -> None:
        """Check that all counts are 0 after all requests have left."""
        with self.requests:
            while self.inside:
                self.requests.leave(self.inside.pop())
                self._update()
            assert (self.gate.running, self.gate.waiting) == (0, 0)
            assert not self.queue


def _entered(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = hypothesis_settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_an_admitted_request_counts_until_it_leaves_with_its_tokens() -> None:
    asked: list[Any] = []

    async def admit(*request: Any) -> None:
        asked.append(request)

    admission = AdmissionClient(admit, lambda *ended: asked.append(ended))
    assert not admission.try_enter("c", 7)
    asyncio.run(admission.enter("c", 3, 7))
    assert (admission.running, admission.waiting) == (1, 0)
    admission.leave("c", 2)
    assert asked == [("c", 3, 7), ("c", 2)]
    assert admission.running == 0


def test_a_refusal_of_the_other_process_is_raised_and_counted() -> None:
    async def refuse(*_: Any) -> list[Any]:
        return [429, "the queue is full", "queue_full", 4]

    admission = AdmissionClient(refuse, lambda *_: None)
    with pytest.raises(Refused, match="the queue is full") as refused:
        asyncio.run(admission.enter("c"))
    assert (refused.value.error.status, refused.value.retry_after) == (429, 4)
    assert (admission.running, admission.waiting, admission.refused) == (0, 0, {"queue_full": 1, "queue_timeout": 0})


def test_waiting_requests_are_counted_by_priority_while_they_wait() -> None:
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
    """Return the admission of a process that asks ``gate`` in another process."""

    async def ask(client: str, priority: int, tokens: int) -> None:
        await gate.enter(client, priority, tokens)

    return AdmissionClient(ask, lambda client, tokens: gate.leave(client, tokens))


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_bodies_of_waiting_requests_have_a_bounded_size(is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.access.admission.MAX_WAITING_BYTES", 100)
    own = admission(max_concurrent_requests=1)
    gate = make_shared(own) if is_shared else own
    with WaitingRequests(own) as requests:
        requests.ask("a")
        tasks = [requests.loop.create_task(gate.enter("b", body_bytes=size)) for size in (101, 1, 0)]
        requests.settle()
        with pytest.raises(Refused) as refused:
            requests.run(tasks[1])  # type: ignore[arg-type]
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
        requests.settle()
        assert (gate.waiting, gate.waiting_bytes) == (1, 0)
        fitting = requests.loop.create_task(gate.enter("b", body_bytes=100))
        requests.leave("a")
        requests.leave("b")
        requests.run(fitting)  # type: ignore[arg-type]
        assert (gate.waiting, gate.waiting_bytes) == (0, 0)
