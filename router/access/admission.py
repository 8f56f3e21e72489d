"""Admission: how many requests are served at once, in all and for each client, and which of those waiting is next.

A request that cannot be served at once waits in one line of bounded length, in which higher priorities come first and
clients of one priority take turns: a client with a thousand requests waiting delays another's only request by one turn,
not by a thousand. When the line is full, a newcomer takes the place of a lower priority's last request, or of the last
one of the client that has most requests in it, if the newcomer's has fewer. The bodies of those that wait in one
process have a bounded size, too.

A request that was let in (``try_enter`` returned True, or ``enter`` returned) leaves again with ``leave``. All that
these are told is plain data, so that another process may be asked: by ``SharedAdmission``.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from router.access.line import Place, WaitingLine
from router.access.token_rate import TokenRates
from router.http import ApiError, Refused

if TYPE_CHECKING:
    from router.settings import RouterSettings

__all__ = ["Admission", "Limits", "SharedAdmission"]

# A waiter's future is given None when it is its turn, and otherwise the refusal.
_Turn = asyncio.Future["Refused | None"]

# The bodies of requests in line, in one process, have so many bytes together at most; or it is one alone.
MAX_WAITING_BYTES = 256 * 1024 * 1024

_NO_RATES: Mapping[str, float] = MappingProxyType({})


class Admission:
    """Counts the requests that are served, and keeps the line of those that wait."""

    def __init__(self, settings: RouterSettings, token_rates: Mapping[str, float] = _NO_RATES) -> None:
        """
        Args:
            token_rates: tokens a second of the clients that have a limit of their own; 0 is none.
        """
        self.running = 0
        """Requests let in and not gone yet."""
        self.refused: dict[str, int] = {"queue_full": 0, "queue_timeout": 0}
        """Requests rejected so far, by the code of their error."""
        rates = TokenRates(settings.max_tokens_per_sec_per_key, token_rates)
        self._rates = rates if rates.is_limited else None
        if self._rates is not None:
            self.refused["rate_limit_exceeded"] = 0
        self.is_limited = self._rates is not None or bool(
            settings.max_concurrent_requests or settings.max_concurrent_requests_per_key
        )
        """Whether there are limits, so that a request's priority and its tokens make a difference."""
        self._limit = settings.max_concurrent_requests or sys.maxsize
        self._client_limit = settings.max_concurrent_requests_per_key or sys.maxsize
        self._line_limit = settings.max_queued_requests
        self._patience = settings.queue_timeout_secs
        self._running_of: dict[str, int] = {}
        self._running_elsewhere: dict[str, Mapping[str, int]] = {}
        self._num_elsewhere = 0
        self.waiting_bytes = 0
        """Bytes of the bodies of the requests in the line, as far as they are in this process."""
        self._line: WaitingLine[_Turn] = WaitingLine()
        self._usual_wait = 1.0

    def __repr__(self) -> str:
        return f"<Admission {self.running} running, {self.waiting} waiting of {self._line.num_clients} clients>"

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return self._line.waiting

    @property
    def waiting_by_priority(self) -> dict[int, int]:
        """Requests in the line, for each priority that has any."""
        return self._line.count_by_priority()

    def try_enter(self, client: str, tokens: int = 0) -> bool:
        """Let a request of ``client`` in if there is room for it now.

        It overtakes nobody: a request that waits while there is room for others waits for one of its own client.

        Args:
            tokens: those of its prompt, estimated.

        Raises:
            Refused: 429: the client has used its tokens.
        """
        running = self._running_of.get(client, 0)
        if self._num_elsewhere:
            running += self._count_elsewhere(client)
        if self.running + self._num_elsewhere >= self._limit or running >= self._client_limit:
            return False
        if self._rates is not None:
            self._take_tokens(self._rates, client, tokens)
        self.running += 1
        self._running_of[client] = self._running_of.get(client, 0) + 1
        return True

    async def enter(self, client: str, priority: int = 0, tokens: int = 0, body_bytes: int = 0) -> None:
        """Let a request of ``client`` in as soon as it is its turn; cancelling this leaves the line.

        Args:
            priority: higher comes first.
            tokens: those of its prompt, estimated.
            body_bytes: the size of its body, if that is in this process.

        Raises:
            Refused: 429: the line is full, or it was not its turn in time; or the client has used its tokens.
        """
        if self.try_enter(client, tokens):
            return
        if trouble := _explain_bytes(self.waiting, self.waiting_bytes, body_bytes):
            raise self._count_refusal("queue_full", trouble, self._guess_wait())
        self.waiting_bytes += body_bytes
        try:
            await self._enter_by_line(client, priority, tokens)
        finally:
            self.waiting_bytes -= body_bytes

    async def _enter_by_line(self, client: str, priority: int, tokens: int) -> None:
        if self._rates is not None:
            self._take_tokens(self._rates, client, tokens)
        try:
            await self._wait_in_line(client, priority)
        except BaseException:
            if self._rates is not None:
                self._rates.charge_tokens(client, -tokens)
            raise

    def leave(self, client: str, tokens: int = 0) -> None:
        """A request of ``client`` that was let in has ended; let in the next ones in line.

        Args:
            tokens: how many more it used than were named at its beginning; negative if it used less.
        """
        if self._rates is not None:
            self._rates.charge_tokens(client, tokens)
        self.running -= 1
        running = self._running_of[client] - 1
        if running:
            self._running_of[client] = running
        else:
            del self._running_of[client]
        if self._line.waiting:
            self._admit_waiting()

    def charge_tokens(self, client: str, tokens: int) -> None:
        """Charge ``client`` for tokens that it used at another router."""
        if self._rates is not None:
            self._rates.charge_tokens(client, tokens)

    def note_elsewhere(self, router: str, running: Mapping[str, int]) -> None:
        """Another router has these requests of clients running, and they count; or none, if ``running`` is empty."""
        self._running_elsewhere[router] = running
        if not running:
            del self._running_elsewhere[router]
        self._num_elsewhere = sum(sum(each.values()) for each in self._running_elsewhere.values())
        if self._line.waiting:
            self._admit_waiting()

    async def _wait_in_line(self, client: str, priority: int) -> None:
        if self.waiting >= self._line_limit:
            self._make_room(client, priority)
        loop = asyncio.get_running_loop()
        since = loop.time()
        place = self._line.join_line(priority, client, loop.create_future())
        timer = loop.call_later(self._patience, self._time_out, place)
        try:
            refused = await place.turn
        except asyncio.CancelledError:
            if not place.turn.cancelled() and place.turn.result() is None:
                self.leave(client)  # it was let in, but its task was cancelled before it could know
            else:
                self._line.leave_line(place)
            raise
        finally:
            timer.cancel()
        if refused is not None:
            raise refused
        self._usual_wait += 0.1 * (loop.time() - since - self._usual_wait)

    def _admit_waiting(self) -> None:
        """Let in as many as there is room for, one of each client in turn."""
        while self.running + self._num_elsewhere < self._limit:
            place = self._line.take_next(self._has_room_for)
            if place is None:
                return
            if not place.turn.done():  # else it was cancelled just now, and its task has not run since
                self.running += 1
                self._running_of[place.client] = self._running_of.get(place.client, 0) + 1
                place.turn.set_result(None)

    def _has_room_for(self, client: str) -> bool:
        return self._running_of.get(client, 0) + self._count_elsewhere(client) < self._client_limit

    def _count_elsewhere(self, client: str) -> int:
        return sum(running.get(client, 0) for running in self._running_elsewhere.values())

    def _take_tokens(self, rates: TokenRates, client: str, tokens: int) -> None:
        """Charge the client for a prompt; refuse it where it has used its tokens."""
        seconds = rates.seconds_to_wait(client)
        if seconds:
            rate = rates.rate_of(client)
            message = f"this API key may use {rate:g} tokens a second, and has used them; try again in {seconds:.1f} s"
            raise self._count_refusal("rate_limit_exceeded", message, seconds)
        rates.charge_tokens(client, tokens)

    def _make_room(self, client: str, priority: int) -> None:
        """Reject a request in line, so that one of ``client`` may stand there; or this one, if none has to give way."""
        place = self._line.find_last(priority, client)
        if place is None:
            message = f"{self.running} requests run and {self.waiting} wait; no more may wait"
            raise self._count_refusal("queue_full", message, self._guess_wait())
        self._line.leave_line(place)
        if not place.turn.done():
            why = (
                "others' clients have fewer of them" if place.priority == priority else "others have a higher priority"
            )
            message = f"{self.waiting} requests wait, and {why}; this one had to give way"
            place.turn.set_result(self._count_refusal("queue_full", message, self._guess_wait()))

    def _time_out(self, place: Place[_Turn]) -> None:
        """Reject a request that has waited for too long."""
        if not place.turn.done():
            self._line.leave_line(place)
            message = f"it was not this request's turn within {self._patience:g} s; {self.running} requests run"
            place.turn.set_result(self._count_refusal("queue_timeout", message, self._guess_wait()))

    def _guess_wait(self) -> float:
        # A client that comes back after as long as others wait at present will most likely not find the same crowd.
        return min(self._usual_wait, self._patience)

    def _count_refusal(self, code: str, message: str, seconds: float) -> Refused:
        """The refusal of a request that is not let in, and may come again after so many ``seconds``."""
        self.refused[code] += 1
        return Refused(ApiError(429, message, code), max(1, math.ceil(seconds)))


