"""``python -m router.register`` with twenty heartbeats a second."""

from __future__ import annotations

import sys

from router import register

if __name__ == "__main__":
    register.HEARTBEAT_SECONDS = register.FIRST_RETRY_SECONDS = 0.05
    sys.exit(register.main())
