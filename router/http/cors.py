"""CORS: which pages' scripts may use the router from a browser, by the WHATWG's Fetch Standard.

A browser keeps an answer from a script of another origin than the answer's own unless a header allows it, errors too.
Before a request that no HTML form could send, it asks by a preflight, an OPTIONS without credentials.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from router.http.api_error import ApiError
from router.http.message import Headers

__all__ = ["Cors", "PreflightAnswer"]

ANYBODY = "*"
METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
# What a script may read beside the headers that the standard names.
EXPOSED = b"X-Request-Id, Retry-After"
# So long a browser need not ask again; Chromium takes two hours at most.
MAX_AGE_SECONDS = 3600

_VARY = (b"vary", b"Origin")


class PreflightAnswer(NamedTuple):
    """The answer to a preflight, beside the headers of every answer."""

    status: int
    headers: Headers
    body: bytes


class Cors:
    """The origins whose pages may use the router."""

    def __init__(self, origins: Collection[str]) -> None:
        """
        Args:
            origins: such as ``https://chat.example.com``; ``*`` for all.
        """
        self._is_open = ANYBODY in origins
        self._origins = {_as_browsers_say(origin) for origin in origins}

    def __repr__(self) -> str:
        return f"<Cors {ANYBODY if self._is_open else sorted(self._origins)}>"

    def answer_headers(self, headers: Headers) -> Headers:
        """Headers of every answer to a request with these ``headers``, of an error too."""
        if self._is_open:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        origin = _find_header(headers, b"origin")
        if origin.decode("latin-1") not in self._origins:
            return [_VARY]  # no cache may give this answer to an origin that is allowed
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED), _VARY]

    def answer_preflight(self, headers: Headers) -> PreflightAnswer | None:
        """The answer to an OPTIONS with these headers; None if it is no preflight."""
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
        # Those asked for, as "*" would leave out Authorization.
        if wanted := _find_header(headers, b"access-control-request-headers"):
            allowed.append((b"access-control-allow-headers", wanted))
        return PreflightAnswer(204, allowed, b"")


def _find_header(headers: Headers, wanted: bytes) -> bytes:
    for name, value in headers:
        if name == wanted:
            return value
    return b""


def _as_browsers_say(origin: str) -> str:
    """In lower case, and without the scheme's own port."""
    origin = origin.lower()
    return origin.removesuffix(":443" if origin.startswith("https:") else ":80")
