"""One request's way through an instance: from its checked body, over the hand-over, to pieces of text.

This is the asyncio side; the engine's thread is reached through ``EngineCore`` only. How a request is answered
depends on the instance's role and is chosen once, when the instance starts:

base.py             one request while it is answered: its tokens become text; the parts that all requests share
mixed.py            the instance computes the prompt and the answer
prefill.py          the instance computes the prompt and hands it over, directly or through the pool
decode.py           the instance waits for the prompt's KV and goes on from there, or computes the prompt itself
kept_prefill.py     the instance computes the prompt and keeps its KV for a decode instance that asks for it
fetching_decode.py  the instance asks a prefill instance for the prompt's KV, or fails
pair_info.py        the part of a pair that a request has an instance play, in whichever dialect it was asked
choices.py          the n choices of one request: the prompt computed once, the answers beside each other
live.py             all requests that are being answered: begun for the role, found again to be aborted
detokenizer.py      token ids -> text, piece by piece
token_bytes.py      token id -> the bytes it stands for
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
