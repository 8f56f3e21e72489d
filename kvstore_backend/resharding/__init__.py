"""Blocks of one model under another sharding than one's own: another tensor-parallel size, or another block size.

Stored blocks are never divided again: an instance stores whole blocks of its own rank, in one piece each. A reader of
another sharding's blocks gathers: it reads the pieces with its heads and tokens into separate memory, verifies them as
always, and copies its share of them to the target.

family.py  ShardingFamily: a namespace and its peers (the same model in other shardings), and where their blocks overlap
peers.py   PeerShardings: which other shardings are in a pool, how much of a prompt they have, and how it is read
gather.py  Gatherer: pieces of another sharding in, own blocks out
"""

from kvstore_backend.resharding.family import ShardingFamily, find_family
from kvstore_backend.resharding.peers import PeerShardings, Run

__all__ = ["PeerShardings", "Run", "ShardingFamily", "find_family"]
