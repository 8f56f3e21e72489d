"""The ports of an instance: taken before its model is loaded, and listened on after."""

from __future__ import annotations

import errno
import socket
import time

from kvstore_backend import ConfigError

__all__ = ["CLOSED_CONNECTION_SECONDS", "bind_socket", "start_listening"]

# Linux takes clients' ends from 32768 to 60999; one keeps its port for 60 s after it was closed.
CLOSED_CONNECTION_SECONDS = 70.0


def bind_socket(host: str, port: int, flag: str) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port is noticed before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        _bind_patiently(bound, host, port)
    except (OSError, UnicodeError) as exc:
        bound.close()
        if not isinstance(exc, OSError) or exc.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(f"cannot listen on {host}:{port}: --host must be an address of this machine") from None
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}; choose another {flag}") from None
    return bound


def _bind_patiently(bound: socket.socket, host: str, port: int) -> None:
    """Bind, if need be after waiting for the end of a connection that has the port for its client's end."""
    give_up_at, told = time.monotonic() + CLOSED_CONNECTION_SECONDS, False
    while True:
        try:
            return bound.bind((host, port))
        except OSError as exc:
            is_held = exc.errno == errno.EADDRINUSE and not _is_served(bound.family, host, port)
            if not is_held or time.monotonic() >= give_up_at:
                raise
        if not told:
            print(f"engine.api_server: waiting for port {port}: a closed connection still has it", flush=True)
            told = True
        time.sleep(0.2)


def _is_served(family: int, host: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def start_listening(bound: socket.socket, flag: str) -> None:
    """Listen, while a refusal can still be told: several may bind one port before the first of them listens."""
    try:
        bound.listen()
    except OSError as exc:
        host, port = bound.getsockname()[:2]
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}; choose another {flag}") from None
