"""PodWatch: the pods that match a label selector, as the cluster's API server reports them.

PodWatch lists the pods, then watches changes (https://kubernetes.io/docs/reference/using-api/api-concepts/). When a
watch ends, the next one continues from the same version. If the API server does not have this version any more (410
Gone), or after any failure, the pods are listed again. While the API server does not respond, the last known pods stay.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvcommon.json_objects import load_object
from router.fleet.discovery.pods import Pod, read_pod
from router.http import Address, ConnectionPool, ResponseReader, TimedOut, UpstreamError
from router.settings import RouterSettings, SettingsError, read_authorities, read_token

__all__ = ["PodWatch"]

_log = logging.getLogger("router.fleet.discovery")

# A watch ends after this time, so that a lost connection is noticed.
WATCH_SECONDS = 120
LATE_SECONDS = 10.0
ANSWER_SECONDS = 30.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 30.0
PAGE_PODS = 250
ERROR_BYTES = 64 * 1024
# Limit for the size of one event. The description of a pod has a few KB.
MAX_EVENT_BYTES = 4 * 1024 * 1024
ALL_NAMESPACES = "all"
_API_URL = re.compile(r"https?://(?P<host>[\w.-]+|\[[\da-fA-F:.]+\])(?::(?P<port>\d{1,5}))?/?", re.ASCII)


class ApiFailure(Exception):
    """The API server does not respond, or its response is invalid. The message is one sentence."""


class Gone(Exception):
    """The API server no longer has the version at which a watch should begin. The pods must be listed again."""


class PodWatch:
    """List of the pods that match a label selector, updated by a watch of the Kubernetes API."""

    def __init__(self, settings: RouterSettings, on_change: Callable[[], None]) -> None:
        """
        Args:
            settings: the settings of service discovery.
            on_change: called when the pods have changed.

        Raises:
            SettingsError: the credentials cannot be read, or the address of the API server is invalid.
        """
        self.pods: dict[str, Pod] = {}
        """The pods by namespace and name."""
        self.trouble = "the API server has not been asked yet"
        """Why the known pods may be outdated, in one sentence; ``""`` if they are current."""
        self.was_listed = False
        """Whether the pods have been listed at least once."""
        self._on_change = on_change
        self._port = settings.service_discovery_port
        self._selector = ",".join(settings.selector)
        self._address = _parse_address(settings.kubernetes_api)
        self._account = Path(settings.kubernetes_account)
        self._read_credentials()
        namespace = settings.service_discovery_namespace
        namespace = namespace or read_token(self._account / "namespace", "manager.kubernetes-account")
        self._path = "/api/v1/pods"
        if namespace != ALL_NAMESPACES:
            self._path = f"/api/v1/namespaces/{_encode(namespace)}/pods"
        self._pool = ConnectionPool()
        self._version = ""  # the version of the pods after which the next watch begins
        self._has_response = False  # whether a watch has worked since the last failure

    async def keep_current(self) -> None:
        """List and watch the pods, until this task is cancelled."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            self._has_response = False
            try:
                await self._list_pods()
                while True:
                    await self._watch_pods()
            except Gone:
                _log.debug("the API server no longer has the changes since the last event; the pods are listed again")
                if self._has_response:
                    continue
            except (ApiFailure, UpstreamError, SettingsError) as exc:
                self._note_trouble(str(exc))
            except Exception:
                _log.exception("the API server's response could not be read; the request is repeated")
                self.trouble = "the API server's response could not be read"
            finally:
                self._pool.close()
            if self._has_response:
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(
                pause * random.uniform(0.5, 1.0)
            )  # so that several routers do not retry at the same time
            pause = min(LAST_PAUSE_SECONDS, 2 * pause)

    async def _list_pods(self) -> None:
        """Fetch the list of pods, and replace the known pods with it."""
        tls = self._read_credentials()[1]
        self._pool = ConnectionPool(tls)
        documents: list[dict[str, Any]] = []
        token, version = "", ""
        while True:
            query = {"labelSelector": self._selector, "limit": str(PAGE_PODS)}
            if token:
                query["continue"] = token
            target = f"{self._path}?{_format_query(query)}"
            answer = await self._pool.fetch(
                self._address, "GET", target, headers=self._headers(), timeout=ANSWER_SECONDS
            )
            if answer.status == 410:
                raise Gone
            if answer.status != 200:
                raise self._explain_status(answer.status, answer.body)
            page = _parse_object(answer.body)
            metadata = page.get("metadata") or {}
            documents += page.get("items") or ()
            token, version = metadata.get("continue") or "", str(metadata.get("resourceVersion") or "")
            if not token:
                break
        pods = {pod.name: pod for pod in (read_pod(document, self._port) for document in documents)}
        self._version = version
        if self.trouble and self.was_listed:
            _log.info("service discovery: the API server %s responds again", self._address.url)
        is_changed = pods != self.pods or not self.was_listed
        self.pods, self.trouble, self.was_listed = pods, "", True
        if is_changed:
            self._on_change()

    async def _watch_pods(self) -> None:
        """Apply changes of the pods until the API server ends the watch.

        Raises:
            Gone: the API server does not have the version at which the watch should begin.
        """
        query = {
            "labelSelector": self._selector,
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        target = f"{self._path}?{_format_query(query)}".encode()
        exchange = self._pool.exchange(self._address, "GET", target, self._headers(), b"", fresh=True)
        loop = asyncio.get_running_loop()
        late = TimedOut(f"the API server {self._address.url} did not answer a watch within {ANSWER_SECONDS:g} s")
        timer = loop.call_later(ANSWER_SECONDS, exchange.fail, late)
        try:
            reader = ResponseReader(exchange)
            status = await reader.head()
            timer.cancel()
            seconds = WATCH_SECONDS + LATE_SECONDS
            late = TimedOut(f"the API server {self._address.url} did not end a watch within {seconds:g} s")
            timer = loop.call_later(seconds, exchange.fail, late)
            if status == 410:
                raise Gone
            if status != 200:
                raise self._explain_status(status, await reader.read(ERROR_BYTES))
            unread = b""
            while data := await reader.chunk():
                *lines, unread = (unread + data).split(b"\n")
                for line in filter(None, lines):
                    self._on_event(_parse_object(line))
                if len(unread) > MAX_EVENT_BYTES:
                    raise ApiFailure(f"the API server sent an event of more than {MAX_EVENT_BYTES} bytes")
            self._has_response = True
        finally:
            timer.cancel()
            exchange.close()

    def _on_event(self, event: dict[str, Any]) -> None:
        kind, document = event.get("type"), event.get("object")
        if not isinstance(document, dict):
            raise ApiFailure(f"the API server sent an event without an object: {str(event)[:200]}")
        if kind == "ERROR":
            if document.get("code") == 410:
                raise Gone
            raise ApiFailure(f"the API server ended the watch: {document.get('message') or document.get('code')}")
        self._has_response = True
        self._version = str((document.get("metadata") or {}).get("resourceVersion") or self._version)
        if kind == "BOOKMARK":
            return
        pod = read_pod(document, self._port)
        if kind == "DELETED":
            is_changed = self.pods.pop(pod.name, None) is not None
        else:
            is_changed = self.pods.get(pod.name) != pod
            self.pods[pod.name] = pod
        if is_changed:
            self._on_change()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        token = self._read_credentials()[0]  # read each time, because Kubernetes renews it about once an hour
        accept = [(b"accept", b"application/json")]
        return [*accept, (b"authorization", f"Bearer {token}".encode())] if token else accept

    def _read_credentials(self) -> tuple[str, Any]:
        """Return the token and the TLS context with the trusted authorities; ``""`` and None if TLS is not used."""
        if not self._address.tls:  # as with kubectl proxy
            return "", None
        token = read_token(self._account / "token", "manager.kubernetes-account")
        return token, read_authorities(str(self._account / "ca.crt"), "manager.kubernetes-account")

    def _note_trouble(self, sentence: str) -> None:
        """Record why the watch failed.

        The first failure after a success is logged. Until the pods have been listed once, each new failure is logged.
        """
        if self.trouble != sentence and (not self.trouble or not self.was_listed):
            known = f"; the instances of the {len(self.pods)} known pods stay registered" if self.was_listed else ""
            _log.error("service discovery: %s%s; trying again", sentence, known)
        self.trouble = sentence

    def _explain_status(self, status: int, body: bytes) -> ApiFailure:
        try:
            message = str(_parse_object(body).get("message") or "")
        except ApiFailure:
            message = ""
        remedy = ""
        if status == 403:
            remedy = "; the router's service account must be allowed to list and watch pods"
        reason = f": {message}" if message else ""
        return ApiFailure(f"the API server {self._address.url} answered with {status}{reason}{remedy}")


def _parse_object(data: bytes) -> dict[str, Any]:
    found = load_object(data)
    if found is None:
        raise ApiFailure(f"the API server sent data that is not a JSON object: {data[:100]!r}")
    return found


def _parse_address(url: str) -> Address:
    found = _API_URL.fullmatch(url)
    is_tls = url.startswith("https")
    port = int((found and found["port"]) or (443 if is_tls else 80))
    if found is None or not 0 < port < 65536:
        raise SettingsError(f"manager.kubernetes-api is {url!r}; it must be https://HOST:PORT, with no path")
    return Address(found["host"].strip("[]"), port, tls=is_tls)


def _format_query(members: Mapping[str, str]) -> str:
    return "&".join(f"{name}={_encode(value)}" for name, value in members.items())


def _encode(text: str) -> str:
    """Return the text percent-encoded, for use in a path or a query."""
    kept = b"-._~"
    return "".join(
        chr(byte) if byte in kept or (byte < 128 and chr(byte).isalnum()) else f"%{byte:02X}" for byte in text.encode()
    )
