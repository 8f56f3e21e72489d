"""Limits for HTTP requests. Router and engine use the same limits: an instance accepts what the router accepts."""

from __future__ import annotations

__all__ = [
    "HEAD_BYTES",
    "LONGEST_URL",
    "MAX_HEADERS",
    "READ_SECONDS",
    "HeadRefusal",
    "refuse_long_head",
    "refuse_unreadable",
]

HEAD_BYTES = 64 * 1024
"""Limit for the head of a request, and for other parts that are not the body."""
MAX_HEADERS = 1000
LONGEST_URL = 0xFFFF
"""Limit of httptools for the path and query of a URL. httptools reports a longer URL as invalid HTTP."""
READ_SECONDS = 60.0
"""Maximum time to wait for the first or the next bytes of a request; the same as in nginx."""

HeadRefusal = tuple[int, str, str]
"""Error response for a refused request head: HTTP status, message and error code."""


def refuse_long_head(url_bytes: int, server: str) -> HeadRefusal:
    """Return the error for a request head that is larger than ``HEAD_BYTES``.

    Args:
        url_bytes: length of the path and query of the request.
        server: the server that refuses the request, for the message, such as "this router".
    """
    if url_bytes < HEAD_BYTES // 2:
        return 431, f"the request head is larger than the {HEAD_BYTES} bytes that {server} accepts", "head_too_large"
    return (
        414,
        f"the path and its query are longer than the {HEAD_BYTES} bytes that {server} accepts",
        "target_too_long",
    )


def refuse_unreadable(url_bytes: int, server: str) -> HeadRefusal:
    """Return the error for a request head that httptools cannot parse, perhaps because its URL is too long.

    The arguments are those of ``refuse_long_head``.
    """
    if url_bytes > LONGEST_URL:
        return refuse_long_head(url_bytes, server)
    return 400, "this is not an HTTP/1.1 request", "invalid_http"
