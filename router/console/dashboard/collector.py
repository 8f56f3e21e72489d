"""Collector: periodically polls the router, its instances and the pool's masters, and fills a History."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from router.console.client import ROLES, RouterClient, RouterError, TokenWanted
from router.console.dashboard.figures import Listed, RouterFigures, read_listed, read_loads, read_router_figures
from router.console.dashboard.history import History, InstanceReport, MasterReport, Moment
from router.console.dashboard.scraper import ScrapeError, Scraper

__all__ = ["Collector"]

_log = logging.getLogger("router.console.dashboard")

MAX_AT_ONCE = 32


class Collector:
    """Polls every ``seconds``. Views read the metrics from ``history``.

    Args:
        pools: ``host:port`` of the HTTP endpoint of each of the pool's masters.
    """

    def __init__(self, router: RouterClient, scraper: Scraper, pools: Sequence[str], seconds: float) -> None:
        self.router = router
        self.pools = pools
        self.seconds = seconds
        self.history = History()
        self._scraper = scraper
        self._listed: list[Listed] = []
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)

    async def keep_looking(self) -> None:
        """Poll until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self.look()
            except Exception:
                _log.exception("a look at the router failed; the next one follows")
            await asyncio.sleep(max(0.1, self.seconds - (time.monotonic() - began)))

    async def look(self) -> Moment:
        """Poll everything once, and store the result."""
        masters = asyncio.gather(*(self._ask_master(address) for address in self.pools))
        figures: RouterFigures | None = None
        trouble = listing_trouble = ""
        try:
            samples = await self.router.read_metrics()
            figures = read_router_figures(samples)
            try:
                self._listed = [read_listed(each) for each in await self.router.list_instances()]
            except TokenWanted as exc:
                listing_trouble = str(exc)
                self._listed = read_loads(samples)
            self._listed.sort(key=lambda each: (ROLES.index(each.role), each.key))
        except (RouterError, ValueError, KeyError, TypeError) as exc:
            trouble = (
                str(exc) if isinstance(exc, RouterError) else f"{self.router.url} is not a router of ours: {exc!r}"
            )
        # Instances continue to work while the router does not answer.
        reports = await asyncio.gather(*(self._ask_instance(each) for each in self._listed))
        moment = Moment(
            time=time.time(),
            router=figures,
            trouble=trouble,
            listing_trouble=listing_trouble,
            instances={report.listed.key: report for report in reports},
            masters=tuple(await masters),
        )
        self.history.add(moment)
        return moment

    async def close(self) -> None:
        """Close the connections."""
        try:
            await self.router.close()
        except Exception:
            _log.exception("the connections to the router were not closed")
        await self._scraper.close()

    async def _ask_instance(self, listed: Listed) -> InstanceReport:
        async with self._at_once:
            try:
                return InstanceReport(listed, await self._scraper.ask_instance(listed))
            except ScrapeError as exc:
                return InstanceReport(listed, trouble=str(exc))

    async def _ask_master(self, address: str) -> MasterReport:
        try:
            return MasterReport(address, await self._scraper.ask_master(address))
        except ScrapeError as exc:
            return MasterReport(address, trouble=str(exc))
