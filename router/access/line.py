"""WaitingLine: requests that wait for their turn. Higher priorities come first, and clients of one priority take turns.

No request waits forever: a priority that was passed over ``MAX_PASSED_OVER`` times in a row by higher priorities gets
the next turn. So the first request of a priority is admitted after at most ``MAX_PASSED_OVER`` + (number of priorities)
others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["WaitingLine"]

MAX_PASSED_OVER = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Place(Generic[T]):  # not a NamedTuple: Python 3.10 has no generic ones
    """Position of one request: what is needed to find it again."""

    priority: int
    client: str
    turn: T


class WaitingLine(Generic[T]):
    """Queued requests, each identified by its ``turn``: any hashable object of its own."""

    def __init__(self) -> None:
        self.waiting = 0
        """Number of queued requests."""
        self._levels: dict[int, _Level[T]] = {}

    @property
    def num_clients(self) -> int:
        """Number of clients that have queued requests."""
        return len({client for level in self._levels.values() for client in level.clients})

    def count_by_priority(self) -> dict[int, int]:
        """Number of queued requests of each priority that has any."""
        return {priority: sum(map(len, level.clients.values())) for priority, level in self._levels.items()}

    def join_line(self, priority: int, client: str, turn: T) -> Place[T]:
        """Add a request behind the other requests of this client and priority."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            self._levels = dict(sorted(self._levels.items(), reverse=True))
        level.clients.setdefault(client, {})[turn] = None
        self.waiting += 1
        return Place(priority, client, turn)

    def leave_line(self, place: Place[T]) -> None:
        """Remove a request from the queue, if it is still there."""
        level = self._levels.get(place.priority)
        line = level.clients.get(place.client, {}) if level else {}
        if level is not None and place.turn in line:
            del line[place.turn]
            self.waiting -= 1
            if not line:
                del level.clients[place.client]
            if not level.clients:
                del self._levels[place.priority]

    def take_next(self, may_enter: Callable[[str], bool]) -> Place[T] | None:
        """Remove and return the next request of those clients that ``may_enter``; None if there is none."""
        ready = []
        for priority, level in self._levels.items():
            client = next(filter(may_enter, level.clients), None)
            if client is not None:
                ready.append((priority, client))
        if not ready:
            return None
        # Of the priorities that were passed over too often, take the one passed over most; for equal counts, the higher
        # one.
        late = [each for each in ready if self._levels[each[0]].passed_over >= MAX_PASSED_OVER]
        priority, client = max(late, key=lambda each: self._levels[each[0]].passed_over) if late else ready[0]
        for other, _ in ready:
            if other < priority:
                self._levels[other].passed_over += 1
        level = self._levels[priority]
        level.passed_over = 0
        line = level.clients[client]
        place = Place(priority, client, next(iter(line)))
        level.clients[client] = level.clients.pop(client)  # the client moves to the end of the order
        self.leave_line(place)
        return place

    def find_last(self, priority: int, client: str) -> Place[T] | None:
        """Return the queued request that has to give way to a new one of ``client``; None if the new one has to.

        A request of the lowest queued priority gives way: the last one of the client that has most requests of that
        priority. It gives way to a request of a higher priority; to one of the same priority only if its client has at
        least two requests more than ``client``.
        """
        lowest = min(self._levels, default=priority)
        if lowest > priority or lowest not in self._levels:
            return None
        clients = self._levels[lowest].clients
        greediest = max(clients, key=lambda name: len(clients[name]))
        if lowest == priority and len(clients[greediest]) <= len(clients.get(client, ())) + 1:
            return None
        return Place(lowest, greediest, next(reversed(clients[greediest])))


class _Level(Generic[T]):
    """Requests of one priority."""

    __slots__ = ("clients", "passed_over")

    def __init__(self) -> None:
        # Clients in the order of their turns; the requests of each in order of arrival.
        self.clients: dict[str, dict[T, None]] = {}
        self.passed_over = 0
        """How often in a row higher priorities came first while a request of this priority could have been admitted."""
