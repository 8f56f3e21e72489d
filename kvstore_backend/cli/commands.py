"""Parses the command line, and runs one command."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import NoReturn

from kvcommon.hints import list_flags, suggest_name
from kvcommon.output import run_program
from kvcommon.versions import find_version
from kvstore_backend.backend import KVStoreError
from kvstore_backend.cli import bench, certify, doctor, master, stats
from kvstore_backend.cli.checks import find_wheels
from kvstore_backend.cli.operator import clear, ls, pin, why_miss
from kvstore_backend.config import wants_native_log

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """Command of the program ``kvstore``.

    Attributes:
        summary: sentence about the command, for the list of commands.
        add_arguments: declares the arguments of the command.
        run: runs the command; returns the exit status, or raises ``KVStoreError`` with a message of one sentence.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]

    @classmethod
    def of_module(cls, module: ModuleType) -> Command:
        """Return the command of a module with the functions ``add_arguments`` and ``run``.

        The summary is the first line of the module's docstring.
        """
        return cls((module.__doc__ or "").splitlines()[0], module.add_arguments, module.run)


COMMANDS = {
    "doctor": Command.of_module(doctor),
    "bench": Command.of_module(bench),
    "stats": Command.of_module(stats),
    "master": Command.of_module(master),
    "certify": Command.of_module(certify.command),
    "ls": Command.of_module(ls),
    "why-miss": Command.of_module(why_miss),
    "clear": Command.of_module(clear),
    "pin": Command("Protect blocks from eviction for a time.", pin.add_pin_arguments, pin.pin),
    "unpin": Command("End the protection of blocks from eviction.", pin.add_unpin_arguments, pin.unpin),
}
"""Commands of ``kvstore``, by name."""
# A command that takes longer to stop after Ctrl-C prints a message.
_SILENT_SECONDS = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names; return the exit status: 0 for success, 1 for a failure, 130 after Ctrl-C.

    For a command line that cannot be parsed, the process ends with status 2.
    """
    return run_program("kvstore", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    arguments = _parse_arguments(argv)
    try:
        with _silence_native_log(is_wanted=arguments.command == "master"), _announce_slow_stop():
            status: int = arguments.run(arguments)
    except KVStoreError as exc:
        print(f"kvstore: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command and its arguments. For an unknown command or flag, end the process with a message."""
    parser = argparse.ArgumentParser(prog="kvstore", description="Checks, measures and manages a pool of KV blocks.")
    parser.add_argument("--version", action="version", version=_describe_version())
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh"),
        action=_PrintCompletion,
        help="print the completion script of this shell",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    added = {}
    for name, command in COMMANDS.items():
        added[name] = commands.add_parser(name, help=command.summary, description=command.summary)
        command.add_arguments(added[name])
        added[name].set_defaults(run=command.run, command=name)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"there is no command {argv[0]!r}{suggest_name(argv[0], COMMANDS)}")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and "native" in arguments:
        arguments.native = unknown
    elif unknown:
        flags = [flag for flag in list_flags(added[arguments.command]) if flag.startswith("--")]
        word = unknown[0].partition("=")[0]
        hint = suggest_name(word, flags) if word.startswith("-") else "; give only one CONFIG"
        added[arguments.command].error(f"argument {word!r} is not known{hint}")
    return arguments


class _PrintCompletion(argparse.Action):
    """Action that prints the completion script of a shell and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, values: object, __: object = None) -> NoReturn:
        shtab = importlib.import_module("shtab")  # imported here, because nothing else needs it
        print(shtab.complete(parser, shell=values))
        parser.exit()


def _describe_version() -> str:
    """Return the version of this project, and the versions of the installed distributions of Mooncake."""
    wheels = ", ".join(f"{wheel} {version}" for wheel, version in find_wheels().items())
    return f"kvstore {find_version()}; {wheels or 'no Mooncake'}"


@contextlib.contextmanager
def _silence_native_log(*, is_wanted: bool) -> Iterator[None]:
    """Hide what Mooncake's library writes to standard error during the ``with`` block, but not messages of ``kvstore``.

    The library logs errors even if nothing is wrong, for example for each metadata entry that does not exist. If
    ``is_wanted`` is True or ``MC_LOG_LEVEL`` is set, this function hides nothing.
    """
    errors = sys.__stderr__
    if is_wanted or wants_native_log() or errors is None or sys.stderr is not errors:
        yield
        return
    errors.flush()
    number = errors.fileno()
    kept = os.dup(number)
    own = open(os.dup(kept), "w", buffering=1, encoding=errors.encoding, errors="backslashreplace")  # noqa: SIM115
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
    sys.stderr = own
    try:
        yield
    finally:
        sys.stderr = errors
        own.close()
        os.dup2(kept, number)
        os.close(kept)


@contextlib.contextmanager
def _announce_slow_stop() -> Iterator[None]:
    """Print "stopping ..." if the ``with`` block takes longer than ``_SILENT_SECONDS`` to end after Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C is ignored here, or has another handler
        return

    def on_interrupt(_: int, __: FrameType | None) -> None:
        announcement = threading.Timer(_SILENT_SECONDS, print, ["kvstore: stopping ..."], {"file": sys.stderr})
        announcement.daemon = True
        announcement.start()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
