"""``kvstore``: look after a pool from the command line."""

from kvstore_backend.cli.commands import main

__all__ = ["main"]
