"""Attention over paged KV memory, registered through transformers' AttentionInterface.

paged.py        KV memory in blocks, and exact attention over it
retrieval.py    sparse attention: initial blocks, the window, and the blocks that an index finds best
block_index.py  one vector for each block and KV head, searched for the blocks that matter to a query
"""
