"""Attention over paged KV memory, registered through transformers' AttentionInterface.

paged.py        KV memory in blocks, and exact attention over it
retrieval.py    sparse attention: initial blocks, the window, and the best blocks by an index
block_index.py  one vector for each block and KV head, searched for the blocks that matter to a query
plan.py         the blocks that one step reads, as tables for all of its layers
pages.py        attention to chosen blocks in place
working_set.py  GPU copies of blocks in host memory, for attention
"""
