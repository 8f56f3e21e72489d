"""The model: its weights, its memory, one forward pass over the chunks of a step, and sampling.

attention/        attention over paged KV memory: full attention, and sparse attention
checkpoint.py     loads a checkpoint: configuration, model, tokenizer, default values for requests
device_copies.py  copies numbers of a step to the device and back
layer_groups.py   groups of a model's layers, and the place of each layer in a block
memory_budget.py  computes how many KV blocks fit in memory
model_runner.py   owns the weights and the KV memory, runs a forward pass
out_of_memory.py  explains a failed allocation in one sentence
packed_linear.py  linear layers with weights in oneDNN's order, for CPUs
sampler.py        samples the next token of each sequence from logits
short_conv.py     short convolutions, with their states in KV memory
weights.py        version and digest of a model's weights, for the namespace
"""
