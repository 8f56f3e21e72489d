"""``kvstore certify``: tests whether two instances that share a KV pool answer correctly while the pool fails.

command.py    the command: its arguments, the order of the cases, the exit status
recipe.py     reads a recipe: how to start, stop and break a pool and its instances
processes.py  starts the programs of a recipe in process groups of their own, and signals them
instances.py  sends prompts to an instance; collects its answers, their times and cached tokens
tampering.py  removes, damages and adds values in a pool
cases.py      the cases: what fails in each, and when
isolation.py  measures what one tenant finds out about the prompts of another
page.py       writes the results as one HTML file
"""

from kvstore_backend.cli.certify.command import add_arguments, run

__all__ = ["add_arguments", "run"]
