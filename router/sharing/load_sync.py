"""LoadSync: counts each instance's requests over all processes. The counts are at most some milliseconds old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from router.policies import InstanceLoad

if TYPE_CHECKING:
    from router.fleet import Registry
    from router.sharing.link import Link

__all__ = ["LoadSync"]

# Minimum time between two messages with changed counts. With 10 ms, a router with two workers under full load needs
# some per cent more CPU for these messages, and the simulator shows an improvement of at most 1 %.
SEND_SECONDS = 0.025
# All counts are sent at this interval, for new processes and to replace lost messages. A process that has no requests
# sends empty counts at its first MAX_IDLE_REPORTS intervals without requests, and then nothing.
SEND_ALL_SECONDS = 1.0
MAX_IDLE_REPORTS = 3

# Requests, tokens and queued work, as in ``InstanceLoad``.
_Figures = tuple[int, int, float]
_NOTHING: _Figures = (0, 0, 0.0)


class SharedLoad(InstanceLoad):
    """The load on one instance, by the requests of all processes."""

    __slots__ = ("_on_change", "is_sent")

    def __init__(self, key: str, on_change: Callable[[SharedLoad], None]) -> None:
        super().__init__(key)
        self._on_change = on_change
        self.is_sent = True
        """Whether the last change of this process has been sent to the other processes."""

    def add_request(self, tokens: int, work: float) -> None:
        """Add a request as ``InstanceLoad.add_request`` does, and let ``LoadSync`` send the new counts."""
        InstanceLoad.add_request(self, tokens, work)
        if self.is_sent:
            self._on_change(self)

    def remove_prefill(self, tokens: int, work: float) -> None:
        """Remove a prefill as ``InstanceLoad.remove_prefill`` does, and let ``LoadSync`` send the new counts."""
        InstanceLoad.remove_prefill(self, tokens, work)
        if self.is_sent:
            self._on_change(self)

    def remove_request(self, tokens: int, work: float) -> None:
        """Remove a request as ``InstanceLoad.remove_request`` does, and let ``LoadSync`` send the new counts."""
        InstanceLoad.remove_request(self, tokens, work)
        if self.is_sent:
            self._on_change(self)


class LoadSync:
    """Adds the requests of other processes to the loads in ``registry``, and sends them the counts of this process."""

    def __init__(self, link: Link, registry: Registry) -> None:
        self._link = link
        self._registry = registry
        self._others: dict[str, dict[str, _Figures]] = {}
        self._changed: list[SharedLoad] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._num_idle_reports = 0
        if not link.is_alone:
            registry.make_load = self._make_load
            link.subscribe_to_topic("load", self._on_counts)
            link.subscribe_to_departures(self._forget_process)

    async def keep_sending(self) -> None:
        """Send all counts to the other processes periodically, until cancelled. If this is the only process, return."""
        while not self._link.is_alone:
            await asyncio.sleep(SEND_ALL_SECONDS)
            own = ((instance.key, self._own_figures(instance.load)) for instance in self._registry)
            counts = {key: figures for key, figures in own if figures[0]}
            self._num_idle_reports = 0 if counts else self._num_idle_reports + 1
            if self._num_idle_reports <= MAX_IDLE_REPORTS:
                self._link.publish_event("load", [True, counts])

    def _make_load(self, key: str) -> InstanceLoad:
        load = SharedLoad(key, self._on_change)
        for figures in self._others.values():
            _replace_figures(load, _NOTHING, figures.get(key, _NOTHING))
        return load

    def _on_change(self, load: SharedLoad) -> None:
        load.is_sent = False
        self._changed.append(load)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._sent_at + SEND_SECONDS), self._send_changes)

    def _send_changes(self) -> None:
        self._timer = None
        self._sent_at, self._num_idle_reports = asyncio.get_running_loop().time(), 0
        changed, self._changed = self._changed, []
        counts = {}
        for load in changed:
            load.is_sent = True
            # A request may end after its instance was removed, when another instance uses the same address.
            if (instance := self._registry.get(load.key)) is not None and instance.load is load:
                counts[load.key] = self._own_figures(load)
        self._link.publish_event("load", [False, counts])

    def _own_figures(self, load: InstanceLoad) -> _Figures:
        """Return the part of ``load`` that comes from this process's requests."""
        requests, tokens, queued = load.requests, load.tokens, load.queued
        for figures in self._others.values():
            theirs = figures.get(load.key, _NOTHING)
            requests, tokens, queued = requests - theirs[0], tokens - theirs[1], queued - theirs[2]
        return requests, tokens, queued

    def _on_counts(self, sender: str, content: list[Any]) -> None:
        is_whole, counts = content
        known = self._others.setdefault(sender, {})
        for key in set(known).difference(counts) if is_whole else ():
            self._set_figures(known, key, _NOTHING)
        for key, figures in counts.items():
            self._set_figures(known, key, tuple(figures))

    def _set_figures(self, known: dict[str, _Figures], key: str, figures: _Figures) -> None:
        before = known.pop(key, _NOTHING)
        if figures[0]:
            known[key] = figures
        else:
            figures = _NOTHING  # without requests, tokens and queued work can only be rounding errors
        if (instance := self._registry.get(key)) is not None:
            _replace_figures(instance.load, before, figures)

    def _forget_process(self, name: str) -> None:
        known = self._others.pop(name, {})
        for key in list(known):
            self._set_figures(known, key, _NOTHING)


def _replace_figures(load: InstanceLoad, before: _Figures, now: _Figures) -> None:
    load.requests += now[0] - before[0]
    load.tokens += now[1] - before[1]
    load.queued += now[2] - before[2]
