"""Types for the parts of an HTTP/1.1 message: address, headers, the head of a request, and a complete response."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = [
    *("HOP_BY_HOP", "NOT_PASSED_BACK", "Address", "Headers", "PreparedHead", "Response", "end_to_end", "prepare_head"),
]

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    name.encode()
    for name in (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
"""Names of headers that apply to one connection only, so the router does not forward them (RFC 9110, 7.6.1)."""

NOT_PASSED_BACK = HOP_BY_HOP | {
    *(b"location", b"content-location", b"refresh", b"alt-svc", b"x-request-id", b"set-cookie"),
    *(b"x-router-request-id", b"x-router-decision", b"x-router-prefill", b"x-router-decode", b"x-router-mixed"),
    *(b"x-router-prefill-url", b"x-router-decode-url"),
    *(b"access-control-allow-credentials", b"access-control-allow-headers", b"access-control-allow-methods"),
    *(b"access-control-allow-origin", b"access-control-expose-headers", b"access-control-max-age"),
}
"""Names of headers in an instance's response that the router does not forward to clients: headers for one connection,
headers that would make a client bypass the router, and headers that the router sets itself.
"""


class Address(NamedTuple):
    """Host and port at which an instance listens."""

    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        """Return the address as a URL, for example ``http://10.0.0.1:8000``."""
        return f"{'https' if self.tls else 'http'}://{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PreparedHead(NamedTuple):
    """Request line and headers of a request, without the headers that depend on the instance."""

    start: bytes
    needs_length: bool
    """Whether the request needs a ``content-length``, because its method is neither GET nor HEAD."""
    bodiless: bool
    """Whether the response has no body, because the method is HEAD."""


class Response(NamedTuple):
    """A complete response with its body."""

    status: int
    headers: Headers
    body: bytes


def prepare_head(method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> PreparedHead:
    """Return the head of a request, which can be sent to several instances.

    Args:
        target: path and query as in the request line.
        headers: all headers except ``host``, ``connection`` and ``content-length``; the connection pool adds those.
    """
    lines = [b"%s %s HTTP/1.1\r\n" % (method.encode(), target)]
    for header in headers:  # no comprehension: it costs a call, and this runs for every request
        lines.append(b"%s: %s\r\n" % header)
    start = b"".join(lines)
    return PreparedHead(start, method != "GET" and method != "HEAD", method == "HEAD")


def end_to_end(headers: Headers, dropped: frozenset[bytes] = HOP_BY_HOP) -> Headers:
    """Return the headers to forward: all except those in ``dropped`` and those that the ``connection`` header names."""
    kept: Headers = []
    named: set[bytes] | None = None
    for header in headers:
        name, value = header
        if name not in dropped:
            kept.append(header)
        elif name == b"connection":
            named = set() if named is None else named
            named.update([option.strip().lower() for option in value.split(b",")])
    if named is not None and named - dropped:
        kept = [header for header in kept if header[0] not in named]
    return kept
