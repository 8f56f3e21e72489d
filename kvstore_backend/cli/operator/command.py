"""Command: one command of ``kvstore``, as the list of commands has it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        summary: one sentence, for the list of commands.
        add_arguments: declares its arguments.
        run: carries it out; returns the exit status, or raises ``KVStoreError`` with one sentence.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]

    @classmethod
    def of_module(cls, module: ModuleType) -> Command:
        """The command of a module that has its two functions and, as the first line of its docstring, the summary."""
        return cls((module.__doc__ or "").splitlines()[0], module.add_arguments, module.run)