class SharedAdmission:
    """Asks the process that has the ``Admission`` of all, and counts this one's requests."""

    is_limited = True
    """Whether there are limits, as in ``Admission``."""

    def __init__(
        self,
        wait_for_entry: Callable[[str, int, int], Awaitable[Sequence[Any] | None]],
        report_end: Callable[[str, int], None],
    ) -> None:
        """
        Args:
            wait_for_entry: takes client, priority and tokens; returns None once the request is let in, or else the
                parts of its refusal: status, message, code, and the seconds to wait.
            report_end: takes client and tokens of a request that has ended.
        """
        self.running = 0
        """This process's requests that were let in and are not gone yet."""
        self.refused: Counter[str] = Counter(queue_full=0, queue_timeout=0)
        """This process's requests that were rejected, by the code of their error."""
        self.waiting_bytes = 0
        """Bytes of their bodies."""
        self.waiting_by_priority: Counter[int] = Counter()
        """This process's requests in the line."""
        self._wait_for_entry = wait_for_entry
        self._report_end = report_end

    def __repr__(self) -> str:
        return f"<SharedAdmission {self.running} running, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """This process's requests in the line."""
        return self.waiting_by_priority.total()

    def try_enter(self, client: str, tokens: int = 0) -> bool:
        """See ``Admission.try_enter``; only the other process knows whether there is room."""
        return False

    async def enter(self, client: str, priority: int = 0, tokens: int = 0, body_bytes: int = 0) -> None:
        """See ``Admission.enter``.

        Raises:
            Refused: as there.
        """
        if trouble := _explain_bytes(self.waiting, self.waiting_bytes, body_bytes):
            self.refused["queue_full"] += 1
            raise Refused(ApiError(429, trouble, "queue_full"), 1)
        self.waiting_by_priority[priority] += 1
        self.waiting_bytes += body_bytes
        try:
            refusal = await self._wait_for_entry(client, priority, tokens)
        finally:
            self.waiting_bytes -= body_bytes
            self.waiting_by_priority[priority] -= 1
            self.waiting_by_priority += Counter()  # drops priorities of which nobody waits any more
        if refusal is not None:
            status, message, code, retry_after = refusal
            self.refused[code] += 1
            raise Refused(ApiError(status, message, code), retry_after)
        self.running += 1

    def leave(self, client: str, tokens: int = 0) -> None:
        """See ``Admission.leave``."""
        self.running -= 1
        self._report_end(client, tokens)


Limits = Admission | SharedAdmission


def _explain_bytes(waiting: int, waiting_bytes: int, coming: int) -> str:
    """Why a request may not wait, for the size of the bodies that do; "" if it may."""
    if not waiting_bytes or not coming or waiting_bytes + coming <= MAX_WAITING_BYTES:
        return ""
    return (
        f"{waiting} requests wait, with bodies of {waiting_bytes} bytes, and this one has {coming}; "
        f"{MAX_WAITING_BYTES} may wait"
    )
