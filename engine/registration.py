"""Heartbeat to the router: FastDeploy's registration, every five seconds for as long as the instance lives."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import httpx

from kvstore_backend import ConfigError

__all__ = ["host_ip_towards", "keep_registered", "router_url"]

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
# Until the first registration has worked, and after one has failed.
_RETRY_SECONDS = 1.0


def router_url(text: str) -> str:
    """``host:port`` or a URL -> ``http://host:port``; 0.0.0.0 means this machine, as FastDeploy's examples use it.

    Raises:
        ConfigError: no host or no port in it.
    """
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
    except httpx.InvalidURL as exc:
        raise ConfigError(f"--router {text!r} is not host:port ({exc})") from None
    if not url.host or url.port is None:
        raise ConfigError(f"--router {text!r} is not host:port, such as 127.0.0.1:52700")
    host = "127.0.0.1" if url.host == "0.0.0.0" else url.host
    return f"{url.scheme}://{host}:{url.port}"


def host_ip_towards(url: str) -> str:
    """This machine's address as the host of ``url`` sees it."""
    target = httpx.URL(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the route.
        probe.connect((target.host, target.port or 80))
        address: str = probe.getsockname()[0]
        return address


async def keep_registered(router: str, instance: dict[str, Any]) -> None:
    """Register ``instance`` (FastDeploy's fields) at ``router`` again and again, until cancelled."""
    said: str | None = None
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        while True:
            try:
                answer = await client.post(f"{router}/register", json=instance)
                problem = "" if answer.status_code == 200 else f"it answered {answer.status_code}: {answer.text[:200]}"
            except httpx.HTTPError as exc:
                problem = f"{type(exc).__name__}: {exc}"
            if problem != said:
                if problem:
                    log.warning("Cannot register at router %s, and trying again: %s", router, problem)
                else:
                    log.info("Registered at router %s", router)
                said = problem
            await asyncio.sleep(_RETRY_SECONDS if problem else HEARTBEAT_SECONDS)
