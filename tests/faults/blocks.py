"""Blocks whose bytes follow from their hash, so that a reader can tell whether one is right."""

from __future__ import annotations

import hashlib

from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.namespace import Namespace

__all__ = ["NAMESPACE", "conversation", "right_bytes"]

NAMESPACE = Namespace("model", "float32", 4, 2, 2, 2, "layer,kv,head,token,dim")


def conversation(number: int, blocks: int) -> list[bytes]:
    """The hashes of a sequence that differs from any other number's."""
    tokens = [number, *range(1, 4 * blocks)]
    return extend_block_hashes([], tokens, 4, root_hash())


def right_bytes(block_hash: bytes, nbytes: int) -> bytes:
    """The contents of the block of this hash."""
    return (hashlib.sha512(block_hash).digest() * (nbytes // 64 + 1))[:nbytes]
