"""Supported checkpoints: every layer must use our attention. Others are refused at the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, Qwen2Config, Qwen3NextConfig, StableLmConfig

from engine.model.checkpoint import choose_device, choose_dtype, load_model_config, read_model
from engine.model.model_runner import ModelRunner
from engine.scheduling.request import SamplingDefaults
from kvstore_backend import ConfigError
from kvstore_backend.config import PRECISION_VARIABLES
from tests.engine.checkpoints import CHECKPOINTS, write_checkpoint

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def runner_of(folder: Path, block_size: int = 16) -> ModelRunner:
    runner = ModelRunner(str(folder), load_model_config(str(folder)), "cpu", torch.float32, block_size)
    runner.allocate_kv(4)
    return runner


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_model_with_transformers_attention_interface_can_run(tmp_path: Path, name: str, block_size: int) -> None:
    runner = runner_of(write_checkpoint(CHECKPOINTS[name](), tmp_path), block_size)
    runner.try_out()
    assert not runner.kv.any(), "the trial step left values in KV memory"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2), "transformers' AttentionInterface"),
        (StableLmConfig(**SMALL), "cannot run a StableLmForCausalLM"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_without_our_attention_is_refused_in_one_sentence(tmp_path: Path, config: Any, reason: str) -> None:
    runner = runner_of(write_checkpoint(config, tmp_path))
    with pytest.raises(ConfigError) as caught:
        runner.try_out()
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"--model '{tmp_path}': ")
    assert "\n" not in str(caught.value)


def test_layers_of_other_types_are_refused_before_the_weights_are_loaded(tmp_path: Path) -> None:
    Qwen3NextConfig(**{**SMALL, "num_hidden_layers": 4}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="layers of type linear_attention; this engine supports"):
        runner_of(tmp_path)


def test_a_config_that_is_not_json_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{model_type: qwen2}")
    with pytest.raises(ConfigError, match="is not a checkpoint that transformers can load"):
        load_model_config(str(tmp_path))


def test_blocks_are_contiguous_in_memory(tiny_checkpoint: Path) -> None:
    runner = runner_of(tiny_checkpoint)
    spans = [runner.span(block) for block in range(4)]
    assert spans[0].address == runner.kv.data_ptr()
    assert [span.address + span.nbytes for span in spans[:-1]] == [span.address for span in spans[1:]]
    assert sum(span.nbytes for span in spans) == runner.kv.numel() * runner.kv.element_size()


def test_a_checkpoint_that_changes_while_it_is_loaded_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "m")

    def read(*args: Any, **options: Any) -> Any:
        found = read_model(*args, **options)
        (folder / "config.json").write_text((folder / "config.json").read_text().replace("{", '{"more": 1,', 1))
        return found

    monkeypatch.setattr("engine.model.model_runner.read_model", read)
    with pytest.raises(ConfigError, match="changed while its weights were loaded; start again"):
        runner_of(folder)


@pytest.mark.parametrize("name", PRECISION_VARIABLES)
def test_instances_that_calculate_with_another_precision_share_no_blocks(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = runner_of(tiny_checkpoint).namespace
    monkeypatch.setenv(name, "1")
    assert runner_of(tiny_checkpoint).namespace.digest != plain.digest


def test_instances_with_different_versions_of_transformers_share_no_blocks(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = runner_of(tiny_checkpoint).namespace
    monkeypatch.setattr("engine.model.model_runner.transformers.__version__", "5.99.0")
    assert runner_of(tiny_checkpoint).namespace.digest != plain.digest


def test_all_end_tokens_of_the_checkpoint_are_used(word_model: Path) -> None:
    assert runner_of(word_model).eos_token_ids == {256, 258}


def test_end_tokens_outside_the_vocabulary_are_ignored(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = with_generation_config(tiny_checkpoint, tmp_path, {"eos_token_id": [-1, 3, 1 << 20]})
    found = runner_of(folder).eos_token_ids
    assert 3 in found
    assert found.isdisjoint({-1, 1 << 20})


@pytest.mark.parametrize(
    ("generation_config", "names"),
    [
        ({"no_repeat_ngram_size": 3, "suppress_tokens": [1], "forced_bos_token_id": 0}, 3),
        ({"min_p": 0.1, "presence_penalty": 1.5, "top_p": 0.9}, 2),
        ({"no_repeat_ngram_size": 0, "suppress_tokens": [], "num_beams": 1, "repetition_penalty": 1.05}, 0),
    ],
)
def test_one_warning_names_unsupported_generation_settings_of_the_checkpoint(
    tiny_checkpoint: Path,
    tmp_path: Path,
    generation_config: dict[str, Any],
    names: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner_of(with_generation_config(tiny_checkpoint, tmp_path, generation_config))
    messages = [record.getMessage() for record in caplog.records if record.name == "engine.model.checkpoint"]
    assert len(messages) == bool(names)
    assert sum(name in "".join(messages) for name in generation_config) == names


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("repetition_penalty", value, "is not a number from 0.01 to 100") for value in (0, -1.5, "1.05", 1e9)),
        ("temperature", -0.1, "is not a number from 0 to 100"),
        ("temperature", True, "is not a number from 0 to 100"),
        ("top_p", 1.5, "is not a number from 0 to 1"),
        ("top_k", 1.5, "is not a number of at least -1"),
        ("top_k", -2, "is not a number of at least -1"),
    ],
)
def test_a_default_outside_its_range_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, name: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{name} .* in its generation_config.json {message}"):
        runner_of(with_generation_config(tiny_checkpoint, tmp_path, {name: value}))


def test_sampling_defaults_come_from_the_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert runner_of(tiny_checkpoint).defaults == SamplingDefaults()
    qwens = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    stated = with_generation_config(tiny_checkpoint, tmp_path, {**qwens, "max_new_tokens": 48})
    assert runner_of(stated).defaults == SamplingDefaults(48, 0.7, 0.8, 20, 1.05)


@pytest.mark.parametrize("limit", [0, -1, 1.5])
def test_a_default_length_must_be_a_positive_number(tiny_checkpoint: Path, tmp_path: Path, limit: object) -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens"):
        runner_of(with_generation_config(tiny_checkpoint, tmp_path, {"max_new_tokens": limit}))


def with_generation_config(checkpoint: Path, folder: Path, generation_config: dict[str, Any]) -> Path:
    """Copy the checkpoint, with this generation config."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


@pytest.mark.parametrize(("requested", "chosen"), [("float16", torch.float16), ("auto", torch.bfloat16)])
def test_the_dtype_is_the_given_one_or_that_of_the_checkpoint(requested: str, chosen: torch.dtype) -> None:
    assert choose_dtype(requested, Qwen2Config(dtype="bfloat16")) == chosen


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_cuda_device_is_an_error_and_auto_selects_the_cpu() -> None:
    assert choose_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="--device cuda: PyTorch sees no CUDA device; use --device cpu"):
        choose_device("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cudnn_attention_is_disabled_on_a_gpu(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(ModelRunner, "_place_model", lambda *_: None)
    torch.backends.cuda.enable_cudnn_sdp(True)
    config = load_model_config(str(tiny_checkpoint))
    try:
        ModelRunner(str(tiny_checkpoint), config, device, torch.float32, 16)
        assert torch.backends.cuda.cudnn_sdp_enabled() is (device == "cpu")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
