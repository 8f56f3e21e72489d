"""Reads blocks of the same model in another sharding: another tensor-parallel size, or another block size.

Stored blocks are not divided: each rank of an instance stores whole blocks of its own heads, in one piece. A reader
with another sharding *gathers* a block: it reads into separate memory all stored blocks (pieces) that contain a part of
the block, checks them as usual, and copies the parts that it needs to the target.

family.py  ShardingFamily: the shardings of a model (peers), and the places where their blocks overlap
peers.py   PeerShardings: finds the blocks of a prompt in other shardings in a pool, and reads them
gather.py  Gatherer: reads pieces of another sharding, and assembles blocks of the own sharding
"""

from kvstore_backend.resharding.family import ShardingFamily, find_family
from kvstore_backend.resharding.peers import PeerShardings, Run

__all__ = ["PeerShardings", "Run", "ShardingFamily", "find_family"]
