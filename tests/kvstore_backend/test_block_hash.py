from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore_backend.block_hash import extend_block_hashes, root_hash

TOKEN = st.integers(0, 2**32 - 1)
TOKENS = st.lists(TOKEN, max_size=80)
BLOCK_SIZE = st.integers(1, 9)


def hashes_of(tokens: list[int], block_size: int = 4, root: bytes | None = None) -> list[bytes]:
    return extend_block_hashes([], tokens, block_size, root_hash() if root is None else root)


@given(TOKENS, BLOCK_SIZE)
def test_every_full_block_has_a_hash_and_a_partial_one_has_none(tokens: list[int], block_size: int) -> None:
    hashes = hashes_of(tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    assert all(len(digest) == 32 for digest in hashes)


@given(TOKENS, TOKENS, BLOCK_SIZE)
def test_more_tokens_only_add_hashes(tokens: list[int], more: list[int], block_size: int) -> None:
    hashes = hashes_of(tokens, block_size)
    assert hashes_of(tokens + more, block_size)[: len(hashes)] == hashes


@given(TOKENS, st.lists(st.integers(0, 80)), BLOCK_SIZE)
def test_hashes_that_are_extended_in_steps_equal_hashes_computed_at_once(
    tokens: list[int], steps: list[int], block_size: int
) -> None:
    hashes: list[bytes] = []
    for length in sorted(step for step in steps if step <= len(tokens)):
        extend_block_hashes(hashes, tokens[:length], block_size, root_hash())
    assert extend_block_hashes(hashes, tokens, block_size, root_hash()) == hashes_of(tokens, block_size)


@given(st.lists(TOKEN, min_size=1, max_size=40), st.data())
def test_a_changed_token_changes_the_hash_of_its_block_and_of_all_after_it(
    tokens: list[int], data: st.DataObject
) -> None:
    tokens = tokens[: len(tokens) // 4 * 4]
    assume(tokens)
    position = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens]
    other[position] = data.draw(TOKEN.filter(lambda token: token != tokens[position]))
    same = [a == b for a, b in zip(hashes_of(tokens), hashes_of(other), strict=True)]
    assert same == [block < position // 4 for block in range(len(same))]


@given(st.lists(TOKEN, min_size=4, max_size=40), st.text(), st.text())
def test_different_salts_share_no_hash(tokens: list[int], salt: str, other: str) -> None:
    assume(salt != other)
    ours, theirs = (set(hashes_of(tokens, root=root_hash(each))) for each in (salt, other))
    assert not ours & theirs


@given(st.text(max_size=5), st.binary(max_size=5), st.text(max_size=5), st.binary(max_size=5))
def test_salt_and_extra_are_not_confused(salt: str, extra: bytes, other_salt: str, other_extra: bytes) -> None:
    assert (root_hash(salt, extra) == root_hash(other_salt, other_extra)) == (
        (salt, extra) == (other_salt, other_extra)
    )


def test_a_salt_that_is_not_valid_unicode_is_hashed_like_any_other() -> None:
    assert root_hash("\ud800") != root_hash("\ud801") != root_hash("")


@given(st.lists(TOKEN, min_size=12, max_size=12))
def test_equal_tokens_in_different_blocks_have_different_hashes(tokens: list[int]) -> None:
    block = tokens[:4]
    assert len(set(hashes_of(block * 3))) == 3


def test_the_borders_of_a_token_are_part_of_the_hash() -> None:
    assert hashes_of([1, 2, 3, 4]) != hashes_of([12, 3, 4, 0])
    assert hashes_of([0x0100, 0, 0, 0]) != hashes_of([0, 0x01, 0, 0])


def test_the_hash_is_as_documented() -> None:
    root = hashlib.sha256(b"kvstore.root.v1\0" + (4).to_bytes(8, "little") + b"salt" + b"lora").digest()
    first = hashlib.sha256(root + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    second = hashlib.sha256(first + bytes([3, 0, 0, 0, 255, 255, 255, 255])).digest()
    assert extend_block_hashes([], [1, 2, 3, 2**32 - 1, 9], 2, root_hash("salt", b"lora")) == [first, second]


def test_arrays_hash_like_lists() -> None:
    tokens = [5, 6, 7, 8, 9]
    for dtype in (np.int32, np.int64, np.uint32):
        assert extend_block_hashes([], np.array(tokens, dtype), 2, root_hash()) == hashes_of(tokens, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 2**32, 2**70, 1.5, "7", None])
def test_a_value_that_is_not_a_token_is_refused(token: object) -> None:
    with pytest.raises(ValueError, match="integers in"):
        extend_block_hashes([], [1, token], 2, root_hash())  # type: ignore[list-item]


def test_an_array_of_negative_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="integers in"):
        extend_block_hashes([], np.array([1, -1]), 2, root_hash())  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_block_size_that_is_not_positive_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}"):
        hashes_of([1, 2], block_size)


def test_more_hashes_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 hashes were given, but the tokens fill only 1 blocks"):
        extend_block_hashes([b"a" * 32, b"b" * 32], [1, 2, 3], 2, root_hash())
