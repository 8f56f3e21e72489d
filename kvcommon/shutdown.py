"""Reports the progress of a server that takes long to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["count_requests", "report_progress"]

# Seconds of a stop until the first report, and between further reports.
QUIET_SECONDS, PROGRESS_SECONDS = 2.0, 5.0


async def report_progress(report: Callable[[], None]) -> None:
    """Call ``report`` after ``QUIET_SECONDS``, then every ``PROGRESS_SECONDS``, until the caller cancels this task."""
    await asyncio.sleep(QUIET_SECONDS)
    while True:
        report()
        await asyncio.sleep(PROGRESS_SECONDS)


def count_requests(count: int) -> str:
    """Return ``1 running request`` or ``N running requests``, for the message of a stop that waits for them."""
    return "1 running request" if count == 1 else f"{count} running requests"
