"""The worker's half of the vLLM connector; ``test_halves.py`` tests both halves together."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_backend.integrations.vllm import worker as module
from kvstore_backend.integrations.vllm.clock import HostClock
from kvstore_backend.integrations.vllm.messages import Transfer
from kvstore_backend.integrations.vllm.worker import WorkerHalf
from kvstore_backend.transfers import Outcome

BLOCK_BYTES = 100


class ControlledTransfers:
    """``Transfers`` that the test ends."""

    def __init__(self, pool: Any, memory: Any, post: Any, start_thread: Any) -> None:
        self.memory = memory
        self.post = post
        self.loads: list[tuple[Any, ...]] = []
        self.saves: list[tuple[Any, ...]] = []
        self.decisions: list[Any] = []
        self.is_closed = False

    def load(self, names: Any, blocks: Any, on_end: Any, on_release: Any, *, decide: Any) -> None:
        self.loads.append((names, blocks, on_end, on_release))
        self.decisions.append(decide)

    def save(self, names: Any, blocks: Any, on_end: Any, on_release: Any) -> None:
        self.saves.append((names, blocks, on_end, on_release))

    def end(self, begun: tuple[Any, ...], outcome: Outcome) -> None:
        """End a transfer."""
        if outcome.is_released:
            self.post(begun[3])
        self.post(lambda: begun[2](outcome))

    def close(self) -> None:
        self.is_closed = True


class Pool:
    """A pool that only records its flushes."""

    namespace = SimpleNamespace(digest="n")

    def __init__(self) -> None:
        self.flushed: list[float] = []
        self.can_flush = True

    def flush_writes(self, seconds: float) -> bool:
        self.flushed.append(seconds)
        return self.can_flush


class Half:
    """A worker's half with simulated transfers and a simulated pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        monkeypatch.setattr(module, "Transfers", ControlledTransfers)
        self.pool = Pool()
        memory: Any = SimpleNamespace(count_bytes=lambda blocks: len(blocks) * BLOCK_BYTES, bind_thread=lambda: None)
        self.worker = WorkerHalf(self.pool, memory, **{"route": "the route", **more})  # type: ignore[arg-type]
        self.transfers: Any = self.worker._transfers

    def counts(self) -> dict[str, float]:
        """Return all counts since the last call."""
        return self.worker.take_counts().get("n", {})


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Half:
    return Half(monkeypatch)


def transfer(number: int = 1, **more: Any) -> Transfer:
    return Transfer(number, "a", [b"x", b"y", b"z"], [7, 8, 9], **more)


