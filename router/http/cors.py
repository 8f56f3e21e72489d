"""CORS: which web pages may use the router from a browser, according to the WHATWG's Fetch Standard.

A browser hides an answer, including errors, from a script of another origin unless a response header allows it. Before
a request that no HTML form could send, it sends a preflight: an OPTIONS request without credentials.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from router.http.api_error import ApiError
from router.http.message import Headers

__all__ = ["Cors", "PreflightAnswer"]

ANYBODY = "*"
METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
# Headers that a script may read in addition to those in the standard.
EXPOSED = b"X-Request-Id, Retry-After"
# A browser may cache the preflight's answer for this time. Chromium's maximum is two hours.
MAX_AGE_SECONDS = 3600

_VARY = (b"vary", b"Origin")


class PreflightAnswer(NamedTuple):
    """The answer to a preflight, in addition to the headers of every answer."""

    status: int
    headers: Headers
    body: bytes


class Cors:
    """The origins of the pages that may use the router."""

    def __init__(self, origins: Collection[str]) -> None:
        """
        Args:
            origins: for example ``https://chat.example.com``; ``*`` for all.
        """
        self._is_open = ANYBODY in origins
        self._origins = {_as_browsers_say(origin) for origin in origins}

    def __repr__(self) -> str:
        return f"<Cors {ANYBODY if self._is_open else sorted(self._origins)}>"

    def answer_headers(self, headers: Headers) -> Headers:
        """Return the headers for every answer to a request with these ``headers``, including errors."""
        if self._is_open:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        origin = _find_header(headers, b"origin")
        if origin.decode("latin-1") not in self._origins:
            return [_VARY]  # a cache must not send this answer to an allowed origin
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED), _VARY]

    def answer_preflight(self, headers: Headers) -> PreflightAnswer | None:
        """Return the answer to an OPTIONS with these headers; None if it is not a preflight."""
        origin = _find_header(headers, b"origin")
        if not origin or not _find_header(headers, b"access-control-request-method"):
            return None
        name = origin.decode("latin-1")
        if not self._is_open and name not in self._origins:
            message = f"pages of the origin {name!r} may not use this router; server.cors-allowed-origins names those" \
                " that may"  # fmt: skip
            body = ApiError(403, message, "origin_not_allowed").body()
            return PreflightAnswer(403, [(b"content-type", b"application/json")], body)
        allowed = [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", b"%d" % MAX_AGE_SECONDS)]
        # Lists the requested headers, because "*" would not include Authorization.
        if wanted := _find_header(headers, b"access-control-request-headers"):
            allowed.append((b"access-control-allow-headers", wanted))
        return PreflightAnswer(204, allowed, b"")


def _find_header(headers: Headers, wanted: bytes) -> bytes:
    for name, value in headers:
        if name == wanted:
            return value
    return b""


def _as_browsers_say(origin: str) -> str:
    """Return the origin as browsers send it: in lower case, and without the scheme's default port."""
    origin = origin.lower()
    return origin.removesuffix(":443" if origin.startswith("https:") else ":80")
