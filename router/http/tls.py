"""TLS for connections from clients: a listener's context, which also answers clients that use plain HTTP."""

from __future__ import annotations

import logging
import ssl
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from router.http.api_error import ApiError

__all__ = ["ListenerContext"]

_log = logging.getLogger("router.http.tls")

_PLAIN_HTTP = ApiError(400, "this port speaks HTTPS: the address begins with https:// instead of http://", "plain_http")


class _ClientTls(ssl.SSLObject):
    """TLS of one client's connection: a failed handshake is logged, and plain HTTP is answered.

    The event loop calls these methods, and sends the bytes in ``outgoing`` whenever a method has to wait for data.
    """

    outgoing: ssl.MemoryBIO
    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Continue the handshake; called by the event loop whenever data has arrived."""
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
            _log.info("a client spoke plain HTTP to this port, which speaks HTTPS")
            self._failure = exc
            body = _PLAIN_HTTP.body()
            head = b"%scontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.outgoing.write(head % (STATUS_LINE[_PLAIN_HTTP.status], len(body)) + body)
            raise ssl.SSLWantReadError from None  # the client reads the answer and leaves, or the handshake times out


class ListenerContext(ssl.SSLContext):
    """TLS context of a port that clients connect to. The certificate is loaded later."""

    def __new__(cls) -> ListenerContext:
        """Create the context. An ``ssl.SSLContext`` gets its protocol here, not in ``__init__``."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self) -> None:
        self.sslobject_class = _ClientTls

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Return the TLS object of a new connection; called by the event loop."""
        client = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(client, _ClientTls)
        client.outgoing = outgoing
        return client
