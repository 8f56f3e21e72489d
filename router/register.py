"""Registers a server that cannot register itself: ``python -m router.register --router H:P --port N``.

This program is a sidecar. It runs next to a server with OpenAI's endpoints and ``/health`` (vLLM, SGLang, MindIE,
llama.cpp). FastDeploy's instances register themselves and do not need it. Every five seconds, the sidecar checks
whether the server is healthy. If so, it registers the server. If not, or if the sidecar has ended, the heartbeats stop
and the router removes the instance. The sidecar also finds out which engine the server has.

The router does not import this module, because only ``router.http`` may send requests to instances.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import signal
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from kvcommon.addresses import find_own_address
from kvcommon.json_objects import load_object
from kvcommon.kv_events import name_host
from kvcommon.output import run_program
from router.fleet import EngineKind, IdentityHidden, KvConnector, Role, ask_identity, ask_sglang
from router.settings import (
    CERTIFICATE_REMEDY,
    FlagParser,
    SettingsError,
    is_certificate_refused,
    parse_port,
    parse_url,
    read_authorities,
    read_token,
)

__all__ = ["Sidecar", "main"]

_log = logging.getLogger("router.register")

HEARTBEAT_SECONDS = 5.0
FIRST_RETRY_SECONDS = 0.5
ROLES = tuple(role.value for role in Role)
_TIMEOUT_SECONDS = 4.0


class ServerError(Exception):
    """The server is not healthy, does not report its engine, or contradicts a flag. The message is one sentence."""


class UntrustedError(Exception):
    """The certificate of the router or the server is not trusted, so a retry does not help. The message is one
    sentence.
    """


class Sidecar:
    """Sends the heartbeats of one server.

    Args:
        router: URL of the router.
        payload: fields of the registration. ``port`` is required; ``role``, ``host_ip``, ``connector_port``,
            ``engine``, ``bootstrap_port``, ``kv_connector`` and ``kv_events`` are optional. In ``kv_events``, a
            wildcard is replaced by the server's address. Without ``host_ip``, the address is this machine's, as the
            router sees it; it is determined before each heartbeat. Without ``engine``, the server is queried.
        token: the router's registration token or admin token; ``""`` if it has none.
        tls: TLS context with the trusted certificate authorities; None: the system's authorities.
    """

    def __init__(
        self, router: str, payload: dict[str, Any], token: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        self._router = router
        self._payload = payload
        self._tls = tls or ssl.create_default_context()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._last_problem: str | None = None
        self._found: dict[str, Any] | None = None  # fields that the server has reported; None while it is not healthy

    async def keep_registering(self) -> None:
        """Send heartbeats, and log each change, until this task is cancelled.

        After a failure the next heartbeat follows sooner, because the router or the server may start a second later.

        Raises:
            UntrustedError: the certificate of the router or the server is not trusted.
        """
        async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, trust_env=False, verify=self._tls) as client:
            pause = FIRST_RETRY_SECONDS
            while True:
                problem = await self._send_heartbeat(client)
                self._log_change(problem)
                await asyncio.sleep(pause if problem else HEARTBEAT_SECONDS)
                pause = min(2 * pause, HEARTBEAT_SECONDS) if problem else FIRST_RETRY_SECONDS

    async def _send_heartbeat(self, client: httpx.AsyncClient) -> str:
        """Check the server and send one heartbeat. Return the problem in one sentence; ``""`` if there is none."""
        try:
            payload = {"host_ip": await asyncio.to_thread(find_own_address, self._router), **self._payload}
        except OSError as exc:
            return f"the router {self._router} cannot be reached: {exc}"
        scheme, _, host = payload["host_ip"].rpartition("://")
        server = f"{scheme or 'http'}://{f'[{host}]' if ':' in host else host}:{payload['port']}"
        try:
            await self._check_server(client, server)
        except ServerError as exc:
            self._found = None
            return f"cannot register yet: {exc}"
        payload = {"role": "mixed", **(self._found or {}), **payload}
        if kv_events := payload.get("kv_events"):
            payload["kv_events"] = {name: name_host(value, host.strip("[]")) for name, value in kv_events.items()}
        try:
            response = await client.post(f"{self._router}/register", json=payload, headers=self._headers)
        except httpx.HTTPError as exc:
            if is_certificate_refused(exc):
                raise UntrustedError(f"the router {self._router} {CERTIFICATE_REMEDY}: {exc}") from None
            return f"the router {self._router} does not answer ({_describe_error(exc)}); trying again"
        if response.status_code != 200:
            status, text = response.status_code, response.text[:300]
            return f"the router {self._router} refused the registration with status {status}: {text}; trying again"
        if load_object(response.content) is None:
            return f"the server at {self._router} is not a router: its answer is not JSON; trying again"
        return ""

    async def _check_server(self, client: httpx.AsyncClient, server: str) -> None:
        """Check that the server is healthy, and query its engine unless it is known; else raise ``ServerError``."""
        try:
            health = await client.get(f"{server}/health")
        except httpx.HTTPError as exc:
            if is_certificate_refused(exc):
                raise UntrustedError(f"the server at {server} {CERTIFICATE_REMEDY}: {exc}") from None
            raise ServerError(f"the server at {server} does not answer /health ({_describe_error(exc)})") from None
        if health.status_code != 200:
            raise ServerError(f"the server at {server} answers /health with {health.status_code}")
        if self._found is not None:
            return

        async def fetch(path: str) -> tuple[int, bytes]:
            response = await client.get(f"{server}{path}")
            return response.status_code, response.content

        engine, role = self._payload.get("engine"), self._payload.get("role")
        found: dict[str, Any] = {}
        try:
            if engine is None:
                found = await ask_identity(fetch)
            elif engine == EngineKind.SGLANG.value:
                found = await ask_sglang(fetch)
        except httpx.HTTPError as exc:
            raise ServerError(f"cannot find out which engine {server} runs ({_describe_error(exc)})") from None
        except IdentityHidden as exc:
            raise ServerError(f"the server at {server} {exc}; name the engine with --engine") from None
        reported = found.get("role", role)
        if role not in (None, reported):
            raise ServerError(f"the server at {server} reports that it is a {reported} instance, but --role is {role}")
        self._found = found

    def _log_change(self, problem: str) -> None:
        """Log a new problem, or that there is no problem any more; log nothing if nothing has changed."""
        if problem != self._last_problem:
            self._last_problem = problem
            if problem:
                _log.warning("%s", problem)
            else:
                known = {"engine": "", "role": "mixed", **(self._found or {}), **self._payload}
                what = f"{known['engine']} {known['role']}".strip()
                _log.info("registered at %s: %s at port %s", self._router, what, known["port"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sidecar until SIGTERM or SIGINT.

    Returns:
        The exit status: 0; 1 if the certificate of the router or the server is not trusted; 2 if the flags are wrong.
    """
    try:
        arguments = _make_flags().parse_args(sys.argv[1:] if argv is None else argv)
        token = read_token(arguments.token_file, "--token-file") if arguments.token_file else ""
        tls = read_authorities(str(arguments.ca_file), "--ca-file") if arguments.ca_file else None
        kv_events = _read_kv_events(arguments)
    except SettingsError as exc:
        print(f"router.register: {exc}", file=sys.stderr)
        return 2
    payload = {"port": arguments.port}
    if arguments.host:
        payload["host_ip"] = arguments.host
    for name in ("role", "connector_port", "engine", "bootstrap_port", "kv_connector"):
        if value := getattr(arguments, name):
            payload[name] = value
    if kv_events:
        payload["kv_events"] = kv_events
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        asyncio.run(_run_until_signal(Sidecar(arguments.router, payload, token, tls)))
    except UntrustedError as exc:
        print(f"router.register: {exc}", file=sys.stderr)
        return 1
    return 0


