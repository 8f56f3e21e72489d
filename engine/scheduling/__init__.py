"""Scheduling: chooses the chunks of each step, and allocates KV blocks. No file here uses tensors.

block_groups.py      groups of layers that read different parts of a prefix, and the blocks that each group needs
block_manager.py     reference counts of KV blocks, and the prefix cache
cache_events.py      reports changes of the prefix cache as KV events
cache_hints.py       reads how long a request wants its prompt's blocks cached (cache_control)
pool_use.py          the reason why a prompt got blocks from the pool, or got none
prefill_progress.py  logs the progress of long prompts
request.py           Request: what the client sent; Sequence: the state of its computation
retrieval_config.py  the settings of sparse attention
scheduler.py         chooses which sequence computes how many tokens in the next step
"""
