"""Conversion of blocks between KV memory's form and another form in the pool; runs on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Codec"]


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
