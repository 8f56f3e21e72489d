"""Collector: regularly polls the router, its instances and the pool's masters, and stores the results in a History."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from router.console.client import ROLES, RouterClient, RouterError, TokenWanted
from router.console.dashboard.events import Event, find_events
from router.console.dashboard.figures import Listed, RouterFigures, read_listed, read_loads, read_router_figures
from router.console.dashboard.history import History, InstanceReport, MasterReport, Moment
from router.console.dashboard.scraper import ScrapeError, Scraper

__all__ = ["Collector"]

_log = logging.getLogger("router.console.dashboard")

MAX_AT_ONCE = 32
MAX_EVENTS = 1000


class Collector:
    """Polls the router, its instances and the pool's masters every ``seconds``. The views read the results from
    ``history``.

    Args:
        router: client of the router.
        scraper: fetches the metrics of instances and masters.
        pools: ``host:port`` of the HTTP endpoint of each master.
        seconds: interval between two polls.
    """

    def __init__(self, router: RouterClient, scraper: Scraper, pools: Sequence[str], seconds: float) -> None:
        self.router = router
        self.pools = pools
        self.seconds = seconds
        self.history = History()
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        """The last changes of the router, the instances and the masters that polls have found, oldest first."""
        self._scraper = scraper
        self._listed: list[Listed] = []
        # The last poll; an instance that did not respond has its figures of an earlier poll.
        self._seen: Moment | None = None
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)

    async def keep_polling(self) -> None:
        """Poll every ``seconds``, until this task is cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self.poll()
            except Exception:
                _log.exception("a poll of the router, its instances and the masters failed; the next poll follows")
            await asyncio.sleep(max(0.1, self.seconds - (time.monotonic() - began)))

    async def poll(self) -> Moment:
        """Poll the router, the instances and the masters once, and store the result."""
        masters = asyncio.gather(*(self._fetch_master(address) for address in self.pools))
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
            trouble = str(exc) if isinstance(exc, RouterError) else f"{self.router.url} is not a KV router: {exc!r}"
        # The known instances are polled even if the router does not respond, because they may still work.
        reports = await asyncio.gather(*(self._fetch_instance(each) for each in self._listed))
        moment = Moment(
            time=time.time(),
            router=figures,
            trouble=trouble,
            listing_trouble=listing_trouble,
            instances={report.listed.key: report for report in reports},
            masters=tuple(await masters),
        )
        seen = moment if self._seen is None else _fill_gaps(self._seen, moment)
        if self._seen is not None:
            self.events.extend(find_events(self._seen, seen))
        self._seen = seen
        self.history.add(moment)
        return moment

    async def close(self) -> None:
        """Close the connections to the router, the instances and the masters."""
        await self.router.close()
        await self._scraper.close()

    async def _fetch_instance(self, listed: Listed) -> InstanceReport:
        async with self._at_once:
            try:
                return InstanceReport(listed, await self._scraper.fetch_instance(listed))
            except ScrapeError as exc:
                return InstanceReport(listed, trouble=str(exc))

    async def _fetch_master(self, address: str) -> MasterReport:
        try:
            return MasterReport(address, await self._scraper.fetch_master(address))
        except ScrapeError as exc:
            return MasterReport(address, trouble=str(exc))


def _fill_gaps(before: Moment, after: Moment) -> Moment:
    """Return ``after`` with the figures of ``before`` for each instance that did not respond.

    Otherwise, no poll could be compared with the one before the restart of an instance, which lasts longer than a poll.
    """
    filled = dict(after.instances)
    for key, report in after.instances.items():
        if report.figures is None and (earlier := before.instances.get(key)) is not None:
            filled[key] = replace(report, figures=earlier.figures)
    return replace(after, instances=filled)
