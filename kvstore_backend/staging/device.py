"""Interface of a device with KV blocks in its memory: the calls that staging makes to CUDA, and to its stand-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
from typing import TYPE_CHECKING

from kvstore_backend.transfers import Event

if TYPE_CHECKING:
    import torch

__all__ = ["Codec", "Device", "Step", "Stream"]

Step = Callable[[], object]
"""Part of a copy: torch operations that do not wait for the device."""


class Stream(Protocol):
    """Copies that run one after another, in queue order, concurrently with all other work. Any thread may call it."""

    def queue(self, steps: Sequence[Step], after: Event | None) -> Event:
        """Queue ``steps``, to run in order after the event ``after`` and after all earlier steps of this stream.

        They run in torch's inference mode, because engines may have made KV memory in it.

        Returns:
            The end of the last step, or of a failed one; it raises that step's exception.
        """


class Device(Protocol):
    """Memory of a device, and host memory that it copies to and from."""

    def record_event(self) -> Event | None:
        """Return an event for all device work that the calling thread has begun so far; None: it has ended."""

    def open_stream(self) -> Stream:
        """Open a new stream."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate memory of the device, uint8 ``[nbytes]``."""

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned host memory, uint8 ``[nbytes]``: the device copies from and to it directly."""


class Codec(Protocol):
    """Converter of blocks, as rows of bytes, from KV memory's form to the pool's and back.

    Attributes:
        nbytes: bytes of one encoded block.
    """

    nbytes: int

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode rows of KV memory, uint8 ``[block, bytes]``, to uint8 ``[block, nbytes]``; the input may change."""

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """Decode rows to KV memory's form; ``encoded`` may have gaps between its rows."""