class TestLoads:
    """Loads, from the plan to the report to vLLM."""

    def test_a_complete_load_is_reported_and_counted(self, half: Half) -> None:
        half.worker.start_loads([transfer()])
        (begun,) = half.transfers.loads
        assert begun[:2] == ([b"x", b"y", b"z"], [7, 8, 9])
        assert half.transfers.decisions == [None]
        half.transfers.end(begun, Outcome(3, 0.5, True))
        loaded, report = half.worker.take_outcomes()
        assert (loaded.requests, loaded.blocks, loaded.failed) == ({"a"}, set(), set())
        assert (report.ended, report.short, report.loads) == (Counter({1: 1}), set(), [(3, 0.5)])
        assert half.counts() == {"load ok": 3, "load bytes": 3 * BLOCK_BYTES, "load seconds": 0.5}

    def test_the_missing_blocks_of_a_short_load_are_computed(self, half: Half) -> None:
        half.worker.start_loads([transfer()])
        half.transfers.end(half.transfers.loads[0], Outcome(1, 0.5, True))
        loaded, report = half.worker.take_outcomes()
        assert (loaded.requests, loaded.blocks, loaded.failed) == ({"a"}, {8, 9}, set())
        assert report.short == {"a"}
        assert half.counts() == {"load ok": 1, "load failed": 2, "load bytes": BLOCK_BYTES, "load seconds": 0.5}

    @pytest.mark.parametrize(("count", "is_released"), [(2, True), (2, False), (3, True)])
    def test_an_incomplete_load_of_several_groups_fails(self, half: Half, count: int, is_released: bool) -> None:
        half.worker.start_loads([replace(transfer(), num_units=2)])
        half.transfers.end(half.transfers.loads[0], Outcome(count, 0.5, is_released))
        loaded, report = half.worker.take_outcomes()
        missing = {"a"} if count < 3 else set()
        assert (loaded.requests, loaded.blocks, loaded.failed, report.short) == ({"a"}, set(), missing, missing)
        assert report.loads == [(2, 0.5)], "two units for any number of names"

    def test_a_load_without_blocks_fails(self, half: Half) -> None:
        half.worker.start_loads([replace(transfer(), names=[], blocks=[], num_units=2)])
        half.transfers.end(half.transfers.loads[0], Outcome(0, 0.0, True))
        assert half.worker.take_outcomes()[0].failed == {"a"}

    def test_a_request_with_blocks_of_a_late_read_fails_and_its_pin_remains(self, half: Half) -> None:
        half.worker.start_loads([transfer()])
        half.transfers.end(half.transfers.loads[0], Outcome(1, 0.5, False))
        loaded, report = half.worker.take_outcomes()
        assert (loaded.blocks, loaded.failed) == (set(), {"a"})
        assert report.ended == Counter()
        half.transfers.post(half.transfers.loads[0][3])
        assert half.worker.take_outcomes()[1].ended == Counter({1: 1})

    def test_blocks_of_another_sharding_have_a_reader_and_a_count_of_their_own(self, half: Half) -> None:
        run: Any = SimpleNamespace(count_foreign=lambda count: count - 1)
        reader = object()
        peers: Any = SimpleNamespace(reader_of=lambda *asked: (asked, reader))
        half.worker._peers = peers
        half.worker.start_loads([transfer(run=run)])
        asked: list[Any] = []

        def read_leading(count: int, read: Any) -> int:
            asked.append((count, read))
            return count - 1

        assert half.transfers.decisions[0](read_leading) == 2
        names = [b"x", b"y", b"z"]
        assert asked == [(3, ((run, names, 0, names), reader))]
        half.transfers.end(half.transfers.loads[0], Outcome(3, 0.0, True))
        assert half.counts()["gather ok"] == 2

    def test_a_load_that_cannot_begin_fails_at_once(self, half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*given: object, **more: object) -> None:
            raise RuntimeError("CUDA error")

        monkeypatch.setattr(half.transfers, "load", fail)
        half.worker.start_loads([transfer(3)])
        loaded, report = half.worker.take_outcomes()
        assert (loaded.requests, loaded.blocks, loaded.failed) == ({"a"}, {7, 8, 9}, set())
        assert report.ended == Counter({3: 1})

    def test_the_blocks_of_an_adapter_that_changed_during_the_load_are_computed(
        self, half: Half, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for is_unchanged, missing in ((True, set()), (False, {7, 8, 9})):
            monkeypatch.setattr(half.worker.adapters, "is_unchanged", lambda adapter, is_so=is_unchanged: is_so)
            half.worker.start_loads([transfer(adapter=("ad", "/ad"))])
            half.transfers.end(half.transfers.loads[-1], Outcome(3, 0.5, True))
            assert half.worker.take_outcomes()[0].blocks == missing


class TestSaves:
    """Saves, from the plan to the pool, and the waits for them."""

    def test_a_save_is_counted_and_reported(self, half: Half) -> None:
        half.worker.start_saves([transfer()])
        assert half.worker._saving == {1}
        half.transfers.end(half.transfers.saves[0], Outcome(2, 0.25, True))
        assert half.worker._saving == set()
        assert half.worker.take_outcomes()[1].ended == Counter({1: 1})
        assert half.counts() == {"save ok": 2, "save failed": 1, "save seconds": 0.25}

    def test_a_save_that_cannot_begin_is_dropped(self, half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*given: object) -> None:
            raise RuntimeError("CUDA error")

        monkeypatch.setattr(half.transfers, "save", fail)
        half.worker.start_saves([transfer(3)])
        assert half.worker._saving == set()
        assert half.worker.take_outcomes()[1].ended == Counter({3: 1})
        assert half.counts() == {"save dropped": 3}

    @pytest.mark.parametrize("is_unchanged", [True, False])
    def test_blocks_of_an_adapter_are_saved_only_if_its_files_are_unchanged(
        self, half: Half, monkeypatch: pytest.MonkeyPatch, is_unchanged: bool
    ) -> None:
        asked: list[object] = []

        def look(name: object) -> bool:
            asked.append(name)
            return is_unchanged

        monkeypatch.setattr(half.worker.adapters, "is_unchanged", look)
        half.worker.start_saves([transfer(adapter=("ad", "/ad")), transfer(2)])
        assert asked == [("ad", "/ad")]
        assert len(half.transfers.saves) == 1 + is_unchanged
        assert half.worker._saving == ({1, 2} if is_unchanged else {2})

    def test_wait_for_saves_returns_at_once_without_saves(self, half: Half) -> None:
        assert half.worker.wait_for_saves([])
        assert half.pool.flushed == []

    @pytest.mark.parametrize("can_flush", [True, False])
    def test_the_wait_for_saves_ends_with_a_flush(self, half: Half, can_flush: bool) -> None:
        half.pool.can_flush = can_flush
        assert half.worker.wait_for_saves([1]) is can_flush
        (seconds,) = half.pool.flushed
        assert 0 < seconds <= 5.0

    def test_the_wait_ends_with_the_last_awaited_save(self, half: Half) -> None:
        half.worker.start_saves([transfer(1), transfer(2)])
        answers: list[bool] = []
        waiting = threading.Thread(target=lambda: answers.append(half.worker.wait_for_saves([1])), daemon=True)
        waiting.start()
        assert half.pool.flushed == []
        half.transfers.end(half.transfers.saves[0], Outcome(3, 0.0, True))
        waiting.join(4.0)
        assert answers == [True], "the end of the save ends the wait before its deadline"
        assert half.worker._saving == {2}

    def test_a_flush_gets_the_remaining_time(self, half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
        times = iter([100.0, 106.0])
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
        assert half.worker.wait_for_saves([1])
        assert half.pool.flushed == [0.0]

    def test_the_wait_for_slow_saves_ends_at_its_deadline(self, half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_SAVE_WAIT_SECONDS", 0.01)
        half.worker.start_saves([transfer()])
        assert half.worker.wait_for_saves([1]) is False
        assert half.pool.flushed == []


def test_steps_are_measured_with_the_given_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Clock(HostClock):
        def begin(self) -> None:
            calls.append("begin")

        def end(self, num_tokens: int) -> None:
            calls.append(num_tokens)

        def take_steps(self) -> list[tuple[int, float]]:
            return [(4, 0.5)]

    half = Half(monkeypatch, clock=Clock())
    half.worker.begin_step()
    half.worker.end_step(7)
    assert calls == ["begin", 7]
    assert half.worker.take_outcomes()[1].steps == [(4, 0.5)]


def test_the_defaults_are_the_direct_route_and_the_clock_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    def open_route(route: str, memory: object, pool: object) -> str:
        opened.append(route)
        return "direct memory"

    monkeypatch.setattr(module, "open_route", open_route)
    half = Half(monkeypatch, route=None)
    assert opened == ["direct"]
    assert half.transfers.memory == "direct memory"
    half.worker.begin_step()
    half.worker.end_step(3)
    ((num_tokens, seconds),) = half.worker.take_outcomes()[1].steps
    assert num_tokens == 3
    assert seconds >= 0
    assert Half(monkeypatch).transfers.memory == "the route"


def test_changes_of_adapters_are_reported_once(half: Half, tmp_path: Path) -> None:
    nowhere: Any = SimpleNamespace(lora_name="ad", lora_path=str(tmp_path / "none"))
    half.worker.adapters._note_read(nowhere, None, None)
    assert half.worker.take_outcomes()[1].adapters == {("ad", str(tmp_path / "none")): [None]}
    assert half.worker.take_outcomes()[1].is_empty


def test_close_closes_the_transfers(half: Half) -> None:
    half.worker.close()
    assert half.transfers.is_closed


def test_blocks_of_other_shardings_are_searched_only_with_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PeerShardings", lambda pool, family: ("siblings", family))
    assert Half(monkeypatch).worker._peers is None
    family: Any = object()
    worker: Any = Half(monkeypatch, family=family).worker
    assert worker._peers == ("siblings", family)
