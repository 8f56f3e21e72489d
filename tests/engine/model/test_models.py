"""Supported models: every shape is computed correctly, all kinds of files are read, and other models are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Lfm2Config,
    Llama4TextConfig,
    MistralConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)

from engine.model.attention import paged
from engine.model.checkpoint import check_length, load_model_config, load_tokenizer
from engine.model.layer_groups import group_layers
from engine.model.model_runner import ModelRunner
from engine.scheduling.request import BlockTable, Request, SamplingParams, Sequence
from engine.scheduling.scheduler import Chunk
from kvstore_backend import ConfigError
from tests.engine.checkpoints import (
    ARCHITECTURES,
    GROUPED,
    VOCAB_SIZE,
    byte_fallback_tokenizer,
    config_of,
    write_checkpoint,
)
from tests.engine.gpu_form import attend_as_on_gpu
from tests.support.device import TORCH_DEVICE

BLOCK = 16
PROMPT = tuple(range(40, 77))


def runner_of(folder: Path, num_blocks: int = 4) -> ModelRunner:
    runner = ModelRunner(str(folder), load_model_config(str(folder)), TORCH_DEVICE, torch.float32, BLOCK)
    runner.allocate_kv(num_blocks)
    runner.try_out()
    return runner


def logprobs(runner: ModelRunner, *chunks: int) -> dict[int, float]:
    """Return the logprobs of the token after ``PROMPT``, computed in chunks of these sizes."""
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


def logprobs_of_batch(
    runner: ModelRunner, chunks: dict[str, tuple[int, ...]]
) -> dict[str, tuple[tuple[int, ...], dict[int, float]]]:
    """Return the tokens of each prompt, and the logprobs of the next one. Chunks of one step are computed together."""
    blocks = random.Random(3).sample(range(len(runner.kv)), len(runner.kv))
    sequences = {}
    for name, sizes in chunks.items():
        tokens = tuple(random.Random(name).choices(range(VOCAB_SIZE), k=sum(sizes)))
        sequence = Sequence(Request(name, tokens, SamplingParams(1, temperature=0.0, logprobs=20)), BLOCK)
        count = -(-len(tokens) // BLOCK)
        sequence.tables = [BlockTable([blocks.pop() for _ in range(count)]) for _ in runner.groups.groups]
        sequences[name] = sequence
    found = {}
    for step in range(max(map(len, chunks.values()))):
        some = [Chunk(sequences[name], sizes[step]) for name, sizes in chunks.items() if step < len(sizes)]
        sampling = [chunk.sequence for chunk in some if chunk.samples]
        choices = runner.run(some)
        for chunk in some:
            chunk.sequence.num_computed += chunk.num_tokens
        for sequence, choice in zip(sampling, choices, strict=True):
            assert choice
            assert choice[1]
            found[sequence.request.request_id] = sequence.request.prompt_token_ids, dict(choice[1].top)
    return found


def reference_logprobs(folder: Path, tokens: tuple[int, ...] = PROMPT) -> dict[int, float]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        found = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], dim=-1)
    values, ids = torch.topk(found, 20)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_shape_of_every_architecture_is_computed_as_in_transformers(
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


def test_a_checkpoint_without_one_of_its_files_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_checkpoint(config_of("qwen2"), tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "s", max_shard_size="30KB")
    (missing := sorted((tmp_path / "s").glob("model-*.safetensors"))[1]).unlink()
    with pytest.raises(ConfigError) as caught:
        runner_of(tmp_path / "s")
    assert str(caught.value).startswith(f"--model '{tmp_path / 's'}'")
    assert missing.name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["cpu", "gpu"])
@pytest.mark.parametrize("family", GROUPED)
def test_layers_of_every_kind_are_computed_as_in_transformers(
    family: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "gpu":
        attend_as_on_gpu(monkeypatch)
    folder = write_checkpoint(GROUPED[family](), tmp_path)
    runner = runner_of(folder, 80)
    runner.kv.normal_()  # earlier contents of the blocks must have no effect
    got = logprobs_of_batch(runner, {"long": (40, 33, 1, 39, 1), "middle": (1, 16, 32, 1, 20), "short": (16, 1)})
    for name, (tokens, values) in got.items():
        assert values == pytest.approx(reference_logprobs(folder, tokens), abs=1e-4), name


def test_long_scores_with_soft_capping_are_computed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.attention.paged._MAX_SCORE_BYTES", 2000)
    folder = write_checkpoint(GROUPED["gemma2"](), tmp_path)
    [(tokens, values)] = logprobs_of_batch(runner_of(folder, 40), {"long": (60, 50, 1)}).values()
    assert values == pytest.approx(reference_logprobs(folder, tokens), abs=1e-4)


class _Sizes(TorchDispatchMode):
    """Collects the number of elements of each tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.found.append((str(func), result.numel()))
        return result


