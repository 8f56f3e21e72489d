"""Entry point of ``python -m router.launch``."""

import signal
import sys

from kvcommon.output import run_program
from router.launch import main

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback until the server runs
    sys.exit(run_program("router", main))
