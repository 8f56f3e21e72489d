"""Dialects: requests to the instances of each engine, alone or as a pair.

dialect.py     the parts of a dialect: a pair, and the changes to a request for each leg
fastdeploy.py  FastDeploy, and our own engine
vllm.py        vLLM, with the connector that its instances use to transfer KV
sglang.py      SGLang
in_order.py    any engine whose instances share a pool: prefill first, then decode
pairs.py       the pairs created so far, each with the members that never change
"""

from router.serving.dialects.dialect import LegPlan, NotAsPair, NotReady, Pair
from router.serving.dialects.pairs import Pairs, plan_alone

__all__ = ["LegPlan", "NotAsPair", "NotReady", "Pair", "Pairs", "plan_alone"]
