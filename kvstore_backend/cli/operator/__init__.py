"""Operator commands on the blocks of a pool: one file for a command, or for a pair of related commands.

ls.py         kvstore ls: a pool's namespaces, or a prefix
clear.py      kvstore clear: removes the named blocks
why_miss.py   kvstore why-miss: why set-ups do not share blocks, or why a prompt or request was a miss
pin.py        kvstore pin, unpin: protects blocks from eviction for a time
copy.py       kvstore export, import: a namespace to and from a folder
warm.py       kvstore warm: sends prompts, so that their blocks are stored
archive.py    the folder that export writes
command.py    Command: one entry of the list of commands
asking.py     HTTP requests to instances and routers
pool.py       which pool: arguments, and its opened holdings
scope.py      which blocks of the pool: namespaces, or those of a prefix
catalogue.py  the contents of a pool, namespace by namespace
values.py     blocks as they are stored, read in batches and checked
"""

from kvstore_backend.cli.operator import clear, copy, ls, pin, warm, why_miss
from kvstore_backend.cli.operator.command import Command

__all__ = ["OPERATOR_COMMANDS", "Command"]

OPERATOR_COMMANDS = {
    "ls": Command.of_module(ls),
    "why-miss": Command.of_module(why_miss),
    "clear": Command.of_module(clear),
    "pin": Command("Protect blocks from eviction for a time.", pin.add_pin_arguments, pin.pin),
    "unpin": Command("End the protection of blocks from eviction.", pin.add_unpin_arguments, pin.unpin),
    "warm": Command.of_module(warm),
    "export": Command("Copy a namespace to a folder.", copy.add_export_arguments, copy.export_blocks),
    "import": Command("Store what export copied to a folder.", copy.add_import_arguments, copy.import_blocks),
}
"""Operator commands by name."""
