"""Which models there are: every shape computed right, files of every kind read, what is not known refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from engine.model.model_runner import ModelRunner, check_length, load_model_config, load_tokenizer
from engine.scheduling.request import Request, SamplingParams, Sequence
from engine.scheduling.scheduler import Chunk
from kvstore_backend import ConfigError
from tests.engine.checkpoints import ARCHITECTURES, byte_fallback_tokenizer, config_of, write_checkpoint
from tests.support.device import TORCH_DEVICE

BLOCK = 16
PROMPT = tuple(range(40, 77))


def runner_of(folder: Path) -> ModelRunner:
    runner = ModelRunner(str(folder), load_model_config(str(folder)), TORCH_DEVICE, torch.float32, BLOCK)
    runner.allocate_kv(4)
    runner.try_out()
    return runner


def logprobs(runner: ModelRunner, *chunks: int) -> dict[int, float]:
    """What the runner makes of the token after ``PROMPT``, computed in chunks of these sizes."""
    params = SamplingParams(1, temperature=0.0, logprobs=20)
    sequence = Sequence(Request("r", PROMPT, params), BLOCK)
    sequence.block_table = [2, 0, 3]
    for size in chunks:
        sampled = runner.run([Chunk(sequence, size)])
        sequence.num_computed += size
    [choice] = sampled
    assert choice
    assert choice[1]
    return dict(choice[1].top)


def reference_logprobs(folder: Path, tokens: tuple[int, ...] = PROMPT) -> dict[int, float]:
    """What transformers itself makes of it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        found = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], dim=-1)
    values, ids = torch.topk(found, 20)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_shape_of_every_architecture_is_computed_as_transformers_does(
    architecture: str, kv_heads: int, tied: bool, tmp_path: Path
) -> None:
    config = config_of(architecture, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    folder = write_checkpoint(config, tmp_path)
    assert logprobs(runner_of(folder), 20, 16, 1) == pytest.approx(reference_logprobs(folder), abs=1e-4)


def test_a_checkpoint_in_several_files_is_the_same_model(tmp_path: Path) -> None:
    whole = write_checkpoint(config_of("qwen2"), tmp_path / "whole")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(sharded, max_shard_size="30KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert not (sharded / "model.safetensors").exists()
    assert logprobs(runner_of(sharded), 37) == logprobs(runner_of(whole), 37)


def test_a_checkpoint_that_lacks_one_of_its_files_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_checkpoint(config_of("qwen2"), tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "s", max_shard_size="30KB")
    (lost := sorted((tmp_path / "s").glob("model-*.safetensors"))[1]).unlink()
    with pytest.raises(ConfigError) as caught:
        runner_of(tmp_path / "s")
    assert str(caught.value).startswith(f"--model '{tmp_path / 's'}'")
    assert lost.name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(num_hidden_layers=3, use_sliding_window=True, max_window_layers=2),  # the last layer only
        Qwen2Config(num_hidden_layers=3, use_sliding_window=True, max_window_layers=0),
        Qwen2Config(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], use_sliding_window=True),
    ],
    ids=["last", "all", "first"],
)
def test_layers_that_see_only_a_window_are_refused_if_only_one_does(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="layers of type sliding_attention; only full attention is supported"):
        load_model_config(str(tmp_path))


@pytest.mark.parametrize(
    "window",
    [
        {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},  # beginning after the last layer
    ],
    ids=["switched off", "no layer"],
)
def test_a_window_that_no_layer_uses_is_no_obstacle(window: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint(config_of("qwen2", **window), tmp_path)
    assert logprobs(runner_of(folder), 30, 7) == pytest.approx(reference_logprobs(folder), abs=1e-4)


def test_a_window_of_all_layers_without_a_list_of_layers_is_refused(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MistralConfig(vocab_size=300, num_hidden_layers=1, sliding_window=8, **small)
    with pytest.raises(ConfigError, match="cannot run a MistralForCausalLM: attention with a sliding window"):
        runner_of(write_checkpoint(config, tmp_path))


class TestScaledRope:
    """A token's KV must not depend on what else is in the batch: blocks are shared by their tokens alone."""

    DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}  # noqa: RUF012
    LONG = {  # noqa: RUF012
        "rope_type": "longrope",
        "factor": 8.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }
    YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}  # noqa: RUF012

    @pytest.mark.parametrize("rope", [DYNAMIC, LONG, YARN], ids=lambda rope: rope["rope_type"])
    def test_is_computed_as_transformers_does_within_the_first_length(self, rope: Any, tmp_path: Path) -> None:
        folder = write_checkpoint(config_of("llama", rope_parameters=rope), tmp_path)
        check_length(str(folder), load_model_config(str(folder)), 64)
        assert logprobs(runner_of(folder), 20, 16, 1) == pytest.approx(reference_logprobs(folder), abs=1e-4)

    def test_is_refused_beyond_the_length_at_which_it_would_turn_to_longer_waves(self, tmp_path: Path) -> None:
        config_of("llama", rope_parameters=self.LONG).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="--max-model-len 65: beyond 64 tokens the longrope scaling"):
            check_length(str(tmp_path), load_model_config(str(tmp_path)), 65)

    def test_is_refused_beyond_the_positions_where_it_would_begin_to_follow_the_length(self, tmp_path: Path) -> None:
        config_of("llama", rope_parameters=self.DYNAMIC).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="--max-model-len 513 is more than the 512 positions"):
            check_length(str(tmp_path), load_model_config(str(tmp_path)), 513)


TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}{{ 'assistant:' }}"


@pytest.mark.parametrize("as_file", [True, False], ids=["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_is_found_where_checkpoints_keep_it(as_file: bool, tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = byte_fallback_tokenizer(chat_template=TEMPLATE)
    tokenizer.save_pretrained(tmp_path, save_jinja_files=as_file)
    assert (tmp_path / "chat_template.jinja").exists() == as_file
    assert ("chat_template" in json.loads((tmp_path / "tokenizer_config.json").read_text())) != as_file
    messages = [{"role": "user", "content": "the river"}]
    text = load_tokenizer(str(tmp_path)).apply_chat_template(messages, tokenize=False)
    assert text == "<s>user: the riverassistant:"


def test_a_text_begins_with_the_token_its_tokenizer_puts_there(tmp_path: Path) -> None:
    byte_fallback_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer("the river")["input_ids"][0] == tokenizer.bos_token_id


# What the README says of decoders.

TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    "config", [MistralConfig(**TINY, sliding_window=None), Phi3Config(**TINY)], ids=["mistral", "phi3"]
)
def test_decoders_with_full_attention_run(config: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(config, tmp_path)
    assert logprobs(runner_of(folder), 37) == pytest.approx(reference_logprobs(folder), abs=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**TINY, head_dim=8), "layers of type sliding_attention; only full attention"),
        (Gemma2Config(**TINY, head_dim=8, layer_types=["full_attention"] * 2), "with soft-capping is not supported"),
        (
            GptOssConfig(
                **TINY,
                head_dim=8,
                num_local_experts=2,
                num_experts_per_tok=1,
                layer_types=["full_attention"] * 2,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            "with sinks is not supported",
        ),
    ],
    ids=["sliding windows", "soft-capping", "sinks"],
)
def test_decoders_with_more_than_that_are_refused_in_one_sentence(config: Any, reason: str, tmp_path: Path) -> None:
    folder = write_checkpoint(config, tmp_path)
    with pytest.raises(ConfigError, match=reason) as caught:
        runner_of(folder)
    assert "\n" not in str(caught.value)
