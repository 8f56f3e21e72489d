"""RouterClient: reads the state of a router and its instances over HTTP, and sends operator commands."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvcommon import addresses
from router.settings import (
    CERTIFICATE_REMEDY,
    FlagParser,
    is_certificate_refused,
    parse_url,
    read_authorities,
    read_token,
)

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
    "add_interval_flag",
    "add_router_flags",
    "find_own_address",
    "parse_samples",
]

ROLES = ("mixed", "prefill", "decode")
"""The roles under which ``/registered`` lists instances."""
TIMEOUT_SECONDS = 5.0
DEFAULT_INTERVAL = 2.0
# Timeout for the next event of a stream. It is long, because the prompt is computed before the first event.
STREAM_SECONDS = 300.0


class RouterError(Exception):
    """The router does not respond, or refuses the request. The message is one sentence."""


class RouterAway(RouterError):
    """The router does not respond."""


class UntrustedCertificate(RouterError):
    """The router's certificate is not trusted, so a retry does not help."""


class UnknownInstance(RouterError):
    """The instance is not registered at the router."""


class TokenWanted(RouterError):
    """The router requires its admin token, but the client did not send it."""


class Sample(NamedTuple):
    """One sample of a metric in Prometheus's text format: its labels and its value."""

    labels: Mapping[str, str]
    value: float


class RouterClient:
    """HTTP client of one router. A method that sends a request raises ``RouterError`` if the router does not respond.

    Args:
        url: URL of the router, without a path.
        token: the router's admin token; ``""`` if it has none.
        ca_file: file with the certificate authorities to trust; ``""``: the system's authorities.
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
            SettingsError: a file that a flag names cannot be used.
        """
        token = read_token(flags.token_file, "--token-file") if flags.token_file else ""
        return cls(flags.router, token, str(flags.ca_file or ""))

    async def close(self) -> None:
        """Close the connections to the router."""
        await self._http.aclose()

    async def read_metrics(self) -> dict[str, list[Sample]]:
        """Return the samples of the router's ``/metrics``, which cover all processes of the router, by metric name."""
        return parse_samples((await self._fetch("GET", "/metrics")).text)

    async def list_instances(self) -> list[dict[str, Any]]:
        """Return the entries of ``/registered`` for all instances."""
        listed = await self._fetch_object("/registered", *ROLES)
        return [instance for role in ROLES for instance in listed[role]]

    async def read_shared_state(self) -> str:
        """Return why the router cannot reach the other routers; ``""`` if they can be reached, or if there are none."""
        response = await self._fetch("GET", "/health")
        return str(self._read_object("/health", response).get("shared_state", "")) if response.content else ""

    async def read_drain(self, instance: str) -> dict[str, Any]:
        """Return whether an instance drains, and how many requests the instance is running."""
        return await self._fetch_object(
            f"/admin/drain?instance={quote(instance, safe='')}", "state", "running_requests", "draining"
        )

    async def list_requests(self, count: int = 50) -> list[dict[str, Any]]:
        """Return the ``count`` requests that ended last, newest first, in the format of the access log."""
        listed: list[dict[str, Any]] = (await self._fetch_object(f"/admin/requests?count={count}", "requests"))[
            "requests"
        ]
        return listed

    async def explain_request(self, request_id: str) -> dict[str, Any]:
        """Return how the instances of an ended request were chosen, and its result."""
        return await self._fetch_object(f"/admin/explain/{quote(request_id, safe='')}")

    async def give_order(self, order: str, instance: str, **members: Any) -> dict[str, Any]:
        """Send the operator command ``drain``, ``pause``, ``resume`` or ``weight``. Return the instance's new state."""
        body = {"instance": instance, **members}
        return await self._fetch_object(f"/admin/{order}", "state", "running_requests", body=body)

    @contextlib.asynccontextmanager
    async def open_chat(self, body: Mapping[str, Any], api_key: str = "") -> AsyncIterator[ChatStream]:
        """Send a chat completion, and return its stream for a ``with`` block. The end of the block ends the request.

        Args:
            body: body of the request, without ``stream``.
            api_key: API key of a client; ``""`` if the router requires none.
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
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as exc:
            raise self._explain_failure(exc) from None
        try:
            if response.status_code == 401:
                raise RouterError(
                    f"the router at {self.url} requires an API key; give the key's file with --api-key-file"
                )
            if response.status_code != 200:
                await response.aread()
                raise RouterError(f"the router at {self.url} refused the request: {_read_message(response)}")
            yield ChatStream(self.url, response)
        except httpx.HTTPError as exc:
            raise self._explain_failure(exc) from None
        finally:
            await response.aclose()

    def _explain_failure(self, exc: httpx.HTTPError) -> RouterError:
        if is_certificate_refused(exc):
            return UntrustedCertificate(f"the router at {self.url} {CERTIFICATE_REMEDY}: {exc}")
        return RouterAway(f"the router at {self.url} does not answer: {str(exc) or type(exc).__name__}")

    async def _fetch_object(self, path: str, *names: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a GET, or a POST if there is a ``body``. Return what ``_read_object`` returns for the response."""
        return self._read_object(path, await self._fetch("GET" if body is None else "POST", path, body), *names)

    def _read_object(self, path: str, response: httpx.Response, *names: str) -> dict[str, Any]:
        """Return the JSON object in a response; raise ``RouterError`` if there is none, or if a member is missing."""
        try:
            found = response.json()
        except ValueError:
            found = None
        if not isinstance(found, dict) or not found.keys() >= set(names):
            raise RouterError(
                f"the server at {self.url} is not a router, because a router sends another response to {path}; "
                "give the router's address with --router"
            )
        return found

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            response = await asyncio.wait_for(self._http.request(method, path, json=body), TIMEOUT_SECONDS)
        except asyncio.TimeoutError:  # httpx's timeout is for each read
            raise RouterAway(f"the router at {self.url} does not answer within {TIMEOUT_SECONDS:g} s") from None
        except httpx.HTTPError as exc:
            raise self._explain_failure(exc) from None
        if response.status_code in (401, 403):
            raise TokenWanted(
                f"the router at {self.url} requires its admin token for {path}; give the token's file with --token-file"
            )
        if response.status_code != 200:
            is_unknown = response.status_code == 404 and _read_error(response).get("code") == "unknown_instance"
            error = UnknownInstance if is_unknown else RouterError
            raise error(f"the router at {self.url} refused {path}: {_read_message(response)}")
        return response


