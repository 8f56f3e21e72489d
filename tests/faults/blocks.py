"""Blocks with bytes that are a function of the hash, so that a reader can check them."""

from __future__ import annotations

import hashlib

from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.namespace import Namespace

__all__ = ["NAMESPACE", "conversation", "right_bytes"]

NAMESPACE = Namespace("model", "float32", 4, 2, 2, 2, "layer,kv,head,token,dim")


def conversation(number: int, blocks: int) -> list[bytes]:
    """Return the block hashes of a sequence, which differ for each number."""
    tokens = [number, *range(1, 4 * blocks)]
    return extend_block_hashes([], tokens, 4, root_hash())


def right_bytes(block_hash: bytes, nbytes: int) -> bytes:
    """Return the bytes of the block with this hash."""
    return (hashlib.sha512(block_hash).digest() * (nbytes // 64 + 1))[:nbytes]
