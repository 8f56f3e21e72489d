"""The parts of an HTTP/1.1 message as the router passes them around."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Address", "Answer", "Headers", "PreparedHead", "prepare_head"]

Headers = list[tuple[bytes, bytes]]


class Address(NamedTuple):
    """Where an instance listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PreparedHead(NamedTuple):
    """Request line and headers, as far as they do not depend on the instance."""

    start: bytes
    needs_length: bool
    bodiless: bool


def prepare_head(method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> PreparedHead:
    """The head of a request.

    Args:
        target: path and query as they stand in the request line.
        headers: without ``host``, ``connection`` and ``content-length``, which are added later.
    """
    parts = [b"%s %s HTTP/1.1\r\n" % (method.encode(), target)]
    parts += [b"%s: %s\r\n" % header for header in headers]
    return PreparedHead(b"".join(parts), method not in ("GET", "HEAD"), method == "HEAD")


class Answer(NamedTuple):
    """A whole response, read to its end."""

    status: int
    headers: Headers
    body: bytes
