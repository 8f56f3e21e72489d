"""Small random checkpoints of model families whose layers store their KV in several ways, for ``vllm_families.py``.

    python benchmarks/hybrid_models.py FAMILY FOLDER

Run it with a Python that has torch and transformers. Weights are large enough that a response depends on the whole
prompt; the tokenizer is that of this project's small model.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.make_model import default_folder, make_model

__all__ = ["FAMILIES", "make_family"]

_VOCABULARY = 2048
_STD = 0.12


def _gemma3() -> tuple[Any, Any]:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM, Gemma3TextConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=256,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        max_position_embeddings=8192,
        initializer_range=_STD,
        tie_word_embeddings=False,
    )


def _gpt_oss() -> tuple[Any, Any]:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM, GptOssConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192,
        rope_scaling=None,
        initializer_range=_STD,
    )


def _lfm2() -> tuple[Any, Any]:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM, Lfm2Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention", "conv"],
        block_dim=128,
        conv_dim=128,
        conv_dim_out=128,
        max_position_embeddings=8192,
        initializer_range=_STD,
    )


def _deepseek_v2() -> tuple[Any, Any]:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM, DeepseekV2Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,  # vLLM supports MLA with 512 + 64 elements only
        v_head_dim=32,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        max_position_embeddings=8192,
        initializer_range=_STD,
    )


def _mistral() -> tuple[Any, Any]:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM, MistralConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=256,
        max_position_embeddings=8192,
        initializer_range=_STD,
    )


def _granite4() -> tuple[Any, Any]:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    return GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_expand=2,
        mamba_n_groups=1,
        max_position_embeddings=8192,
        initializer_range=_STD,
    )


def _qwen3_next() -> tuple[Any, Any]:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM, Qwen3NextConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        max_position_embeddings=8192,
        initializer_range=_STD,
    )


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "lfm2": _lfm2,
    "deepseek_v2": _deepseek_v2,
    "mistral": _mistral,
    "granite4": _granite4,
    "qwen3_next": _qwen3_next,
}
"""Families by name -> function that returns class and configuration of a checkpoint."""


def make_family(family: str, folder: Path) -> Path:
    """Write the checkpoint of a family to ``folder``, if it is not there; return the folder."""
    if (folder / "config.json").exists():
        return folder
    import torch

    torch.manual_seed(0)
    kind, config = FAMILIES[family]()
    kind(config).to(torch.float32).save_pretrained(folder)
    tokenizer = default_folder()
    make_model(tokenizer)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)
    return folder


if __name__ == "__main__":
    print(make_family(sys.argv[1], Path(sys.argv[2])))
