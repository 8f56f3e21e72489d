"""Settings of a vLLM instance that determine its blocks' bytes, for its namespace; imports nothing from vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvstore_backend.backend import ConfigError
from kvstore_backend.config import named_variables
from kvstore_backend.integrations.vllm.fields import IGNORED_VARIABLES, collect_fields, describe_config
from kvstore_backend.namespace import fingerprint_model

__all__ = ["collect_settings", "find_checkpoint"]

# All of these formats read the checkpoint's safetensors, if it has any.
_PLAIN_FORMATS = ("auto", "hf", "safetensors")
# Some models build these rotations for an instance's longest prompt; they then differ for all prompts.
_ROPES_BY_LENGTH = ("longrope", "dynamic")
# Llama 4 scales queries by position from this length on (vLLM 0.32's llama4.py), unless configured otherwise.
_LLAMA4_TUNED_FROM = 32768


def collect_settings(vllm_config: Any, variables: Iterable[str] = ()) -> dict[str, object]:
    """Return names and values of settings that are not at their defaults; equal for instances that may share blocks.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        variables: names of environment variables that vLLM reads.

    Raises:
        ConfigError: the files of a draft model are missing here.
    """
    settings = collect_fields(vllm_config, _describe_special(vllm_config))
    settings |= _describe_generation(vllm_config.model_config)
    # vLLM makes the hash of every prompt's first block from Python's seed; cuBLAS itself reads the other variable.
    counted = {"PYTHONHASHSEED", "NVIDIA_TF32_OVERRIDE", *variables} - IGNORED_VARIABLES
    return settings | {f"environment {name}": value for name, value in named_variables(counted).items()}


def find_checkpoint(model: Any, download_dir: str | None = None) -> Path:
    """Return the folder from which the weights were loaded; for a name of the Hugging Face hub, the download folder.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model.model, revision=model.revision, cache_dir=download_dir, local_files_only=True)
        )
    except Exception as exc:
        raise ConfigError(f"model {model.model!r} is no folder, and not in Hugging Face's cache here: {exc}") from exc


def _describe_special(vllm_config: Any) -> dict[str, object]:
    """Return values for fields with own values that contain too much or too little."""
    model, load = vllm_config.model_config, vllm_config.load_config
    rope = getattr(model.hf_text_config, "rope_parameters", None)
    is_by_length = any(each in str(rope) for each in _ROPES_BY_LENGTH)
    is_random = load.load_format == "dummy"
    special: dict[str, object] = {
        "ModelConfig.hf_config": describe_config(model.hf_config),
        "ModelConfig.max_model_len": model.max_model_len if is_by_length else None,
        "ModelConfig.seed": model.seed if is_random else None,
        "LoadConfig.load_format": None if load.load_format in _PLAIN_FORMATS else str(load.load_format),
    }
    if (loras := vllm_config.lora_config) is not None:
        # Usually the model's dtype; then there is no difference from instances without adapters, and prompts are
        # shared.
        special["LoRAConfig.lora_dtype"] = None if loras.lora_dtype in ("auto", model.dtype) else str(loras.lora_dtype)
    if (drafts := vllm_config.speculative_config) is not None:
        special["SpeculativeConfig.draft_model_config"] = _describe_draft(drafts, model, load.download_dir)
    if (media := model.multimodal_config) is not None and media.mm_encoder_fp8_scale_path:
        special["MultiModalConfig.mm_encoder_fp8_scale_path"] = _describe_file(media.mm_encoder_fp8_scale_path)
    return special


def _describe_generation(model: Any) -> dict[str, object]:
    """Return the generation settings that attention reads; ``hf_config`` lacks them if Llama 4 is a part of a model."""
    generation = {**model.try_get_generation_config(), **model.override_generation_config}
    counted = {name: value for name, value in generation.items() if name.startswith("attn_")}
    kinds = [
        f"{getattr(each, 'model_type', '')} {getattr(each, 'architectures', '')}".lower()
        for each in (model.hf_config, model.hf_text_config)
    ]
    if any("llama4" in kind for kind in kinds):
        counted.setdefault("attn_temperature_tuning", model.max_model_len > _LLAMA4_TUNED_FROM)
    return {f"generation_config {name}": value for name, value in counted.items()}


def _describe_draft(drafts: Any, model: Any, download_dir: str | None) -> str | None:
    """Return a fingerprint of the weights that make drafts; None: the model's own weights, or no drafts."""
    draft = drafts.draft_model_config
    if draft is None or draft.model == model.model:
        return None
    return fingerprint_model(find_checkpoint(draft, download_dir))


def _describe_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return path
