"""Command: one entry of the list of commands of ``kvstore``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """Command of ``kvstore``.

    Attributes:
        summary: one sentence, for the list of commands.
        add_arguments: declares its arguments.
        run: runs the command; returns the exit status, or raises ``KVStoreError`` with one sentence.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]

    @classmethod
    def of_module(cls, module: ModuleType) -> Command:
        """Return the command of a module that has both functions and, as first line of its docstring, the summary."""
        return cls((module.__doc__ or "").splitlines()[0], module.add_arguments, module.run)
