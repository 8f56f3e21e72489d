"""Exceptions that say why an exchange with an instance failed.

::

    UpstreamError
    ├── NoRoom
    ├── ConnectFailed
    │   ├── NameUnresolved
    │   └── ConnectRefused
    ├── ConnectionLost
    │   └── StaleConnection
    ├── BadResponse
    └── TimedOut
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
    """The instance's host name was not resolved, because no name server responded. The instance may work."""


class NoRoom(UpstreamError):
    """The router's machine cannot open another connection. The instance is not the cause."""


class ConnectionLost(UpstreamError):
    """The connection to the instance ended before the response was complete."""


class StaleConnection(ConnectionLost):
    """A pooled connection ended before the first byte of the response: the instance had probably closed it before."""


class BadResponse(UpstreamError):
    """The instance sent bytes that are not an HTTP/1.1 response."""


class TimedOut(UpstreamError):
    """The response of the instance took longer than its time limit."""
