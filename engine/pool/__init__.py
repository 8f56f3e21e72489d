"""Loads KV blocks from the pool, and saves KV blocks to it.

background.py      gives threads a lower priority than the computation
kv_codec.py        compresses KV blocks in the pool
pool_connector.py  loads and saves the blocks of sequences
saved_blocks.py    saves cached blocks again that the pool has lost; remembers which blocks are pinned
staging.py         access to KV memory for the pool and for hand-overs: directly, or through host buffers
"""
