"""The order of the CUDA calls of a copy, with stand-ins for CUDA; ``test_memory.py`` tests their effect on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kvstore_backend.staging.cuda import CudaDevice, find_architecture

CALLS: list[str] = []


class FakeEvent:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, blocking: bool) -> None:
        assert blocking, "a thread that waits leaves the processor to others"

    def record(self, stream: object) -> None:
        CALLS.append(f"record on {stream}")

    def synchronize(self) -> None:
        CALLS.append("wait")


class FakeStream:
    """Stands in for ``torch.cuda.Stream``."""

    def __init__(self, device: torch.device) -> None:
        pass

    def __str__(self) -> str:
        return "the side stream"

    def wait_event(self, event: FakeEvent) -> None:
        CALLS.append("stream waits")

    def synchronize(self) -> None:
        CALLS.append("wait for the stream")


@contextlib.contextmanager
def fake_current(stream: FakeStream) -> Iterator[None]:
    CALLS.append("enter")
    yield
    CALLS.append("leave")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    CALLS.clear()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", fake_current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the engine's stream")
    return CudaDevice(torch.device("cuda"))


def test_a_copy_begins_after_the_engines_event_and_ends_with_its_last_step(device: CudaDevice) -> None:
    after = device.record_event()
    ended = device.open_stream().queue([lambda: CALLS.append("gather"), lambda: CALLS.append("copy")], after)
    ended.synchronize()
    assert [
        "record on the engine's stream",
        *("stream waits", "enter", "gather", "copy", "record on the side stream", "leave"),
        "wait",
    ] == CALLS


def test_the_wait_for_the_end_raises_the_error_of_a_step(device: CudaDevice) -> None:
    def fail() -> None:
        raise MemoryError("the device is full")

    ended = device.open_stream().queue([lambda: CALLS.append("gather"), fail], None)
    with pytest.raises(MemoryError, match="the device is full"):
        ended.synchronize()
    assert CALLS == ["enter", "gather", "wait for the stream"]


def test_memory_is_on_the_device_or_pinned_and_a_mark_records_the_time(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[tuple[int, dict[str, object]]] = []
    result = torch.zeros(1)

    def allocate(nbytes: int, **options: object) -> torch.Tensor:
        allocated.append((nbytes, options))
        return result

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: SimpleNamespace(**options))
    assert device.allocate(7) is device.allocate_host(9) is result
    assert allocated == [
        (7, {"dtype": torch.uint8, "device": torch.device("cuda")}),
        (9, {"dtype": torch.uint8, "pin_memory": True}),
    ]
    assert vars(device.make_mark()) == {"enable_timing": True}


def test_a_thread_is_bound_to_the_device_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    CudaDevice(torch.device("cuda", 3)).bind_thread()
    assert bound == [torch.device("cuda", 3)]


def test_a_copy_that_waits_for_nothing_begins_at_once(device: CudaDevice) -> None:
    assert device.open_stream().queue([], None) is not None
    assert CALLS == ["enter", "record on the side stream", "leave"]


@pytest.mark.parametrize(
    ("hip", "has_gpu", "architecture"),
    [("6.2", True, "gfx942"), (None, True, "9.0"), (None, False, "")],
    ids=["AMD", "NVIDIA", "none"],
)
def test_the_architecture_is_that_of_the_current_gpu(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, has_gpu: bool, architecture: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(gcnArchName="gfx942"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert find_architecture() == architecture
