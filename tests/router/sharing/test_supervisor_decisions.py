"""Decisions of a supervisor, with stand-ins for workers. ``test_supervisor.py`` has real processes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from router.sharing import supervisor as module
from router.sharing.silence import Silence
from router.sharing.supervisor import HUNG_SECONDS, QUIET_SECONDS, STOP_SECONDS
from tests.router.sharing.links import until
from tests.router.sharing.supervised import GRACES, Supervised, WorkerStandIn, run_supervised

Work = Callable[[Supervised], Awaitable[None]]


@pytest.fixture(autouse=True)
def shorten_times_and_check_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Shorten all times. Fail if asyncio logs an error."""
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.005)
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.005)
    monkeypatch.setattr(module, "LAST_PAUSE_SECONDS", 0.04)
    monkeypatch.setattr(module, "ACCEPT_PAUSE_SECONDS", 0.005)
    yield
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# The start of workers


def test_workers_start_with_different_names_and_one_of_them_is_the_first() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start()
        tasks = [worker.task for worker in supervised.workers]
        assert [task.is_first for task in tasks] == [True, False]
        assert len({task.name for task in tasks}) == 2
        assert [(task.is_replacement, task.num_replaced) for task in tasks] == [(False, 0)] * 2
        assert all(worker.is_daemon for worker in supervised.workers)

    run_supervised(work)


def test_the_supervisor_closes_the_workers_ends_of_sockets_and_never_blocks_on_its_own() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start()
        for worker in supervised.workers:
            assert worker.task.channel.fileno() == worker.task.connections.fileno() == -1
        assert not any(worker.connections.getblocking() for worker in supervised.supervisor._workers.values())
        assert not supervised.listener.getblocking()

    run_supervised(work)


def test_connections_are_accepted_when_all_workers_are_ready() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start()
        first, second = supervised.workers
        supervised.connect()
        first.send("ready")
        await until(lambda: sum(each.is_ready for each in supervised.supervisor._workers.values()) == 1)
        await asyncio.sleep(0)
        assert supervised.num_readies == 0
        assert first.take_connections() == []
        second.send("ready")
        await until(lambda: supervised.num_readies == 1)
        (await get_connection(first)).close()

    run_supervised(work)


def test_only_a_router_with_limits_has_an_admission_server() -> None:
    async def expect_none(supervised: Supervised) -> None:
        await supervised.start()
        assert supervised.supervisor._hub.admission is None

    async def expect_one(supervised: Supervised) -> None:
        await supervised.start()
        assert supervised.supervisor._hub.admission is not None

    run_supervised(expect_none)
    run_supervised(expect_one, max_concurrent_requests=3)


def test_a_worker_that_cannot_start_ends_the_router_with_its_message() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start()
        first, second = supervised.workers
        first.send("refuse", "this is wrong")
        await until(lambda: bool(second.read("stop")))
        second.send("refuse", "this is wrong, too")
        await until(lambda: supervised.supervisor._refusal != "")
        assert second.read("stop") == [[0.0]]
        for worker in supervised.workers:
            worker.end()
        assert await supervised.end() == "this is wrong"
        assert supervised.num_readies == 0

    run_supervised(work)


def test_a_replacement_that_cannot_start_is_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        supervised.workers[0].end(1)
        late = await supervised.wait_for_worker(2)
        late.send("refuse", "the file is gone")
        await until(lambda: "cannot start: the file is gone" in caplog.text)
        assert late.read("stop") == []
        assert await supervised.end() == ""

    run_supervised(work)


def test_messages_of_a_worker_reach_the_others_and_its_log_lines_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start()
        first, second = supervised.workers
        first.send("publish", first.task.name, "topic", "content")
        await until(lambda: second.read("publish") == [[first.task.name, "topic", "content"]])
        first.send("log", logging.WARNING, "router.some", "100 % of it")
        await until(lambda: ("router.some", logging.WARNING, "100 % of it") in caplog.record_tuples)

    run_supervised(work)


# The choice of a worker for a connection


