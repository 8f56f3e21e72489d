"""Why an exchange with an instance failed.

::

    UpstreamError
    ├── NoRoom            this machine cannot open one more connection, to any instance
    ├── ConnectFailed     no connection was made, so the instance has not seen the request
    │   ├── NameUnresolved    no name server answers at present, which says nothing of the instance
    │   └── ConnectRefused    nobody listens there: not yet, or no more, and then accepted requests may still go on
    ├── ConnectionLost    the connection ended before the response did
    │   └── StaleConnection   a pooled connection ended without one byte of response: most likely, but not
    │                         certainly, the instance closed it while idle and never saw the request
    ├── BadResponse       the bytes received are not an HTTP/1.1 response
    └── TimedOut          the time given was over
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
    """An exchange with an instance failed; the text is one sentence that names the instance."""


class ConnectFailed(UpstreamError):
    """No connection was made, so the instance has not seen the request."""


class ConnectRefused(ConnectFailed):
    """Nobody listens there. A process that ends may still finish the requests it has accepted."""


class NameUnresolved(ConnectFailed):
    """The instance's name was not resolved, as no name server answered."""


class NoRoom(UpstreamError):
    """This machine has no room for one more connection; no instance is to blame."""


class ConnectionLost(UpstreamError):
    """The connection ended before the response did."""


class StaleConnection(ConnectionLost):
    """A pooled connection ended without one byte of response: most likely the instance never saw the request."""


class BadResponse(UpstreamError):
    """The bytes received are not an HTTP/1.1 response."""


class TimedOut(UpstreamError):
    """The time given to the exchange was over."""
