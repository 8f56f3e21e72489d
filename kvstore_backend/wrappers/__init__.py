"""Backends around a backend, one concern each.

wrapper.py       the part that wrappers have in common: calls that are not their concern go to the backend inside
checked.py       a header with a checksum before every block; a block that does not verify is a miss
parts.py         large batches in parts on several threads, for checked.py
guarded.py       a deadline for every call, and a circuit breaker
late_calls.py    what is done when no call that was given up touches memory any more
write_behind.py  writes in the background, from memory of its own
tiered.py        a fast backend before a large one
metered.py       Prometheus metrics of every call
"""
