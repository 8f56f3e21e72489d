"""Transfers between the engine's KV blocks and the pool.

background.py      work during a running step, at low priority
kv_codec.py        compression of KV blocks in the pool
pool_connector.py  loads and saves of the engine's blocks, on threads of their own
saved_blocks.py    cached blocks that the pool had, to save them again if it has lost them
staging.py         access of the pool and hand-overs to KV memory: directly, or through host buffers
"""
