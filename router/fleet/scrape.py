"""Scraper: fetches the load that instances report themselves, for the policies that use it.

The router's own counts do not include requests that reach an instance by another way; its ``/metrics`` do.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING

from router.fleet.tasks import gather_spread
from router.http import UpstreamError

if TYPE_CHECKING:
    from router.fleet.instance import Instance
    from router.fleet.registry import Registry
    from router.http import ConnectionPool
    from router.settings import RouterSettings

__all__ = ["WANTED_BY", "Scraper"]

_log = logging.getLogger("router.fleet.scrape")

WANTED_BY = frozenset({"fd_remote_metrics_score", "remote_cache_aware"})
"""The policies that use the load reported by instances."""

# One line of Prometheus's text format, with the names of FastDeploy (also used by our engine) and vLLM. An instance may
# report a metric several times, for each model or data-parallel rank.
_SAMPLE = re.compile(rb"^(?:fastdeploy|vllm):num_requests_(running|waiting)(?:\{.*\})? +([0-9.eE+]+)", re.MULTILINE)


class Scraper:
    """Updates ``InstanceLoad.running`` and ``InstanceLoad.waiting``; None if an instance does not report them."""

    def __init__(self, settings: RouterSettings, registry: Registry, upstream: ConnectionPool) -> None:
        policies = (settings.prefill_policy, settings.decode_policy) if settings.splitwise else (settings.policy,)
        self.wanted = not WANTED_BY.isdisjoint(policies)
        """Whether a policy in use needs the metrics."""
        self._interval = settings.stats_interval_secs
        self._registry = registry
        self._upstream = upstream

    async def keep_scraping(self) -> None:
        """Poll all instances every ``stats_interval_secs`` until cancelled; return if no policy needs it."""
        while self.wanted:
            try:
                await self.scrape_all()
            except Exception:
                _log.exception("a round of scraping failed; the next one follows")
            await asyncio.sleep(self._interval)

    async def scrape_all(self) -> None:
        """Poll all instances concurrently. The time-out is one interval, so that no value becomes stale."""
        await gather_spread(map(self._scrape_instance, list(self._registry)))

    async def _scrape_instance(self, instance: Instance) -> None:
        load = instance.load
        address = instance.address._replace(port=instance.registration.metrics_port)
        try:
            response = await self._upstream.fetch(address, "GET", "/metrics", timeout=self._interval)
            load.running, load.waiting = _parse_figures(response.body)
        except (UpstreamError, ValueError, OverflowError) as exc:
            if load.running is not None:
                _log.info("instance %s does not say its load any more: %s", instance.key, exc)
            load.running = load.waiting = None


def _parse_figures(text: bytes) -> tuple[int, int]:
    """Return the numbers of running and waiting requests.

    Raises:
        ValueError: the text lacks one of them.
    """
    sums: dict[bytes, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    if len(sums) < 2:
        raise ValueError("it has no fastdeploy:num_requests_running and _waiting, nor vllm:...")
    return int(sums[b"running"]), int(sums[b"waiting"])
