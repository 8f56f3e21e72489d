"""Scraper: fetches the metrics of instances and of the pool's masters over HTTP."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

import httpx

from kvcommon.mooncake import parse_plain_metrics
from router.console.client import parse_samples
from router.console.dashboard.figures import (
    InstanceFigures,
    Listed,
    MasterFigures,
    read_instance_figures,
    read_master_figures,
    read_segments,
)

__all__ = ["ScrapeError", "Scraper"]

TIMEOUT_SECONDS = 3.0
# Maximum number of clients whose memory is shown. A master lists the memory of each client.
_MAX_SEGMENTS = 64
_MAX_PAGE_BYTES = 16 << 20


class ScrapeError(Exception):
    """The metrics cannot be fetched. The message is one sentence with the reason."""


class Scraper:
    """Fetches metrics, with one pool of connections."""

    def __init__(self, verify: ssl.SSLContext | bool = True) -> None:
        """
        Args:
            verify: TLS context with the trusted authorities for instances that use HTTPS; True: the system's.
        """
        self._http = httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False, verify=verify)

    async def close(self) -> None:
        """Close the connections to instances and masters."""
        await self._http.aclose()

    async def fetch_instance(self, listed: Listed) -> InstanceFigures:
        """Fetch the values from an instance's ``/metrics``.

        Raises:
            ScrapeError: the values cannot be fetched.
        """
        page = await self._fetch(listed.metrics_url)
        try:
            return read_instance_figures(parse_samples(page), listed)
        except ValueError as exc:
            raise ScrapeError(f"{listed.metrics_url} does not have Prometheus's format: {exc}") from None

    async def fetch_master(self, address: str) -> MasterFigures:
        """Fetch the values of a master.

        Args:
            address: ``host:port`` of the master's HTTP endpoint.

        Raises:
            ScrapeError: the values cannot be fetched.
        """
        health = await self._fetch_object(f"http://{address}/health")
        if "role" not in health:
            raise ScrapeError(f"the server at {address} is not a mooncake_master: its /health reports no role")
        try:
            figures = parse_plain_metrics(await self._fetch(f"http://{address}/metrics"))
        except ValueError as exc:
            raise ScrapeError(f"http://{address}/metrics does not have Prometheus's format: {exc}") from None
        try:
            segments = read_segments(await self._fetch_object(f"http://{address}/get_segments_detail"))
        except ScrapeError:  # a standby master may not serve this path
            segments = []
        return read_master_figures(health, figures, segments[:_MAX_SEGMENTS])

    async def _fetch_object(self, url: str) -> dict[str, Any]:
        try:
            found = json.loads(await self._fetch(url))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ScrapeError(f"the page {url} is not a JSON object")
        return found

    async def _fetch(self, url: str) -> str:
        try:
            return await asyncio.wait_for(self._read_page(url), TIMEOUT_SECONDS)
        except asyncio.TimeoutError:  # httpx's timeout is for each read
            raise ScrapeError(f"{url} does not answer within {TIMEOUT_SECONDS:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise ScrapeError(f"{url} does not answer: {str(exc) or type(exc).__name__}") from None

    async def _read_page(self, url: str) -> str:
        page = bytearray()
        async with self._http.stream("GET", url) as response:
            if response.status_code != 200:
                raise ScrapeError(f"{url} answers with status {response.status_code}")
            async for data in response.aiter_bytes():
                page += data
                if len(page) > _MAX_PAGE_BYTES:
                    raise ScrapeError(f"the page {url} is longer than {_MAX_PAGE_BYTES:,} bytes")
        return page.decode(errors="replace")
