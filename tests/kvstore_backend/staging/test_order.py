"""No block is read before its copy has ended or reused before its save has ended; broken devices are detected."""

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


def is_detected(make_device: Callable[[Chance], SlowDevice] = SlowDevice) -> bool:
    return any(run_schedule(seed, make_device) for seed in range(NUM_SCHEDULES))


class Stale(SlowDevice):
    """Copies do not wait for the engine's computation."""

    def record_event(self) -> Event | None:
        return None


class _Torn:
    """Reports the end before the last step."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def queue(self, steps: Sequence[Step], after: Event | None) -> Event:
        ended = self._stream.queue(steps[:-1], after)
        self._stream.queue(steps[-1:], None)
        return ended


class Torn(SlowDevice):
    """A load ends before its scatter, and the pool reads before the copy of a save."""

    def open_stream(self) -> Stream:
        return _Torn(StandInDevice.open_stream(self))


class _Disordered:
    """Copies do not wait for each other."""

    def __init__(self, device: SlowDevice) -> None:
        self._device = device

    def queue(self, steps: Sequence[Step], after: Event | None) -> Event:
        return StandInDevice.open_stream(self._device).queue(steps, after)


class Disordered(SlowDevice):
    """Each copy has its own thread, although all use the same memory of the device."""

    def open_stream(self) -> Stream:
        return _Disordered(self)


@pytest.mark.parametrize("broken", [Stale, Torn, Disordered])
def test_a_broken_device_is_detected(broken: type[SlowDevice]) -> None:
    assert is_detected(broken)


def test_a_buffer_that_is_reused_before_its_copy_ended_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Ring.take

    def take_early(ring: Ring) -> Buffer:
        for buffer in ring._free:
            buffer.copied = None
        return take(ring)

    monkeypatch.setattr(Ring, "take", take_early)
    assert is_detected()


def test_a_buffer_that_is_reused_during_a_late_call_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def reuse(window: _StagedWindow) -> bool:
        window.take_back()
        monkeypatch.setattr(window, "take_back", lambda: None)
        return False

    monkeypatch.setattr(_StagedWindow, "set_aside", reuse)
    assert is_detected()


@pytest.mark.parametrize("begin", ["fetch", "deliver"])
def test_a_transfer_that_does_not_wait_for_its_copies_is_detected(monkeypatch: pytest.MonkeyPatch, begin: str) -> None:
    begin_copy = getattr(_StagedWindow, begin)

    def begin_without_event(window: _StagedWindow, *count: int) -> None:
        begin_copy(window, *count)
        window._copied = None

    monkeypatch.setattr(_StagedWindow, begin, begin_without_event)
    assert is_detected()
