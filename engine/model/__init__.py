"""The model: one forward pass over the chunks of a step, its memory, and the choice of tokens.

attention/        attention over paged KV memory: exact, and sparse by retrieval
device_copies.py  the numbers of a step, on their way to the device and back
memory_budget.py  how many KV blocks there are, beside the memory of sparse attention
model_runner.py   the checkpoint, its KV memory, and one forward pass
out_of_memory.py  memory that cannot be had, told in a sentence
packed_linear.py  linear layers with weights as oneDNN wants them, for CPUs
sampler.py        logits -> the next token of each sequence
weights.py        which weights a model has, and the namespace of their KV
"""
