"""The duration of steps, on the host and on a device, which runs later than the host."""

from __future__ import annotations

from kvstore_backend.integrations.vllm.clock import DeviceClock, HostClock


class Device:
    """A stream of a GPU. The test sets how many marks have ended, and the time is the number of marks."""

    def __init__(self) -> None:
        self.queued = self.ended = 0

    def make_mark(self) -> Event:
        return Event(self)


class Event:
    """A mark in the stream of a ``Device``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.at = 0

    def record(self) -> None:
        self._device.queued += 1
        self.at = self._device.queued

    def query(self) -> bool:
        return self._device.ended >= self.at

    def elapsed_time(self, end_event: Event) -> float:
        return 1000.0 * (end_event.at - self.at)


def test_on_the_host_a_step_ends_when_it_returns() -> None:
    clock = HostClock()
    for num_tokens in (5, 0, 7):
        clock.begin()
        clock.end(num_tokens)
    assert [num_tokens for num_tokens, _ in clock.take_steps()] == [5, 7]
    assert clock.take_steps() == []


def test_on_a_device_a_step_is_reported_after_the_device_has_ended_it() -> None:
    device = Device()
    clock = DeviceClock(device.make_mark)
    for num_tokens in (5, 7):
        clock.begin()
        clock.end(num_tokens)
    assert clock.take_steps() == []
    device.ended = 2
    assert clock.take_steps() == [(5, 1.0)]
    device.ended = 4
    assert clock.take_steps() == [(7, 1.0)]


def test_a_step_without_prompts_records_no_event_at_its_end() -> None:
    device = Device()
    clock = DeviceClock(device.make_mark)
    clock.begin()
    clock.end(0)
    assert (clock.take_steps(), device.queued) == ([], 1)
