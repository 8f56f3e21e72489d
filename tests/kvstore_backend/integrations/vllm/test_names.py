"""The names in the pool of the blocks of a vLLM request."""

from __future__ import annotations

from kvstore_backend.integrations.vllm.adapters import name_blocks


def test_an_adapter_and_a_reset_change_all_names() -> None:
    plain = [bytes([i]) * 32 for i in range(3)]
    assert name_blocks(plain) == plain
    variants = [
        name_blocks(plain),
        name_blocks(plain, b"a" * 32),
        name_blocks(plain, b"", b"a" * 16),
        name_blocks(plain, b"a" * 32, b"a" * 16),
    ]
    assert len({name for names in variants for name in names}) == 12


def test_a_name_has_32_bytes_and_depends_only_on_the_block_and_the_adapter() -> None:
    plain = [bytes([i]) * 32 for i in range(3)]
    named = name_blocks(plain, b"a" * 32)
    assert [len(name) for name in named] == [32] * 3
    assert name_blocks(plain[1:], b"a" * 32) == named[1:]
    assert name_blocks(plain, b"a" * 31) != named


def test_an_adapter_and_a_reset_with_the_same_bytes_give_different_names() -> None:
    plain = [bytes(32)]
    assert name_blocks(plain, b"a" * 16) != name_blocks(plain, b"", b"a" * 16)
    assert name_blocks(plain, b"ab", b"c") != name_blocks(plain, b"a", b"bc")


def test_each_combination_of_group_adapter_and_epoch_gives_another_name() -> None:
    named = [
        name_blocks([bytes(32)], adapter, epoch, group)[0]
        for adapter in (b"", b"a" * 32)
        for epoch in (b"", b"e" * 16)
        for group in (b"", b"0 full", b"1 window")
    ]
    assert len(set(named)) == len(named)
