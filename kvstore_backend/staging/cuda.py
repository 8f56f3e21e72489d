"""Makes CUDA streams and events for staging, apart from the engine's own, and allocates GPU and pinned host memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from kvstore_backend.staging.device import Step, Stream
from kvstore_backend.transfers import Event

__all__ = ["CudaDevice", "find_architecture"]


def find_architecture() -> str:
    """Return the architecture of the current GPU, such as ``9.0`` or AMD's ``gfx942``; empty without a GPU."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties().gcnArchName)
    return "{}.{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else ""


class CudaDevice:
    """One GPU, with CUDA's streams, events and memory.

    Args:
        device: the GPU as a ``torch.device``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record_event(self) -> Event:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def make_mark(self) -> torch.cuda.Event:
        """Return a new CUDA event that records the time at which the GPU reaches it."""
        return torch.cuda.Event(enable_timing=True)

    def bind_thread(self) -> None:
        """Make this GPU the current GPU of the calling thread.

        Otherwise a wait for an event on this thread would open a context on the first GPU.
        """
        torch.cuda.set_device(self._device)

    def open_stream(self) -> Stream:
        return _CudaStream(self._device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class _CudaStream:
    """Queue of copies on a CUDA stream. Memory that torch allocates in a copy step belongs to this stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()  # the copy steps of two copies must not be mixed

    def queue(self, steps: Sequence[Step], after: Event | None) -> Event:
        with self._lock:
            return self._queue(steps, after)

    def _queue(self, steps: Sequence[Step], after: Event | None) -> Event:
        if after is not None:
            self._stream.wait_event(cast(torch.cuda.Event, after))
        ended = torch.cuda.Event(blocking=True)
        try:
            with torch.cuda.stream(self._stream), torch.inference_mode():
                for step in steps:
                    step()
                ended.record(self._stream)
        except Exception as exc:
            return _Failed(exc, self._stream)
        return ended


@dataclass(frozen=True)
class _Failed:
    """Event for a list of copy steps, of which one could not be queued.

    ``synchronize`` raises the error of this step.
    """

    error: Exception
    stream: torch.cuda.Stream

    def synchronize(self) -> None:
        self.stream.synchronize()
        raise self.error
