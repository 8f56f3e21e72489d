"""Blocks of one model under another cut than one's own: another tensor-parallel size, or another block size.

Stored blocks are never cut again: an instance stores whole blocks of its own rank, in one piece each. A reader of
another cut's blocks gathers: it reads the pieces with its heads and tokens into separate memory, verifies them as
always, and copies its share of them to the target.

family.py    Family: a namespace and its siblings (the same model in other cuts), and where their blocks overlap
siblings.py  Siblings: which other cuts are in a pool, how much of a prompt they have, and how it is read
gather.py    Gatherer: pieces of another cut in, own blocks out
"""

from kvstore_backend.cuts.family import Family, find_family
from kvstore_backend.cuts.siblings import Run, Siblings

__all__ = ["Family", "Run", "Siblings", "find_family"]
