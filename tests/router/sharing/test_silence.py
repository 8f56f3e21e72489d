"""Whether a silent worker hangs, or gets no CPU: by what a kernel would say, and by what this one says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.fleet import AwakeClock
from router.sharing.silence import Silence, ThreadTimes, read_thread_times
from router.sharing.supervisor import HUNG_SECONDS, Supervisor
from tests.support.waiting import wait_until


class Worker:
    """A worker whose times the test says, measured twice a second as a supervisor does."""

    def __init__(self) -> None:
        self.now = 100.0
        self.times: ThreadTimes | None = ThreadTimes("S", 5.0, 5.0)
        self.silence = Silence(1, lambda: self.now, lambda pid: self.times)

    def pass_seconds(self, seconds: float, state: str, ran: float = 0.0, waited: float = 0.0) -> float:
        """What is counted as silence after so long, of which it ran and waited these parts of each second."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            if self.times is not None:
                self.times = ThreadTimes(state, self.times.ran + ran / 2, self.times.waited + waited / 2)
            counted = self.silence.measure()
        return counted


@pytest.mark.parametrize(("state", "ran"), [("T", 0.0), ("S", 0.0), ("S", 0.01), ("R", 1.0), ("Z", 0.0)])
def test_one_that_is_stopped_or_waits_or_computes_all_the_time_is_silent_all_the_time(state: str, ran: float) -> None:
    worker = Worker()
    assert worker.pass_seconds(16.0, state, ran) == pytest.approx(16.0)


def test_one_that_has_to_wait_for_a_cpu_is_silent_only_for_the_rest() -> None:
    worker = Worker()
    worker.pass_seconds(0.5, "R")
    assert worker.pass_seconds(20.0, "R", ran=0.1, waited=0.9) == pytest.approx(0.5 + 2.0)


def test_one_that_gets_no_cpu_at_all_is_not_silent_before_the_kernel_counts_its_wait() -> None:
    worker = Worker()
    worker.pass_seconds(0.5, "R")
    assert worker.pass_seconds(60.0, "R") == pytest.approx(0.5)
    assert worker.times is not None
    worker.times = worker.times._replace(waited=worker.times.waited + 60.0)  # it gets one at last
    assert worker.pass_seconds(1.0, "S") == pytest.approx(1.5)


def test_one_that_waits_for_a_disk_is_not_silent() -> None:
    worker = Worker()
    worker.pass_seconds(0.5, "D")
    assert worker.pass_seconds(60.0, "D") == pytest.approx(0.5)


def test_a_wait_that_is_over_does_not_count_for_what_follows() -> None:
    worker = Worker()
    worker.pass_seconds(10.0, "R", ran=0.1, waited=0.9)
    assert worker.pass_seconds(20.0, "S") >= 20.0


def test_with_its_next_word_its_silence_is_over() -> None:
    worker = Worker()
    worker.pass_seconds(10.0, "R", ran=0.1, waited=0.9)
    worker.silence.note_message()
    assert worker.silence.measure() == 0.0
    assert worker.pass_seconds(3.0, "S") == pytest.approx(3.0)


def test_where_the_system_says_nothing_all_time_counts() -> None:
    worker = Worker()
    worker.times = None
    assert worker.pass_seconds(7.0, "S") == pytest.approx(7.0)


def spin(*, is_idle: bool) -> subprocess.Popen[bytes]:
    """A process that computes on the first CPU of this one, if need be only when nobody else wants to."""
    cpu = min(os.sched_getaffinity(0))
    policy = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))" if is_idle else "pass"
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}}); {policy}\nwhile True: pass"
    return subprocess.Popen([sys.executable, "-S", "-c", code])


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for each in started:
        each.kill()
        each.wait()


def measure(pid: int, seconds: float) -> float:
    """The silence of a real process that says nothing for so long."""
    silence = Silence(pid, time.monotonic)
    while (passed := time.monotonic() - silence.began_at) < seconds:
        time.sleep(0.05)
        counted = silence.measure()
    return counted / passed


def test_this_kernel_tells_who_gets_no_cpu(processes: list[subprocess.Popen[bytes]]) -> None:
    starved = spin(is_idle=True)
    processes += [starved, spin(is_idle=False), spin(is_idle=False)]
    wait_until(lambda: has_run(processes[1]) and has_run(processes[2]), "the other two to compute")
    assert measure(starved.pid, 2.0) < 0.5
    for each in processes[1:]:
        each.send_signal(signal.SIGSTOP)
    wait_until(lambda: has_run(starved), "it to get a CPU")
    starved.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(starved) == "T", "it to stop")
    assert measure(starved.pid, 0.5) > 0.9


def has_run(process: subprocess.Popen[bytes]) -> bool:
    times = read_thread_times(process.pid)
    return times is not None and times.ran > 0.05 and state_of(process) == "R"


def state_of(process: subprocess.Popen[bytes]) -> str:
    times = read_thread_times(process.pid)
    return times.state if times is not None else ""


def test_a_process_that_is_gone_has_no_times() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert read_thread_times(process.pid) is None


def test_a_kernel_without_the_waits_still_tells_the_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: Any) -> str:
        if path.name == "schedstat":
            raise FileNotFoundError(path)
        return read_text(path, **options)

    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", refuse)
    times = read_thread_times(os.getpid())
    assert times is not None
    assert times.waited == 0.0
    assert times.ran == pytest.approx(time.thread_time(), abs=5.0)


class Killed:
    """A worker's process that notes whether it was killed."""

    pid = 1
    is_killed = False

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(
    ("state", "ran", "is_killed"),
    [
        ("T", 0.0, True),  # stopped
        ("S", 0.0, True),  # it waits for something that does not come
        ("R", 1.0, True),  # one piece of work holds its loop up
        ("R", 0.02, False),  # it would run, and gets no CPU
        ("D", 0.0, False),  # it waits for memory
    ],
)
def test_a_supervisor_kills_a_worker_that_hangs_and_none_that_gets_no_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, state: str, ran: float, is_killed: bool
) -> None:
    worker, process = Worker(), Killed()
    supervisor = make_supervisor(worker.silence, process, lambda: worker.now)
    for _ in range(int(2 * HUNG_SECONDS) + 8):
        worker.pass_seconds(0.5, state, ran, 0.0)
        supervisor._check_workers()
    assert process.is_killed is is_killed
    assert ("is killed" in caplog.text) is is_killed
    assert caplog.text.count("it waited for a CPU or a disk") == (not is_killed)


def test_a_supervisor_that_did_not_run_itself_kills_nobody() -> None:
    now, process = 100.0, Killed()
    awake = AwakeClock(lambda: now)
    silence = Silence(1, awake.now, lambda pid: ThreadTimes("S", 0.0, 0.0))
    supervisor = make_supervisor(silence, process, awake.now)
    now += 1000.0
    supervisor._check_workers()
    assert not process.is_killed


def make_supervisor(silence: Silence, process: Killed, now: Callable[[], float]) -> Supervisor:
    """A supervisor of one worker, of which only the watch over it is there."""
    supervisor: Any = object.__new__(Supervisor)
    supervisor._clock = SimpleNamespace(now=now)
    supervisor._is_stopping = False
    supervisor._workers = {"w": SimpleNamespace(name="w", process=process, silence=silence)}
    return cast(Supervisor, supervisor)
