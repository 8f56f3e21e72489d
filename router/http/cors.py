"""CORS: which web pages may use the router from a browser, according to the WHATWG's Fetch Standard.

If a script comes from another origin, the browser hides every response from it, including errors, unless a response
header allows the script to read it. The browser sends a preflight (an OPTIONS request without credentials) before any
request that an HTML form cannot send.
"""

from __future__ import annotations

from collections.abc import Collection

from router.http.api_error import ApiError
from router.http.message import Headers, Response

__all__ = ["Cors", "find_foreign_page"]

METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
# Headers that a script may read in addition to those in the standard.
EXPOSED = b"X-Request-Id, Retry-After"
# A browser may cache the response to a preflight for this time. Chromium's maximum is two hours.
MAX_AGE_SECONDS = 3600

_VARY = (b"vary", b"Origin")


class Cors:
    """The origins of the web pages that may use the router."""

    def __init__(self, origins: Collection[str]) -> None:
        """
        Args:
            origins: for example ``https://chat.example.com``; ``*`` allows all origins.
        """
        self._is_open = "*" in origins
        self._origins = {_normalize_origin(origin) for origin in origins}

    def allows(self, origin: str) -> bool:
        """Return whether web pages of an origin may use the router."""
        return self._is_open or origin in self._origins

    def answer_headers(self, headers: Headers) -> Headers:
        """Return the headers to add to every response, also to errors, for a request with these ``headers``."""
        if self._is_open:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        origin = _find_header(headers, b"origin")
        if origin.decode("latin-1") not in self._origins:
            return [_VARY]  # a cache must not send this response to an allowed origin
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED), _VARY]

    def answer_preflight(self, headers: Headers) -> Response | None:
        """Return the response to an OPTIONS request with these headers; None if the request is not a preflight.

        The caller adds the headers of ``answer_headers``.
        """
        origin = _find_header(headers, b"origin")
        if not origin or not _find_header(headers, b"access-control-request-method"):
            return None
        name = origin.decode("latin-1")
        if not self.allows(name):
            message = f"pages of the origin {name!r} may not use this router; server.cors-allowed-origins lists those" \
                " that may"  # fmt: skip
            body = ApiError(403, message, "origin_not_allowed").body()
            return Response(403, [(b"content-type", b"application/json")], body)
        allowed = [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", b"%d" % MAX_AGE_SECONDS)]
        # The response lists the requested headers, because "*" does not include Authorization.
        if wanted := _find_header(headers, b"access-control-request-headers"):
            allowed.append((b"access-control-allow-headers", wanted))
        return Response(204, allowed, b"")


def find_foreign_page(headers: Headers) -> str:
    """Return the origin of the web page whose script or form sends a request; ``""`` if it is the router's own origin,
    or if no page sends the request.

    Browsers send simple requests of all pages, and only hide the responses. A gateway reports no header ``host``.
    """
    origin, host = _find_header(headers, b"origin"), _find_header(headers, b"host")
    is_own = not host or origin.partition(b"://")[2] == host
    return "" if is_own else origin.decode("latin-1")


def _find_header(headers: Headers, wanted: bytes) -> bytes:
    for name, value in headers:
        if name == wanted:
            return value
    return b""


def _normalize_origin(origin: str) -> str:
    """Return ``origin`` as a browser sends it: in lower case, and without the default port of its scheme."""
    origin = origin.lower()
    return origin.removesuffix(":443" if origin.startswith("https:") else ":80")
