"""The command line: its commands, and the exit status of their errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvstore_backend.backend import KVStoreError
from kvstore_backend.cli import bench, doctor, master, stats

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0 done, 1 something is wrong, 2 the command line is."""
    parser = argparse.ArgumentParser(prog="kvstore", description="Look after a pool of KV blocks.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (doctor, bench, stats, master):
        summary = (command.__doc__ or "").splitlines()[0]
        added = commands.add_parser(command.__name__.rpartition(".")[2], help=summary, description=summary)
        command.add_arguments(added)
        added.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except KVStoreError as exc:
        print(f"kvstore: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status
