"""Parses addresses such as HOST:PORT, and finds the address at which another host reaches this machine."""

from __future__ import annotations

import re
import socket
from typing import NamedTuple

__all__ = ["ServerAddress", "find_own_address", "parse_address"]

_ADDRESS = re.compile(r"(?:(?P<scheme>https?)://)?(?P<host>[\w.-]+|\[[\da-fA-F:.]+\]):(?P<port>\d{1,5})/?", re.ASCII)


class ServerAddress(NamedTuple):
    """Address of an HTTP server. An IPv6 address in ``host`` has its brackets."""

    scheme: str
    host: str
    port: int

    @property
    def url(self) -> str:
        """Address as ``http://host:port``."""
        return f"{self.scheme}://{self.host}:{self.port}"


def parse_address(text: str) -> ServerAddress:
    """Parse ``host:port`` or ``http(s)://host:port``.

    Raises:
        ValueError: the text has another form, or the port is not between 1 and 65535; the message is one sentence.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ValueError(f"{text!r} is not host:port, such as 127.0.0.1:9000")
    return ServerAddress(found["scheme"] or "http", found["host"], int(found["port"]))


def find_own_address(url: str) -> str:
    """Return the address of this machine that it uses to connect to the host of ``url``.

    An IPv6 address is returned without brackets.

    Raises:
        OSError: the host of ``url`` is not known, or there is no route to it.
        ValueError: ``parse_address`` cannot parse ``url``.
    """
    server = parse_address(url)
    host = server.host.strip("[]")
    family, kind, _, _, address = socket.getaddrinfo(host, server.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket sends nothing here; the system picks the route
        own: str = probe.getsockname()[0]
        return own
