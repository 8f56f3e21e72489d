"""How the instances of each engine are asked: alone, or as a pair.

dialect.py     the parts of a dialect: a pair, and the changes to a request for each leg
fastdeploy.py  FastDeploy, and our own engine
vllm.py        vLLM, by the connector that its instances hand KV over with
sglang.py      SGLang
in_order.py    any engine whose instances share a pool: prefill first, then decode
pairs.py       the pairs that were made, each with the members that stay the same
"""

from router.serving.dialects.dialect import LegAsk, NotAsPair, NotReady, Pair
from router.serving.dialects.pairs import Pairs, ask_alone

__all__ = ["LegAsk", "NotAsPair", "NotReady", "Pair", "Pairs", "ask_alone"]
