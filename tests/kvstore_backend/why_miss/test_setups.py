"""Two set-ups that do not share blocks: the field that keeps them apart is named, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore_backend.manifest import Manifest
from kvstore_backend.namespace import Namespace
from kvstore_backend.why_miss import REASONS, compare_setups

NAMESPACE = Namespace("a" * 32, "bfloat16", 64, 24, 2, 64, "layer,kv,head,token,dim")
FACTS = {"name": "qwen", "architecture": "1", "software": "engine", "block_hashes": "kvstore"}


def manifest(facts: dict[str, str] | None = None, **fields: str | int) -> Manifest:
    return Manifest(replace(NAMESPACE, **fields).fields, {**FACTS, **(facts or {})})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "reason", "said"),
    [
        (manifest(kv_dtype="float32"), "other_dtype", "'bfloat16' of A, 'float32' of B"),
        (manifest(block_size=16), "other_block_size", "64 of A, 16 of B"),
        (manifest(model="b"), "other_weights", "the weights differ ('qwen' of A, 'qwen' of B)"),
        (manifest({"architecture": "2", "name": "llama"}, model="b"), "other_model", "'qwen' of A, 'llama' of B"),
        (manifest(weights_version="7"), "other_weights", "nothing of A, '7' of B"),
        (manifest(tp_size=2, num_kv_heads=1), "other_tp_size", "also: num_kv_heads differs: 2 of A, 1 of B"),
        (manifest(tp_rank=1), "other_rank", "each rank of a set-up has its own blocks"),
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
def test_the_difference_is_named(other: Manifest, reason: str, said: str) -> None:
    verdict = compare_setups(manifest(), other, ("A", "B"))
    assert (verdict.reason, said in verdict.sentence) == (reason, True), verdict.sentence


def test_a_setting_of_the_engine_is_named_where_the_checkpoint_is_one() -> None:
    facts = {"checkpoint": "c", "setting hf_overrides": "{}", "setting dtype": "float16"}
    other = manifest({**facts, "setting hf_overrides": "{'rope': 2}"}, model="b")
    verdict = compare_setups(manifest(facts), other, ("A", "B"))
    assert verdict.reason == "other_settings"
    assert "hf_overrides ('{}' of A, \"{'rope': 2}\" of B)" in verdict.sentence
    verdict = compare_setups(manifest(facts), manifest({**facts, "setting dtype": "bfloat16"}, model="b"))
    assert verdict.reason == "other_dtype"


@pytest.mark.parametrize("facts", [{}, {"name": "renamed"}, {"software": "engine 2"}])
def test_equal_setups_share_blocks_whatever_their_facts(facts: dict[str, str]) -> None:
    assert compare_setups(manifest(), manifest(facts)).reason == "same_setup"


def test_a_lie_in_the_facts_makes_no_difference_where_there_is_none() -> None:
    lie = replace(manifest(), facts={"architecture": "other", "block_hashes": "vLLM"})
    assert compare_setups(manifest(), lie).reason == "same_setup"
