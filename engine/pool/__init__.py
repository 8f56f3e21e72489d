"""Between the engine's KV blocks and the pool.

background.py      work beside a running step
kept_blocks.py     which blocks the pool was asked to keep, and when it is to be asked again
kv_codec.py        KV blocks in fewer bytes, in the pool
pool_connector.py  between the engine's blocks and the pool: loads and saves on threads of their own
saved_blocks.py    cached blocks that the pool had, for putting them again where it has lost them
staging.py         KV memory as the pool and hand-overs reach it: itself, or by way of host buffers
"""
