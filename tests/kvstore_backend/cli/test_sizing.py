from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_backend.backend import ConfigError
from kvstore_backend.cli.ascend import context_cost, hccl_sizing, kv_bytes_per_token

QWEN2 = {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896}


def model(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_example_of_mindie_with_128_dies_is_computed() -> None:
    links, factor = hccl_sizing(128, 0.92)
    assert "127 x 4 MB = 508 MB" in links.text
    assert factor.text.startswith("lower it from 0.92 to 0.91, which frees 600 MB; to 0.88 if cards may be added later")


@pytest.mark.parametrize(
    ("cards", "factor"),
    [(1, "is low enough"), (2, "0.91"), (151, "0.91"), (152, "0.90"), (302, "0.89"), (512, "0.88")],
)
def test_every_600_mb_of_links_lower_the_factor_by_a_hundredth(cards: int, factor: str) -> None:
    assert factor in hccl_sizing(cards, 0.92)[1].text


@given(st.integers(1, 512))
def test_up_to_512_cards_pass(cards: int) -> None:
    assert all(finding.level == "ok" for finding in hccl_sizing(cards, 0.92))


def test_more_cards_than_can_be_linked_are_refused() -> None:
    (finding,) = hccl_sizing(513, 0.92)
    assert finding.level == "fail"
    assert "at most 512 cards" in finding.remedy


@pytest.mark.parametrize(("cards", "memory_factor"), [(0, 0.92), (-3, 0.92), (8, 0.04), (8, 1.5)])
def test_impossible_figures_are_refused(cards: int, memory_factor: float) -> None:
    assert hccl_sizing(cards, memory_factor)[0].level == "fail"


@pytest.mark.parametrize(
    ("changes", "nbytes"),
    [
        ({"torch_dtype": "bfloat16"}, 2 * 24 * 2 * 64 * 2),
        ({"dtype": "float32"}, 2 * 24 * 2 * 64 * 4),
        ({"head_dim": 128, "dtype": "bfloat16"}, 2 * 24 * 2 * 128 * 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"}, 24 * (512 + 64) * 2),
    ],
)
def test_the_kv_bytes_of_a_token_are_computed(tmp_path: Path, changes: dict[str, object], nbytes: int) -> None:
    assert kv_bytes_per_token(model(tmp_path, {**QWEN2, **changes})) == nbytes


def test_the_figures_of_a_model_of_text_and_images_are_in_text_config(tmp_path: Path) -> None:
    assert kv_bytes_per_token(model(tmp_path, {"text_config": QWEN2, "dtype": "float32"})) == 2 * 24 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"num_hidden_layers": 2}, "lacks 'num_attention_heads'"),
        ([], "is not the configuration of a decoder model"),
        ({**QWEN2, "dtype": "int3"}, "lacks 'int3'"),
    ],
)
def test_an_incomplete_configuration_is_refused(tmp_path: Path, config: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        kv_bytes_per_token(model(tmp_path, config))


@pytest.mark.parametrize(("cards", "tokens"), [(2, 600), (151, 600), (152, 1200), (512, 2400)])
def test_the_context_is_shorter_by_the_memory_that_links_take(cards: int, tokens: int) -> None:
    (finding,) = context_cost(cards, 10**6, 8)
    assert finding.level == "warn"
    assert f"about {tokens} tokens less" in finding.text
    assert f"up to {tokens * 8} if it is divided among the model's 8 cards" in finding.text


def test_the_lost_context_of_an_unknown_model_has_no_number_of_tokens() -> None:
    (finding,) = context_cost(128, None)
    assert "600 MB less for KV on every card" in finding.text
    assert "--model FOLDER shows how many tokens are lost" in finding.remedy


def test_a_single_card_loses_no_context() -> None:
    assert context_cost(1, 10**6) == []
