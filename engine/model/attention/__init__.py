"""Attention over paged KV memory, registered through transformers' AttentionInterface.

paged.py        KV memory in blocks, and exact attention over it
retrieval.py    sparse attention: initial blocks, the window, and the blocks that an index finds best
block_index.py  one vector for each block and KV head, searched for the blocks that matter to a query
plan.py         the blocks that one step reads, as tables for all of its layers
pages.py        attention to chosen blocks where they lie
working_set.py  blocks of host memory that a GPU holds, to attend to them
"""
