"""Those settings of a vLLM instance that decide on the bytes of its blocks, for its namespace; free of vLLM."""

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

# All of these read the checkpoint's safetensors, where it has any.
_PLAIN_FORMATS = ("auto", "hf", "safetensors")
# Rotations that some models build for the longest prompt an instance takes, and that differ then for all prompts.
_ROPES_BY_LENGTH = ("longrope", "dynamic")
# Llama 4 scales queries by their positions from this length on (vLLM 0.32's llama4.py), unless it is told otherwise.
_LLAMA4_TUNED_FROM = 32768


def collect_settings(vllm_config: Any, variables: Iterable[str] = ()) -> dict[str, object]:
    """Names and values of those that are not at their defaults; equal for instances that may share blocks.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        variables: of the environment, which vLLM reads.

    Raises:
        ConfigError: the files of a draft model are not here.
    """
    settings = collect_fields(vllm_config, _describe_special(vllm_config))
    settings |= _describe_generation(vllm_config.model_config)
    # Python's seed is vLLM's for the hash of the first block of every prompt; cuBLAS reads the other one itself.
    counted = {"PYTHONHASHSEED", "NVIDIA_TF32_OVERRIDE", *variables} - IGNORED_VARIABLES
    return settings | {f"environment {name}": value for name, value in named_variables(counted).items()}


def find_checkpoint(model: Any, download_dir: str | None = None) -> Path:
    """The folder the weights were loaded from; for a name of the Hugging Face hub, where they were downloaded to.

    Raises:
        ConfigError: there is neither.
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
    """Fields whose values say too much or too little as they are."""
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
        # Mostly the model's, and then no difference from instances without adapters, with which prompts are shared.
        special["LoRAConfig.lora_dtype"] = None if loras.lora_dtype in ("auto", model.dtype) else str(loras.lora_dtype)
    if (drafts := vllm_config.speculative_config) is not None:
        special["SpeculativeConfig.draft_model_config"] = _describe_draft(drafts, model, load.download_dir)
    if (media := model.multimodal_config) is not None and media.mm_encoder_fp8_scale_path:
        special["MultiModalConfig.mm_encoder_fp8_scale_path"] = _describe_file(media.mm_encoder_fp8_scale_path)
    return special


def _describe_generation(model: Any) -> dict[str, object]:
    """What attention reads of the generation config; with Llama 4 as a part of a model it is not in ``hf_config``."""
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
    """Which weights make drafts; none: those of the model itself, or none at all."""
    draft = drafts.draft_model_config
    if draft is None or draft.model == model.model:
        return None
    return fingerprint_model(find_checkpoint(draft, download_dir))


def _describe_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return path
