"""Compression of KV blocks on their way to the pool and back: ``?kv=int8`` or ``?kv=fp8`` in the pool's URL.

A stored block has, for every channel (layer, K or V, head, dimension), one scale in bfloat16, and then for every
element one byte: its value divided by its channel's scale. The scale is chosen so that the largest value of the
channel, over the block's tokens, becomes the largest value that a byte can hold. Some channels of keys are many times
as large as others; one scale for all of them would leave the small ones no precision.

Such blocks are not exact when they are read, so they have a namespace of their own, and an instance without ``kv``
never reads them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kvstore_backend import Namespace
from kvstore_backend.staging import Codec

__all__ = ["choose_codec", "quantised_namespace"]

_AS = " as "
_SCALE = torch.bfloat16
# Rounding to bfloat16 may make a scale smaller by 1/256; then the largest value would overflow.
_MARGIN = 1 + 2**-8
_TYPES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


class _QuantisingCodec:
    """Quantises with one scale per channel and one byte per element.

    Args:
        kv: the KV memory, ``[block, layer, K or V, head, token, dimension]``.
        name: ``int8`` or ``fp8``.
    """

    def __init__(self, kv: torch.Tensor, name: str) -> None:
        self._type, self._largest = _TYPES[name]
        self._kv_dtype = kv.dtype
        self._block = kv.shape[1:]
        self._channels = torch.Size([*kv.shape[1:-2], 1, kv.shape[-1]])
        self._scale_bytes = math.prod(self._channels) * _SCALE.itemsize
        self.nbytes = self._scale_bytes + math.prod(self._block)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        values = rows.view(self._kv_dtype).view(-1, *self._block).float()
        largest = torch.maximum(values.amax(-2, keepdim=True), -values.amin(-2, keepdim=True))
        # For zeros any scale works; infinity and NaN stay unchanged, as they would without a pool.
        scales = (largest * (_MARGIN / self._largest)).clamp_(min=torch.finfo(_SCALE).tiny).to(_SCALE)
        values /= scales
        if not self._type.is_floating_point:
            values.round_()
        encoded = rows.new_empty(len(rows), self.nbytes)
        encoded[:, : self._scale_bytes] = scales.flatten(1).view(torch.uint8)
        encoded[:, self._scale_bytes :] = values.to(self._type).flatten(1).view(torch.uint8)
        return encoded

    def decode(self, encoded: torch.Tensor) -> torch.Tensor:
        scales = encoded[:, : self._scale_bytes].contiguous().view(_SCALE).view(-1, *self._channels)
        values = encoded[:, self._scale_bytes :].contiguous().view(self._type).view(-1, *self._block)
        return values.float().mul_(scales).to(self._kv_dtype).flatten(1).view(torch.uint8)


def quantised_namespace(namespace: Namespace, kv: str) -> Namespace:
    """Return the namespace of blocks stored in the form ``kv``: ``int8``, ``fp8``, or empty for unchanged bytes."""
    return replace(namespace, kv_dtype=f"{namespace.kv_dtype}{_AS}{kv}") if kv else namespace


def choose_codec(namespace: Namespace, kv: torch.Tensor) -> Codec | None:
    """Return the codec between a namespace's blocks in the pool and ``kv``; None: the bytes are the same in both."""
    name = namespace.kv_dtype.partition(_AS)[2]
    return _QuantisingCodec(kv, name) if name else None
