"""The simulator's core: equal seeds give equal runs, time is virtual, and the seed determines threads and clocks."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from simulation.world import Event, Outcome, Plan, Process, World

_REAL_LOCK, _REAL_SLEEP = threading.Lock, time.sleep


class _Small(World):
    """A world that runs ``program(world)``, which starts processes and threads."""

    name = "small"

    def __init__(self, seed: int, program: Callable[[_Small], None]) -> None:
        super().__init__(seed)
        self._program = program
        self.notes: list[Any] = []

    def draw_plan(self, draw: random.Random) -> Plan:
        return Plan({}, [])

    def build(self) -> None:
        self._program(self)

    def perform(self, event: Event) -> None:
        process = self.processes[event.target]
        {"pause": process.pause, "resume": process.resume, "crash": process.crash}[event.kind]()

    def is_at_rest(self) -> bool:
        return all(thread.is_ended for thread in self.scheduler.threads)


@pytest.fixture(scope="module", autouse=True)
def _freeze_objects() -> None:
    """Exclude the objects of other tests from garbage collection: each run of a world collects garbage twice."""
    gc.collect()
    gc.freeze()


def _run(program: Callable[[_Small], None], seed: int = 1, events: tuple[Event, ...] = ()) -> tuple[list[Any], Outcome]:
    world = _Small(seed, program)
    outcome = world.run(Plan({}, list(events)))
    return world.notes, outcome


def _count_without_lock(world: _Small) -> None:
    process = world.make_process("p")
    counter = {"value": 0}
    lock = threading.Lock()

    def count() -> None:
        for _ in range(5):
            with lock:
                value = counter["value"]
            with lock:
                counter["value"] = value + 1
        world.trace.add(
            "p", f"{threading.current_thread().name} {counter['value']} {random.random()} {os.urandom(4)!r}"
        )
        world.notes.append(counter["value"])

    for number in range(3):
        process.start_thread(count, f"counter-{number}")


def _sleep_past_events(world: _Small) -> None:
    world.make_process("p").start_thread(lambda: time.sleep(2.0), "t")


class _Noting(_Small):
    """A world that writes a note to the details of each event."""

    def perform(self, event: Event) -> None:
        event.details["notes"].append(event.kind)


def test_a_world_that_changes_the_details_of_an_event_does_not_change_the_plan() -> None:
    plan = Plan({}, [Event(1.0, "request", "", {"notes": []})])
    outcome = _Noting(1, _sleep_past_events).run(plan)
    assert "plan           request notes=[]" in outcome.trace
    assert plan.events[0].details == {"notes": []}


def test_equal_seeds_give_equal_traces() -> None:
    traces = [_run(_count_without_lock, seed=5)[1].trace for _ in range(2)]
    assert traces[0] == traces[1] != ""


def test_some_seeds_find_a_race_and_others_miss_it() -> None:
    found: set[bool] = set()
    for seed in range(20):
        found.add(max(_run(_count_without_lock, seed=seed)[0]) == 15)
        if len(found) == 2:
            break
    assert found == {True, False}


def test_a_real_thread_that_ends_during_a_run_has_its_own_id() -> None:
    ends, is_over = threading.Lock(), threading.Lock()
    ends.acquire()
    is_over.acquire()
    found: list[int] = []

    def end() -> None:
        with ends:
            found.append(threading.get_ident())
        is_over.release()

    thread = threading.Thread(target=end)
    thread.start()

    def program(world: _Small) -> None:
        ends.release()
        is_over.acquire()

    _run(program)
    thread.join()
    assert found == [thread.ident]


def test_virtual_time_passes_faster_than_real_time() -> None:
    def program(world: _Small) -> None:
        def sleep() -> None:
            began = time.monotonic()
            time.sleep(500)
            world.notes.append(time.monotonic() - began)

        world.make_process("p").start_thread(sleep)

    notes, outcome = _run(program)
    assert notes == [500.0]
    assert outcome.real_seconds < outcome.virtual_seconds


def test_each_process_has_a_clock_of_its_own() -> None:
    def program(world: _Small) -> None:
        def read() -> None:
            time.sleep(10)
            world.notes.append((time.time() - 1_800_000_000, round(world.now, 3)))

        world.make_process("true").start_thread(read)
        world.make_process("ahead", offset=20.0).start_thread(read)
        world.make_process("fast", rate=2.0).start_thread(read)

    notes, _ = _run(program)
    assert sorted(notes) == [(10.0, 5.0), (10.0, 10.0), (30.0, 10.0)]


def test_a_paused_process_continues_when_it_is_resumed_and_a_crashed_one_never() -> None:
    def program(world: _Small) -> None:
        def tick(name: str) -> None:
            for _ in range(3):
                time.sleep(1)
                world.notes.append((name, round(world.now, 3)))

        for name in ("paused", "crashed"):
            world.make_process(name).start_thread(functools.partial(tick, name))

    events = (Event(1.5, "pause", "paused"), Event(1.6, "crash", "crashed"), Event(4.5, "resume", "paused"))
    world = _Small(1, program)
    world.is_at_rest = lambda: world.now > 10  # type: ignore[method-assign]
    world.run(Plan({}, list(events)))
    assert world.notes == [("crashed", 1.0), ("paused", 1.0), ("paused", 4.5), ("paused", 5.5)] or world.notes == [
        ("paused", 1.0),
        ("crashed", 1.0),
        ("paused", 4.5),
        ("paused", 5.5),
    ]


def test_threads_wait_for_each_other_in_virtual_time() -> None:
    def program(world: _Small) -> None:
        items: queue.Queue[int] = queue.Queue(maxsize=2)
        changed = threading.Condition()
        ready: list[int] = []

        def produce() -> None:
            for number in range(5):
                time.sleep(1)
                items.put(number)
            with changed:
                ready.append(1)
                changed.notify_all()

        def consume() -> None:
            taken = [items.get(timeout=2) for _ in range(5)]
            with pytest.raises(queue.Empty):
                items.get(timeout=3)
            with changed:
                assert changed.wait_for(lambda: ready, timeout=5)
            world.notes.append((taken, round(world.now, 3)))

        process = world.make_process("p")
        process.start_thread(produce, "produce")
        process.start_thread(consume, "consume")

    notes, outcome = _run(program)
    assert notes == [([0, 1, 2, 3, 4], 8.0)]
    assert not outcome.failures


def test_event_loops_wait_for_threads_and_timers() -> None:
    def program(world: _Small) -> None:
        async def main() -> None:
            slow = asyncio.ensure_future(asyncio.to_thread(time.sleep, 2))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(slow), 1)
            world.notes.append(round(world.now, 3))
            await slow
            world.notes.append(round(world.now, 3))

        world.make_process("p").start_loop(main)

    notes, outcome = _run(program)
    assert notes == [1.0, 2.0]
    assert not outcome.failures


def test_a_deadlock_is_a_failure() -> None:
    def program(world: _Small) -> None:
        locks = threading.Lock(), threading.Lock()

        def take(first: int) -> None:
            with locks[first]:
                time.sleep(1)
                with locks[1 - first]:
                    pass

        for first in (0, 1):
            world.make_process(f"p{first}").start_thread(functools.partial(take, first))

    _, outcome = _run(program)
    assert [failure.oracle for failure in outcome.failures] == ["rest"]


def test_an_exception_that_is_not_caught_is_a_failure() -> None:
    def program(world: _Small) -> None:
        async def forget() -> None:
            async def fail() -> None:
                raise ValueError("forgotten")

            forgotten = asyncio.ensure_future(fail())
            await asyncio.sleep(1)
            del forgotten

        def fail() -> None:
            raise KeyError("lost")

        world.make_process("loop").start_loop(forget)
        world.make_process("thread").start_thread(fail)

    _, outcome = _run(program)
    assert sorted(failure.message.partition("\n")[0] for failure in outcome.failures) == [
        "loop of loop: Task exception was never retrieved",
        "thread thread/main ended with KeyError: 'lost'",
    ]


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


def _serve_echo(world: _Small) -> Process:
    server = world.make_process("server")

    async def serve() -> None:
        await asyncio.get_running_loop().create_server(_Echo, "server", 80)
        await asyncio.sleep(400)

    server.start_loop(serve)
    return server


class _Reader(asyncio.Protocol):
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.lost = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(type(exc).__name__)


def _talk(world: _Small, client: Callable[[], Any]) -> None:
    async def begin() -> None:
        await asyncio.sleep(1)
        await client()
        world.scheduler.stop()

    world.make_process("client").start_loop(begin)
    world.is_at_rest = lambda: world.now > 200  # type: ignore[method-assign]


def test_bytes_in_several_pieces_arrive_in_order() -> None:
    sent = bytes(range(256)) * 4000

    def program(world: _Small) -> None:
        _serve_echo(world)
        world.network.link("client", "server").split = 1.0

        async def client() -> None:
            transport, reader = await asyncio.get_running_loop().create_connection(_Reader, "server", 80)
            transport.write(sent)
            await asyncio.sleep(10)
            world.notes.append((b"".join(reader.pieces), len(reader.pieces) > 1))
            transport.close()

        _talk(world, client)

    notes, outcome = _run(program)
    assert notes == [(sent, True)]
    assert not outcome.failures


def test_connections_end_as_in_tcp() -> None:
    def program(world: _Small) -> None:
        server = _serve_echo(world)

        async def client() -> None:
            loop = asyncio.get_running_loop()
            with pytest.raises(ConnectionRefusedError):
                await loop.create_connection(_Reader, "server", 81)
            _, killed = await loop.create_connection(_Reader, "server", 80)
            reset, cut_off = [(await loop.create_connection(_Reader, "server", 80)) for _ in range(2)]
            reset[0].get_extra_info("socket").endpoint.reset()
            world.notes.append(await reset[1].lost)
            world.network.set_down(world.network.links_of("server"), True)
            cut_off[0].write(b"into the void")
            await asyncio.sleep(100)
            world.notes.append((list(cut_off[1].pieces), cut_off[1].lost.done()))
            world.network.set_down(world.network.links_of("server"), False)
            await asyncio.sleep(10)
            world.notes.append(cut_off[1].pieces)
            server.crash()
            world.notes.append(await killed.lost)

        _talk(world, client)

    notes, outcome = _run(program)
    assert not outcome.failures
    assert notes == ["ConnectionResetError", ([], False), [b"into the void"], "NoneType"]


class _PausedReader(_Reader):
    """A reader that reads no data in its first 5 s."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        asyncio.get_running_loop().call_later(5, transport.resume_reading)


