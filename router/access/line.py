"""WaitingLine: the queue of waiting requests. Higher priorities are served first, and clients of a priority in turn.

No request waits forever. If ``MAX_PASSED_OVER`` requests of higher priorities were served in a row while a request of a
lower priority was waiting, the request of the lower priority is served next. So at most ``MAX_PASSED_OVER`` + (number
of priorities) requests are served before the first request of any priority.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["WaitingLine"]

MAX_PASSED_OVER = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Place(Generic[T]):  # not a NamedTuple, which cannot be generic in Python 3.10
    """Position of a request in the queue; needed to remove the request."""

    priority: int
    client: str
    turn: T


class WaitingLine(Generic[T]):
    """The queued requests.

    The caller identifies each request by a hashable object, its ``turn``: for example, the future that the
    request awaits.
    """

    def __init__(self) -> None:
        self.waiting = 0
        """Number of queued requests."""
        self._levels: dict[int, _Level[T]] = {}

    def count_by_priority(self) -> dict[int, int]:
        """Return the number of queued requests of each priority. Priorities without queued requests are missing."""
        return {priority: sum(map(len, level.clients.values())) for priority, level in self._levels.items()}

    def join_line(self, priority: int, client: str, turn: T) -> Place[T]:
        """Add a request after the other requests of the same client and priority."""
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
        """Remove and return the next request of a client for which ``may_enter`` is True; None if there is none."""
        ready = []
        for priority, level in self._levels.items():
            client = next(filter(may_enter, level.clients), None)
            if client is not None:
                ready.append((priority, client))
        if not ready:
            return None
        # Of the priorities that were passed over too often, the one that was passed over most is next; if the counts
        # are equal, the higher priority.
        late = [each for each in ready if self._levels[each[0]].passed_over >= MAX_PASSED_OVER]
        priority, client = max(late, key=lambda each: self._levels[each[0]].passed_over) if late else ready[0]
        for other, _ in ready:
            if other < priority:
                self._levels[other].passed_over += 1
        level = self._levels[priority]
        level.passed_over = 0
        line = level.clients[client]
        place = Place(priority, client, next(iter(line)))
        level.clients[client] = level.clients.pop(client)  # moves the client to the end of the order
        self.leave_line(place)
        return place

    def find_last(self, priority: int, client: str) -> Place[T] | None:
        """Return the queued request that a new request of ``client`` may replace; None if there is none.

        Only one queued request can be replaced: in the lowest queued priority, the last request of the client with the
        most requests. The new request may replace it if ``priority`` is higher; or if ``priority`` is equal, and
        ``client`` has at least two queued requests fewer in this priority than the other client.
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
    """The waiting requests of one priority."""

    __slots__ = ("clients", "passed_over")

    def __init__(self) -> None:
        # Clients in the order of their turns; the requests of each in order of arrival.
        self.clients: dict[str, dict[T, None]] = {}
        self.passed_over = 0
        """Number of requests of higher priorities served in a row while a request of this priority was waiting."""
