"""The ports of an instance: bound before its model is loaded, and opened after."""

from __future__ import annotations

import errno
import socket

from kvcommon.ports import bind_patiently
from kvstore_backend import ConfigError

__all__ = ["bind_socket", "start_listening"]


def bind_socket(host: str, port: int, flag: str) -> socket.socket:
    """Bind a socket without listening, so that a port in use is detected before a model is loaded."""
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
    print(f"engine.api_server: waiting for port {port}: a closed connection still has it", flush=True)


def start_listening(bound: socket.socket, flag: str) -> None:
    """Listen and report a failure now: several processes may bind one port before the first of them listens."""
    try:
        bound.listen()
    except OSError as exc:
        host, port = bound.getsockname()[:2]
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}; choose another {flag}") from None
