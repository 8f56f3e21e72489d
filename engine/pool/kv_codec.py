"""Compresses KV blocks in the pool to one byte per element, if the pool's URL has ``?kv=int8`` or ``?kv=fp8``.

A channel is one dimension of K or V in one head of one layer. A stored block has first a scale for each channel, in
bfloat16, and then one byte for each element: its value divided by the scale of its channel. The scale is such that the
largest absolute value of the channel in the block becomes the largest value of the byte's type. Each channel has its
own scale, because the values of some channels of K are many times as large as those of others.

A loaded block differs a little from the original one. So these blocks have their own namespace, and instances without
``kv`` do not read them.
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
# Rounding to bfloat16 may make a scale smaller by 1/256. Without this factor the largest value could then overflow.
_MARGIN = 1 + 2**-8
_TYPES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


class _QuantisingCodec:
    """A codec (``int8`` or ``fp8``) that stores one scale per channel and one byte per element.

    It compresses blocks of KV memory ``[block, layer, k/v, head, token, dimension]``.
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
        # The minimum is for channels of zeros. In a channel with infinity or NaN, all values become infinity or NaN.
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
    """Return the namespace of compressed blocks; ``kv`` is ``int8``, ``fp8``, or "" if blocks are not compressed."""
    return replace(namespace, kv_dtype=f"{namespace.kv_dtype}{_AS}{kv}") if kv else namespace


def choose_codec(namespace: Namespace, kv: torch.Tensor) -> Codec | None:
    """Return the codec for the blocks of a namespace, or None if they are not compressed. ``kv`` is the KV memory."""
    name = namespace.kv_dtype.partition(_AS)[2]
    return _QuantisingCodec(kv, name) if name else None
