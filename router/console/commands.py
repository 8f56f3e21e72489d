"""``kvrouter``: starts the router, or one of the programs that an operator runs beside it.

``kvrouter --port 52700 --splitwise`` is ``python -m router.launch --port 52700 --splitwise``; with a command as its
first word, such as ``kvrouter drain``, it is that program. A program is loaded only when it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from router.settings import suggest_name

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "dashboard": "router.console.dashboard",
    "drain": "router.console.drain",
    "top": "router.console.top",
}
"""The module of each command, whose ``main`` takes the arguments behind the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, or without one the router; return the exit status, 2 if there is no such command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0].startswith("-"):
        return _run("router.launch", arguments)
    command = arguments.pop(0)
    if command not in COMMANDS:
        hint = suggest_name(command, COMMANDS)
        print(f"kvrouter: {command} is not a command{hint}; without one the router starts", file=sys.stderr)
        return 2
    return _run(COMMANDS[command], arguments)


def _run(module: str, arguments: Sequence[str]) -> int:
    status: int = importlib.import_module(module).main(arguments)
    return status
