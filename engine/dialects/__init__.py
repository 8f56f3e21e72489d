"""Request formats for a prefill/decode pair. An instance can use other engines' formats, to test routers with them.

base.py        the interface of a dialect
fastdeploy.py  FastDeploy's: the router asks both concurrently; decode's address is in ``disaggregate_info``
vllm.py        vLLM's with its NixlConnector: prefill first, then decode with its ``kv_transfer_params``
sglang.py      SGLang's: the router asks both concurrently; they connect by ``bootstrap_room``
"""

from engine.dialects.base import PairDialect
from engine.dialects.fastdeploy import FastDeployDialect
from engine.dialects.sglang import SglangDialect
from engine.dialects.vllm import VllmDialect

__all__ = ["FastDeployDialect", "PairDialect", "SglangDialect", "VllmDialect"]
