"""The lifecycle of a request in an instance: from its checked body, over the hand-over, to pieces of text.

This is the asyncio side; it reaches the engine's thread through ``EngineCore`` only. The way to answer a request
depends on the instance's role and is chosen once, when the instance starts:

base.py         one request while it is answered: its tokens become text; the parts that all requests share
prefill.py      the instance computes the prompt and transfers it, directly or through the pool
decode.py       the instance waits for the prompt's KV and continues from there, or computes the prompt itself
choices.py      the n choices of one request: the prompt is computed once, the answers concurrently
live.py         all requests that are being answered: created for the role, looked up to be aborted
detokenizer.py  token ids -> text, piece by piece
"""

from engine.generation.base import Generation, Piece
from engine.generation.choices import Choices
from engine.generation.live import BROKEN, Generations, PairInfo, list_unknown_ids

__all__ = [
    "BROKEN",
    "Choices",
    "Generation",
    "Generations",
    "PairInfo",
    "Piece",
    "list_unknown_ids",
]
