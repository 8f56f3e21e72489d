"""Blocks of one model under another cut: another tensor-parallel size, or another block size, than one's own.

Nothing that is written is ever cut again: an instance stores whole blocks of its own rank, in one piece each. Who reads
another cut's blocks gathers: it reads the pieces that hold its heads and tokens into memory of its own, has them
verified as ever, and copies its share of them to where it wants it.

family.py    Family: a namespace, those of the same model in other cuts, and which bytes of their blocks are whose
siblings.py  Siblings: which other cuts live in a pool, how much of a prompt they have, and how it is read
gather.py    Gatherer: pieces of another cut in, own blocks out
"""

from kvstore_backend.cuts.family import Family, find_family
from kvstore_backend.cuts.siblings import Run, Siblings

__all__ = ["Family", "Run", "Siblings", "find_family"]
