"""Stand-in for a device: threads and host memory in place of streams and device memory.

Staging runs the same copy steps on a device and on the stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kvstore_backend.staging.device import Step, Stream
from kvstore_backend.threads import DaemonThreads
from kvstore_backend.transfers import Event

__all__ = ["StandInDevice"]


class StandInDevice:
    """Device for KV in host memory: threads replace the device's streams.

    ``record_event`` returns None: an engine on the host has ended its work on KV memory when a call of the engine
    returns.

    Args:
        start_thread: called on the thread of each new stream before everything else.
        before_step: called before each copy step, on the thread of its stream; tests use it to delay copies.
    """

    def __init__(
        self, start_thread: Callable[[], None] | None = None, before_step: Callable[[], None] = lambda: None
    ) -> None:
        self._start_thread = start_thread
        self._before_step = before_step

    def record_event(self) -> Event | None:
        return None

    def open_stream(self) -> Stream:
        return _ThreadStream(self._start_thread, self._before_step)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class _ThreadStream:
    """Queue of copies on a thread. The thread ends when this object has no references any more."""

    def __init__(self, start_thread: Callable[[], None] | None, before_step: Callable[[], None]) -> None:
        self._thread = DaemonThreads(1, "staging", start_thread)
        self._before_step = before_step

    def queue(self, steps: Sequence[Step], after: Event | None) -> Event:
        before_step = self._before_step

        def run() -> None:
            if after is not None:
                after.synchronize()
            for step in steps:
                before_step()  # may block, and simulated threads share torch's mode: so it runs outside of the mode
                with torch.inference_mode():
                    step()

        return _End(self._thread.submit(run))


@dataclass(frozen=True)
class _End:
    """Event for the end of a list of copy steps. ``synchronize`` raises the exception of a step that failed."""

    future: Future[None]

    def synchronize(self) -> None:
        self.future.result()
