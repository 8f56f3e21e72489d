"""RouterClient: a router's account of itself and of its instances, and the orders it takes, over HTTP."""

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
"""As ``/registered`` lists instances."""
TIMEOUT_SECONDS = 5.0
# The router asks an instance, and then all others, for 10 s each at most.
MISS_SECONDS = 25.0
# A stream's next piece; a long prompt is computed before the first.
STREAM_SECONDS = 300.0


class RouterError(Exception):
    """The router does not answer, or refuses: one sentence that says so."""


class RouterAway(RouterError):
    """The router does not answer."""


class UntrustedCertificate(RouterError):
    """The router's certificate is not believed; asking again does not help."""


class UnknownInstance(RouterError):
    """The router knows no such instance."""


class TokenWanted(RouterError):
    """The router has an admin token, and was not given it."""


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
        return parse_samples((await self._fetch("GET", "/metrics")).text)

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
        progress: dict[str, Any] = (
            await self._fetch("GET", f"/admin/drain?instance={quote(instance, safe='')}")
        ).json()
        return progress

    async def list_requests(self, count: int = 50) -> list[dict[str, Any]]:
        """The last requests that have ended, the newest first, as lines of the access log have them."""
        listed: list[dict[str, Any]] = (await self._fetch("GET", f"/admin/requests?count={count}")).json()["requests"]
        return listed

    async def explain_request(self, request_id: str) -> dict[str, Any]:
        """How a request that has ended was placed and answered."""
        found: dict[str, Any] = (await self._fetch("GET", f"/admin/explain/{quote(request_id, safe='')}")).json()
        return found

    async def explain_miss(self, request_id: str) -> dict[str, Any]:
        """Why the prompt of a request that has ended took no more from a cache, which instances are asked for."""
        path = f"/admin/why_miss/{quote(request_id, safe='')}"
        told: dict[str, Any] = (await self._fetch("GET", path, timeout=MISS_SECONDS)).json()
        return told

    async def give_order(self, order: str, instance: str, **members: Any) -> dict[str, Any]:
        """Let the router carry out ``drain``, ``pause``, ``resume`` or ``weight``; the instance's state afterwards."""
        answer = await self._fetch("POST", f"/admin/{order}", {"instance": instance, **members})
        outcome: dict[str, Any] = answer.json()
        return outcome

    @contextlib.asynccontextmanager
    async def open_chat(self, body: Mapping[str, Any], api_key: str = "") -> AsyncIterator[ChatStream]:
        """A chat completion as a stream, which is given up where the block is left before its end.

        Args:
            body: the request's, but for ``stream``.
            api_key: a client's, where the router wants one.
        """
        request = self._http.build_request(
            "POST",
            "/v1/chat/completions",
            json={**body, "stream": True, "stream_options": {"include_usage": True}},
            timeout=httpx.Timeout(TIMEOUT_SECONDS, read=STREAM_SECONDS),
        )
        request.headers.pop("authorization", None)  # the admin token is no client's key
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

    async def _fetch(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, json=body, timeout=timeout)
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
    """The answer to a chat completion, as it comes."""

    def __init__(self, url: str, answer: httpx.Response) -> None:
        self._url = url
        self._answer = answer
        self.request_id = answer.headers.get("x-request-id", "")

    async def read_events(self) -> AsyncIterator[dict[str, Any]]:
        """Its events, but for ``[DONE]``; one that tells an error is raised as a ``RouterError``."""
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
    """The samples of a page in Prometheus's text format, by their names.

    Raises:
        ValueError: it is no such page.
    """
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    return samples


def add_router_flags(parser: FlagParser) -> None:
    """The flags of every program here: where the router is, and how to be believed."""
    parser.add_argument(
        "--router",
        type=_parse_url,
        default="http://127.0.0.1:9000",
        metavar="HOST:PORT",
        help="the router (default: 127.0.0.1:9000, where it listens by default); https://HOST:PORT if it speaks HTTPS",
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="with the router's admin token, if it has one")
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="with certificates of the authorities that the router's own must be of (default: the system's)",
    )


def parse_interval(text: str) -> float:
    """The seconds between two looks, as a flag gives them."""
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
    """This machine's address as the router at this URL sees it.

    Raises:
        RouterAway: there is no way to the router.
    """
    try:
        own = addresses.find_own_address(router)
    except OSError as exc:
        raise RouterAway(f"there is no way to the router {router}: {exc.strerror or exc}") from None
    return f"[{own}]" if ":" in own else own


def _read_error(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, as OpenAI has it; in the Go router's dialect it is a text, and the facts stand beside."""
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
