"""RouterClient: reads the state of a router and its instances, and sends operator commands, over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvcommon import addresses
from kvcommon.addresses import parse_address
from router.settings import CERTIFICATE_REMEDY, FlagParser, is_certificate_refused, read_authorities, read_token

__all__ = [
    "ROLES",
    "ChatStream",
    "RouterAway",
    "RouterClient",
    "RouterError",
    "Sample",
    "TokenWanted",
    "UnknownInstance",
    "UntrustedCertificate",
    "add_router_flags",
    "find_own_address",
    "parse_interval",
    "parse_samples",
]

ROLES = ("mixed", "prefill", "decode")
"""An instance's key in the form that ``/registered`` uses."""
TIMEOUT_SECONDS = 5.0
# Timeout for the next event of a stream. A long prompt is computed before the first event.
STREAM_SECONDS = 300.0


class RouterError(Exception):
    """The router does not answer, or it refuses. The message is one sentence."""


class RouterAway(RouterError):
    """The router does not answer."""


class UntrustedCertificate(RouterError):
    """The router's certificate is not trusted. A retry does not help."""


class UnknownInstance(RouterError):
    """The router does not know this instance."""


class TokenWanted(RouterError):
    """The router requires its admin token, which was not sent."""


class Sample(NamedTuple):
    """One line of ``/metrics``."""

    labels: Mapping[str, str]
    value: float


class RouterClient:
    """Client of one router with one connection pool. Every call raises ``RouterError`` if the router fails to answer.

    Args:
        url: URL of the router, without a path.
        token: its admin token, if it has one.
        ca_file: certificates of the authorities that may have issued the router's certificate; ``""`` for the system's.
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
        """Create a client from the flags of ``add_router_flags``.

        Raises:
            SettingsError: a file named in the flags cannot be used.
        """
        token = read_token(flags.token_file, "--token-file") if flags.token_file else ""
        return cls(flags.router, token, str(flags.ca_file or ""))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def read_metrics(self) -> dict[str, list[Sample]]:
        """Return the samples of ``/metrics``, of all processes of the router, by name."""
        return parse_samples((await self._fetch("GET", "/metrics")).text)

    async def list_instances(self) -> list[dict[str, Any]]:
        """Return the entries of ``/registered``, of all roles."""
        listed = (await self._fetch("GET", "/registered")).json()
        return [instance for role in ROLES for instance in listed[role]]

    async def read_shared_state(self) -> str:
        """Return why the router has no contact with the other routers; ``""`` if it has, or there are none."""
        answer = await self._fetch("GET", "/health")
        return str(answer.json().get("shared_state", "")) if answer.content else ""

    async def read_drain(self, instance: str) -> dict[str, Any]:
        """Return whether an instance drains, and how many requests it runs."""
        progress: dict[str, Any] = (
            await self._fetch("GET", f"/admin/drain?instance={quote(instance, safe='')}")
        ).json()
        return progress

    async def list_requests(self, count: int = 50) -> list[dict[str, Any]]:
        """Return the requests that ended last, newest first, in the format of the access log."""
        listed: list[dict[str, Any]] = (await self._fetch("GET", f"/admin/requests?count={count}")).json()["requests"]
        return listed

    async def explain_request(self, request_id: str) -> dict[str, Any]:
        """Return how an ended request was placed and answered."""
        found: dict[str, Any] = (await self._fetch("GET", f"/admin/explain/{quote(request_id, safe='')}")).json()
        return found

    async def give_order(self, order: str, instance: str, **members: Any) -> dict[str, Any]:
        """Have the router execute ``drain``, ``pause``, ``resume`` or ``weight``; return the instance's new state."""
        answer = await self._fetch("POST", f"/admin/{order}", {"instance": instance, **members})
        outcome: dict[str, Any] = answer.json()
        return outcome

    @contextlib.asynccontextmanager
    async def open_chat(self, body: Mapping[str, Any], api_key: str = "") -> AsyncIterator[ChatStream]:
        """Stream a chat completion. Leaving the block early cancels it.

        Args:
            body: request body without ``stream``.
            api_key: the API key of a client, if the router requires one.
        """
        request = self._http.build_request(
            "POST",
            "/v1/chat/completions",
            json={**body, "stream": True, "stream_options": {"include_usage": True}},
            timeout=httpx.Timeout(TIMEOUT_SECONDS, read=STREAM_SECONDS),
        )
        request.headers.pop("authorization", None)  # the admin token is not an API key
        if api_key:
            request.headers["authorization"] = f"Bearer {api_key}"
        try:
            answer = await self._http.send(request, stream=True)
        except httpx.HTTPError as exc:
            raise self._explain_silence(exc) from None
        try:
            if answer.status_code == 401:
                raise RouterError(f"the router at {self.url} wants a client's API key: give it with --api-key-file")
            if answer.status_code != 200:
                await answer.aread()
                raise RouterError(f"the router at {self.url} refused the request: {_read_message(answer)}")
            yield ChatStream(self.url, answer)
        except httpx.HTTPError as exc:
            raise self._explain_silence(exc) from None
        finally:
            await answer.aclose()

    def _explain_silence(self, exc: httpx.HTTPError) -> RouterError:
        if is_certificate_refused(exc):
            return UntrustedCertificate(f"the router at {self.url} {CERTIFICATE_REMEDY}: {exc}")
        return RouterAway(f"the router at {self.url} does not answer: {exc or type(exc).__name__}")

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as exc:
            raise self._explain_silence(exc) from None
        if answer.status_code in (401, 403):
            raise TokenWanted(f"the router at {self.url} wants its admin token for {path}: give it with --token-file")
        if answer.status_code != 200:
            is_unknown = answer.status_code == 404 and _read_error(answer).get("code") == "unknown_instance"
            error = UnknownInstance if is_unknown else RouterError
            raise error(f"the router at {self.url} refused {path}: {_read_message(answer)}")
        return answer


