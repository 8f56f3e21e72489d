"""Computes names of blocks from their tokens. They are 64-bit numbers, and do not depend on the engine.

The content hash of a block is the XXH3-64 of its tokens (little-endian, 32 bits each). The name of a block covers all
tokens of the prompt up to the block's end. The name of the first block is its content hash. The name of any other block
is the XXH3-64 of the previous block's name and of its own content hash. RFC 1403 of Mooncake recommends this
(``docs/source/api-reference/http/conductor-indexer.md``). The seeds, which depend on LoRA adapter and salt, are those
of Dynamo's indexer (``lib/kv-router/src/protocols.rs``, ``lib/kv-hashing``).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator

import xxhash

__all__ = [
    *("SEED", "TOKEN_BYTES", "chain_names", "hash_contents", "iterate_names", "name_next", "pack_tokens", "seed_of"),
]

SEED = 1337
"""Seed for blocks without LoRA adapter and salt."""

TOKEN_BYTES = 4

_PAIR = struct.Struct("<QQ")
_BITS = (1 << 64) - 1


def seed_of(lora_name: str, cache_salt: str) -> int:
    """Return the seed for blocks with this LoRA adapter and this salt; ``""`` means no adapter, or no salt."""
    seed = SEED
    if lora_name:
        seed += xxhash.xxh3_64_intdigest(lora_name.encode(errors="backslashreplace"))
    if cache_salt:
        seed += xxhash.xxh3_64_intdigest(cache_salt.encode(errors="backslashreplace"), 1)
    return seed & _BITS


def pack_tokens(token_ids: list[int]) -> bytes:
    """Return token ids as bytes, four bytes for each.

    Raises:
        OverflowError: a token id is negative, or has more than 32 bits.
        TypeError: a token id is not a whole number.
    """
    return array("I", token_ids).tobytes()


def hash_contents(tokens: bytes, block_size: int, seed: int) -> Iterator[int]:
    """Yield the content hash of each whole block of ``tokens``."""
    step = TOKEN_BYTES * block_size
    for at in range(0, len(tokens) - step + 1, step):
        yield xxhash.xxh3_64_intdigest(tokens[at : at + step], seed)


def name_next(name: int | None, content: int) -> int:
    """Return the name of a block.

    Args:
        name: name of the previous block; None if the block is the first of a prompt.
        content: content hash of the block.
    """
    return content if name is None else xxhash.xxh3_64_intdigest(_PAIR.pack(name, content), SEED)


def chain_names(contents: Iterable[int]) -> Iterator[int]:
    """Yield the names of a prompt's blocks.

    Args:
        contents: content hashes of the blocks, from the first block of the prompt on.
    """
    name = None
    for content in contents:
        name = name_next(name, content)
        yield name


def iterate_names(tokens: bytes, block_size: int, seed: int) -> Iterator[int]:
    """Yield the names of the whole blocks of a prompt."""
    return chain_names(hash_contents(tokens, block_size, seed))
