"""Registers a server that does not know this router: ``python -m router.register --router H:P --port N``.

It is a sidecar, started next to any server with OpenAI's endpoints and a ``/health`` (vLLM, SGLang, MindIE, llama.cpp).
FastDeploy's instances register themselves; for other servers, the sidecar checks every five seconds whether the server
is healthy and, if so, registers it. When the server is not healthy, or the sidecar ends, the heartbeat stops and the
router removes the instance. The sidecar also queries the server for the kind of its engine.

It is a separate program, and the router does not import it: the router itself sends requests to instances only through
``router.http``. The sidecar does not import the router's fleet, either.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from kvcommon.addresses import find_own_address, parse_address
from router.settings import (
    CERTIFICATE_REMEDY,
    FlagParser,
    SettingsError,
    is_certificate_refused,
    parse_port,
    read_authorities,
    read_token,
)

__all__ = ["Sidecar", "main"]

_log = logging.getLogger("router.register")

HEARTBEAT_SECONDS = 5.0
FIRST_RETRY_SECONDS = 0.5
ROLES = ("mixed", "prefill", "decode")
"""The values of ``router.fleet.Role``."""
ENGINES = ("fastdeploy", "vllm", "sglang", "openai")
"""The values of ``router.fleet.EngineKind``."""
KV_CONNECTORS = ("nixl", "mooncake", "kvstore")
"""The values of ``router.fleet.KvConnector``."""
# Owner of our own engine's models. FastDeploy's models have an owner without the second word.
OUR_OWNER = "fastdeploy-kvstore"
_TIMEOUT_SECONDS = 4.0


class UntoldError(Exception):
    """The server does not report its kind, or it differs from the operator's flags. The message is appended to "not
    registered, as ...".
    """


class UntrustedError(Exception):
    """The certificate of the router or the server is not trusted. A retry does not help. The message is one
    sentence.
    """


class Sidecar:
    """The heartbeat of one server.

    Args:
        router: the router's URL.
        payload: the registration payload: ``port``, and if known ``role``, ``host_ip``, ``connector_port``, ``engine``,
            ``bootstrap_port`` and ``kv_connector``. Without ``host_ip``, it is this machine's address as the router
            sees it, determined again each time. Without ``engine`` or ``role``, the server is queried once it is
            healthy.
        token: the router's registration token or admin token, if it has one.
        tls: context with the trusted authorities, for the router and the server; None for those of the system.
    """

    def __init__(
        self, router: str, payload: dict[str, Any], token: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        self._router = router
        self._payload = payload
        self._tls = tls or ssl.create_default_context()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._last_problem: str | None = None
        self._found: dict[str, Any] | None = None  # reported by the server; until it is not healthy any more

    async def keep_registering(self) -> None:
        """Query the server, register it, and log each change, until cancelled.

        After a failure it retries sooner than after a success: at start the router or the server is often only a second
        late.

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
        """Send one heartbeat; return the problem in one sentence, or ``""``."""
        try:
            payload = {"host_ip": await asyncio.to_thread(find_own_address, self._router), **self._payload}
        except OSError as exc:
            return f"there is no way to the router {self._router}: {exc}"
        scheme, _, host = payload["host_ip"].rpartition("://")
        server = f"{scheme or 'http'}://{f'[{host}]' if ':' in host else host}:{payload['port']}"
        try:
            await self._check_server(client, server)
        except UntoldError as exc:
            self._found = None
            return f"not registered, as {exc}"
        payload = {"role": "mixed", **(self._found or {}), **payload}
        try:
            response = await client.post(f"{self._router}/register", json=payload, headers=self._headers)
        except httpx.HTTPError as exc:
            if is_certificate_refused(exc):
                raise UntrustedError(f"the router {self._router} {CERTIFICATE_REMEDY}: {exc}") from None
            return f"the router {self._router} does not answer ({_describe_error(exc)}); trying again"
        if response.status_code != 200:
            return f"the router {self._router} refused with {response.status_code}: {response.text[:300]}; trying again"
        return ""

    async def _check_server(self, client: httpx.AsyncClient, server: str) -> None:
        """Check that the server is healthy, and find out its kind unless that is known.

        Raises:
            UntoldError: it is not healthy, or does not report its kind.
        """
        try:
            health = await client.get(f"{server}/health")
        except httpx.HTTPError as exc:
            if is_certificate_refused(exc):
                raise UntrustedError(f"the server at {server} {CERTIFICATE_REMEDY}: {exc}") from None
            raise UntoldError(f"the server at {server} does not answer /health ({_describe_error(exc)})") from None
        if health.status_code != 200:
            raise UntoldError(f"the server at {server} answers /health with {health.status_code}")
        if self._found is not None:
            return
        engine, role = self._payload.get("engine"), self._payload.get("role")
        if engine is None:
            found = await _ask_engine(client, server)
        else:
            found = await _ask_sglang(client, server) if engine == "sglang" else {}
        told = found.get("role", role)
        if role not in (None, told):
            raise UntoldError(f"the server at {server} is a {told} instance by its own account, but --role is {role}")
        self._found = found

    def _log_change(self, problem: str) -> None:
        """Log a problem, or its end, once when it changes."""
        if problem != self._last_problem:
            self._last_problem = problem
            if problem:
                _log.warning("%s", problem)
            else:
                known = {"engine": "", "role": "mixed", **(self._found or {}), **self._payload}
                what = f"{known['engine']} {known['role']}".strip()
                _log.info("registered at %s: %s at port %s", self._router, what, known["port"])


