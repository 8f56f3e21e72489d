"""Loads a checkpoint: its configuration, its model, its tokenizer and its default values for requests."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.model.attention import paged
from engine.model.out_of_memory import explain_out_of_memory
from engine.scheduling.request import GREATEST_PENALTY, LEAST_PENALTY, SamplingDefaults
from kvstore_backend import ConfigError

__all__ = [
    "check_length",
    "choose_device",
    "choose_dtype",
    "choose_kernels",
    "eos_token_ids",
    "load_model_config",
    "load_tokenizer",
    "read_defaults",
    "read_model",
    "settle_rope",
    "shorten_look_ups",
    "warn_of_ignored_settings",
]

log = logging.getLogger(__name__)

# Numbers in a generation_config.json that are defaults for requests, each with its minimum and maximum.
_DEFAULTS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, math.inf),
    "repetition_penalty": (LEAST_PENALTY, GREATEST_PENALTY),
}
# Settings in a generation_config.json that this engine ignores, each with the value that changes nothing.
_IGNORED_SETTINGS = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "frequency_penalty": 0.0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "presence_penalty": 0.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


def load_model_config(folder: str) -> Any:
    """Load the text configuration of a checkpoint.

    Raises:
        ConfigError: transformers cannot load the config.json.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as exc:
        reason = str(exc).strip().splitlines()[0]
        raise ConfigError(f"--model {folder!r} is not a checkpoint that transformers can load: {reason}") from exc
    return config.get_text_config()


