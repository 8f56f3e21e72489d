"""``kvstore``: the command line to operate a pool.

__main__.py  python -m kvstore_backend.cli
commands.py  the list of commands, and the exit status of their errors
doctor.py    kvstore doctor: a diagnosis of a configuration, in the order in which to repair it
ascend.py    the checks of a machine with Ascend cards
checks.py    the checks that doctor makes without moving a block, one function a concern
bench.py     kvstore bench: throughput and latency of the bare store and of the full stack
stats.py     kvstore stats: metrics of a pool and of its instances
master.py    kvstore master: starts a Mooncake master
operator/    operator commands on blocks: ls, pin, clear, why-miss
report.py    findings, tables and JSON on standard output
"""

from kvstore_backend.cli.commands import main

__all__ = ["main"]
