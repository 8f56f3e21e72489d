"""Emulations of a prefill/decode pair of vLLM or SGLang by our engine, to test a router with real generation.

vllm.py             vLLM's dialect with its NixlConnector: prefill first, then decode with its ``kv_transfer_params``
sglang.py           SGLang's dialect: the router asks both concurrently; they connect by ``bootstrap_room``
kept.py             prefill's side: prompts that it retains until decode requests them
kept_prefill.py     a request with a prompt that prefill computes and retains
fetching_decode.py  a request with a prompt that decode requests from prefill; the request fails without it
"""

from simulation.actors.dialects.fetching_decode import FetchPrompt
from simulation.actors.dialects.kept import KeptPrompts, keep_prompts, kept_by
from simulation.actors.dialects.kept_prefill import KeepPrompt
from simulation.actors.dialects.sglang import SglangDialect
from simulation.actors.dialects.vllm import VllmDialect

__all__ = ["FetchPrompt", "KeepPrompt", "KeptPrompts", "SglangDialect", "VllmDialect", "keep_prompts", "kept_by"]
