"""Large bodies: they are scanned before they are parsed, while other requests continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.http import UNCHECKED_BYTES, ApiError, BadBody, ClientRequest, LargeBody, estimate_tokens
from router.serving.reading.api import GENERATING
from router.serving.response import RequestEnded

__all__ = ["is_large", "look_through"]


def is_large(request: ClientRequest) -> bool:
    """Return whether the body takes so long to parse that it is scanned first."""
    return len(request.body) > UNCHECKED_BYTES and request.path in GENERATING


async def look_through(request: ClientRequest, check: Callable[[], None]) -> LargeBody:
    """Scan a large body, and let other requests run meanwhile.

    Args:
        check: called after other requests have run; raises if this request has ended.

    Raises:
        RequestEnded: parsing would take too long, or ``check`` has raised it.
    """
    large = LargeBody(request.body)
    try:
        for _ in large.check_values():
            await asyncio.sleep(0)
            check()
        large.prompt_tokens = estimate_tokens(request.body)
        await asyncio.sleep(0)
        check()
    except BadBody as exc:
        raise RequestEnded(ApiError(400, str(exc), "invalid_body", exc.param)) from None
    return large
