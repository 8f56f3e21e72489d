"""Attention over paged KV memory, for transformers' AttentionInterface.

paged.py        full attention over KV memory
places.py       computes where the tokens of a step are in KV memory, for each group of layers
retrieval.py    sparse attention: reads the initial blocks, the window, and the best of the other blocks
block_index.py  the index of sparse attention: finds the blocks that matter most to a query
plan.py         tables of the blocks that sparse attention reads in one step
pages.py        attention to chosen blocks; on a CPU they are not copied to one tensor
working_set.py  copies of blocks from host memory on a GPU, for offloaded sequences
"""
