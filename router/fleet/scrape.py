"""Scraper: asks instances for their own account of their load, for the policies that want it.

The router's own counts know nothing of requests that came by another way; an instance's ``/metrics`` does.
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
"""The policies that look at instances' own figures."""

# One line of Prometheus's text format; FastDeploy's names, which are our engine's too, and vLLM's. An instance may say
# a figure several times, for each model or data-parallel rank.
_SAMPLE = re.compile(rb"^(?:fastdeploy|vllm):num_requests_(running|waiting)(?:\{.*\})? +([0-9.eE+]+)", re.MULTILINE)


class Scraper:
    """Keeps ``InstanceLoad.running`` and ``InstanceLoad.waiting`` up to date; None where an instance does not say."""

    def __init__(self, settings: RouterSettings, registry: Registry, upstream: ConnectionPool) -> None:
        policies = (settings.prefill_policy, settings.decode_policy) if settings.splitwise else (settings.policy,)
        self.wanted = not WANTED_BY.isdisjoint(policies)
        """Whether a policy in use looks at the figures."""
        self._interval = settings.stats_interval_secs
        self._registry = registry
        self._upstream = upstream

    async def keep_scraping(self) -> None:
        """Ask all instances every ``stats_interval_secs`` until cancelled; return at once if no policy wants it."""
        while self.wanted:
            try:
                await self.scrape_all()
            except Exception:
                _log.exception("a round of scraping failed; the next one follows")
            await asyncio.sleep(self._interval)

    async def scrape_all(self) -> None:
        """Ask all instances at once; each has as long as there is between two rounds, so that no figure grows stale."""
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
    """Requests running and waiting.

    Raises:
        ValueError: the text does not say one of them.
    """
    sums: dict[bytes, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    if len(sums) < 2:
        raise ValueError("it has no fastdeploy:num_requests_running and _waiting, nor vllm:...")
    return int(sums[b"running"]), int(sums[b"waiting"])
