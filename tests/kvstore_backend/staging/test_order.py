"""No block is read before its copy ended, and none used again before its save left; and the proof has teeth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvstore_backend.staging import StandInDevice, Step, Stream
from kvstore_backend.staging.memory import _StagedWindow
from kvstore_backend.staging.ring import Buffer, Ring
from kvstore_backend.transfers import Event
from tests.kvstore_backend.staging.schedule import Chance, SlowDevice, run_schedule

NUM_SCHEDULES = 200


def test_every_schedule_keeps_the_order() -> None:
    assert [wrong for seed in range(NUM_SCHEDULES) for wrong in run_schedule(seed)] == []


def is_found(make_device: Callable[[Chance], SlowDevice] = SlowDevice) -> bool:
    return any(run_schedule(seed, make_device) for seed in range(NUM_SCHEDULES))


class Stale(SlowDevice):
    """Copies do not wait for the step."""

    def record_event(self) -> Event | None:
        return None


class _Torn:
    """The end is told before the last step."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def queue(self, steps: Sequence[Step], after: Event | None) -> Event:
        ended = self._stream.queue(steps[:-1], after)
        self._stream.queue(steps[-1:], None)
        return ended


class Torn(SlowDevice):
    """An owner hears of the end before the scatter, and the pool reads before the copy."""

    def open_stream(self) -> Stream:
        return _Torn(StandInDevice.open_stream(self))


class _Disordered:
    """Copies do not wait for each other."""

    def __init__(self, device: SlowDevice) -> None:
        self._device = device

    def queue(self, steps: Sequence[Step], after: Event | None) -> Event:
        return StandInDevice.open_stream(self._device).queue(steps, after)


class Disordered(SlowDevice):
    """Each copy has a thread of its own, though all use the same memory of the device."""

    def open_stream(self) -> Stream:
        return _Disordered(self)


@pytest.mark.parametrize("broken", [Stale, Torn, Disordered])
def test_a_broken_device_is_found(broken: type[SlowDevice]) -> None:
    assert is_found(broken)


def test_a_buffer_that_is_used_again_before_its_copy_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Ring.take

    def take_early(ring: Ring) -> Buffer:
        for buffer in ring._free:
            buffer.copied = None
        return take(ring)

    monkeypatch.setattr(Ring, "take", take_early)
    assert is_found()


def test_a_buffer_that_is_used_again_while_a_late_call_touches_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_again(window: _StagedWindow) -> bool:
        window.take_back()
        monkeypatch.setattr(window, "take_back", lambda: None)
        return False

    monkeypatch.setattr(_StagedWindow, "set_aside", use_again)
    assert is_found()


@pytest.mark.parametrize("begin", ["fetch", "deliver"])
def test_a_transfer_that_does_not_wait_for_its_copies_is_found(monkeypatch: pytest.MonkeyPatch, begin: str) -> None:
    begin_copy = getattr(_StagedWindow, begin)

    def begin_unnoticed(window: _StagedWindow, *count: int) -> None:
        begin_copy(window, *count)
        window._copied = None

    monkeypatch.setattr(_StagedWindow, begin, begin_unnoticed)
    assert is_found()
