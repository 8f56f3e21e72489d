"""TLS for connections from clients. A client that sends plain HTTP to the port gets an error response."""

from __future__ import annotations

import logging
import ssl
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from router.http.api_error import ApiError

__all__ = ["ListenerContext"]

_log = logging.getLogger("router.http.tls")

_PLAIN_HTTP = ApiError(400, "this port serves HTTPS; use https:// instead of http://", "plain_http")


class _ClientTls(ssl.SSLObject):
    """TLS of one client's connection. It logs a failed handshake, and sends an error to a client that uses plain HTTP.

    The event loop calls these methods. When a method needs more data, the loop sends the bytes in ``outgoing``.
    """

    outgoing: ssl.MemoryBIO
    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Continue the handshake. The event loop calls this whenever data has arrived."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as exc:
            if exc.reason != "HTTP_REQUEST":
                _log.debug("a client's TLS handshake failed: %s", exc.reason)
                raise
            _log.info("a client sent plain HTTP to this HTTPS port")
            self._failure = exc
            body = _PLAIN_HTTP.body()
            head = b"%scontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.outgoing.write(head % (STATUS_LINE[_PLAIN_HTTP.status], len(body)) + body)
            raise ssl.SSLWantReadError from None  # the client reads the error, or the handshake times out


class ListenerContext(ssl.SSLContext):
    """TLS context of a port to which clients connect. The certificate is loaded later."""

    def __new__(cls) -> ListenerContext:
        """Create the context. An ``ssl.SSLContext`` takes its protocol in ``__new__``, not in ``__init__``."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self) -> None:
        self.sslobject_class = _ClientTls

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Return the TLS object for a new connection. The event loop calls this."""
        client = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(client, _ClientTls)
        client.outgoing = outgoing
        return client
