"""Tiny checkpoints with random float32 weights, large enough to make every next token a clear choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Ernie4_5Config, LlamaConfig, Qwen2Config, Qwen3Config

__all__ = ["CHECKPOINTS", "VOCAB_SIZE", "write_checkpoint"]

VOCAB_SIZE = 300

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}

CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "qwen2-grouped-untied": lambda: Qwen2Config(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3-multihead-tied": lambda: Qwen3Config(**_SHAPE, num_key_value_heads=4, tie_word_embeddings=True),
    "llama-multiquery-untied": lambda: LlamaConfig(**_SHAPE, num_key_value_heads=1, tie_word_embeddings=False),
    "ernie4.5-grouped-tied": lambda: Ernie4_5Config(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
}
"""Architectures, with grouped, single and one-per-head KV heads, and with tied and untied embeddings."""


def write_checkpoint(config: Any, folder: Path) -> Path:
    """Save a model of this configuration with weights that are the same in every run; no tokenizer."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero, where a lost bias goes unnoticed
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder
