"""Scheduling: which sequence computes how many tokens in the next step, and which KV blocks it has. It uses no tensors.

block_manager.py     which KV block belongs to which sequence; the prefix cache
cache_hints.py       cache_control: how long the request wants its prompt's blocks cached
pool_use.py          why a prompt took blocks from the pool, or none
prefill_progress.py  logs the progress of long prompts
request.py           Request, as the client sent it, and Sequence, the engine's state of it
retrieval_config.py  the sizes of sparse attention
scheduler.py         which sequence computes how many tokens in the next step
"""
