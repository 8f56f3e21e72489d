"""Command line to operate a pool: ``kvstore``.

__main__.py  python -m kvstore_backend.cli
commands.py  lists the commands, and returns the exit status of their errors
doctor.py    kvstore doctor: finds the faults of a pool and its configuration
ascend.py    checks of doctor for a machine with Ascend cards
checks.py    checks of doctor that move no block
bench.py     kvstore bench: measures throughput and latency of a pool
stats.py     kvstore stats: prints the metrics of a pool and of its instances
master.py    kvstore master: starts a Mooncake master
certify/     kvstore certify: tests of two instances that share a pool, while the pool fails
operator/    operator commands on blocks: ls, pin, clear, why-miss
report.py    prints findings, tables, JSON and progress
"""

from kvstore_backend.cli.commands import main

__all__ = ["main"]