def test_scores_with_sinks_are_computed_without_a_copy_of_k_and_v_per_query_head() -> None:
    kv_heads, group, tokens, context, head_dim = 2, 8, 3, 500, 32
    queries = torch.randn(kv_heads, group, tokens, head_dim)
    keys, values = torch.randn(2, kv_heads, 1, context, head_dim)
    sinks = torch.randn(kv_heads, group, 1, 1)
    with _Sizes() as sizes:
        got = paged._attend_with_scores(queries, keys, values, attn_mask=None, scale=0.2, softcap=None, sinks=sinks)
    largest = max(sizes.found, key=lambda each: each[1])
    assert largest[1] <= kv_heads * group * tokens * context, largest
    scores = torch.cat([queries @ keys.transpose(-1, -2) * 0.2, sinks.expand(-1, -1, tokens, 1)], dim=-1)
    torch.testing.assert_close(got, scores.softmax(-1)[..., :-1] @ values)


@pytest.mark.parametrize(
    "window",
    [
        {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},  # begins after the last layer
    ],
    ids=["switched off", "no layer"],
)
def test_a_window_that_no_layer_uses_is_accepted(window: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint(config_of("qwen2", **window), tmp_path)
    assert logprobs(runner_of(folder), 30, 7) == pytest.approx(reference_logprobs(folder), abs=1e-4)


@pytest.mark.parametrize("family", ["phimoe", "mistral"])
def test_a_window_that_no_sequence_exceeds_is_full_attention(family: str, tmp_path: Path) -> None:
    if family == "phimoe":  # its layers do not pass the window to attention
        rope = {**TestScaledRope.LONG, "short_mscale": 1.2, "long_mscale": 1.3}
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        config: Any = PhimoeConfig(**TINY, **experts, sliding_window=512, rope_parameters=rope)
    else:
        config = MistralConfig(**TINY, sliding_window=600)
    runner = runner_of(write_checkpoint(config, tmp_path))
    assert runner.groups.is_full
    assert logprobs(runner, 20, 16, 1) == pytest.approx(reference_logprobs(tmp_path), abs=1e-4)


class TestScaledRope:
    """A token's KV must not depend on other sequences of the batch, because a block is shared by its tokens alone."""

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
    def test_is_computed_as_in_transformers_within_the_original_length(self, rope: Any, tmp_path: Path) -> None:
        folder = write_checkpoint(config_of("llama", rope_parameters=rope), tmp_path)
        check_length(str(folder), load_model_config(str(folder)), 64)
        assert logprobs(runner_of(folder), 20, 16, 1) == pytest.approx(reference_logprobs(folder), abs=1e-4)

    def test_longrope_is_refused_beyond_its_original_length(self, tmp_path: Path) -> None:
        config_of("llama", rope_parameters=self.LONG).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="--max-model-len 65: give at most 64; beyond that, the longrope scaling"):
            check_length(str(tmp_path), load_model_config(str(tmp_path)), 65)

    def test_dynamic_scaling_is_refused_beyond_the_models_positions(self, tmp_path: Path) -> None:
        config_of("llama", rope_parameters=self.DYNAMIC).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="--max-model-len 513 is more than the 512 positions"):
            check_length(str(tmp_path), load_model_config(str(tmp_path)), 513)


TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}{{ 'assistant:' }}"


@pytest.mark.parametrize("as_file", [True, False], ids=["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_is_found_in_both_files(as_file: bool, tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = byte_fallback_tokenizer(chat_template=TEMPLATE)
    tokenizer.save_pretrained(tmp_path, save_jinja_files=as_file)
    assert (tmp_path / "chat_template.jinja").exists() == as_file
    assert ("chat_template" in json.loads((tmp_path / "tokenizer_config.json").read_text())) != as_file
    messages = [{"role": "user", "content": "the river"}]
    text = load_tokenizer(str(tmp_path)).apply_chat_template(messages, tokenize=False)
    assert text == "<s>user: the riverassistant:"


def test_a_text_begins_with_the_token_that_its_tokenizer_adds(tmp_path: Path) -> None:
    byte_fallback_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer("the river")["input_ids"][0] == tokenizer.bos_token_id


# The statements of the README about decoders.

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
        (Gemma3nTextConfig(**{**TINY, "num_hidden_layers": 10}, head_dim=8), "layers that use the KV of other layers"),
        (Gemma3TextConfig(**TINY, head_dim=8, use_bidirectional_attention=True), "has bidirectional attention"),
        (
            Qwen3NextConfig(**{**TINY, "num_hidden_layers": 4}, head_dim=8),
            "layers of type linear_attention; this engine supports only full attention, sliding windows and short conv",
        ),
        (
            Llama4TextConfig(**TINY, head_dim=8),
            "layers of type chunked_attention; this engine supports",
        ),
    ],
    ids=["shared KV", "both directions", "recurrent layers", "chunks"],
)
def test_decoders_with_other_layers_are_refused_in_one_sentence(config: Any, reason: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason) as caught:
        runner_of(tmp_path)
    assert "\n" not in str(caught.value)


def test_blocks_too_small_for_the_state_of_a_convolution_are_refused(tmp_path: Path) -> None:
    config = Lfm2Config(
        **{**TINY, "hidden_size": 512, "num_key_value_heads": 1}, layer_types=["conv", "full_attention"]
    )
    with pytest.raises(
        ConfigError, match="too small for the state of a convolution layer; give --block-size 4 or more"
    ):
        group_layers("m", config, 3, 2 * 3 * 128)
    config.save_pretrained(tmp_path)
