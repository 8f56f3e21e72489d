"""Sends heartbeats to the router: FastDeploy's registration, every five seconds while the instance runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

import httpx

from kvcommon.addresses import find_own_address, parse_address
from kvcommon.json_objects import load_object
from kvcommon.waiting import wait_for_event
from kvstore_backend import ConfigError

__all__ = ["router_url", "send_heartbeats"]

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
# Interval after a failed registration.
RETRY_SECONDS = 1.0
_NO_ADDRESS = "--router %r is not host:port, such as 127.0.0.1:52700"


def router_url(text: str) -> str:
    """Return the URL of the router, ``http://host:port``, for the value of ``--router``.

    Args:
        text: ``host:port``, or a URL without a path. The host 0.0.0.0 means this machine, as in FastDeploy's examples.

    Raises:
        ConfigError: ``text`` is neither.
    """
    try:
        address = parse_address(text)
    except ValueError:
        raise ConfigError(_NO_ADDRESS % text) from None
    url = address._replace(host="127.0.0.1").url if address.host == "0.0.0.0" else address.url
    try:
        httpx.URL(url).host.encode("idna")  # raises UnicodeError for names that DNS cannot have (empty labels)
    except (httpx.InvalidURL, UnicodeError):
        raise ConfigError(_NO_ADDRESS % text) from None
    return url


async def send_heartbeats(
    router: str,
    describe: Callable[[str], dict[str, Any]],
    changed: asyncio.Event,
    token: str = "",
    on_registered: Callable[[], None] = lambda: None,
) -> None:
    """Register an instance at the router, again and again, until this task is cancelled.

    Args:
        router: the URL of the router.
        describe: gets ``host_ip``, the address of this machine on the network to the router; returns the other fields
            of the registration.
        changed: set by the caller when the fields have changed; the next heartbeat is then sent immediately.
        token: the token that the router requires for registrations; "": the router requires no token.
        on_registered: called each time when the router has accepted a registration.
    """
    reported: str | None = None
    headers = {b"Authorization": f"Bearer {token}".encode()} if token else {}
    # The certificate authorities of the system, or those in SSL_CERT_FILE. The default of httpx is its own list.
    tls = ssl.create_default_context()
    async with httpx.AsyncClient(timeout=5.0, trust_env=False, verify=tls) as client:
        while True:
            changed.clear()
            try:
                host_ip = await asyncio.to_thread(find_own_address, router)
                payload = {**describe(host_ip), "host_ip": host_ip}
                response = await client.post(f"{router}/register", json=payload, headers=headers)
                problem = _explain_refusal(response, has_token=bool(token))
            except (httpx.HTTPError, OSError) as exc:
                problem = f"{type(exc).__name__}: {exc}"
            if not problem:
                on_registered()
            if problem != reported:
                if problem:
                    log.warning("Cannot register at router %s; trying again: %s", router, problem)
                else:
                    log.info("Registered at router %s", router)
                reported = problem
            await wait_for_event(changed, RETRY_SECONDS if problem else HEARTBEAT_SECONDS)


def _explain_refusal(response: httpx.Response, *, has_token: bool) -> str:
    """Return why the router did not accept the registration; ``""`` if it did."""
    if response.status_code == 200:
        return "" if load_object(response.content) is not None else "the server is not a router: its answer is not JSON"
    if response.status_code != 401:
        return f"the router answered {response.status_code}: {response.text[:200]}"
    if has_token:
        return "the router answered 401, because the token in the file of --router-token-file is wrong"
    return "the router answered 401, because it requires a token; give the file of the token with --router-token-file"
