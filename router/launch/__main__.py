"""Entry point of ``python -m router.launch``."""

import sys

from kvcommon.output import run_program
from router.launch.program import main

if __name__ == "__main__":
    sys.exit(run_program("router", main))
