"""Emulations of a prefill/decode pair of vLLM or SGLang by our engine, to test a router with real generation.

vllm.py               vLLM's dialect with its NixlConnector: prefill first, then decode with its ``kv_transfer_params``
sglang.py             SGLang's dialect: the router sends the request to both at once; they connect by ``bootstrap_room``
retained.py           prefill's side: prompts that it retains until decode requests them
retaining_prefill.py  a request with a prompt that prefill computes and retains
fetching_decode.py    a request with a prompt that decode requests from prefill; the request fails without it
"""

from simulation.actors.dialects.fetching_decode import FetchPrompt
from simulation.actors.dialects.retained import RetainedPrompts, retain_prompts, retained_prompts_of
from simulation.actors.dialects.retaining_prefill import RetainPrompt
from simulation.actors.dialects.sglang import SglangDialect
from simulation.actors.dialects.vllm import VllmDialect

__all__ = [
    "FetchPrompt",
    "RetainPrompt",
    "RetainedPrompts",
    "SglangDialect",
    "VllmDialect",
    "retain_prompts",
    "retained_prompts_of",
]