async def get_connection(worker: WorkerStandIn) -> socket.socket:
    """Return the next client's connection that a worker gets."""
    taken: list[socket.socket] = []

    def take() -> bool:
        taken.extend(worker.take_connections())
        return bool(taken)

    await until(take)
    (connection,) = taken
    return connection


def test_a_connection_goes_to_the_worker_with_the_fewest_including_those_passed_since() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        first, second = supervised.workers
        await supervised.report(first, 2)
        await supervised.report(second, 4)
        taken = []
        for expected in (first, first, first, second):
            supervised.connect()
            taken.append(await get_connection(expected))
            if len(taken) == 2:  # the two passed connections are among its four
                await supervised.report(first, 4, 2)
        for connection in taken:
            connection.close()

    run_supervised(work)


def test_the_supervisor_closes_a_connection_that_it_has_passed() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        client = supervised.connect()
        (await get_connection(supervised.workers[0])).close()
        client.settimeout(30)
        assert client.recv(1) == b""

    run_supervised(work)


@pytest.mark.parametrize(("seconds", "is_silent"), [(QUIET_SECONDS, False), (QUIET_SECONDS + 0.5, True)])
def test_a_silent_worker_gets_a_connection_only_if_all_are_silent(seconds: float, is_silent: bool) -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        idle, busy = supervised.workers
        supervised.clock.seconds += seconds
        await supervised.report(busy, 9)
        supervised.connect()
        (await get_connection(busy if is_silent else idle)).close()
        supervised.clock.seconds += QUIET_SECONDS + 0.5
        supervised.connect()
        (await get_connection(idle)).close()

    run_supervised(work)


def test_a_worker_that_has_just_become_ready_is_not_silent() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start()
        supervised.clock.seconds += 5.0
        for worker in supervised.workers:
            worker.send("ready")
        await until(lambda: supervised.num_readies == 1)
        first, second = supervised.workers
        await supervised.report(second, 1)
        supervised.connect()
        (await get_connection(first)).close()

    run_supervised(work)


def test_a_worker_that_is_not_ready_or_has_closed_its_channel_gets_no_connection() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        first, second = supervised.workers
        second.end(1)
        late = await supervised.wait_for_worker(2)
        await supervised.report(first, 5)
        supervised.connect()
        (await get_connection(first)).close()
        late.send("ready")
        first.channel.close()
        await until(lambda: [each.is_ready for each in supervised.supervisor._workers.values()] == [False, True])
        for _ in range(2):
            supervised.connect()
            (await get_connection(late)).close()
        assert first.take_connections() == []

    run_supervised(work)


def test_a_connection_that_no_worker_accepts_is_passed_to_the_next_one() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        dying = supervised.workers[0]
        dying.connections.close()
        client = supervised.connect()
        await until(lambda: supervised.supervisor._waiting is not None)
        dying.end(1)
        worker = await supervised.wait_for_worker(1)
        worker.send("ready")
        await assert_serves(worker, client)
        assert supervised.supervisor._waiting is None
        await assert_serves(worker, supervised.connect())

    run_supervised(work, num_workers=1)


async def assert_serves(worker: WorkerStandIn, client: socket.socket) -> None:
    """Assert that the next connection of a worker is this client's."""
    with await get_connection(worker) as connection:
        connection.sendall(b"yes")
        client.settimeout(30)
        assert client.recv(3) == b"yes"


def test_the_connection_of_a_waiting_client_is_closed_when_the_router_stops() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        supervised.workers[0].connections.close()
        client = supervised.connect()
        await until(lambda: supervised.supervisor._waiting is not None)
        await supervised.end()
        client.settimeout(30)
        assert client.recv(1) == b""

    run_supervised(work, num_workers=1)


