"""The model: one forward pass over the chunks of a step, its memory, and the choice of tokens.

attention/        attention over paged KV memory: exact, and sparse by retrieval
device_copies.py  copies of a step's numbers to the device and back
memory_budget.py  how many KV blocks fit in memory next to everything else
model_runner.py   the checkpoint, its KV memory, and one forward pass
out_of_memory.py  failed allocations, explained in a sentence
packed_linear.py  linear layers with weights in oneDNN's own order, for CPUs
sampler.py        logits -> the next token of each sequence
weights.py        version and digest of a model's weights, for the namespace of their KV
"""
