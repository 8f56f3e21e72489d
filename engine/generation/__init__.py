"""Answers requests: turns a checked request into pieces of text.

All code here runs in the event loop; it uses the engine's thread only through ``EngineCore``. A generation is the
answer to one prompt. A *hand-over* passes the KV of a prompt from a prefill to a decode instance, directly or through
the pool. The class of a generation depends on the role of the instance and on the request:

base.py         Generation: runs a sequence and turns its tokens into text; base class for all roles
prefill.py      the generation of a prefill instance: computes the prompt and transfers its KV
decode.py       the generation of a decode instance: waits for the prompt's KV, or computes the prompt
choices.py      all answers to one request: computes each prompt once, and then its answers concurrently
live.py         creates generations for the role of the instance; aborts those that are running
detokenizer.py  turns token ids into text, piece by piece
"""

from engine.generation.base import ENGINE_FAILED, Generation, Piece, SharedParts
from engine.generation.choices import Choices
from engine.generation.live import BROKEN, Generations, PairInfo, list_unknown_ids

__all__ = [
    "BROKEN",
    "ENGINE_FAILED",
    "Choices",
    "Generation",
    "Generations",
    "PairInfo",
    "Piece",
    "SharedParts",
    "list_unknown_ids",
]
