"""Computes block hashes from token ids. The hash of a block is a digest of all tokens up to the end of the block.

    root   = SHA-256("kvstore.root.v1" || length of salt || salt || extra)
    hash_i = SHA-256(hash_{i-1} || tokens of block i as little-endian uint32)

The KV of a block depends on all tokens before it, so its hash depends on them too: equal hashes mean equal prefixes.
The hashes are SHA-256, because a collision would give one user's KV to another user.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

__all__ = ["extend_block_hashes", "root_hash"]

_ROOT_TAG = b"kvstore.root.v1\0"


def root_hash(salt: str = "", extra: bytes = b"") -> bytes:
    """Return the root hash of a sequence of tokens, which is the parent in the hash of the first block.

    Args:
        salt: the request's ``cache_salt`` (as in vLLM). Requests share blocks only if their salts are equal.
        extra: other data on which the KV of the whole sequence depends, such as the name of a LoRA adapter.
    """
    salt_bytes = salt.encode(errors="surrogatepass")  # text from JSON may be invalid Unicode
    return hashlib.sha256(_ROOT_TAG + len(salt_bytes).to_bytes(8, "little") + salt_bytes + extra).digest()


def extend_block_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Append the hashes of further full blocks of a sequence to ``hashes``, and return ``hashes``.

    A later call for the longer sequence hashes only the new full blocks. The last block has no hash until it is full.

    Args:
        hashes: hashes of the first ``len(hashes)`` blocks of the sequence; changed in place.
        token_ids: all tokens of the sequence, integers in ``[0, 2**32)``.
        block_size: tokens in a block.
        root: result of ``root_hash`` for the sequence.

    Raises:
        ValueError: ``block_size`` is not positive, there are more ``hashes`` than full blocks, or a token id is not an
            integer of 32 bits.
    """
    if block_size <= 0:
        raise ValueError(f"block_size is {block_size}; it must be positive")
    num_full = len(token_ids) // block_size
    if len(hashes) > num_full:
        raise ValueError(f"{len(hashes)} hashes were given, but the tokens fill only {num_full} blocks")
    first = len(hashes)
    if first == num_full:
        return hashes
    tokens = np.asarray(token_ids[first * block_size : num_full * block_size])
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= 1 << 32:
        raise ValueError("token ids must be integers in [0, 2**32)")
    data = memoryview(tokens.astype("<u4").tobytes())
    nbytes = 4 * block_size
    parent = hashes[-1] if hashes else root
    for start in range(0, len(data), nbytes):
        digest = hashlib.sha256(parent)
        digest.update(data[start : start + nbytes])
        parent = digest.digest()
        hashes.append(parent)
    return hashes
