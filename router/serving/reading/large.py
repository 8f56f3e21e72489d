"""Large bodies: they are scanned before they are parsed, while other requests continue."""

from __future__ import annotations

import asyncio

from router.http import UNCHECKED_BYTES, ApiError, BadBody, ClientRequest, LargeBody, RequestEnded, estimate_tokens
from router.serving.reading.api import GENERATING

__all__ = ["is_large", "look_through"]


def is_large(request: ClientRequest) -> bool:
    """Return whether the body takes so long to parse that it is scanned first."""
    return len(request.body) > UNCHECKED_BYTES and request.path in GENERATING


async def look_through(request: ClientRequest) -> LargeBody:
    """Scan a large body, and let other requests run meanwhile.

    Raises:
        RequestEnded: parsing would take too long.
    """
    large = LargeBody(request.body)
    try:
        for _ in large.check_values():
            await asyncio.sleep(0)
        large.prompt_tokens = estimate_tokens(request.body)
        await asyncio.sleep(0)
    except BadBody as exc:
        raise RequestEnded(ApiError(400, str(exc), "invalid_body", exc.param)) from None
    return large
