"""KV blocks in fewer bytes, on their way to the pool and back: ``?kv=int8`` or ``?kv=fp8`` of a pool's URL.

A stored block is, for every channel of it (layer, K or V, head, dimension), one scale in bfloat16, and then for every
element its value divided by its channel's scale, in one byte. A channel's scale is such that the largest of its values,
of the block's tokens, is the largest that the byte can tell: some channels of keys are many times as large as others,
which one scale for all of them would leave without a digit.

Such blocks do not come back exactly as they were, so they have a namespace of their own, and an instance without ``kv``
never meets them.
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
# Rounding to bfloat16 may make a scale smaller by a 256th, by which the largest value would overflow.
_MARGIN = 1 + 2**-8
_TYPES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


class _QuantisingCodec:
    """A scale for each channel, and a byte for each element.

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
        # Zeros have any scale; infinity and NaN stay what they are, as they would have been without a pool.
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
    """The namespace of blocks that are stored as ``kv`` says: ``int8``, ``fp8``, or empty for as they are."""
    return replace(namespace, kv_dtype=f"{namespace.kv_dtype}{_AS}{kv}") if kv else namespace


def choose_codec(namespace: Namespace, kv: torch.Tensor) -> Codec | None:
    """The codec of a namespace's blocks, between the pool and ``kv``; None: they are in the pool as they are in it."""
    name = namespace.kv_dtype.partition(_AS)[2]
    return _QuantisingCodec(kv, name) if name else None
