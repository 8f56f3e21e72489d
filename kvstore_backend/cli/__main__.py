"""``python -m kvstore_backend.cli``: the same as ``kvstore``."""

import sys

from kvstore_backend.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
