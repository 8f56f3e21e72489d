"""An operator's commands on the blocks of a pool: one file a command, or a pair of commands that belong together.

ls.py         kvstore ls: a pool's namespaces, or a prefix
clear.py      kvstore clear: removes the blocks that are named
why_miss.py   kvstore why-miss: why set-ups do not share blocks, or a prompt or request was a miss
pin.py        kvstore pin, unpin: keeps blocks from eviction for a time
copy.py       kvstore export, import: a namespace to and from a folder
warm.py       kvstore warm: sends prompts, so that their blocks are there
archive.py    that folder
command.py    Command: one command, as the list of commands has it
asking.py     instances and routers, asked over HTTP
pool.py       which pool: arguments, and its holdings opened
scope.py      which blocks of it: namespaces, or a prefix's
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
    "pin": Command("Keep blocks from eviction for a time.", pin.add_pin_arguments, pin.pin),
    "unpin": Command("Keep blocks from eviction no longer.", pin.add_unpin_arguments, pin.unpin),
    "warm": Command.of_module(warm),
    "export": Command("Copy a namespace to a folder.", copy.add_export_arguments, copy.export_blocks),
    "import": Command("Store what export copied to a folder.", copy.add_import_arguments, copy.import_blocks),
}
"""By their names."""
