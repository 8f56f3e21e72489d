"""Comparison of two configurations or two prompts: the verdict names the difference, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_backend.manifest import Manifest
from kvstore_backend.namespace import Namespace
from kvstore_backend.why_miss import OTHER_TEXT, REASONS, compare_prompts, compare_setups, compare_texts, count_common

NAMESPACE = Namespace("a" * 32, "bfloat16", 64, 24, 2, 64, "layer,kv,head,token,dim")
FACTS = {"name": "qwen", "architecture": "1", "software": "engine", "block_hashes": "kvstore"}


def manifest(facts: dict[str, str] | None = None, **fields: str | int) -> Manifest:
    return Manifest(replace(NAMESPACE, **fields).fields, {**FACTS, **(facts or {})})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "reason", "text"),
    [
        (manifest(kv_dtype="float32"), "other_dtype", "'bfloat16' of A, 'float32' of B"),
        (manifest(block_size=16), "other_block_size", "64 of A, 16 of B"),
        (manifest(model="b"), "other_weights", "the weights differ ('qwen' of A, 'qwen' of B)"),
        (manifest({"architecture": "2", "name": "llama"}, model="b"), "other_model", "'qwen' of A, 'llama' of B"),
        (manifest(weights_version="7"), "other_weights", "nothing of A, '7' of B"),
        (manifest(tp_size=2, num_kv_heads=1), "other_tp_size", "also: num_kv_heads differs: 2 of A, 1 of B"),
        (manifest(tp_rank=1), "other_rank", "each rank of a configuration has its own blocks"),
        (manifest(num_layers=12), "other_shape", "num_layers differs: 24 of A, 12 of B"),
        (manifest(layout="vllm 1"), "other_layout", "'layer,kv,head,token,dim' of A, 'vllm 1' of B"),
        (manifest(tenant="red"), "other_tenant", "nothing of A, 'red' of B"),
        (manifest({"block_hashes": "vLLM"}, model="b", layout="vllm 1"), "other_engine", "kvstore and vLLM"),
        (replace(manifest(), block_format=9), "other_format", "2 of A, 9 of B"),
        (
            replace(manifest(), fields={**NAMESPACE.fields, "new": 1}),
            "other_field",
            "new differs: nothing of A, 1 of B",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value in REASONS else "",
)
def test_the_difference_is_named(other: Manifest, reason: str, text: str) -> None:
    verdict = compare_setups(manifest(), other, ("A", "B"))
    assert (verdict.reason, text in verdict.sentence) == (reason, True), verdict.sentence


def test_a_setting_of_the_engine_is_named_if_the_checkpoint_is_the_same() -> None:
    facts = {"checkpoint": "c", "setting hf_overrides": "{}", "setting dtype": "float16"}
    other = manifest({**facts, "setting hf_overrides": "{'rope': 2}"}, model="b")
    verdict = compare_setups(manifest(facts), other, ("A", "B"))
    assert verdict.reason == "other_settings"
    assert "hf_overrides ('{}' of A, \"{'rope': 2}\" of B)" in verdict.sentence
    verdict = compare_setups(manifest(facts), manifest({**facts, "setting dtype": "bfloat16"}, model="b"))
    assert verdict.reason == "other_dtype"


@pytest.mark.parametrize("facts", [{}, {"name": "renamed"}, {"software": "engine 2"}])
def test_equal_setups_share_blocks_even_if_their_facts_differ(facts: dict[str, str]) -> None:
    assert compare_setups(manifest(), manifest(facts)).reason == "same_setup"


def test_wrong_facts_make_no_difference_between_equal_setups() -> None:
    wrong = replace(manifest(), facts={"architecture": "other", "block_hashes": "vLLM"})
    assert compare_setups(manifest(), wrong).reason == "same_setup"


TOKENS = st.lists(st.integers(0, 3), max_size=30)


def encode(text: str) -> list[int]:
    """Return a token for each character."""
    return [ord(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


@settings(max_examples=60)
@given(TOKENS, TOKENS)
def test_common_tokens_are_counted(first: list[int], second: list[int]) -> None:
    common = count_common(first, second)
    assert first[:common] == second[:common]
    assert first[common : common + 1] != second[common : common + 1] or common == min(len(first), len(second))


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("It is 2026-11-22 15:04:05 now.", "It is 2026-11-22 15:04:09 now.", "a timestamp"),
        ("at 2026-11-22T15:04:05.123Z", "at 2026-11-23T09:00:00.001Z", "a timestamp"),
        ("epoch 1763823845 ms", "epoch 1763823999 ms", "a timestamp"),
        ("Today is 2026-11-22.", "Today is 2026-12-01.", "a date"),
        ("Today is November 22, 2026.", "Today is November 23, 2026.", "a date"),
        ("The time is 15:04.", "The time is 15:05.", "a time of day"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "id 9b2c4567-e89b-12d3-a456-426614174999", "a UUID"),
        ("session a8f3k2l9x0q7 of Ann", "session b7e2j1m8w9p6 of Ann", "a random id"),
        ("It costs 1000000 euros", "It costs 9000000 euros", "a number"),
        ("You are  helpful.", "You are helpful.", "white space"),
        ("Be brief.\n\nNow:", "Be brief.\nNow:", "white space"),
        ("You are Helpful and kind.", "You are helpful and kind.", "upper and lower case"),
        ("Write about the sea.", "Write about mountains.", OTHER_TEXT),
    ],
)
def test_the_kind_of_a_difference_is_named(first: str, second: str, kind: str) -> None:
    assert compare_texts(first, second)[0] == kind
    verdict = compare_prompts(encode(first), encode(second), decode)
    assert (verdict.reason, verdict.details["kind"]) == ("diverges", kind)
    token = verdict.details["token"]
    assert first[:token] == second[:token]


def test_the_position_and_the_texts_that_differ_are_named() -> None:
    verdict = compare_prompts(encode("Now: 15:04:05 UTC"), encode("Now: 15:04:09 UTC"), decode)
    assert verdict.details == {"token": 12, "kind": "a time of day", "first": "15:04:05", "second": "15:04:09"}


def test_continued_and_equal_prompts_are_recognised() -> None:
    assert compare_prompts([1, 2], [1, 2, 3]).reason == "continues"
    assert "the first prompt begins with all 2 tokens" in compare_prompts([1, 2, 3], [1, 2]).sentence
    assert compare_prompts([1, 2], [1, 2]).reason == "same_prompt"


def test_without_a_tokenizer_the_tokens_are_named() -> None:
    assert "at token 2 (other token: '3' became '4')" in compare_prompts([1, 2, 3], [1, 2, 4]).sentence
