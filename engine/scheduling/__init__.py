"""Scheduling: which sequence computes how many tokens in the next step, and which KV blocks it has. Free of tensors.

block_manager.py     which KV block belongs to which sequence; the prefix cache; free of tensors
cache_hints.py       cache_control: how long a prompt's blocks are worth keeping, as a request says it
pool_use.py          why a prompt took blocks from the pool, or none
prefill_progress.py  how far long prompts are, in the log
request.py           Request, as a client asks for it, and Sequence, as the engine works on it
retrieval_config.py  the sizes of sparse attention; free of tensors
scheduler.py         which sequence computes how many tokens in the next step; free of tensors
"""
