"""Another form of blocks in the pool than in KV memory: on the device, before they are copied from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Codec"]


class Codec(Protocol):
    """Blocks as rows of bytes, from KV memory's form into the pool's and back.

    Attributes:
        nbytes: of one encoded block.
    """

    nbytes: int

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encoded rows, uint8 ``[block, nbytes]``, of rows of KV memory, uint8 ``[block, bytes]``, which may change."""

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        """Rows of KV memory again; ``encoded`` may have gaps between its rows."""