def _make_flags() -> FlagParser:
    parser = FlagParser(prog="router.register", description="Registers a server that cannot register itself.")
    parser.add_argument("--router", type=parse_url, required=True, metavar="HOST:PORT", help="the router")
    parser.add_argument(
        "--role",
        type=_parse_role,
        choices=ROLES,
        help="role of the server (default: mixed; an SGLang server reports its role)",
    )
    parser.add_argument("--port", type=parse_port, required=True, help="port of the server")
    parser.add_argument(
        "--host",
        metavar="IP",
        help="address of the server; https://HOST if it serves HTTPS (default: this machine's, as the router sees it)",
    )
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="file with the CA certificates for the router and the server, if they serve HTTPS (default: the system's)",
    )
    parser.add_argument(
        "--connector-port", type=parse_port, help="port at which the server receives KV from prefill instances"
    )
    parser.add_argument(
        "--engine",
        choices=[kind.value for kind in EngineKind],
        help="engine of the server; openai: another engine with OpenAI's endpoints (default: what the server reports)",
    )
    parser.add_argument(
        "--bootstrap-port",
        type=parse_port,
        help="SGLang's --disaggregation-bootstrap-port (default: as reported by the server, or 8998)",
    )
    parser.add_argument(
        "--kv-connector",
        choices=[connector.value for connector in KvConnector],
        help="KV connector of a pair of vLLM instances (default: nixl)",
    )
    parser.add_argument(
        "--kv-events-endpoint",
        type=_parse_endpoint,
        metavar="tcp://HOST:PORT",
        help="endpoint in the server's --kv-events-config, if it publishes KV events; * is the server's address",
    )
    parser.add_argument(
        "--kv-events-replay-endpoint",
        type=_parse_endpoint,
        metavar="tcp://HOST:PORT",
        help="replay_endpoint in the server's --kv-events-config",
    )
    parser.add_argument("--kv-events-topic", metavar="TOPIC", help="topic in the server's --kv-events-config")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the router's registration token or admin token, if the router has one",
    )
    return parser


async def _run_until_signal(sidecar: Sidecar) -> None:
    running = asyncio.ensure_future(sidecar.keep_registering())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _parse_endpoint(text: str) -> str:
    if not re.fullmatch(r"tcp://\S+:\d{1,5}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not tcp://HOST:PORT, such as tcp://*:5557")
    return text


def _read_kv_events(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the field ``kv_events`` of the registration from the flags; empty if no flag is given."""
    names = ("endpoint", "replay_endpoint", "topic")
    given = {name: value for name in names if (value := getattr(arguments, f"kv_events_{name}"))}
    if given and "endpoint" not in given:
        flag = f"--kv-events-{next(iter(given)).replace('_', '-')}"
        raise SettingsError(f"{flag} has no effect without --kv-events-endpoint; add it")
    return given


def _parse_role(text: str) -> str:
    if text.lower() not in ROLES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a role; it must be one of {', '.join(ROLES)}")
    return text.lower()


def _describe_error(exc: httpx.HTTPError) -> str:
    return str(exc) or type(exc).__name__


if __name__ == "__main__":
    sys.exit(run_program("router.register", main))