def check_length(folder: str, config: Any, max_model_len: int) -> None:
    """Check that the model supports sequences of ``max_model_len`` tokens.

    With RoPE scaling of the type "longrope", transformers chooses the frequencies for a whole forward pass, by its
    largest position. So a long sequence would change the keys of all sequences in the same step. This does not happen
    up to ``original_max_position_embeddings``, so that is the limit here. Scaling of the type "dynamic" begins only
    after ``max_position_embeddings``, which no sequence exceeds.

    Raises:
        ConfigError: ``max_model_len`` is too large.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and max_model_len > longest:
        raise ConfigError(f"--max-model-len {max_model_len} is more than the {longest} positions of {folder}; lower it")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and max_model_len > rope["original_max_position_embeddings"]:
        raise ConfigError(
            f"--max-model-len {max_model_len}: give at most {rope['original_max_position_embeddings']}; "
            f"beyond that, the longrope scaling of {folder} would depend on the other sequences in the batch"
        )


def read_model(folder: str, dtype: torch.dtype, *, is_copied: bool) -> tuple[Any, frozenset[str]]:
    """Load the model of a checkpoint into host memory.

    Args:
        folder: the folder of the checkpoint.
        dtype: dtype of the weights.
        is_copied: whether the tensors are copied. If not, they may be mapped from the files.

    Returns:
        The model, and the names of its tensors that the files do not have.

    Raises:
        ConfigError: transformers cannot load the model.
    """
    try:
        with explain_out_of_memory(f"--model {folder!r} on this machine; use a smaller one", any_failure=False):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=paged.ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
            )
    except ConfigError:
        raise
    except Exception as exc:  # transformers raises many types of exceptions here
        reason = str(exc).strip().splitlines()[0]
        raise ConfigError(f"--model {folder!r} has no weights that transformers can load: {reason}") from exc
    if is_copied:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model, frozenset(map(str, info["missing_keys"]))


def choose_kernels(device: torch.device) -> None:
    """Disable cuDNN's kernels for attention on a GPU, in this whole process.

    For bfloat16 and float16 torch prefers cuDNN on Hopper and later GPUs (``check_prefer_cudnn_attention`` in its
    sdp_utils.cpp). But cuDNN builds a plan for each new shape, which took 0.4 s, and each step of a decode has a new
    shape. Without cuDNN torch uses flash attention and similar kernels.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def settle_rope(model: torch.nn.Module) -> None:
    """Switch off a check in RoPE modules: whether a sequence is so long that the frequencies must change.

    Each check would wait for the device. No check is necessary, because ``check_length`` refuses such long sequences.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            module.rope_type = "default"  # type: ignore[assignment]


def shorten_look_ups(model: torch.nn.Module) -> None:
    """Store submodules and weights in the ``__dict__`` of each module, so that Python finds them without a call.

    Otherwise each access calls ``Module.__getattr__``. These calls took a tenth of the host's time of a decode step,
    and on a GPU the host limits the speed of a step. If an attribute is set later, ``Module.__setattr__`` removes the
    stored attribute.
    """
    for module in model.modules():
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)


def eos_token_ids(config: Any, model: Any, vocab_size: int) -> frozenset[int]:
    """Return the tokens that end a text. Ids outside of the vocabulary are left out: some checkpoints have -1."""
    ids: set[int] = set()
    for source in (config, model.generation_config):
        eos = getattr(source, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def read_defaults(folder: str, generation_config: Any) -> SamplingDefaults:
    """Return the sampling defaults in a checkpoint's generation_config.json, from the fields that vLLM uses, too.

    Raises:
        ConfigError: a number is out of range.
    """
    found: dict[str, Any] = {}
    for name, (least, greatest) in _DEFAULTS.items():
        value = getattr(generation_config, name, None)
        if value is None:
            continue
        kinds = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= greatest:
            limits = f"from {least:g} to {greatest:g}" if greatest < math.inf else f"of at least {least:g}"
            raise ConfigError(
                f"--model {folder!r}: {name} {value!r} in its generation_config.json is not a number {limits}"
            )
        found[name] = max(value, 0) if name == "top_k" else float(value)
    if found:
        log.info("Default values for requests, from generation_config.json in %s: %s", folder, found)
    return SamplingDefaults(max_tokens=_default_max_tokens(folder, generation_config), **found)


def _default_max_tokens(folder: str, generation_config: Any) -> int | None:
    """Return the default ``max_tokens``, from ``max_new_tokens``, or None if only the context length limits answers."""
    limit = getattr(generation_config, "max_new_tokens", None)
    if limit is None:
        return None
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(
            f"--model {folder!r}: max_new_tokens {limit!r} in its generation_config.json is not a positive number"
        )
    return limit


def warn_of_ignored_settings(folder: str, generation_config: Any) -> None:
    values = {name: getattr(generation_config, name, None) for name in _IGNORED_SETTINGS}
    names = [name for name, value in values.items() if value not in (None, [], _IGNORED_SETTINGS[name])]
    if names:
        log.warning(
            "Answers may differ from those of transformers: these settings in generation_config.json of %s are "
            "ignored: %s",
            folder,
            ", ".join(names),
        )


def load_tokenizer(folder: str) -> Any:
    """Load the tokenizer of a checkpoint.

    Raises:
        ConfigError: transformers cannot load a tokenizer from the folder.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # Without a tokenizer's files some classes load an empty vocabulary instead of failing.
        if not tokenizer("a", add_special_tokens=False)["input_ids"]:
            raise ValueError("its vocabulary is empty")
    except Exception as exc:  # transformers raises many types of exceptions here
        reason = str(exc).strip().splitlines()[0]
        raise ConfigError(f"--model {folder!r} has no tokenizer that transformers can load: {reason}") from exc
    return tokenizer


def choose_device(wanted: str) -> str:
    """Return the device for ``--device wanted``: ``cpu`` or ``cuda``. For ``auto`` it is cuda if that is available.

    Raises:
        ConfigError: ``wanted`` is ``cuda``, but there is no CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: PyTorch sees no CUDA device; use --device cpu")
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"


def choose_dtype(wanted: str, config: Any) -> torch.dtype:
    """Return the dtype of weights and KV for ``--dtype wanted``. For ``auto`` it is the dtype of the checkpoint."""
    if wanted != "auto":
        chosen: torch.dtype = getattr(torch, wanted)
        return chosen
    saved = getattr(config, "dtype", None)
    return saved if isinstance(saved, torch.dtype) else torch.float32
