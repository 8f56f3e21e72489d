"""Requests without TLS. A client of httpx first reads all certificates of authorities, which takes 22 ms of CPU time.
Tests that send many requests would delay other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx

__all__ = ["answers_ok", "get", "post", "stream"]

# Connections are not reused, because another server may use the same port later.
_CLIENT = httpx.Client(verify=False, trust_env=False, timeout=20, limits=httpx.Limits(max_keepalive_connections=0))


def get(url: str, **options: Any) -> httpx.Response:
    """Send a request like ``httpx.get``."""
    return _CLIENT.get(url, **options)


def answers_ok(url: str) -> bool:
    """Return whether a server responds with 200; False if none listens, or it takes longer than 5 s."""
    with contextlib.suppress(httpx.TransportError):
        return get(url, timeout=5).status_code == 200
    return False


def post(url: str, **options: Any) -> httpx.Response:
    """Send a request like ``httpx.post``."""
    return _CLIENT.post(url, **options)


@contextlib.contextmanager
def stream(method: str, url: str, **options: Any) -> Iterator[httpx.Response]:
    """Send a request like ``httpx.stream``."""
    with _CLIENT.stream(method, url, **options) as response:
        yield response
