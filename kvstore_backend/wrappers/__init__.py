"""Backends around a backend, one concern each.

wrapper.py       the common part of wrappers: other calls are passed to the inner backend
checked.py       a header with a checksum before every block; a block that does not verify is a miss
parts.py         large batches in parts on several threads, for checked.py
guarded.py       a deadline for every call, and a circuit breaker
write_behind.py  writes in the background, from its own memory
tiered.py        a fast backend before a large one
metered.py       Prometheus metrics of every call
"""
