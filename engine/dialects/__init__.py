"""How a pair of instances is asked: an instance stands in for other engines' ways, so that routers can be tested.

base.py        a dialect, as the rest of the engine knows it
fastdeploy.py  FastDeploy's: both at once, decode's address in ``disaggregate_info``
vllm.py        vLLM's with its NixlConnector: prefill first, its ``kv_transfer_params`` then to decode
sglang.py      SGLang's: both at once, who meet by ``bootstrap_room``
"""

from engine.dialects.base import PairDialect
from engine.dialects.fastdeploy import FastDeployDialect
from engine.dialects.sglang import SglangDialect
from engine.dialects.vllm import VllmDialect

__all__ = ["FastDeployDialect", "PairDialect", "SglangDialect", "VllmDialect"]
