"""Actions for when no call that was given up touches callers' memory any more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore_backend.backend import StorageBackend

__all__ = ["call_after_late_calls"]

logger = logging.getLogger(__name__)

_WARN_AFTER_SECONDS = 60.0
# Callables without a thread to wait for them. They refer to memory that a call may still touch, so it is never freed.
_KEPT_FOR_GOOD: list[Callable[[], None]] = []


def call_after_late_calls(stack: StorageBackend, take_back: Callable[[], None]) -> None:
    """Call ``take_back`` when ``stack`` has no late call, on a new thread; it may never be called.

    Until then ``take_back`` stays referenced, and with it the memory that it gives back.
    """

    def wait() -> None:
        while not stack.wait_for_late_calls(_WARN_AFTER_SECONDS):
            logger.warning("A call to the pool has been running for over %g s", _WARN_AFTER_SECONDS)
        try:
            take_back()
        except Exception:
            logger.exception("Memory that a late call had could not be taken back")

    try:
        threading.Thread(target=wait, name="pool-late-calls", daemon=True).start()
    except RuntimeError as exc:
        _KEPT_FOR_GOOD.append(take_back)
        logger.error("Memory that a late call may touch is permanently out of use: %s", exc)
