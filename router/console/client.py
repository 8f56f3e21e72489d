"""RouterClient: what a router says of itself and of its instances, and the orders it takes, over HTTP."""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
from prometheus_client.parser import text_string_to_metric_families

from router.settings import FlagParser, read_authorities, read_token

__all__ = [
    "ROLES",
    "RouterAway",
    "RouterClient",
    "RouterError",
    "Sample",
    "UnknownInstance",
    "add_router_flags",
    "find_own_address",
]

ROLES = ("mixed", "prefill", "decode")
"""As ``/registered`` lists instances."""
TIMEOUT_SECONDS = 5.0
_ADDRESS = re.compile(r"(?:https?://)?(?:[\w.-]+|\[[\da-fA-F:.]+\]):(?P<port>\d{1,5})/?", re.ASCII)


class RouterError(Exception):
    """The router does not answer, or refuses: one sentence that says so."""


class RouterAway(RouterError):
    """The router does not answer."""


class UnknownInstance(RouterError):
    """The router knows no such instance."""


class Sample(NamedTuple):
    """One line of ``/metrics``."""

    labels: Mapping[str, str]
    value: float


class RouterClient:
    """One router, asked over one connection pool; every call raises ``RouterError`` if it does not answer as it should.

    Args:
        url: the router's, without a path.
        token: its admin token, where it has one.
        ca_file: with the certificates of the authorities that the router's own must be of; ``""`` for the system's.
    """

    def __init__(self, url: str, token: str = "", ca_file: str = "") -> None:
        self.url = url
        verify = read_authorities(ca_file, "--ca-file") if ca_file else True
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.AsyncClient(
            base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False, verify=verify, headers=headers
        )

    @classmethod
    def from_flags(cls, flags: argparse.Namespace) -> RouterClient:
        """As ``add_router_flags`` has it.

        Raises:
            SettingsError: a file that the flags name cannot be used.
        """
        token = read_token(flags.token_file, "--token-file") if flags.token_file else ""
        return cls(flags.router, token, str(flags.ca_file or ""))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def read_metrics(self) -> dict[str, list[Sample]]:
        """The samples of ``/metrics``, of all processes of the router, by their names."""
        answer = await self._fetch("GET", "/metrics")
        samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
        return samples

    async def list_instances(self) -> list[dict[str, Any]]:
        """The entries of ``/registered``, of all roles."""
        listed = (await self._fetch("GET", "/registered")).json()
        return [instance for role in ROLES for instance in listed[role]]

    async def read_shared_state(self) -> str:
        """Why the router does not hear of the other routers; ``""`` if it does, or there are none."""
        answer = await self._fetch("GET", "/health")
        return str(answer.json().get("shared_state", "")) if answer.content else ""

    async def read_drain(self, instance: str) -> dict[str, Any]:
        """Whether an instance drains, and how many requests it runs."""
        progress: dict[str, Any] = (await self._fetch("GET", f"/admin/drain?instance={quote(instance, safe='')}")).json()
        return progress

    async def explain_request(self, request_id: str) -> dict[str, Any]:
        """How a request that has ended was placed and answered."""
        found: dict[str, Any] = (await self._fetch("GET", f"/admin/explain/{quote(request_id, safe='')}")).json()
        return found

    async def give_order(self, order: str, instance: str, **members: Any) -> dict[str, Any]:
        """Let the router carry out ``drain``, ``pause``, ``resume`` or ``weight``; the instance's state afterwards."""
        answer = await self._fetch("POST", f"/admin/{order}", {"instance": instance, **members})
        outcome: dict[str, Any] = answer.json()
        return outcome

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as exc:
            raise RouterAway(f"the router at {self.url} does not answer: {exc or type(exc).__name__}") from None
        if answer.status_code in (401, 403):
            raise RouterError(f"the router at {self.url} wants its admin token for {path}: give it with --token-file")
        if answer.status_code != 200:
            is_unknown = answer.status_code == 404 and _read_error(answer).get("code") == "unknown_instance"
            error = UnknownInstance if is_unknown else RouterError
            raise error(f"the router at {self.url} refused {path}: {_read_message(answer)}")
        return answer


def add_router_flags(parser: FlagParser) -> None:
    """The flags of every program here: where the router is, and how to be believed."""
    parser.add_argument(
        "--router",
        type=_parse_url,
        default="http://127.0.0.1:52700",
        metavar="HOST:PORT",
        help="the router (default: 127.0.0.1:52700); https://HOST:PORT if it speaks HTTPS",
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="with the router's admin token, if it has one")
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="with certificates of the authorities that the router's own must be of (default: the system's)",
    )


def _parse_url(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, such as 127.0.0.1:52700")
    return text.rstrip("/") if "://" in text else f"http://{text.rstrip('/')}"


def find_own_address(router: str) -> str:
    """This machine's address as the router at this URL sees it.

    Raises:
        RouterAway: there is no way to the router.
    """
    target = httpx.URL(router)
    try:
        family, kind, _, _, address = socket.getaddrinfo(target.host, target.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: sends nothing, only picks the route
            own: str = probe.getsockname()[0]
    except OSError as exc:
        raise RouterAway(f"there is no way to the router {router}: {exc.strerror or exc}") from None
    return f"[{own}]" if ":" in own else own


def _read_error(answer: httpx.Response) -> dict[str, Any]:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _read_message(answer: httpx.Response) -> str:
    return str(_read_error(answer).get("message") or f"status {answer.status_code}")
