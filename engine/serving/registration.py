"""Heartbeat to the router: FastDeploy's registration, every five seconds for as long as the instance lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Any

import httpx

from kvcommon.addresses import find_own_address, parse_address
from kvstore_backend import ConfigError

__all__ = ["router_url", "send_heartbeats"]

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
# Interval until the first registration has succeeded, and after one has failed.
RETRY_SECONDS = 1.0
_NO_ADDRESS = "--router %r is not host:port, such as 127.0.0.1:52700"


def router_url(text: str) -> str:
    """Convert ``host:port`` or a URL to ``http://host:port``; 0.0.0.0 means this machine, as in FastDeploy's examples.

    Raises:
        ConfigError: it is something else, or has a path, which a router does not have.
    """
    try:
        address = parse_address(text)
    except ValueError:
        raise ConfigError(_NO_ADDRESS % text) from None
    url = address._replace(host="127.0.0.1").url if address.host == "0.0.0.0" else address.url
    try:
        httpx.URL(url).host.encode("idna")  # the form for the look-up: labels of 1 to 63 characters
    except (httpx.InvalidURL, UnicodeError):
        raise ConfigError(_NO_ADDRESS % text) from None
    return url


async def send_heartbeats(
    router: str,
    describe: Callable[[], dict[str, Any]],
    changed: asyncio.Event,
    token: str = "",
    on_registered: Callable[[], None] = lambda: None,
) -> None:
    """Register an instance at ``router`` again and again, until cancelled.

    Args:
        router: ``router_url(...)``.
        describe: returns FastDeploy's current fields, without ``host_ip``, which is determined each time.
        changed: set when the fields have changed, so that the next heartbeat is immediate.
        token: the token that the router requires for a registration, if it requires one.
        on_registered: called each time that the router has accepted a registration.
    """
    reported: str | None = None
    headers = {b"Authorization": f"Bearer {token}".encode()} if token else {}
    # The system's certificate authorities, or those that SSL_CERT_FILE names; by default httpx uses a list of its own.
    tls = ssl.create_default_context()
    async with httpx.AsyncClient(timeout=5.0, trust_env=False, verify=tls) as client:
        while True:
            changed.clear()
            try:
                payload = {**describe(), "host_ip": await asyncio.to_thread(find_own_address, router)}
                response = await client.post(f"{router}/register", json=payload, headers=headers)
                problem = "" if response.status_code == 200 else _explain_refusal(response, has_token=bool(token))
            except (httpx.HTTPError, OSError) as exc:
                problem = f"{type(exc).__name__}: {exc}"
            if not problem:
                on_registered()
            if problem != reported:
                if problem:
                    log.warning("Cannot register at router %s, and trying again: %s", router, problem)
                else:
                    log.info("Registered at router %s", router)
                reported = problem
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(changed.wait(), RETRY_SECONDS if problem else HEARTBEAT_SECONDS)


def _explain_refusal(response: httpx.Response, *, has_token: bool) -> str:
    if response.status_code != 401:
        return f"it answered {response.status_code}: {response.text[:200]}"
    if has_token:
        return "it answered 401: the token in the file of --router-token-file is not the one that it wants"
    return "it answered 401: it wants a token of those who register; name its file with --router-token-file"
