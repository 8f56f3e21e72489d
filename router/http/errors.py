"""Why an exchange with an instance failed.

::

    UpstreamError
    ├── NoRoom            this machine cannot open one more connection, to any instance
    ├── ConnectFailed     no connection was made, so the instance has not received the request
    │   ├── NameUnresolved    no name server answers at present; the instance may work
    │   └── ConnectRefused    no process listens there: not yet, or not any more, then accepted requests may continue
    ├── ConnectionLost    the connection ended before the response did
    │   └── StaleConnection   a pooled connection ended without one byte of response: most likely, but not
    │                         certainly, the instance closed it while idle and never received the request
    ├── BadResponse       the received bytes are not an HTTP/1.1 response
    └── TimedOut          the time limit was exceeded
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
    """No connection was made, so the instance has not received the request."""


class ConnectRefused(ConnectFailed):
    """No process listens there. A process that is shutting down may still finish the requests it has accepted."""


class NameUnresolved(ConnectFailed):
    """The instance's name was not resolved, because no name server answered."""


class NoRoom(UpstreamError):
    """This machine cannot open one more connection. The instance is not the cause."""


class ConnectionLost(UpstreamError):
    """The connection ended before the response did."""


class StaleConnection(ConnectionLost):
    """A pooled connection ended without one byte of response: most likely the instance never received the request."""


class BadResponse(UpstreamError):
    """The received bytes are not an HTTP/1.1 response."""


class TimedOut(UpstreamError):
    """The time limit of the exchange was exceeded."""
