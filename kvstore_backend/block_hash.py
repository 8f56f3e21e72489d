"""Token ids -> chained block hashes: the name of a KV block is a digest of all tokens up to its end.

    root   = SHA-256("kvstore.root.v1" || length of salt || salt || extra)
    hash_i = SHA-256(hash_{i-1} || tokens of block i as little-endian uint32)

A block's KV depends on every token before it, so its hash does too: equal hashes mean equal prefixes, and a look-up of
the longest present prefix reads one list from its start. SHA-256 is used because a collision would give one user's KV
to another user (vLLM chose SHA-256 for the same reason).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

__all__ = ["HASH_BYTES", "extend_block_hashes", "root_hash"]

HASH_BYTES = 32

_ROOT_TAG = b"kvstore.root.v1\0"


def root_hash(salt: str = "", extra: bytes = b"") -> bytes:
    """Return the parent of a sequence's first block.

    Args:
        salt: a request's ``cache_salt`` (as in vLLM): requests share blocks only if their salts are equal.
        extra: anything else that the whole sequence's KV depends on, such as the name of a LoRA adapter.
    """
    salt_bytes = salt.encode(errors="surrogatepass")  # JSON can carry text that is not valid Unicode
    return hashlib.sha256(_ROOT_TAG + len(salt_bytes).to_bytes(8, "little") + salt_bytes + extra).digest()


def extend_block_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Append to ``hashes`` the hashes of the full blocks of ``token_ids`` that it does not cover yet; return it.

    Callers call this again as a sequence grows; only new full blocks are hashed. A partial last block has no hash.

    Args:
        hashes: the hashes of the first ``len(hashes)`` blocks of ``token_ids``; changed in place.
        token_ids: all tokens of the sequence, integers in ``[0, 2**32)``.
        block_size: tokens in a block.
        root: ``root_hash(...)`` of this sequence.

    Raises:
        ValueError: ``block_size`` is not positive, ``hashes`` covers more than ``token_ids`` has, or a token id is
            not an integer or does not fit in 32 bits.
    """
    if block_size <= 0:
        raise ValueError(f"block_size is {block_size}; it must be positive")
    num_full = len(token_ids) // block_size
    if len(hashes) > num_full:
        raise ValueError(f"{len(hashes)} hashes given for {num_full} full blocks of tokens")
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