def test_a_writer_waits_for_a_peer_that_does_not_read() -> None:
    def program(world: _Small) -> None:
        async def serve() -> None:
            await asyncio.get_running_loop().create_server(_PausedReader, "server", 80)
            await asyncio.sleep(400)

        world.make_process("server").start_loop(serve)

        async def client() -> None:
            transport, _ = await asyncio.get_running_loop().create_connection(_Reader, "server", 80)
            transport.write(bytes(4_000_000))
            await asyncio.sleep(4)
            world.notes.append(transport.get_write_buffer_size() > 3_000_000)
            await asyncio.sleep(4)
            world.notes.append(transport.get_write_buffer_size())

        _talk(world, client)

    notes, _ = _run(program)
    assert notes == [True, 0]


def test_a_run_restores_the_standard_library() -> None:
    _run(_count_without_lock)
    assert threading.Lock is _REAL_LOCK
    assert time.sleep is _REAL_SLEEP


def test_simultaneous_arrivals_are_spread_over_turns_in_their_order() -> None:
    def program(world: _Small) -> None:
        process = world.make_process("p")
        process.spreads_over_turns = True

        async def main() -> None:
            turns, has_begun = itertools.count(), asyncio.Event()
            arrivals = [functools.partial(lambda i: world.notes.append((next(turns), i)), i) for i in range(8)]
            callbacks: list[Callable[[], object]] = [has_begun.set, *arrivals]
            for arrival in callbacks:
                world.scheduler.call_later(1.0, functools.partial(process.loops[0].post, arrival))
            await has_begun.wait()
            for _ in range(100):  # one turn in each iteration
                next(turns)
                await asyncio.sleep(0)

        process.start_loop(main)

    notes, outcome = _run(program)
    assert not outcome.failures
    assert [i for _, i in notes] == list(range(8))
    later = [after - before > 1 for (before, _), (after, _) in itertools.pairwise(notes)]
    assert True in later
    assert False in later
