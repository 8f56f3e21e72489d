"""Requests without TLS. A client of httpx reads all of the world's authorities first, which takes 22 ms of computing:
who polls a server so, or asks it thousands of times, keeps the others from their work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx

__all__ = ["answers_ok", "get", "post", "stream"]

# Connections are not kept: the next server at the same port would not know them.
_CLIENT = httpx.Client(verify=False, trust_env=False, timeout=20, limits=httpx.Limits(max_keepalive_connections=0))


def get(url: str, **options: Any) -> httpx.Response:
    """As ``httpx.get``."""
    return _CLIENT.get(url, **options)


def answers_ok(url: str) -> bool:
    """Whether a server answers 200 there; False where none listens, or takes longer than 5 s."""
    with contextlib.suppress(httpx.TransportError):
        return get(url, timeout=5).status_code == 200
    return False


def post(url: str, **options: Any) -> httpx.Response:
    """As ``httpx.post``."""
    return _CLIENT.post(url, **options)


@contextlib.contextmanager
def stream(method: str, url: str, **options: Any) -> Iterator[httpx.Response]:
    """As ``httpx.stream``."""
    with _CLIENT.stream(method, url, **options) as response:
        yield response
