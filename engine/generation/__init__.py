"""The lifecycle of a request in an instance: from its checked body, over the hand-over, to pieces of text.

This is the asyncio side; it reaches the engine's thread through ``EngineCore`` only. The way to answer a request
depends on the instance's role and is chosen once, when the instance starts:

base.py             one request while it is answered: its tokens become text; the parts that all requests share
mixed.py            the instance computes the prompt and the answer
prefill.py          the instance computes the prompt and transfers it, directly or through the pool
decode.py           the instance waits for the prompt's KV and continues from there, or computes the prompt itself
kept_prefill.py     the instance computes the prompt and retains its KV for a decode instance that requests it
fetching_decode.py  the instance requests the prompt's KV from a prefill instance, or fails
pair_info.py        the instance's role for a request of a pair, in any dialect
choices.py          the n choices of one request: the prompt is computed once, the answers concurrently
live.py             all requests that are being answered: created for the role, looked up to be aborted
detokenizer.py      token ids -> text, piece by piece
token_bytes.py      token id -> its bytes
"""

from engine.disaggregation import KeptPrompt
from engine.generation.base import Generation, Piece
from engine.generation.choices import Choices
from engine.generation.live import BROKEN, Generations, list_unknown_ids
from engine.generation.pair_info import FetchPrompt, KeepPrompt, PairInfo

__all__ = [
    "BROKEN",
    "Choices",
    "FetchPrompt",
    "Generation",
    "Generations",
    "KeepPrompt",
    "KeptPrompt",
    "PairInfo",
    "Piece",
    "list_unknown_ids",
]
