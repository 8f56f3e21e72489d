"""Runs ``kvstore`` for ``python -m kvstore_backend.cli``."""

import sys

from kvstore_backend.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
