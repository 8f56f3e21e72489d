"""The silence of workers that hang or get no CPU, with scripted CPU times and with those of this kernel."""

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
    """A worker with scripted CPU times, which are measured twice a second, as a supervisor does."""

    def __init__(self) -> None:
        self.now = 100.0
        self.times: ThreadTimes | None = ThreadTimes("S", 5.0, 5.0)
        self.silence = Silence(1, lambda: self.now, lambda pid: self.times)

    def pass_seconds(self, seconds: float, state: str, ran: float = 0.0, waited: float = 0.0) -> float:
        """Let time pass. The worker runs and waits for these parts of each second. Return the measured silence."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            if self.times is not None:
                self.times = ThreadTimes(state, self.times.ran + ran / 2, self.times.waited + waited / 2)
            counted = self.silence.measure()
        return counted


@pytest.mark.parametrize(("state", "ran"), [("T", 0.0), ("S", 0.0), ("S", 0.01), ("R", 1.0), ("Z", 0.0)])
def test_a_worker_that_is_stopped_waits_or_computes_is_silent_all_the_time(state: str, ran: float) -> None:
    worker = Worker()
    assert worker.pass_seconds(16.0, state, ran) == pytest.approx(16.0)


def test_the_waits_for_a_cpu_are_no_silence() -> None:
    worker = Worker()
    worker.pass_seconds(0.5, "R")
    assert worker.pass_seconds(20.0, "R", ran=0.1, waited=0.9) == pytest.approx(0.5 + 2.0)


def test_a_runnable_worker_is_not_silent_before_the_kernel_counts_its_wait() -> None:
    worker = Worker()
    worker.pass_seconds(0.5, "R")
    assert worker.pass_seconds(60.0, "R") == pytest.approx(0.5)
    assert worker.times is not None
    worker.times = worker.times._replace(waited=worker.times.waited + 60.0)  # the wait ends
    assert worker.pass_seconds(1.0, "S") == pytest.approx(1.5)


def test_a_worker_that_waits_for_a_disk_is_not_silent() -> None:
    worker = Worker()
    worker.pass_seconds(0.5, "D")
    assert worker.pass_seconds(60.0, "D") == pytest.approx(0.5)


def test_a_wait_that_has_ended_does_not_reduce_the_later_silence() -> None:
    worker = Worker()
    worker.pass_seconds(10.0, "R", ran=0.1, waited=0.9)
    assert worker.pass_seconds(20.0, "S") >= 20.0


def test_a_message_ends_the_silence() -> None:
    worker = Worker()
    worker.pass_seconds(10.0, "R", ran=0.1, waited=0.9)
    worker.silence.note_message()
    assert worker.silence.measure() == 0.0
    assert worker.pass_seconds(3.0, "S") == pytest.approx(3.0)


def test_without_times_of_the_system_all_time_is_silence() -> None:
    worker = Worker()
    worker.times = None
    assert worker.pass_seconds(7.0, "S") == pytest.approx(7.0)


def spin(*, is_idle: bool) -> subprocess.Popen[bytes]:
    """Start a process that computes on this process's first CPU; with ``is_idle``, only if no other needs it."""
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
    """Return the part of ``seconds`` that is measured as silence of a real process."""
    silence = Silence(pid, time.monotonic)
    while (passed := time.monotonic() - silence.began_at) < seconds:
        time.sleep(0.05)
        counted = silence.measure()
    return counted / passed


def test_this_kernel_reports_waits_for_a_cpu(processes: list[subprocess.Popen[bytes]]) -> None:
    starved = spin(is_idle=True)
    processes += [starved, spin(is_idle=False), spin(is_idle=False)]
    wait_until(lambda: has_run(processes[1]) and has_run(processes[2]), "the work of the other two")
    assert measure(starved.pid, 2.0) < 0.5
    for each in processes[1:]:
        each.send_signal(signal.SIGSTOP)
    wait_until(lambda: has_run(starved), "the work of the starved process")
    starved.send_signal(signal.SIGSTOP)
    wait_until(lambda: get_state(starved) == "T", "the stop of the starved process")
    assert measure(starved.pid, 0.5) > 0.9


def has_run(process: subprocess.Popen[bytes]) -> bool:
    times = read_thread_times(process.pid)
    return times is not None and times.ran > 0.05 and get_state(process) == "R"


def get_state(process: subprocess.Popen[bytes]) -> str:
    times = read_thread_times(process.pid)
    return times.state if times is not None else ""


def test_a_process_that_has_ended_has_no_times() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert read_thread_times(process.pid) is None


def test_a_kernel_without_the_waits_reports_the_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
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


class KillableProcess:
    """A stand-in for a worker's process that records whether it was killed."""

    pid = 1
    is_killed = False

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(
    ("state", "ran", "is_killed"),
    [
        ("T", 0.0, True),  # stopped
        ("S", 0.0, True),  # it waits endlessly
        ("R", 1.0, True),  # a computation blocks its event loop
        ("R", 0.02, False),  # it can run, but gets no CPU
        ("D", 0.0, False),  # it waits for memory
    ],
)
def test_a_supervisor_kills_a_worker_that_hangs_but_none_that_gets_no_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, state: str, ran: float, is_killed: bool
) -> None:
    worker, process = Worker(), KillableProcess()
    supervisor = make_supervisor(worker.silence, process, lambda: worker.now)
    for _ in range(int(2 * HUNG_SECONDS) + 8):
        worker.pass_seconds(0.5, state, ran, 0.0)
        supervisor._check_workers()
    assert process.is_killed is is_killed
    assert ("is killed" in caplog.text) is is_killed
    assert caplog.text.count("it waited for a CPU or a disk") == (not is_killed)


def test_a_supervisor_that_was_suspended_kills_no_worker() -> None:
    now, process = 100.0, KillableProcess()
    awake = AwakeClock(lambda: now)
    silence = Silence(1, awake.now, lambda pid: ThreadTimes("S", 0.0, 0.0))
    supervisor = make_supervisor(silence, process, awake.now)
    now += 1000.0
    supervisor._check_workers()
    assert not process.is_killed


def make_supervisor(silence: Silence, process: KillableProcess, now: Callable[[], float]) -> Supervisor:
    """Return a supervisor of one worker that has only the parts for its checks of workers."""
    supervisor: Any = object.__new__(Supervisor)
    supervisor._clock = SimpleNamespace(now=now)
    supervisor._is_stopping = False
    supervisor._workers = {"w": SimpleNamespace(name="w", process=process, silence=silence)}
    return cast(Supervisor, supervisor)