class ChatStream:
    """The streamed response to a chat completion."""

    def __init__(self, url: str, response: httpx.Response) -> None:
        self._url = url
        self._answer = response
        self.request_id = response.headers.get("x-request-id", "")

    async def read_events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of the stream, except ``[DONE]``. Raise ``RouterError`` for an error event."""
        async for line in self._answer.aiter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            try:
                event: dict[str, Any] = json.loads(line.removeprefix("data:"))
            except ValueError:
                raise RouterError(f"the router at {self._url} sent an event that is not JSON: {line[:80]!r}") from None
            if error := event.get("error"):
                message = error.get("message") if isinstance(error, dict) else error
                raise RouterError(f"the router ended its response early: {message}")
            yield event


def parse_samples(text: str) -> dict[str, list[Sample]]:
    """Parse metrics in Prometheus's text format, and return the samples by metric name.

    Raises:
        ValueError: the text has another format.
    """
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    return samples


def add_router_flags(parser: FlagParser) -> None:
    """Add the flags that all operator programs have: the router's URL, and the credentials."""
    parser.add_argument(
        "--router",
        type=parse_url,
        default="http://127.0.0.1:9000",
        metavar="HOST:PORT",
        help="the router; https://HOST:PORT if it serves HTTPS (default: 127.0.0.1:9000)",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the router's admin token, if the router has one"
    )
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="file with the CA certificates for the router, if it serves HTTPS (default: the system's)",
    )


def add_interval_flag(parser: FlagParser) -> None:
    """Add the flag ``--interval`` of the programs that poll the router regularly."""
    parser.add_argument(
        "--interval",
        type=_parse_interval,
        default=DEFAULT_INTERVAL,
        metavar="SECONDS",
        help=f"seconds between two polls (default: {DEFAULT_INTERVAL:g})",
    )


def _parse_interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 60")
    return seconds


def find_own_address(router: str) -> str:
    """Return this machine's address, as the router at this URL sees it.

    Raises:
        RouterAway: the router cannot be reached.
    """
    try:
        own = addresses.find_own_address(router)
    except OSError as exc:
        raise RouterAway(f"the router {router} cannot be reached: {exc.strerror or exc}") from None
    return f"[{own}]" if ":" in own else own


def _read_error(response: httpx.Response) -> dict[str, Any]:
    """Return the error object of a response in OpenAI's format; empty if there is none.

    In the Go router's format, ``error`` is a text. Then return the members of the body, such as ``message``.
    """
    try:
        body = response.json()
        error = body["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    if isinstance(error, str):
        return {"message": error, **body}
    return error if isinstance(error, dict) else {}


def _read_message(response: httpx.Response) -> str:
    return str(_read_error(response).get("message") or f"status {response.status_code}")
