"""HOST:PORT in flags, and this machine's address as another host sees it."""

from __future__ import annotations

import re
import socket
from typing import NamedTuple

__all__ = ["ServerAddress", "find_own_address", "parse_address"]

_ADDRESS = re.compile(r"(?:(?P<scheme>https?)://)?(?P<host>[\w.-]+|\[[\da-fA-F:.]+\]):(?P<port>\d{1,5})/?", re.ASCII)


class ServerAddress(NamedTuple):
    """An HTTP server's address; ``host`` has the brackets of an IPv6 address."""

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
        ValueError: the text has another form; the message is one sentence.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ValueError(f"{text!r} is not host:port, such as 127.0.0.1:9000")
    return ServerAddress(found["scheme"] or "http", found["host"], int(found["port"]))


def find_own_address(url: str) -> str:
    """Return this machine's address as the host of ``url`` sees it; an IPv6 address has no brackets.

    Raises:
        OSError: that host is not known, or there is no route to it.
        ValueError: ``parse_address`` cannot parse ``url``.
    """
    server = parse_address(url)
    host = server.host.strip("[]")
    family, kind, _, _, address = socket.getaddrinfo(host, server.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket sends nothing here; the system picks the route
        own: str = probe.getsockname()[0]
        return own
