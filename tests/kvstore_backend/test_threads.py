"""Threads that delay neither the end of the process nor a forked child."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import CancelledError

import pytest

from kvstore_backend.threads import DaemonThreads, after_fork
from tests.support.forking import in_forked_child
from tests.support.waiting import wait_until


def list_threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def begin_and_wait(begun: threading.Event, go: threading.Event) -> bool:
    begun.set()
    return go.wait(30)


def test_work_runs_on_as_few_daemon_threads_as_possible() -> None:
    threads, together = DaemonThreads(2, "test-some"), threading.Barrier(2)
    assert not list_threads("test-some")
    assert threads.submit(lambda: 1).result(30) == 1
    wait_until(lambda: threads._idle._value == 1, "the thread to be idle")
    assert threads.submit(lambda: 2).result(30) == 2
    assert len(list_threads("test-some")) == 1, "an idle thread is used again"
    both = [threads.submit(lambda: together.wait(30)) for _ in range(2)]
    assert sorted(each.result(30) for each in both) == [0, 1]
    assert [threads.submit(lambda i=i: i).result(30) for i in range(5)] == [0, 1, 2, 3, 4]  # type: ignore[misc]
    assert len(list_threads("test-some")) == 2
    assert all(thread.daemon for thread in list_threads("test-some"))
    threads.close()


def test_an_error_in_work_is_raised_by_its_future() -> None:
    threads = DaemonThreads(1, "test-raises")

    def fail() -> None:
        raise KeyError("the reason")

    with pytest.raises(KeyError, match="the reason"):
        threads.submit(fail).result(30)
    assert threads.submit(lambda: "the thread goes on").result(30)
    threads.close()


def test_close_drops_waiting_work_and_does_not_wait_for_running_work() -> None:
    threads, begun, go = DaemonThreads(1, "test-closing"), threading.Event(), threading.Event()
    running_work = threads.submit(lambda: begin_and_wait(begun, go))
    waiting = threads.submit(lambda: None)
    assert begun.wait(30)
    threads.close()
    with pytest.raises(CancelledError):
        waiting.result(30)
    with pytest.raises(RuntimeError, match="test-closing were closed"):
        threads.submit(lambda: None)
    go.set()
    assert running_work.result(30)
    wait_until(lambda: not list_threads("test-closing"), "the end of the thread")


def test_threads_end_when_their_owner_is_collected() -> None:
    threads = DaemonThreads(2, "test-forgotten")
    together = threading.Barrier(2)
    for each in [threads.submit(lambda: together.wait(30)) for _ in range(2)]:
        each.result(30)
    del threads
    gc.collect()
    wait_until(lambda: not list_threads("test-forgotten"), "the end of the threads")


def test_a_thread_works_although_its_start_function_failed(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("no permission")

    threads = DaemonThreads(1, "test-begins", fail)
    assert threads.submit(lambda: 1).result(30) == 1
    assert "no permission" in caplog.text
    threads.close()


def test_each_thread_calls_the_start_function_once() -> None:
    begun: list[str] = []
    threads = DaemonThreads(1, "test-begin", lambda: begun.append(threading.current_thread().name))
    threads.submit(lambda: None).result(30)
    threads.submit(lambda: None).result(30)
    assert begun == ["test-begin-0"]
    threads.close()


class TestWithoutAThread:
    """A machine that cannot start another thread."""

    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        is_full = [True]
        start = threading.Thread.start

        def start_unless_full(self: threading.Thread) -> None:
            if is_full[0]:
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", start_unless_full)
        return is_full

    def test_the_first_work_raises_if_no_thread_can_start(self, full: list[bool]) -> None:
        threads = DaemonThreads(1, "test-full")
        with pytest.raises(RuntimeError, match="can't start"):
            threads.submit(lambda: None)
        full[0] = False
        assert threads.submit(lambda: 1).result(30) == 1
        threads.close()

    def test_later_work_waits_for_the_existing_threads(self, full: list[bool]) -> None:
        full[0] = False
        threads, go = DaemonThreads(2, "test-full"), threading.Event()
        first = threads.submit(lambda: go.wait(30))
        full[0] = True
        second = threads.submit(lambda: 2)
        go.set()
        assert first.result(30)
        assert second.result(30) == 2
        threads.close()


def test_work_in_a_forked_child_runs_on_threads_of_the_child() -> None:
    threads, begun, go = DaemonThreads(1, "test-fork"), threading.Event(), threading.Event()
    busy = threads.submit(lambda: begin_and_wait(begun, go))
    assert begun.wait(30)
    done: list[str] = []
    threads.submit(lambda: done.append("the parent's"))
    with threads._lock:
        assert in_forked_child(lambda: threads.submit(lambda: f"{done} there").result(30)) == "[] there"
    go.set()
    assert busy.result(30)
    threads.close()


def test_an_error_in_one_on_fork_does_not_prevent_the_others() -> None:
    class Fails:
        def on_fork(self) -> None:
            raise RuntimeError("no")

    class Counts:
        calls = 0

        def on_fork(self) -> None:
            self.calls += 1

    fails, counts = Fails(), Counts()
    after_fork(fails)
    after_fork(counts)
    assert in_forked_child(lambda: str(counts.calls)) == "1"
    assert counts.calls == 0
