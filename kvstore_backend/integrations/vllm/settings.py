"""Collects the settings of a vLLM instance that can change the bytes of its blocks. Imports nothing from vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvstore_backend.backend import ConfigError
from kvstore_backend.config import select_variables
from kvstore_backend.integrations.vllm.fields import IGNORED_VARIABLES, collect_fields, describe_config
from kvstore_backend.namespace import fingerprint_model

__all__ = ["collect_settings", "find_checkpoint"]

# Load formats with the same result: each reads the checkpoint's safetensors, if the checkpoint has any.
_PLAIN_FORMATS = ("auto", "hf", "safetensors")
# Kinds of rotary embeddings that depend on ``max_model_len`` in some models, for all prompts.
_ROPES_BY_LENGTH = ("longrope", "dynamic")
# Without another setting, Llama 4 scales queries by position if ``max_model_len`` is larger (vLLM 0.32's llama4.py).
_LLAMA4_TUNED_FROM = 32768


def collect_settings(vllm_config: Any, variables: Iterable[str] = ()) -> dict[str, object]:
    """Return the settings that can change the bytes of blocks and differ from their defaults, with their values.

    Instances with equal results can share blocks.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        variables: names of the environment variables that vLLM reads.

    Raises:
        ConfigError: the files of the draft model are not on this machine.
    """
    settings = collect_fields(vllm_config, _describe_special(vllm_config))
    settings |= _describe_generation(vllm_config.model_config)
    # The hash of every prompt's first block depends on PYTHONHASHSEED. cuBLAS reads NVIDIA_TF32_OVERRIDE.
    counted = {"PYTHONHASHSEED", "NVIDIA_TF32_OVERRIDE", *variables} - IGNORED_VARIABLES
    return settings | {f"environment {name}": value for name, value in select_variables(counted).items()}


def find_checkpoint(model: Any, download_dir: str | None = None) -> Path:
    """Return the folder from which vLLM loads the weights: the model's folder, or the download folder of a hub name.

    Raises:
        ConfigError: the model is not a folder, and Hugging Face's cache on this machine does not have it.
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
        raise ConfigError(
            f"model {model.model!r} is neither a folder nor in Hugging Face's cache on this machine: {exc}"
        ) from exc


def _describe_special(vllm_config: Any) -> dict[str, object]:
    """Return the values of some fields for the namespace, by ``<class>.<field>``, in place of the fields' own values.

    The own value of such a field differs between instances with equal blocks, or is equal in instances with different
    blocks.
    """
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
        # Usually the same as the model's dtype; then prompts without adapters share blocks with other instances.
        special["LoRAConfig.lora_dtype"] = None if loras.lora_dtype in ("auto", model.dtype) else str(loras.lora_dtype)
    if (drafts := vllm_config.speculative_config) is not None:
        special["SpeculativeConfig.draft_model_config"] = _describe_draft(drafts, model, load.download_dir)
    if (media := model.multimodal_config) is not None and media.mm_encoder_fp8_scale_path:
        special["MultiModalConfig.mm_encoder_fp8_scale_path"] = _describe_file(media.mm_encoder_fp8_scale_path)
    return special


def _describe_generation(model: Any) -> dict[str, object]:
    """Return the members of generation_config that attention reads; ``hf_config`` may lack these, as with Llama 4."""
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
    """Return the fingerprint of the draft model; None without a draft model, or if it uses the model's own weights."""
    draft = drafts.draft_model_config
    if draft is None or draft.model == model.model:
        return None
    return fingerprint_model(find_checkpoint(draft, download_dir))


def _describe_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return path
