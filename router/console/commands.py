"""``kvrouter``: starts the router, or an operator program.

``kvrouter --port 52700 --splitwise`` is the same as ``python -m router.launch --port 52700 --splitwise``. If the first
word is a command, as in ``kvrouter drain``, the program of this command runs. Only this program is imported.
``kvrouter --print-completion bash`` (or ``zsh``) prints a script with which the shell completes commands and flags.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from kvcommon.hints import suggest_name
from kvcommon.output import run_program
from router.settings import make_parser

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "dashboard": "router.console.dashboard",
    "drain": "router.console.drain",
    "epp": "router.console.epp",
    "replay": "router.console.replay",
    "simulate": "router.console.simulate",
    "top": "router.console.top",
}
"""The module of each command. Its ``main`` takes the arguments after the command."""

COMPLETION, SHELLS = "--print-completion", ("bash", "zsh")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program of a command; without a command, run the router. Return the exit status; 2: unknown command."""
    return run_program("kvrouter", lambda: _run_command(list(sys.argv[1:] if argv is None else argv)))


def _run_command(arguments: list[str]) -> int:
    if arguments and arguments[0].startswith(COMPLETION):
        return _print_completion(arguments)
    if arguments[:1] in (["-h"], ["--help"]):
        _make_parser().print_help()
        return 0
    if not arguments or arguments[0].startswith("-"):
        return _run("router.launch", arguments)
    command = arguments.pop(0)
    if command not in COMMANDS:
        hint = suggest_name(command, COMMANDS)
        print(
            f"kvrouter: {command} is not a command{hint}; without a command, kvrouter starts the router",
            file=sys.stderr,
        )
        return 2
    return _run(COMMANDS[command], arguments)


def _run(module: str, arguments: Sequence[str]) -> int:
    status: int = importlib.import_module(module).main(arguments)
    return status


def _print_completion(arguments: Sequence[str]) -> int:
    """Print the script for the completion of a shell. Return the exit status."""
    shell = arguments[0].partition("=")[2] or "".join(arguments[1:])
    if shell not in SHELLS:
        print(f"kvrouter: {COMPLETION} must be followed by {' or '.join(SHELLS)}", file=sys.stderr)
        return 2
    print(importlib.import_module("shtab").complete(_make_parser(), shell=shell))
    return 0


def _make_parser() -> argparse.ArgumentParser:
    """Return a parser with the flags of the router, and with all commands and their flags."""
    parser = argparse.ArgumentParser(
        prog="kvrouter",
        usage="%(prog)s [--port PORT] [--splitwise] [more of the flags below]\n       %(prog)s COMMAND [--help]",
        description="Starts the router or, with a command, one of the operator's programs.",
        parents=[make_parser()],
        add_help=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module in COMMANDS.items():
        loaded = importlib.import_module(module)
        summary = (loaded.__doc__ or "").partition(": ")[2].split("\n")[0]
        commands.add_parser(name, parents=[loaded.make_parser()], add_help=False, help=summary, description=summary)
    return parser
