"""Write small random checkpoints of model families for the benchmarks of vLLM. Most families store KV in several ways.

    python benchmarks/hybrid_models.py FAMILY FOLDER

Run it with a Python that has torch and transformers. Weights are large enough that a response depends on the whole
prompt; the tokenizer is that of this project's small model.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from engine.make_model import default_folder, make_model

__all__ = ["FAMILIES", "make_family"]

# What the families have in common, unless they say otherwise.
_COMMON = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.12,
}
# Sizes of make_model, for the families with measured times: a prompt takes longer to compute than to load.
_LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_LARGE,
            "num_hidden_layers": 6,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 256,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_LARGE,
            "intermediate_size": 512,
            "head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_scaling": None,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            **_LARGE,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_dim": 512,
            "conv_dim": 512,
            "conv_dim_out": 512,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            "moe_intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,  # vLLM supports MLA with 512 + 64 elements only
            "v_head_dim": 32,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"num_hidden_layers": 3, "sliding_window": 256}),
    "granite4": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            "shared_intermediate_size": 256,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    ),
}
"""For each family, the names of its model and of its configuration in transformers, and the configuration."""


def make_family(family: str, folder: Path) -> Path:
    """Write the checkpoint of a family to ``folder``, if it is not there; return the folder."""
    if (folder / "config.json").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    kind, kind_of_config, members = FAMILIES[family]
    config = getattr(transformers, kind_of_config)(**{**_COMMON, **members})
    getattr(transformers, kind)(config).to(torch.float32).save_pretrained(folder)
    tokenizer = default_folder()
    make_model(tokenizer)
    for file in (*tokenizer.glob("*token*"), *tokenizer.glob("chat_template*")):
        shutil.copy(file, folder)
    return folder


if __name__ == "__main__":
    print(make_family(sys.argv[1], Path(sys.argv[2])))
