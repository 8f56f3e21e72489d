"""WaitingLine: requests that wait for their turn. Higher priorities come first, and clients of one priority take turns.

Nobody waits for ever: a priority that has been passed over ``MAX_PASSED_OVER`` times in a row by higher ones gets the
next turn. So the first of a priority is let in after at most ``MAX_PASSED_OVER`` + (number of priorities) others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["WaitingLine"]

MAX_PASSED_OVER = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Place(Generic[T]):  # no NamedTuple, which Python 3.10 has no generic ones of
    """One request's place: enough to find it again."""

    priority: int
    client: str
    turn: T


class WaitingLine(Generic[T]):
    """Requests in line, each known by its ``turn``: any hashable object of its own."""

    def __init__(self) -> None:
        self.waiting = 0
        """Requests in the line."""
        self._levels: dict[int, _Level[T]] = {}

    @property
    def num_clients(self) -> int:
        """How many clients have somebody in line."""
        return len({client for level in self._levels.values() for client in level.clients})

    def count_by_priority(self) -> dict[int, int]:
        """How many wait, for each priority that has somebody in line."""
        return {priority: sum(map(len, level.clients.values())) for priority, level in self._levels.items()}

    def join_line(self, priority: int, client: str, turn: T) -> Place[T]:
        """Stand last among the client's requests of this priority."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            self._levels = dict(sorted(self._levels.items(), reverse=True))
        level.clients.setdefault(client, {})[turn] = None
        self.waiting += 1
        return Place(priority, client, turn)

    def leave_line(self, place: Place[T]) -> None:
        """Take a request out of the line, if it is still there."""
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
        """Take out the request whose turn it is, among the clients that ``may_enter``; None if there is none."""
        ready = []
        for priority, level in self._levels.items():
            client = next(filter(may_enter, level.clients), None)
            if client is not None:
                ready.append((priority, client))
        if not ready:
            return None
        # Of those passed over too often the one that was so most; of equals the higher.
        late = [each for each in ready if self._levels[each[0]].passed_over >= MAX_PASSED_OVER]
        priority, client = max(late, key=lambda each: self._levels[each[0]].passed_over) if late else ready[0]
        for other, _ in ready:
            if other < priority:
                self._levels[other].passed_over += 1
        level = self._levels[priority]
        level.passed_over = 0
        line = level.clients[client]
        place = Place(priority, client, next(iter(line)))
        level.clients[client] = level.clients.pop(client)  # the client goes to the end of the order
        self.leave_line(place)
        return place

    def find_last(self, priority: int, client: str) -> Place[T] | None:
        """The request that should give way to another one of ``client``; None if that one has to.

        It is one of the lowest priority in line, if that is lower; or else of the client that has most in line, if
        this client would not have as many. Of the client's own requests the last gives way.
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
    """The requests of one priority."""

    __slots__ = ("clients", "passed_over")

    def __init__(self) -> None:
        # Clients in the order of their turns; each one's requests in the order they came.
        self.clients: dict[str, dict[T, None]] = {}
        self.passed_over = 0
        """How often in a row higher priorities came first while somebody here could have been let in."""
