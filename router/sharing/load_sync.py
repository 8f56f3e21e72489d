"""LoadSync: one count of each instance's requests for all processes, at most some milliseconds old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from router.policies import InstanceLoad

if TYPE_CHECKING:
    from router.fleet import Registry
    from router.sharing.link import Link

__all__ = ["LoadSync"]

# A change after a pause is sent immediately; further ones at this interval. With 10 ms, sending, forwarding and
# receiving take a router with two workers some per cent more CPU under full load, and the simulator shows an
# improvement of at most 1 %.
TELL_SECONDS = 0.025
# All counts are sent at this interval, for new processes, and to replace lost messages.
TELL_ALL_SECONDS = 1.0

# Requests, tokens and queued work, as in ``InstanceLoad``.
_Figures = tuple[int, int, float]
_NOTHING: _Figures = (0, 0, 0.0)


class SharedLoad(InstanceLoad):
    """The load of all processes' requests on one instance."""

    __slots__ = ("_on_change", "is_told")

    def __init__(self, key: str, on_change: Callable[[SharedLoad], None]) -> None:
        super().__init__(key)
        self._on_change = on_change
        self.is_told = True
        """Whether the last change has been sent to the others."""

    def add_request(self, tokens: int, work: float) -> None:
        """See ``InstanceLoad.add_request``."""
        InstanceLoad.add_request(self, tokens, work)
        if self.is_told:
            self._on_change(self)

    def remove_prefill(self, tokens: int, work: float) -> None:
        """See ``InstanceLoad.remove_prefill``."""
        InstanceLoad.remove_prefill(self, tokens, work)
        if self.is_told:
            self._on_change(self)

    def remove_request(self, tokens: int, work: float) -> None:
        """See ``InstanceLoad.remove_request``."""
        InstanceLoad.remove_request(self, tokens, work)
        if self.is_told:
            self._on_change(self)


class LoadSync:
    """Adds the other processes' requests to the loads in ``registry``, and sends them this process's counts."""

    def __init__(self, link: Link, registry: Registry) -> None:
        self._link = link
        self._registry = registry
        self._others: dict[str, dict[str, _Figures]] = {}
        self._changed: list[SharedLoad] = []
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = 0.0
        if not link.is_alone:
            registry.make_load = self._make_load
            link.subscribe_to_topic("load", self._on_load)
            link.subscribe_to_departures(self._forget_process)

    def __repr__(self) -> str:
        return f"<LoadSync with {list(self._others)}>"

    async def keep_telling(self) -> None:
        """Send all counts to the others periodically, until cancelled; return if there are no other processes."""
        while not self._link.is_alone:
            await asyncio.sleep(TELL_ALL_SECONDS)
            told = {instance.key: self._own_figures(instance.load) for instance in self._registry}
            self._link.publish_event("load", [True, told])

    def _make_load(self, key: str) -> InstanceLoad:
        load = SharedLoad(key, self._on_change)
        for figures in self._others.values():
            _replace_figures(load, _NOTHING, figures.get(key, _NOTHING))
        return load

    def _on_change(self, load: SharedLoad) -> None:
        load.is_told = False
        self._changed.append(load)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._told_at + TELL_SECONDS), self._tell_changes)

    def _tell_changes(self) -> None:
        self._timer = None
        self._told_at = asyncio.get_running_loop().time()
        changed, self._changed = self._changed, []
        told = {}
        for load in changed:
            load.is_told = True
            # Requests may outlive their instance, whose address another one has by then.
            if (instance := self._registry.get(load.key)) is not None and instance.load is load:
                told[load.key] = self._own_figures(load)
        self._link.publish_event("load", [False, told])

    def _own_figures(self, load: InstanceLoad) -> _Figures:
        """Return the part of ``load`` that belongs to this process."""
        requests, tokens, queued = load.requests, load.tokens, load.queued
        for figures in self._others.values():
            theirs = figures.get(load.key, _NOTHING)
            requests, tokens, queued = requests - theirs[0], tokens - theirs[1], queued - theirs[2]
        return requests, tokens, queued

    def _on_load(self, sender: str, content: list[Any]) -> None:
        is_whole, told = content
        known = self._others.setdefault(sender, {})
        for key in set(known).difference(told) if is_whole else ():
            self._set_figures(known, key, _NOTHING)
        for key, figures in told.items():
            self._set_figures(known, key, tuple(figures))

    def _set_figures(self, known: dict[str, _Figures], key: str, figures: _Figures) -> None:
        before = known.pop(key, _NOTHING)
        if figures[0]:
            known[key] = figures
        else:
            figures = _NOTHING  # without requests there is no work, except for rounding errors
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
