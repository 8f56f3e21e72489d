"""Admission: how many requests are served at once, in all and for each client, and which of those waiting is next.

A request that cannot be served at once waits in one line of bounded length, in which clients take turns: a client with
a thousand requests waiting delays another's only request by one turn, not by a thousand. When the line is full, the
client that has most requests in it loses its last one to a newcomer that has fewer.

A request that was let in (``try_enter`` returned True, or ``enter`` returned) leaves again with ``leave``.
"""

from __future__ import annotations

import asyncio
import math
import sys
from typing import TYPE_CHECKING

from router.http import ApiError, Refused

if TYPE_CHECKING:
    from router.settings import RouterSettings

__all__ = ["Admission"]

# A waiter's future is given None when it is its turn, and otherwise the refusal.
_Turn = asyncio.Future["Refused | None"]


class Admission:
    """Counts the requests that are served, and keeps the line of those that wait."""

    def __init__(self, settings: RouterSettings) -> None:
        self.running = 0
        """Requests let in and not gone yet."""
        self.waiting = 0
        """Requests in the line."""
        self.refused: dict[str, int] = {"queue_full": 0, "queue_timeout": 0}
        """Requests rejected so far, by the code of their error."""
        self._limit = settings.max_concurrent_requests or sys.maxsize
        self._client_limit = settings.max_concurrent_requests_per_key or sys.maxsize
        self._line_limit = settings.max_queued_requests
        self._patience = settings.queue_timeout_secs
        self._running_of: dict[str, int] = {}
        # Clients with somebody in line, in the order of their turns; each one's requests in the order they came.
        self._lines: dict[str, dict[_Turn, None]] = {}
        self._usual_wait = 1.0

    def __repr__(self) -> str:
        return f"<Admission {self.running} running, {self.waiting} waiting of {len(self._lines)} clients>"

    def try_enter(self, client: str) -> bool:
        """Let a request of ``client`` in if there is room for it now.

        It overtakes nobody: a request that waits while there is room for others waits for one of its own client.
        """
        running = self._running_of.get(client, 0)
        if self.running >= self._limit or running >= self._client_limit:
            return False
        self.running += 1
        self._running_of[client] = running + 1
        return True

    async def enter(self, client: str) -> None:
        """Let a request of ``client`` in as soon as it is its turn; cancelling this leaves the line.

        Raises:
            Refused: 429: the line is full, or it was not its turn in time.
        """
        if self.try_enter(client):
            return
        if self.waiting >= self._line_limit:
            self._make_room(client)
        loop = asyncio.get_running_loop()
        since = loop.time()
        turn: _Turn = loop.create_future()
        self._lines.setdefault(client, {})[turn] = None
        self.waiting += 1
        timer = loop.call_later(self._patience, self._time_out, client, turn)
        try:
            refused = await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.result() is None:
                self.leave(client)  # it was let in, but its task was cancelled before it could know
            else:
                self._leave_line(client, turn)
            raise
        finally:
            timer.cancel()
        if refused is not None:
            raise refused
        self._usual_wait += 0.1 * (loop.time() - since - self._usual_wait)

    def leave(self, client: str) -> None:
        """A request of ``client`` that was let in has ended; let in the next ones in line."""
        self.running -= 1
        running = self._running_of[client] - 1
        if running:
            self._running_of[client] = running
        else:
            del self._running_of[client]
        if self._lines:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Let in as many as there is room for, one of each client in turn."""
        while self.running < self._limit:
            client = next((c for c in self._lines if self._running_of.get(c, 0) < self._client_limit), None)
            if client is None:
                return
            line = self._lines.pop(client)
            turn = next(iter(line))
            del line[turn]
            self.waiting -= 1
            if line:
                self._lines[client] = line  # the client goes to the end of the order
            if not turn.done():  # else it was cancelled just now, and its task has not run since
                self.running += 1
                self._running_of[client] = self._running_of.get(client, 0) + 1
                turn.set_result(None)

    def _make_room(self, client: str) -> None:
        """Reject the last request of the client that has most in line; or this one, if no client has more."""
        greediest = max(self._lines, key=lambda c: len(self._lines[c]), default=client)
        if len(self._lines.get(greediest, ())) <= len(self._lines.get(client, ())) + 1:
            message = f"{self.running} requests run and {self.waiting} wait; no more may wait"
            raise self._count_refusal("queue_full", message)
        last = next(reversed(self._lines[greediest]))
        self._leave_line(greediest, last)
        if not last.done():
            message = f"{self.waiting} requests wait, and others' clients have fewer of them; this one had to give way"
            last.set_result(self._count_refusal("queue_full", message))

    def _time_out(self, client: str, turn: _Turn) -> None:
        """Reject a request that has waited for too long."""
        if not turn.done():
            self._leave_line(client, turn)
            message = f"it was not this request's turn within {self._patience:g} s; {self.running} requests run"
            turn.set_result(self._count_refusal("queue_timeout", message))

    def _leave_line(self, client: str, turn: _Turn) -> None:
        """Take a request out of the line, if it is still there."""
        line = self._lines.get(client, {})
        if turn in line:
            del line[turn]
            self.waiting -= 1
            if not line:
                del self._lines[client]

    def _count_refusal(self, code: str, message: str) -> Refused:
        """The refusal of a request that is not let in."""
        self.refused[code] += 1
        # A client that comes back after as long as others wait at present will most likely not find the same crowd.
        return Refused(ApiError(429, message, code), max(1, math.ceil(min(self._usual_wait, self._patience))))
