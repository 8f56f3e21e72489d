"""Dialects: how a request is sent to the instances of each engine, alone or as a pair.

dialect.py     the base of pairs, and the changes of a request for each leg
fastdeploy.py  FastDeploy, and our own engine
vllm.py        vLLM, with each connector for the KV transfer
sglang.py      SGLang
in_order.py    any engine whose instances share a pool: prefill first, then decode
"""

from router.serving.dialects.dialect import LegPlan, NotAsPair, NotReady, Pair
from router.serving.dialects.fastdeploy import FastDeployPair, plan_fastdeploy
from router.serving.dialects.in_order import InOrderPair, plan_by_header
from router.serving.dialects.sglang import SglangPair, name_sglang_sequences, plan_sglang
from router.serving.dialects.vllm import BootstrapServer, KvstorePair, MooncakePair, NixlPair

__all__ = [
    "BootstrapServer",
    "FastDeployPair",
    "InOrderPair",
    "KvstorePair",
    "LegPlan",
    "MooncakePair",
    "NixlPair",
    "NotAsPair",
    "NotReady",
    "Pair",
    "SglangPair",
    "name_sglang_sequences",
    "plan_by_header",
    "plan_fastdeploy",
    "plan_sglang",
]
