"""Names of a vLLM request's blocks in the pool.

vLLM chains a SHA-256 over tokens, ``cache_salt``, multimodal inputs (a digest of the content, or the uuid that a client
gave it) and a LoRA adapter's name and path. It leaves out which bytes are at that path, because that matters only
between instances. This module adds their digest (``adapters.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

__all__ = ["name_blocks"]

_TAG = b"kvstore.vllm.v1\0"


def name_blocks(block_hashes: Sequence[bytes], adapter: bytes = b"", epoch: bytes = b"") -> list[bytes]:
    """Return a name of 32 bytes for each block.

    Args:
        block_hashes: vLLM's own, of 32 bytes.
        adapter: digest of the request's LoRA adapter; empty: it has none.
        epoch: random bytes that separate this instance's blocks after its weights were changed in place; empty: they
            were not changed.
    """
    if not adapter and not epoch:
        return list(block_hashes)
    root = hashlib.sha256(_TAG + len(adapter).to_bytes(1, "little") + adapter + epoch)
    return [_extend_hash(root, block_hash) for block_hash in block_hashes]


def _extend_hash(root: hashlib._Hash, block_hash: bytes) -> bytes:
    digest = root.copy()
    digest.update(block_hash)
    return digest.digest()
