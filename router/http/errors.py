"""Why an exchange with an instance failed.

::

    UpstreamError
    ├── NoRoom            the router's machine cannot open another connection, to any instance
    ├── ConnectFailed     the router could not connect, so the instance has not received the request
    │   ├── NameUnresolved    no name server responds at present; the instance may work
    │   └── ConnectRefused    no process listens at the instance's address; a process that is shutting down may still
    │                         finish the requests that it has accepted
    ├── ConnectionLost    the connection ended before the response was complete
    │   └── StaleConnection   a pooled connection ended before the first byte of the response: most likely the
    │                         instance closed the idle connection and never received the request
    ├── BadResponse       the instance sent bytes that are not an HTTP/1.1 response
    └── TimedOut          the response took longer than its time limit
"""

from __future__ import annotations

__all__ = [
    "BadResponse",
    "ConnectFailed",
    "ConnectRefused",
    "ConnectionLost",
    "NameUnresolved",
    "NoRoom",
    "StaleConnection",
    "TimedOut",
    "UpstreamError",
]


class UpstreamError(Exception):
    """An exchange with an instance failed. The message is one sentence that names the instance."""


class ConnectFailed(UpstreamError):
    """The router could not connect to the instance, so the instance has not received the request."""


class ConnectRefused(ConnectFailed):
    """No process listens at the instance's address. A process that is shutting down may still finish its requests."""


class NameUnresolved(ConnectFailed):
    """The instance's host name was not resolved, because no name server responded."""


class NoRoom(UpstreamError):
    """The router's machine cannot open another connection. The instance is not the cause."""


class ConnectionLost(UpstreamError):
    """The connection to the instance ended before the response was complete."""


class StaleConnection(ConnectionLost):
    """A pooled connection ended before the first byte of the response; most likely the instance got no request."""


class BadResponse(UpstreamError):
    """The instance sent bytes that are not an HTTP/1.1 response."""


class TimedOut(UpstreamError):
    """The response of the instance took longer than its time limit."""
