"""Registers a server that does not know our router: ``python -m router.register --router H:P --role mixed --port N``.

A sidecar, started beside any server with OpenAI's endpoints and a ``/health`` (vLLM, SGLang, MindIE, llama.cpp): as
FastDeploy's instances do for themselves, it asks that server every five seconds whether it is healthy and, if so,
registers it. When the server is not healthy, or the sidecar ends, the heartbeat ends and the router forgets it.

It is a program of its own: the router does not load it, so that all that the router itself asks of instances still
goes through ``upstream.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from router.access.auth import read_token
from router.fleet.registration import Role
from router.settings import SettingsError

__all__ = ["Sidecar", "main"]

_log = logging.getLogger("router.register")

HEARTBEAT_SECONDS = 5.0
_TIMEOUT_SECONDS = 4.0
_ADDRESS = re.compile(r"(?:(?P<scheme>https?)://)?(?P<host>[\w.-]+|\[[\da-fA-F:.]+\]):(?P<port>\d{1,5})/?", re.ASCII)


class Sidecar:
    """The heartbeat of one server.

    Args:
        router: the router's URL.
        card: what is registered: ``role``, ``port`` and, where they are known, ``host_ip`` and ``connector_port``.
            Without ``host_ip`` it is this machine's address as the router sees it, found out anew each time.
        token: the router's admin token, where it has one.
    """

    def __init__(self, router: str, card: dict[str, Any], token: str = "") -> None:
        self._router = router
        self._card = card
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._said: str | None = None

    async def run(self) -> None:
        """Until cancelled: ask the server, register it, say what changed."""
        async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
            while True:
                self._say(await self._beat(client))
                await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _beat(self, client: httpx.AsyncClient) -> str:
        """One heartbeat; what is the matter, or nothing."""
        try:
            card = {"host_ip": await asyncio.to_thread(_own_address, self._router), **self._card}
        except OSError as exc:
            return f"there is no way to the router {self._router}: {exc}"
        host = f"[{card['host_ip']}]" if ":" in card["host_ip"] else card["host_ip"]
        server = f"http://{host}:{card['port']}"
        try:
            health = await client.get(f"{server}/health")
        except httpx.HTTPError as exc:
            return f"not registered, as the server at {server} does not answer /health ({_reason(exc)})"
        if health.status_code != 200:
            return f"not registered, as the server at {server} answers /health with {health.status_code}"
        try:
            answer = await client.post(f"{self._router}/register", json=card, headers=self._headers)
        except httpx.HTTPError as exc:
            return f"the router {self._router} does not answer ({_reason(exc)}); trying again"
        if answer.status_code != 200:
            return f"the router {self._router} refused with {answer.status_code}: {answer.text[:300]}; trying again"
        return ""

    def _say(self, problem: str) -> None:
        """Once, when it changes."""
        if problem != self._said:
            self._said = problem
            if problem:
                _log.warning("%s", problem)
            else:
                _log.info("registered at %s: %s at port %s", self._router, self._card["role"], self._card["port"])


def main(argv: Sequence[str] | None = None) -> int:
    """Register until SIGTERM or SIGINT; the exit status: 0, or 2 if the command line cannot be used."""
    parser = argparse.ArgumentParser(prog="router.register", description="Register a server that cannot by itself.")
    parser.add_argument("--router", type=_router_url, required=True, metavar="HOST:PORT", help="the router")
    parser.add_argument("--role", choices=[role.value for role in Role], required=True, help="what the server does")
    parser.add_argument("--port", type=_port, required=True, help="where the server listens")
    parser.add_argument("--host", metavar="IP", help="of the server (default: this machine's, as the router sees it)")
    parser.add_argument("--connector-port", type=_port, help="where it takes KV from prefill instances, if it does")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="with the router's admin token, if it has one")
    arguments = parser.parse_args(argv)
    try:
        token = read_token(arguments.token_file, "--token-file") if arguments.token_file else ""
    except SettingsError as exc:
        print(f"router.register: {exc}", file=sys.stderr)
        return 2
    card = {"role": arguments.role, "port": arguments.port}
    if arguments.host:
        card["host_ip"] = arguments.host
    if arguments.connector_port:
        card["connector_port"] = arguments.connector_port
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(_until_told_to_end(Sidecar(arguments.router, card, token)))
    return 0


async def _until_told_to_end(sidecar: Sidecar) -> None:
    running = asyncio.ensure_future(sidecar.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _router_url(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, such as 127.0.0.1:52700")
    return f"{found['scheme'] or 'http'}://{found['host']}:{found['port']}"


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, a number from 1 to 65535")
    return int(text)


def _own_address(router: str) -> str:
    """This machine's address as the router sees it."""
    target = httpx.URL(router)
    family, kind, _, _, address = socket.getaddrinfo(target.host, target.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: sends nothing, only picks the route
        own: str = probe.getsockname()[0]
        return own


def _reason(exc: httpx.HTTPError) -> str:
    return str(exc) or type(exc).__name__


if __name__ == "__main__":
    sys.exit(main())
