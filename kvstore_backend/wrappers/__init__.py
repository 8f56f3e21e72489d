"""Wrappers: backends that add one function each to another backend.

wrapper.py       base class of wrappers: passes all calls to the inner backend
checked.py       stores a header with a checksum before every block, and checks it in each read
parts.py         divides large batches among several threads, for checked.py
guarded.py       gives every call a deadline, and stops the use of a pool that fails (circuit breaker)
write_behind.py  writes in the background, from its own memory
tiered.py        puts a fast backend before a large one
metered.py       counts all calls in Prometheus metrics
"""
