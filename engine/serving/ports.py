"""The ports of an instance: binds them before the model is loaded, and listens on them after that."""

from __future__ import annotations

import errno
import socket

from kvcommon.output import announce
from kvcommon.ports import bind_patiently
from kvstore_backend import ConfigError

__all__ = ["bind_socket", "start_listening"]


def bind_socket(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket that is bound to a port, but does not listen yet. ``flag`` is the port's flag, for messages.

    Raises:
        ConfigError: the port is in use or not allowed, or ``host`` is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bind_patiently(bound, (host, port), lambda: _announce_wait(port))
    except (OSError, UnicodeError) as exc:
        bound.close()
        if not isinstance(exc, OSError) or exc.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(f"cannot listen on {host}:{port}: --host must be an address of this machine") from None
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}; choose another {flag}") from None
    return bound


def _announce_wait(port: int) -> None:
    announce(f"engine.api_server: waiting for port {port}, which a closed connection still uses")


def start_listening(bound: socket.socket, flag: str) -> None:
    """Listen on a bound socket.

    Raises:
        ConfigError: another process listens on the port. Several processes can bind a port before one of them listens.
    """
    try:
        bound.listen()
    except OSError as exc:
        host, port = bound.getsockname()[:2]
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}; choose another {flag}") from None
