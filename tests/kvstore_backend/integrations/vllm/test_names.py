"""The pool's names for blocks of a vLLM request."""

from __future__ import annotations

from kvstore_backend.integrations.vllm.adapters import name_blocks


def test_names_of_adapter_and_reset_differ_from_the_plain_ones() -> None:
    plain = [bytes([i]) * 32 for i in range(3)]
    assert name_blocks(plain) == plain
    every = [
        name_blocks(plain),
        name_blocks(plain, b"a" * 32),
        name_blocks(plain, b"", b"a" * 16),
        name_blocks(plain, b"a" * 32, b"a" * 16),
    ]
    assert len({name for each in every for name in each}) == 12


def test_names_are_of_32_bytes_and_depend_on_the_block_alone() -> None:
    plain = [bytes([i]) * 32 for i in range(3)]
    named = name_blocks(plain, b"a" * 32)
    assert [len(name) for name in named] == [32] * 3
    assert name_blocks(plain[1:], b"a" * 32) == named[1:]
    assert name_blocks(plain, b"a" * 31) != named


def test_an_adapter_is_not_taken_for_a_reset() -> None:
    plain = [bytes(32)]
    assert name_blocks(plain, b"a" * 16) != name_blocks(plain, b"", b"a" * 16)
    assert name_blocks(plain, b"ab", b"c") != name_blocks(plain, b"a", b"bc")


def test_groups_adapters_and_epochs_never_give_two_blocks_one_name() -> None:
    named = [
        name_blocks([bytes(32)], adapter, epoch, group)[0]
        for adapter in (b"", b"a" * 32)
        for epoch in (b"", b"e" * 16)
        for group in (b"", b"0 full", b"1 window")
    ]
    assert len(set(named)) == len(named)
