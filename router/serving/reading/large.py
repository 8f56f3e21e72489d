"""Large bodies: looked through before they are parsed, while other requests go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.http import UNCHECKED_BYTES, ApiError, BadBody, ClientRequest, LargeBody, estimate_tokens
from router.serving.reading.api import GENERATING
from router.serving.response import RequestEnded

__all__ = ["is_large", "look_through"]


def is_large(request: ClientRequest) -> bool:
    """Whether its body takes so long to parse that it is looked through first."""
    return len(request.body) > UNCHECKED_BYTES and request.path in GENERATING


async def look_through(request: ClientRequest, check: Callable[[], None]) -> LargeBody:
    """Look through a large body, and let other requests go on meanwhile.

    Args:
        check: called after each of them has had a turn; raises where this request has ended.

    Raises:
        RequestEnded: it would take too long to parse, or ``check`` has raised it.
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
