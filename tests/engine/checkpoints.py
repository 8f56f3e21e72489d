"""Tiny checkpoints with random float32 weights, large enough that the likeliest token is always clear."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from engine import make_model
from tests.support.small_model import write_few_words

__all__ = [
    "ARCHITECTURES",
    "CHECKPOINTS",
    "GROUPED",
    "VOCAB_SIZE",
    "byte_fallback_tokenizer",
    "config_of",
    "write_characters_in_parts",
    "write_checkpoint",
]

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

ARCHITECTURES: dict[str, Callable[..., Any]] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "ernie4.5": Ernie4_5Config,
}


def config_of(architecture: str, **changes: Any) -> Any:
    """Make a tiny configuration: by default, two heads share a KV head, and embeddings are untied."""
    shape = {**_SHAPE, "num_key_value_heads": 2, "tie_word_embeddings": False, **changes}
    return ARCHITECTURES[architecture](**shape)


CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "qwen2-grouped-untied": lambda: Qwen2Config(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3-multihead-tied": lambda: Qwen3Config(**_SHAPE, num_key_value_heads=4, tie_word_embeddings=True),
    "llama-multiquery-untied": lambda: LlamaConfig(**_SHAPE, num_key_value_heads=1, tie_word_embeddings=False),
    "ernie4.5-grouped-tied": lambda: Ernie4_5Config(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
}
"""Architectures with grouped, single and one-per-head KV heads, and with tied and untied embeddings."""


WINDOW = 40
"""Tokens that a layer with a sliding window reads: no multiple of a block."""

_GROUPED = {**_SHAPE, "num_hidden_layers": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
_SLIDING, _FULL = "sliding_attention", "full_attention"

GROUPED: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: Gemma2Config(**_GROUPED, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_GROUPED, "num_hidden_layers": 7},
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        layer_types=[_SLIDING] * 3 + [_FULL] + [_SLIDING] * 2 + [_FULL],
    ),
    "gpt-oss": lambda: GptOssConfig(**_GROUPED, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "mistral": lambda: MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "qwen2-windows": lambda: Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3
    ),
    "cohere2": lambda: Cohere2Config(
        **_without(_GROUPED, "head_dim"), sliding_window=WINDOW, layer_types=[_SLIDING] * 3 + [_FULL]
    ),
    "lfm2": lambda: Lfm2Config(
        **_without(_GROUPED, "head_dim"), layer_types=["conv", _FULL, "conv", "conv"], conv_bias=True
    ),
}
"""Architectures with several groups of layers, or one without full attention."""


def _without(shape: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in shape.items() if key != name}


def write_checkpoint(config: Any, folder: Path) -> Path:
    """Save a model of this configuration without a tokenizer. Its weights are equal in all runs."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers sets them to zero, which would hide a missing bias
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def byte_fallback_tokenizer(**settings: Any) -> Any:
    """Make a tokenizer like those of SentencePiece models (Llama, ERNIE): a few words, and UTF-8 bytes for the rest.

    It adds ``<s>`` before a text. ``settings`` are further arguments of ``PreTrainedTokenizerFast``.
    """
    letters = "\u2581abcdefghijklmnopqrstuvwxyz"
    words = ["\u2581the", "\u2581river"]
    parts = sorted({word[:end] for word in words for end in range(2, len(word) + 1)}, key=len)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *parts]
    merges = [(piece[:-1], piece[-1]) for piece in parts]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings
    )


def write_characters_in_parts(folder: Path) -> Path:
    """Write a checkpoint that generates words, as ``write_few_words`` does, and characters of two to four tokens."""
    write_few_words(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tensors = load_file(folder / "model.safetensors")
    head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    stream = torch.Generator().manual_seed(7)
    channel = make_model.CONSTANT_CHANNEL
    for character in "\u00e9\u20ac\U0001f600":
        first, *others = tokenizer.encode(character).ids
        head[first] = 0.5 * torch.randn(head.shape[1], generator=stream)
        for before, after in itertools.pairwise([first, *others]):
            # A separate channel, to which no layer writes, makes each part always follow the part before it.
            channel += 1
            for name, tensor in tensors.items():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    tensor[channel] = 0
            embedding[:, channel] = 0
            head[:, channel] = 0
            embedding[before, channel] = 10
            head[after, channel] = 100
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
