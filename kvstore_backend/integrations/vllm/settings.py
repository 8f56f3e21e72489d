"""Collects the settings of a vLLM instance that can change the bytes of its blocks. Imports nothing from vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstore_backend.backend import ConfigError
from kvstore_backend.config import PRECISION_VARIABLES, select_variables
from kvstore_backend.integrations.vllm.fields import IGNORED_VARIABLES, collect_fields, describe_config
from kvstore_backend.namespace import fingerprint_model

__all__ = [
    "collect_settings",
    "find_checkpoint",
    "find_configuration",
    "fingerprint_checkpoint",
    "is_quantized",
    "list_foreign_weights",
]

# Load formats with the same result: each reads the checkpoint's safetensors, if the checkpoint has any. But if it has
# files in Mistral's format, only "auto" reads these.
_PLAIN_FORMATS = ("auto", "hf", "safetensors")
_MISTRAL_FILES = "consolidated*.safetensors"
# Load formats with which vLLM reads weights from a file of another name, or from another process.
_FOREIGN_FORMATS = ("ipc_cache", "modelexpress", "tensorizer")
# Kinds of rotary embeddings that depend on ``max_model_len`` in some models, for all prompts.
_ROPES_BY_LENGTH = ("longrope", "dynamic")
# Without another setting, Llama 4 scales queries by position if ``max_model_len`` is larger (vLLM 0.32's llama4.py).
_LLAMA4_TUNED_FROM = 32768
# Members of config.json that name models whose weights vLLM also reads (Ultravox).
_OTHER_MODELS = ("audio_model_id", "text_model_id")
# Architecture -> folder in the checkpoint with a part of its weights.
_SUBFOLDERS = {"MiMoV2OmniForCausalLM": "audio_tokenizer", "MoonshotKimiaForCausalLM": "whisper-large-v3"}
# Variables that vLLM's list lacks: the hash of every prompt's first block depends on PYTHONHASHSEED, and the video
# frames of one model on XHS_VIDEO_JPEG_QUALITY.
_MORE_VARIABLES = ("PYTHONHASHSEED", "XHS_VIDEO_JPEG_QUALITY", *PRECISION_VARIABLES)
_PLAIN_KV = ("auto", "bfloat16", "float16", "float32")
# Kinds of quantization that only compress weights: every GPU calculates with the model's dtype.
_PLAIN_QUANTIZATION = (None, "auto_awq", "auto_gptq", "awq", "awq_marlin", "gptq", "gptq_marlin")


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
    settings |= _describe_other_weights(vllm_config)
    counted = {*_MORE_VARIABLES, *variables} - IGNORED_VARIABLES
    return settings | {f"environment {name}": value for name, value in select_variables(counted).items()}


def is_quantized(vllm_config: Any) -> bool:
    """Return whether weights or KV are quantized, so that vLLM may calculate in another format on another GPU."""
    model = vllm_config.model_config
    is_plain = model.quantization in _PLAIN_QUANTIZATION and model.quantization_config is None
    return not is_plain or vllm_config.cache_config.cache_dtype not in _PLAIN_KV


def find_checkpoint(model: Any, download_dir: str | None = None) -> Path:
    """Return the folder from which vLLM loads the weights: the model's folder, or the download folder of a hub name.

    Raises:
        ConfigError: the model is not a folder, and Hugging Face's cache on this machine does not have it.
    """
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    if any(text.strip().lower() in ("1", "true") for text in select_variables(["VLLM_USE_MODELSCOPE"]).values()):
        raise ConfigError(f"model {model.model!r} is not a folder, but a name at ModelScope; give vLLM its folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model.model, revision=model.revision, cache_dir=download_dir, local_files_only=True)
        )
    except Exception as exc:
        raise ConfigError(
            f"model {model.model!r} is neither a folder nor in Hugging Face's cache on this machine: {exc}"
        ) from exc


def find_configuration(model: Any, download_dir: str | None = None) -> Path:
    """Return the folder with a model's config.json; vLLM's ``--download-dir`` may have only the model's weights."""
    folder = find_checkpoint(model, download_dir)
    is_there = any((folder / name).exists() for name in ("config.json", "params.json"))
    return folder if is_there else find_checkpoint(model)


