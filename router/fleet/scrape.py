"""Scraper: fetches the load that instances report at ``/metrics``, for the policies that use this load.

The router's own counts do not include requests that reach an instance in another way. The instance's metrics do.
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

# A line of Prometheus's text format. An instance may report a metric several times, once for each model or
# data-parallel rank. Our engine reports the same values under the names of two engines.
_SAMPLE = re.compile(
    rb"^(?:(fastdeploy|vllm):num_requests_(running|waiting)|(sglang):num_(running|queue)_reqs)"
    rb"(?:\{.*\})? +([0-9.eE+]+)",
    re.MULTILINE,
)
# For each engine, its name in ``_SAMPLE`` and its names for running and waiting. Our engine uses FastDeploy's.
_NAMES = ((b"fastdeploy", b"running", b"waiting"), (b"vllm", b"running", b"waiting"), (b"sglang", b"running", b"queue"))


class Scraper:
    """Fetches the instances' metrics, and sets ``InstanceLoad.running`` and ``waiting`` (None if not reported)."""

    def __init__(self, settings: RouterSettings, registry: Registry, upstream: ConnectionPool) -> None:
        policies = (settings.prefill_policy, settings.decode_policy) if settings.splitwise else (settings.policy,)
        self.wanted = not WANTED_BY.isdisjoint(policies)
        """Whether a policy of this router uses the reported load."""
        self._interval = settings.stats_interval_secs
        self._registry = registry
        self._upstream = upstream

    async def keep_scraping(self) -> None:
        """Call ``scrape_all`` every ``stats_interval_secs`` until this task is cancelled. Return if no policy needs
        it.
        """
        while self.wanted:
            try:
                await self.scrape_all()
            except Exception:
                _log.exception("polling the instances' metrics failed; the next round follows")
            await asyncio.sleep(self._interval)

    async def scrape_all(self) -> None:
        """Fetch the metrics of all instances concurrently. If an instance responds too late, its load is None."""
        await gather_spread(map(self._scrape_instance, list(self._registry)))

    async def _scrape_instance(self, instance: Instance) -> None:
        load = instance.load
        address = instance.address._replace(port=instance.registration.metrics_port)
        try:
            response = await self._upstream.fetch(address, "GET", "/metrics", timeout=self._interval)
            load.running, load.waiting = _parse_figures(response.body)
        except (UpstreamError, ValueError, OverflowError) as exc:
            if load.running is not None:
                _log.info("instance %s no longer reports its load: %s", instance.key, exc)
            load.running = load.waiting = None


def _parse_figures(text: bytes) -> tuple[int, int]:
    """Parse Prometheus's text format; return the numbers of running and of waiting requests.

    Raises:
        ValueError: one of the numbers is missing.
    """
    sums: dict[tuple[bytes, bytes], float] = {}
    for *names, value in _SAMPLE.findall(text):
        engine, state = filter(None, names)
        sums[engine, state] = sums.get((engine, state), 0.0) + float(value)
    for engine, running, waiting in _NAMES:
        if (engine, running) in sums and (engine, waiting) in sums:
            return int(sums[engine, running]), int(sums[engine, waiting])
    raise ValueError(
        "its /metrics has neither fastdeploy:num_requests_running and fastdeploy:num_requests_waiting, nor the same "
        "numbers under the names of vLLM or SGLang"
    )
