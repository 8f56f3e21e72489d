"""Interface of a device with KV blocks in its memory: a GPU, or the stand-in for KV in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvstore_backend.transfers import Event

if TYPE_CHECKING:
    import torch

__all__ = ["Codec", "Device", "Step", "Stream"]

Step = Callable[[], object]
"""Copy step: a part of a copy, as a function with torch operations that do not wait for the device."""


class Stream(Protocol):
    """Interface of a device's queue of copies, which run one after another, concurrently with the device's other work.

    Any thread may call the methods.
    """

    def queue(self, steps: Sequence[Step], after: Event | None) -> Event:
        """Queue copy steps, which run in order, after the event ``after`` and all earlier copy steps of this stream.

        Copy steps run in torch's inference mode, because an engine may have created its KV memory in this mode.

        Returns:
            Event for the end of the last copy step. If a copy step fails, the later ones do not run, and
            ``synchronize`` of the event raises the exception of the failed one.
        """


class Device(Protocol):
    """Interface of a device with memory and streams, which can copy from and to host memory."""

    def record_event(self) -> Event | None:
        """Return an event for the end of all device work that this thread has queued; None if all has ended."""

    def open_stream(self) -> Stream:
        """Return a new stream of the device, for copies."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate ``nbytes`` bytes of device memory, as uint8 ``[nbytes]``."""

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Allocate ``nbytes`` bytes of pinned host memory, as uint8 ``[nbytes]``, for copies from and to the device."""


class Codec(Protocol):
    """Interface of an object that converts blocks, as rows of bytes, between KV memory's form and the pool's form.

    Attributes:
        nbytes: bytes of one encoded block, in the pool.
    """

    nbytes: int

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Convert blocks from KV memory's form, uint8 ``[block, bytes]``, to the pool's, uint8 ``[block, nbytes]``.

        The call may overwrite ``rows``.
        """

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """Convert blocks from the pool's form, ``[block, nbytes]``, to KV memory's form. ``encoded`` may have gaps
        between its rows.
        """