def list_foreign_weights(vllm_config: Any) -> list[str]:
    """Return the settings with which vLLM reads weights that are not in the model's folder."""
    loads = [vllm_config.load_config, getattr(vllm_config.speculative_config, "draft_load_config", None)]
    formats = [f"--load-format {load.load_format}" for load in loads if load and load.load_format in _FOREIGN_FORMATS]
    weights = vllm_config.model_config.model_weights
    return [*formats, f"model_weights {weights}"] if weights else formats


def fingerprint_checkpoint(model: Any, vllm_config: Any) -> str:
    """Return the fingerprint of the checkpoint of ``model``, a ``ModelConfig`` of the instance.

    If vLLM reads weights that are not in the model's folder (``list_foreign_weights``), the fingerprint does not
    identify these weights, so the operator's ``weights_version`` must. The folder may then be without weights.
    """
    if list_foreign_weights(vllm_config):
        return fingerprint_model(find_checkpoint(model), needs_weights=False)
    place = vllm_config.load_config.download_dir
    return fingerprint_model(find_checkpoint(model, place), find_configuration(model, place))


def _describe_special(vllm_config: Any) -> dict[str, object]:
    """Return values for the namespace, by ``<class>.<field>``, that replace the values of these fields.

    With the fields' own values, instances with equal blocks would have different namespaces, or instances with
    different blocks would have the same namespace.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    is_plain = load.load_format == "auto" or (
        load.load_format in _PLAIN_FORMATS and not any(find_checkpoint(model, load.download_dir).glob(_MISTRAL_FILES))
    )
    rope = getattr(model.hf_text_config, "rope_parameters", None)
    is_by_length = any(each in str(rope) for each in _ROPES_BY_LENGTH)
    is_random = load.load_format == "dummy"
    special: dict[str, object] = {
        "ModelConfig.hf_config": describe_config(model.hf_config),
        "ModelConfig.max_model_len": model.max_model_len if is_by_length else None,
        "ModelConfig.seed": model.seed if is_random else None,
        "LoadConfig.load_format": None if is_plain else str(load.load_format),
    }
    if (loras := vllm_config.lora_config) is not None:
        # Usually the same as the model's dtype; then prompts without adapters share blocks with other instances.
        special["LoRAConfig.lora_dtype"] = None if loras.lora_dtype in ("auto", model.dtype) else str(loras.lora_dtype)
    if (drafts := vllm_config.speculative_config) is not None:
        special["SpeculativeConfig.draft_model_config"] = _describe_draft(drafts, vllm_config)
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


def _describe_other_weights(vllm_config: Any) -> dict[str, object]:
    """Return fingerprints of weights that are not in the checkpoint's folder itself.

    They are in subfolders, or in other models that config.json names.
    """
    model, place = vllm_config.model_config, vllm_config.load_config.download_dir
    names = {name: str(getattr(model.hf_config, name, None) or "") for name in _OTHER_MODELS}
    found = {
        name: fingerprint_checkpoint(SimpleNamespace(model=text, revision=None), vllm_config)
        for name, text in names.items()
        if text
    }
    for architecture in getattr(model.hf_config, "architectures", None) or ():
        if (name := _SUBFOLDERS.get(architecture)) and (folder := find_checkpoint(model, place) / name).is_dir():
            found[name] = fingerprint_model(folder, find_configuration(model, place) / name)
    return {f"weights in {name}": fingerprint for name, fingerprint in found.items()}


def _describe_draft(drafts: Any, vllm_config: Any) -> str | None:
    """Return the fingerprint of the draft model; None without a draft model, or if it uses the model's own weights."""
    draft = drafts.draft_model_config
    if draft is None or draft.model == vllm_config.model_config.model:
        return None
    return fingerprint_checkpoint(draft, vllm_config)


def _describe_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return path
