"""Entry point of ``python -m router.launch``."""

import sys

from router.launch.program import main

if __name__ == "__main__":
    sys.exit(main())