def main(argv: Sequence[str] | None = None) -> int:
    """Register until SIGTERM or SIGINT. Return the exit status: 0, 1 if the certificate of the router or the server is
    not trusted, 2 if the command line cannot be used.
    """
    try:
        arguments = _make_flags().parse_args(sys.argv[1:] if argv is None else argv)
        token = read_token(arguments.token_file, "--token-file") if arguments.token_file else ""
        tls = read_authorities(str(arguments.ca_file), "--ca-file") if arguments.ca_file else None
    except SettingsError as exc:
        print(f"router.register: {exc}", file=sys.stderr)
        return 2
    payload = {"port": arguments.port}
    if arguments.host:
        payload["host_ip"] = arguments.host
    for name in ("role", "connector_port", "engine", "bootstrap_port", "kv_connector"):
        if value := getattr(arguments, name):
            payload[name] = value
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        asyncio.run(_run_until_signal(Sidecar(arguments.router, payload, token, tls)))
    except UntrustedError as exc:
        print(f"router.register: {exc}", file=sys.stderr)
        return 1
    return 0


def _make_flags() -> FlagParser:
    parser = FlagParser(prog="router.register", description="Register a server that cannot by itself.")
    parser.add_argument("--router", type=_parse_router_url, required=True, metavar="HOST:PORT", help="the router")
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
        help="address of the server (default: this machine's, as the router sees it); https://HOST if it serves HTTPS",
    )
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="file with the authorities that may issue the certificates of the router and the server, if they serve "
        "HTTPS (default: the system's)",
    )
    parser.add_argument(
        "--connector-port", type=parse_port, help="port at which it receives KV from prefill instances, if it does"
    )
    parser.add_argument(
        "--engine", choices=ENGINES, help="kind of the server (default: as reported by it; openai is any other one)"
    )
    parser.add_argument(
        "--bootstrap-port",
        type=parse_port,
        help="SGLang's --disaggregation-bootstrap-port (default: as reported by the server, or 8998)",
    )
    parser.add_argument(
        "--kv-connector", choices=KV_CONNECTORS, help="KV connector of a pair of vLLM instances (default: nixl)"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the router's registration or admin token, if it has one",
    )
    return parser


async def _run_until_signal(sidecar: Sidecar) -> None:
    running = asyncio.ensure_future(sidecar.keep_registering())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def _ask_engine(client: httpx.AsyncClient, server: str) -> dict[str, Any]:
    """Query the kind of the server, and the other registration fields that it reports.

    Raises:
        UntoldError: it does not report its kind.
    """
    status, models = await _fetch_object(client, f"{server}/v1/models")
    listed = models.get("data")
    first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
    owner = str(first.get("owned_by") or "").lower()
    if owner.startswith("fastdeploy"):
        return {"engine": "fastdeploy", **({"cache_salt": True} if owner == OUR_OWNER else {})}
    if owner in ("", "vllm") and "version" in (await _fetch_object(client, f"{server}/version"))[1]:
        return {"engine": "vllm"}
    if owner in ("", "sglang") and (found := await _ask_sglang(client, server)):
        return found
    if status in (401, 403):
        raise UntoldError(f"the server at {server} wants a key before it tells what it is; say so with --engine")
    return {"engine": "openai"}


async def _ask_sglang(client: httpx.AsyncClient, server: str) -> dict[str, Any]:
    """Query the registration fields of an SGLang server; empty if it is another server or reports none."""
    _, info = await _fetch_object(client, f"{server}/server_info")
    if "disaggregation_mode" not in info:
        _, info = await _fetch_object(client, f"{server}/get_server_info")  # its earlier name
    if "disaggregation_mode" not in info:
        return {}
    mode, port = info["disaggregation_mode"], info.get("disaggregation_bootstrap_port")
    found: dict[str, Any] = {"engine": "sglang", "role": mode if mode in ROLES else "mixed"}
    if mode == "prefill" and isinstance(port, int):
        found["bootstrap_port"] = port
    return found


async def _fetch_object(client: httpx.AsyncClient, url: str) -> tuple[int, dict[str, Any]]:
    """Fetch ``url``, and return the status and the JSON object of the answer; an empty one if it is no object or no
    success.

    Raises:
        UntoldError: it does not answer.
    """
    try:
        answer = await client.get(url)
        content = answer.json() if answer.status_code == 200 else {}
    except httpx.HTTPError as exc:
        raise UntoldError(f"{url} does not answer ({_describe_error(exc)})") from None
    except ValueError:
        content = {}
    return answer.status_code, content if isinstance(content, dict) else {}


def _parse_router_url(text: str) -> str:
    try:
        return parse_address(text).url
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _parse_role(text: str) -> str:
    if text.lower() not in ROLES:
        raise argparse.ArgumentTypeError(f"{text!r} is no kind of instance; it must be one of {', '.join(ROLES)}")
    return text.lower()


def _describe_error(exc: httpx.HTTPError) -> str:
    return str(exc) or type(exc).__name__


if __name__ == "__main__":
    sys.exit(main())