class ChatStream:
    """Streamed answer to a chat completion."""

    def __init__(self, url: str, answer: httpx.Response) -> None:
        self._url = url
        self._answer = answer
        self.request_id = answer.headers.get("x-request-id", "")

    async def read_events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield its events except ``[DONE]``; raise an error event as a ``RouterError``."""
        async for line in self._answer.aiter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            try:
                event: dict[str, Any] = json.loads(line.removeprefix("data:"))
            except ValueError:
                raise RouterError(f"the router at {self._url} sent an event that is no JSON: {line[:80]!r}") from None
            if error := event.get("error"):
                said = error.get("message") if isinstance(error, dict) else error
                raise RouterError(f"the answer broke off: {said}")
            yield event


def parse_samples(text: str) -> dict[str, list[Sample]]:
    """Parse a page in Prometheus's text format and return its samples by name.

    Raises:
        ValueError: the page has another format.
    """
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    return samples


def add_router_flags(parser: FlagParser) -> None:
    """Add the flags that all operator programs share: the router's URL, and the credentials."""
    parser.add_argument(
        "--router",
        type=_parse_url,
        default="http://127.0.0.1:9000",
        metavar="HOST:PORT",
        help="the router (default: 127.0.0.1:9000, its own default); https://HOST:PORT if it serves HTTPS",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the router's admin token, if it has one"
    )
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="file with the authorities that may issue the router's certificate (default: the system's)",
    )


def parse_interval(text: str) -> float:
    """Parse a flag's value: the seconds between two polls."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 60")
    return seconds


def _parse_url(text: str) -> str:
    try:
        return parse_address(text).url
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def find_own_address(router: str) -> str:
    """Return this machine's address as the router at this URL sees it.

    Raises:
        RouterAway: the router cannot be reached.
    """
    try:
        own = addresses.find_own_address(router)
    except OSError as exc:
        raise RouterAway(f"there is no way to the router {router}: {exc.strerror or exc}") from None
    return f"[{own}]" if ":" in own else own


def _read_error(answer: httpx.Response) -> dict[str, Any]:
    """Return the error object of an answer in OpenAI's format. In the Go router's dialect, ``error`` is a text and its
    details are next to it.
    """
    try:
        told = answer.json()
        error = told["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    if isinstance(error, str):
        return {"message": error, **told}
    return error if isinstance(error, dict) else {}


def _read_message(answer: httpx.Response) -> str:
    return str(_read_error(answer).get("message") or f"status {answer.status_code}")
