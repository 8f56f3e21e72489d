"""The interface of a device whose memory holds KV blocks: the calls that staging makes to CUDA, and to its stand-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

from kvstore_backend.transfers import Event

__all__ = ["Device", "Step", "Stream"]

Step = Callable[[], object]
"""A part of a copy: operations of torch, which do not wait for the device."""


class Stream(Protocol):
    """Copies that run one after another, in the order they were queued, beside all else. For any thread."""

    def queue(self, steps: Sequence[Step], after: Event | None) -> Event:
        """Have ``steps`` run in their order once ``after`` has come, and all that was queued here before has ended.

        They run in torch's inference mode, as engines may have made KV memory in it.

        Returns:
            The end of the last step, or of a failed one, whose exception it raises.
        """


class Device(Protocol):
    """A device's memory, and host memory that it copies to and from."""

    def record_event(self) -> Event | None:
        """The end of all that the calling thread has begun on the device so far; None: it has ended."""

    def open_stream(self) -> Stream:
        """A stream of its own."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of the device, uint8 ``[nbytes]``."""

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Memory of the host, uint8 ``[nbytes]``, that is not paged out: the device copies from and to it directly."""