def test_without_a_worker_clients_wait_and_the_supervisor_retries_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        supervised.workers[0].end(1)
        worker = await supervised.wait_for_worker(1)
        with count_calls(supervised.supervisor, "_list_by_load") as calls:
            monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 3600.0)
            client = supervised.connect()
            await until(lambda: len(calls) > 0)
            await let_loop_run()
            assert len(calls) == 1
        worker.send("ready")
        supervised.supervisor._resume_accepting()
        await until(lambda: bool(supervised.supervisor._workers[worker.task.name].is_ready))
        supervised.supervisor._resume_accepting()
        await assert_serves(worker, client)

    run_supervised(work, num_workers=1)


@contextmanager
def count_calls(supervisor: Any, name: str) -> Iterator[list[None]]:
    """Yield a list that gets one entry for each call of the supervisor's method ``name``."""
    calls: list[None] = []
    method = getattr(supervisor, name)

    def count() -> Any:
        calls.append(None)
        return method()

    setattr(supervisor, name, count)
    yield calls
    delattr(supervisor, name)


async def let_loop_run() -> None:
    """Let the event loop run all callbacks that are due."""
    for _ in range(20):
        await asyncio.sleep(0.001)


class FullListener:
    """A listener of a process without free descriptors."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.is_full = True
        self.num_refused = 0
        self.fileno, self.close = listener.fileno, listener.close

    def accept(self) -> tuple[socket.socket, Any]:
        if self.is_full:
            self.num_refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()


def test_without_a_free_descriptor_clients_wait_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        supervised.supervisor._listener = full = FullListener(supervised.listener)
        monkeypatch.setattr(module, "ACCEPT_PAUSE_SECONDS", 3600.0)
        client = supervised.connect()
        await until(lambda: full.num_refused > 0)
        await let_loop_run()
        assert full.num_refused == 1  # during the pause there is no retry
        assert "the router cannot accept another connection: Too many open files" in caplog.text
        monkeypatch.setattr(module, "ACCEPT_PAUSE_SECONDS", 0.005)
        supervised.supervisor._resume_accepting()
        await until(lambda: full.num_refused > 2)
        full.is_full = False
        await assert_serves(supervised.workers[0], client)

    run_supervised(work, num_workers=1)


# Workers that end


def test_a_worker_that_has_ended_is_replaced_in_its_place(caplog: pytest.LogCaptureFixture) -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        first, second = supervised.workers
        first.end(0)
        third = await supervised.wait_for_worker(2)
        second.end(-signal.SIGSEGV)
        fourth = await supervised.wait_for_worker(3)
        tasks = [worker.task for worker in supervised.workers]
        assert len({task.name for task in tasks}) == 4
        assert [(task.is_first, task.is_replacement, task.num_replaced) for task in tasks[2:]] == [
            (True, True, 1),
            (False, True, 2),
        ]
        assert third.read("gone") == [[second.task.name]]
        assert fourth.read("gone") == []
        assert list(supervised.supervisor._workers) == [third.task.name, fourth.task.name]

    run_supervised(work)
    ends = [record.getMessage().partition(" ")[2].partition(" ")[2] for record in caplog.records]
    assert ends == [
        "ended with status 0; another worker replaces it",
        "was killed by SIGSEGV; another worker replaces it",
    ]


def test_the_sockets_of_a_worker_that_has_ended_are_closed() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        ended = supervised.supervisor._workers[supervised.workers[0].task.name]
        transport = ended.channel._transport
        supervised.workers[0].end(1)
        await supervised.wait_for_worker(1)
        assert ended.connections.fileno() == -1
        assert transport.is_closing()

    run_supervised(work, num_workers=1)


def test_the_pause_before_a_replacement_doubles_after_early_deaths_and_is_reset_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = []
    monkeypatch.setattr(module, "EARLY_DEATH_SECONDS", 3600.0)

    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        for number in range(5):
            supervised.workers[number].end(1)
            await supervised.wait_for_worker(number + 1)
            pauses.append(supervised.supervisor._pause)
        monkeypatch.setattr(module, "EARLY_DEATH_SECONDS", 0.0)
        supervised.workers[5].end(1)
        await supervised.wait_for_worker(6)
        pauses.append(supervised.supervisor._pause)

    run_supervised(work, num_workers=1)
    assert pauses == [0.01, 0.02, 0.04, 0.04, 0.04, 0.005]


def test_a_replacement_is_started_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr(module, "LAST_PAUSE_SECONDS", 3600.0)

    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        supervised.workers[0].end(1)
        await until(lambda: not supervised.supervisor._workers)
        await let_loop_run()
        assert len(supervised.workers) == 1
        assert not supervised.run.done()  # a router without a worker continues
        (start,) = supervised.supervisor._starts
        start.cancel()

    run_supervised(work, num_workers=1)


@pytest.mark.parametrize("failure", [OSError("no memory"), EOFError("no nursery")])
def test_the_start_of_a_replacement_is_repeated_after_a_failure(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        supervised.failures.append(failure)
        supervised.workers[0].end(1)
        worker = await supervised.wait_for_worker(1)
        assert supervised.supervisor._pause == 0.04
        assert f"a worker cannot be started; the next attempt is in 0.04 s: {failure}" in caplog.text
        worker.send("ready")
        await assert_serves(worker, supervised.connect())

    run_supervised(work, num_workers=1)


def test_a_failed_start_leaves_no_descriptor_open() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        supervised.failures.append(OSError("no memory"))
        num_open = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="no memory"):
            await supervised.supervisor._start_worker(0, is_replacement=True)
        assert len(os.listdir("/proc/self/fd")) == num_open

    run_supervised(work)


def test_no_replacement_is_started_while_the_router_stops() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        first, second = supervised.workers
        first.end(1)
        await until(lambda: len(supervised.supervisor._workers) == 1)
        supervised.supervisor._stop_workers(0.0)
        second.end(1)
        assert await supervised.end() == ""
        assert len(supervised.workers) == 2

    run_supervised(work)


# Silent workers


def test_a_worker_that_is_silent_for_longer_than_the_limit_is_killed() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        silent, talking = supervised.workers
        for passed in (10.0, HUNG_SECONDS):
            supervised.clock.seconds = 100.0 + passed
            await supervised.report(talking, int(passed))
            supervised.supervisor._check_workers()
            assert not silent.is_killed
        supervised.clock.seconds += 0.5
        await until(lambda: silent.is_killed)
        assert not talking.is_killed

    run_supervised(work)


def test_cpu_times_are_read_only_for_silent_workers() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        (worker,) = supervised.supervisor._workers.values()
        reads: list[int] = []
        worker.silence = Silence(0, supervised.clock.now, reads.append)
        supervised.clock.seconds += QUIET_SECONDS
        supervised.supervisor._check_workers()
        assert reads == []
        supervised.clock.seconds += 0.5
        supervised.supervisor._check_workers()
        assert reads == [0]

    run_supervised(work, num_workers=1)


# The end of the router


@pytest.mark.parametrize("sent", list(GRACES))
def test_a_signal_lets_workers_end_their_requests_within_its_grace(sent: signal.Signals) -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        signal.raise_signal(sent)
        worker, _ = supervised.workers
        await until(lambda: worker.read("stop") == [[GRACES[sent]]])
        assert worker.read("leave") == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 30)

    async def work_with_address(supervised: Supervised) -> None:
        address.extend(supervised.listener.getsockname())
        await work(supervised)

    address: Any = []
    run_supervised(work_with_address)


def test_with_a_delay_workers_get_a_leave_message_before_the_stop() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        signal.raise_signal(signal.SIGTERM)
        worker = supervised.workers[0]
        await until(lambda: worker.read("stop") == [[7.0]])
        assert [kind for kind, *_ in worker.messages if kind in ("leave", "stop")] == ["leave", "stop"]

    run_supervised(work, shutdown_delay_secs=0.05)


def test_a_worker_that_starts_during_the_delay_gets_the_leave_message() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: bool(supervised.workers[0].read("leave")))
        supervised.workers[1].end(1)
        late = await supervised.wait_for_worker(2)
        await until(lambda: late.read("leave") == [[]])
        assert late.read("stop") == []
        supervised.supervisor._stop.cancel()

    run_supervised(work, shutdown_delay_secs=3600.0)


def test_an_interrupt_is_not_delayed() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        signal.raise_signal(signal.SIGINT)
        worker = supervised.workers[0]
        await until(lambda: worker.read("stop") == [[3.0]])
        assert worker.read("leave") == []

    run_supervised(work, shutdown_delay_secs=3600.0)


def test_a_second_signal_ends_the_delay() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        worker = supervised.workers[0]
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: bool(worker.read("leave")))
        delayed = supervised.supervisor._stop
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: worker.read("stop") == [[0.0]])
        assert delayed.cancelled()

    run_supervised(work, shutdown_delay_secs=3600.0)


def test_a_worker_that_starts_while_the_router_stops_gets_the_rest_of_the_grace() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        supervised.supervisor._stop_workers(10.0)
        for seconds, left in ((4.0, 6.0), (14.0, 0.0)):
            supervised.clock.seconds = 100.0 + seconds
            await supervised.supervisor._start_worker(0, is_replacement=True)
            late = supervised.workers[-1]
            await until(lambda late=late, left=left: late.read("stop") == [[left]])  # type: ignore[misc]
            assert late.read("leave") == []

    run_supervised(work)


def test_workers_that_exceed_their_grace_by_some_seconds_are_killed() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        supervised.supervisor._stop_workers(10.0)
        (worker,) = supervised.workers
        supervised.clock.seconds += 10.0 + STOP_SECONDS
        supervised.supervisor._check_workers()
        assert not worker.is_killed
        supervised.clock.seconds += 0.5
        await until(lambda: worker.is_killed)
        assert await supervised.end() == ""

    run_supervised(work, num_workers=1)


def test_workers_are_checked_more_often_while_the_router_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        with count_calls(supervised.supervisor, "_check_workers") as checks:
            supervised.supervisor._stop_workers(10.0)
            monkeypatch.setattr(module, "CHECK_SECONDS", 3600.0)
            await until(lambda: len(checks) > 2)

    run_supervised(work)


def test_a_supervisor_that_stops_passes_no_connection_to_a_worker() -> None:
    async def work(supervised: Supervised) -> None:
        await supervised.start_ready()
        supervised.supervisor._pause_accepting(0.0)
        supervised.supervisor._stop_workers(10.0)
        with count_calls(supervised.supervisor, "_list_by_load") as calls:
            await let_loop_run()
            assert calls == []

    run_supervised(work)


# Other routers


class OtherRouters:
    """A stand-in for ``SharedState`` without Redis; ``test_routers.py`` has a real one."""

    prefixes: ClassVar[dict[str, Any]] = {"a": 1}
    made: ClassVar[list[OtherRouters]] = []

    def __init__(self, url: str, name: str, on_message: Any, list_records: Any, clock: Callable[[], float]) -> None:
        self.url, self.name, self.clock = url, name, clock
        self.have_records = asyncio.Event()
        self.is_connected = False
        self.is_disconnected = False
        self.made.append(self)

    async def keep_connection(self) -> None:
        self.is_connected = True
        await asyncio.Event().wait()

    async def wait_for_records(self) -> None:
        await self.have_records.wait()

    async def fetch_prefixes(self) -> dict[str, Any]:
        return self.prefixes

    async def disconnect(self, connection: asyncio.Task[None]) -> None:
        connection.cancel()
        await asyncio.wait([connection])
        self.is_disconnected = True

    def send_message(self, *message: Any) -> None:
        pass


def run_with_others(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Supervised, OtherRouters], Awaitable[None]], num_workers: int = 2
) -> None:
    """Run ``work`` with a supervisor that has ready workers, but not yet the records of other routers."""

    async def run(supervised: Supervised) -> None:
        await supervised.start()
        others = OtherRouters.made.pop()
        assert (others.url, others.clock()) == ("redis://host:6379/0", 100.0)
        for worker in supervised.workers:
            worker.send("ready")
        await until(lambda: all(each.is_ready for each in supervised.supervisor._workers.values()))
        await work(supervised, others)
        await supervised.end()
        assert others.is_disconnected

    monkeypatch.setattr(module, "SharedState", OtherRouters)
    run_supervised(run, num_workers, shared_state="redis://host:6379/0")


def test_connections_are_accepted_when_workers_have_the_records_and_prefixes_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(supervised: Supervised, others: OtherRouters) -> None:
        first, second = supervised.workers
        await let_loop_run()
        assert (others.is_connected, supervised.num_readies) == (True, 0)
        assert first.read("publish") == []
        others.have_records.set()
        await until(lambda: bool(second.read("publish")))
        assert supervised.num_readies == 0
        await until(lambda: first.read("publish") == second.read("publish") == [["", "prefixes", {"a": 1}]])
        await until(lambda: supervised.num_readies == 1)

    run_with_others(monkeypatch, work)


def test_the_start_does_not_wait_for_prefixes_if_no_other_router_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(supervised: Supervised, others: OtherRouters) -> None:
        others.have_records.set()
        await until(lambda: supervised.num_readies == 1)
        assert supervised.workers[0].read("publish") == []

    monkeypatch.setattr(OtherRouters, "prefixes", {})
    run_with_others(monkeypatch, work)


@pytest.mark.parametrize(("num_workers", "num_messages"), [(1, 1), (2, 0)])
def test_a_replacement_gets_the_prefixes_of_other_routers_if_it_is_the_only_worker(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, num_messages: int
) -> None:
    async def work(supervised: Supervised, others: OtherRouters) -> None:
        others.have_records.set()
        started = list(supervised.workers)
        await until(lambda: supervised.num_readies == 1 if all(w.read("ask") for w in started) else False)
        started[0].end(1)
        late = await supervised.wait_for_worker(num_workers)
        late.send("ready")
        await until(lambda: all(each.is_ready for each in supervised.supervisor._workers.values()))
        await until(lambda: len(late.read("publish")) == num_messages)
        await let_loop_run()
        assert late.read("publish") == [["", "prefixes", {"a": 1}]] * num_messages

    run_with_others(monkeypatch, work, num_workers)


# The process that workers are forked from


def test_the_process_that_forks_workers_starts_early_with_their_module() -> None:
    code = (
        "from multiprocessing import forkserver\n"
        "from router.sharing.supervisor import start_forkserver\n"
        "start_forkserver('json')\n"
        "server = forkserver._forkserver\n"
        "print(server._forkserver_pid is not None, server._preload_modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output == "True ['json']\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_process_that_forks_workers_survives_a_signal_while_it_imports(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "signalled.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    code = (
        "from multiprocessing import get_context\n"
        "from router.sharing.supervisor import start_forkserver\n"
        "start_forkserver('signalled')\n"
        "process = get_context('forkserver').Process(target=print, args=('forked',))\n"
        "process.start()\n"
        "process.join()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("forked\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_of_the_process_that_forks_workers_is_not_lost(number: signal.Signals) -> None:
    code = (
        "import os, signal\n"
        "from multiprocessing import forkserver\n"
        "from router.sharing.supervisor import start_forkserver\n"
        f"signal.signal({int(number)}, signal.SIG_DFL)\n"
        "start = forkserver.ensure_running\n"
        f"forkserver.ensure_running = lambda: (os.kill(os.getpid(), {int(number)}), start())\n"
        "start_forkserver('json')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (-number, "")


def test_a_worker_gets_signals_that_the_process_that_forks_it_has_blocked() -> None:
    """With a changed ``sys.path`` that process cannot import the module of the workers, and forks without it."""
    code = (
        "import signal\n"
        "from types import SimpleNamespace\n"
        "from router.launch import worker\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})\n"
        "worker.open_log = worker.prepare_process = worker._serve = lambda *_: None\n"
        "worker.uvloop.run = lambda _: print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
        "worker.run_worker(SimpleNamespace(settings=None))\n"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output == "set()\n"
