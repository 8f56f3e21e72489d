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


def collect_settings(vllm_config: Any, variables: Iterable[str] = ()) -> dict[str, object]:
    """Names and values of those that are not at their defaults; equal for instances that may share blocks.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        variables: of the environment, which vLLM reads.

    Raises:
        ConfigError: the files of a draft model are not here.
    """
    settings = collect_fields(vllm_config, _describe_special(vllm_config))
    # Both decide on the hashes of blocks; Python's own seed is vLLM's for the first block of every prompt.
    counted = {"PYTHONHASHSEED", *variables} - IGNORED_VARIABLES
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
    is_random = load.load_format == "dummy"
    special: dict[str, object] = {
        "ModelConfig.hf_config": describe_config(model.hf_config),
        # Of Phi-3's two kinds of rotation an instance takes one for all prompts, by the longest that it is to take.
        "ModelConfig.max_model_len": model.max_model_len if "longrope" in str(rope) else None,
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
