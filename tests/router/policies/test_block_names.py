"""Names of blocks as in RFC 1403 of Mooncake and in Dynamo (``lib/kv-router/src/protocols.rs``, ``lib/kv-hashing``)."""

from __future__ import annotations

import struct

import pytest
import xxhash

from router.policies.block_names import chain_names, hash_contents, iterate_names, pack_tokens, seed_of


def xxh3(data: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(data, seed)


def test_a_content_is_the_hash_of_the_tokens_of_a_complete_block() -> None:
    tokens = pack_tokens([1, 2, 3, 4, 5])
    assert list(hash_contents(tokens, 2, 1337)) == [
        xxh3(b"\1\0\0\0\2\0\0\0", 1337),
        xxh3(b"\3\0\0\0\4\0\0\0", 1337),
    ]


def test_the_first_name_is_its_content_and_the_next_ones_are_chained() -> None:
    """Mooncake: ``seq_hash[0] = local_block_hash[0]``; Dynamo: ``compute_seq_hash_for_block``."""
    assert list(chain_names([10, 20, 30])) == [
        10,
        second := xxh3(struct.pack("<QQ", 10, 20), 1337),
        xxh3(struct.pack("<QQ", second, 30), 1337),
    ]


def test_equal_blocks_after_different_prefixes_have_different_names() -> None:
    first, second = (list(iterate_names(pack_tokens(tokens), 2, 1337)) for tokens in ([1, 2, 9, 9], [3, 4, 9, 9]))
    assert first[1] != second[1]


@pytest.mark.parametrize(
    ("lora_name", "cache_salt", "seed"),
    [
        ("", "", 1337),
        ("a", "", 1337 + xxh3(b"a", 0)),
        ("", "a", 1337 + xxh3(b"a", 1)),
        ("a", "b", 1337 + xxh3(b"a", 0) + xxh3(b"b", 1)),
    ],
)
def test_a_seed_is_the_same_as_in_dynamo(lora_name: str, cache_salt: str, seed: int) -> None:
    """The seed is a wrapping sum, as in ``compute_salt_hash``."""
    assert seed_of(lora_name, cache_salt) == seed % 2**64


def test_a_name_with_half_a_character_has_a_seed() -> None:
    assert seed_of("\ud800", "\ud800") != seed_of("", "")
