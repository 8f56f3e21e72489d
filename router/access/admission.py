"""Admission: limits the requests that run concurrently, in total and per client, and queues further requests.

A request that cannot run immediately waits in a queue. Requests of a higher priority are served first. Within a
priority, clients are served in turn: a client with 1,000 waiting requests delays the only request of another client by
one turn, not by 1,000.

The queue has a maximum length. When it is full, a new request replaces the last request of a lower priority. If there
is none, it replaces the last request of a client with the same priority that has at least two more requests in the
queue. Otherwise it is refused. The total size of the bodies that wait in one process is limited, too.

Call ``leave`` for each request that was admitted (``try_enter`` returned True, or ``enter`` returned). All arguments
are plain data, so that ``AdmissionClient`` can forward the calls to another process.
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

__all__ = ["Admission", "AdmissionClient", "Limits"]

# The result of a waiting request's future: None when it is admitted, else the refusal.
_Turn = asyncio.Future["Refused | None"]

# Limit of the total size of queued bodies in one process. A larger body may wait if no other body waits.
MAX_WAITING_BYTES = 256 * 1024 * 1024

_NO_RATES: Mapping[str, float] = MappingProxyType({})


class Admission:
    """Counts the running requests, and manages the queue of waiting requests."""

    def __init__(self, settings: RouterSettings, token_rates: Mapping[str, float] = _NO_RATES) -> None:
        """
        Args:
            settings: the limits for all clients.
            token_rates: limits of tokens per second of the clients that have their own limit; 0 means no limit.
        """
        self.running = 0
        """Number of requests that were admitted and have not ended."""
        self.refused: dict[str, int] = {"queue_full": 0, "queue_timeout": 0}
        """Number of refused requests so far, by error code."""
        rates = TokenRates(settings.max_tokens_per_sec_per_key, token_rates)
        self._rates = rates if rates.is_limited else None
        if self._rates is not None:
            self.refused["rate_limit_exceeded"] = 0
        self.is_limited = self._rates is not None or bool(
            settings.max_concurrent_requests or settings.max_concurrent_requests_per_key
        )
        """Whether any limit is set. Without limits, the priority and the token count of a request have no effect."""
        self._limit = settings.max_concurrent_requests or sys.maxsize
        self._client_limit = settings.max_concurrent_requests_per_key or sys.maxsize
        self._line_limit = settings.max_queued_requests
        self._patience = settings.queue_timeout_secs
        self._running_of: dict[str, int] = {}
        self._running_elsewhere: dict[str, Mapping[str, int]] = {}
        self._num_elsewhere = 0
        self.waiting_bytes = 0
        """Total size in bytes of the queued bodies in this process."""
        self._line: WaitingLine[_Turn] = WaitingLine()
        self._usual_wait = 1.0

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return self._line.waiting

    @property
    def waiting_by_priority(self) -> dict[int, int]:
        """Number of queued requests of each priority. Priorities without queued requests are missing."""
        return self._line.count_by_priority()

    def try_enter(self, client: str, tokens: int = 0) -> bool:
        """Admit a request of ``client`` if it may run now. Return False if it must wait.

        A request that may run now delays no queued request: while the total limit is not reached, the queue contains
        only requests of clients that have reached their own limits.

        Args:
            client: name of the client.
            tokens: estimated number of prompt tokens.

        Raises:
            Refused: status 429: the client has used all its tokens.
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
        """Wait until the request of ``client`` is admitted. If this task is cancelled, the request is removed from the
        queue.

        Args:
            client: name of the client.
            priority: priority of the request; higher values are served first.
            tokens: estimated number of prompt tokens.
            body_bytes: size of the request's body if it is in this process, else 0.

        Raises:
            Refused: status 429: the queue is full, the request waited too long, or the client has used all its tokens.
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
        """Record that an admitted request of ``client`` has ended, and admit the next requests from the queue.

        Args:
            client: name of the client.
            tokens: tokens used in addition to the estimate that was charged at admission; negative if fewer were used.
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
        """Set the number of running requests of each client at another router. They count towards the limits here,
        too.
        """
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
                self.leave(client)  # the request was admitted, but this task was cancelled before it could run
            else:
                self._line.leave_line(place)
            raise
        finally:
            timer.cancel()
        if refused is not None:
            try:
                raise refused
            finally:
                del refused, place  # avoids a reference cycle through the traceback of ``refused``
        self._usual_wait += 0.1 * (loop.time() - since - self._usual_wait)

    def _admit_waiting(self) -> None:
        """Admit as many queued requests as the limits allow, one of each client in turn."""
        while self.running + self._num_elsewhere < self._limit:
            place = self._line.take_next(self._has_room_for)
            if place is None:
                return
            if not place.turn.done():  # otherwise the request was cancelled, but its task has not run since then
                self.running += 1
                self._running_of[place.client] = self._running_of.get(place.client, 0) + 1
                place.turn.set_result(None)

    def _has_room_for(self, client: str) -> bool:
        return self._running_of.get(client, 0) + self._count_elsewhere(client) < self._client_limit

    def _count_elsewhere(self, client: str) -> int:
        return sum(running.get(client, 0) for running in self._running_elsewhere.values())

    def _take_tokens(self, rates: TokenRates, client: str, tokens: int) -> None:
        """Charge the client for a prompt; refuse the request if the client has used all its tokens."""
        seconds = rates.seconds_to_wait(client)
        if seconds:
            rate = rates.rate_of(client)
            message = f"this API key has used its {rate:g} tokens per second; try again in {seconds:.1f} s"
            raise self._count_refusal("rate_limit_exceeded", message, seconds)
        rates.charge_tokens(client, tokens)

    def _make_room(self, client: str, priority: int) -> None:
        """Remove a queued request to make space for a new request of ``client``.

        Raises:
            Refused: no queued request can be removed, so the new request is refused.
        """
        place = self._line.find_last(priority, client)
        if place is None:
            message = f"the queue is full: {self.running} requests are running and {self.waiting} are waiting"
            raise self._count_refusal("queue_full", message, self._guess_wait())
        self._line.leave_line(place)
        if not place.turn.done():
            why = (
                "other clients have fewer requests in it"
                if place.priority == priority
                else "a request of higher priority arrived"
            )
            message = f"the queue is full with {self.waiting} requests, and {why}, so this request was removed"
            place.turn.set_result(self._count_refusal("queue_full", message, self._guess_wait()))

    def _time_out(self, place: Place[_Turn]) -> None:
        if not place.turn.done():
            self._line.leave_line(place)
            message = f"this request waited in the queue for {self._patience:g} s; {self.running} requests are running"
            place.turn.set_result(self._count_refusal("queue_timeout", message, self._guess_wait()))

    def _guess_wait(self) -> float:
        # The mean wait of admitted requests. After this time, a client that retries probably finds a shorter queue.
        return min(self._usual_wait, self._patience)

    def _count_refusal(self, code: str, message: str, seconds: float) -> Refused:
        """Count and return a refusal that asks the client to retry after ``seconds``."""
        self.refused[code] += 1
        return Refused(ApiError(429, message, code), max(1, math.ceil(seconds)))


class AdmissionClient:
    """Forwards calls to the process that has the ``Admission`` of all workers, and counts this process's requests."""

    is_limited = True
    """Whether any limit is set. It is always True, because without limits this class is not used."""

    def __init__(
        self,
        wait_for_entry: Callable[[str, int, int], Awaitable[Sequence[Any] | None]],
        report_end: Callable[[str, int], None],
    ) -> None:
        """
        Args:
            wait_for_entry: called with client, priority and tokens of a request. Returns None when the request is
                admitted. If it is refused, returns status, message, code, and the seconds until a retry.
            report_end: called with the arguments of ``leave``.
        """
        self.running = 0
        """Number of requests in this process that were admitted and have not ended."""
        self.refused: Counter[str] = Counter(queue_full=0, queue_timeout=0)
        """Number of refused requests in this process, by error code."""
        self.waiting_bytes = 0
        """Total size in bytes of the queued bodies in this process."""
        self.waiting_by_priority: Counter[int] = Counter()
        """Number of queued requests in this process, by priority."""
        self._wait_for_entry = wait_for_entry
        self._report_end = report_end

    @property
    def waiting(self) -> int:
        """Number of queued requests in this process."""
        return self.waiting_by_priority.total()

    def try_enter(self, client: str, tokens: int = 0) -> bool:
        """Return False, because only the supervisor knows whether the request may run now."""
        return False

    async def enter(self, client: str, priority: int = 0, tokens: int = 0, body_bytes: int = 0) -> None:
        """Wait until the supervisor admits the request of ``client``. ``Admission.enter`` describes the arguments.

        Raises:
            Refused: status 429: the queue is full, the request waited too long, or the client has used all its tokens.
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
            self.waiting_by_priority += Counter()  # drops priorities without waiting requests
        if refusal is not None:
            status, message, code, retry_after = refusal
            self.refused[code] += 1
            raise Refused(ApiError(status, message, code), retry_after)
        self.running += 1

    def leave(self, client: str, tokens: int = 0) -> None:
        """Report to the supervisor that an admitted request of ``client`` has ended.

        Args:
            client: name of the client.
            tokens: tokens used in addition to the estimate that was charged at admission; negative if fewer were used.
        """
        self.running -= 1
        self._report_end(client, tokens)


Limits = Admission | AdmissionClient


def _explain_bytes(waiting: int, waiting_bytes: int, coming: int) -> str:
    """Return why a request may not be queued: the queued bodies would be too large. Return ``""`` if it may.

    Args:
        waiting: number of queued requests.
        waiting_bytes: size of their bodies.
        coming: size of this request's body.
    """
    if not waiting_bytes or not coming or waiting_bytes + coming <= MAX_WAITING_BYTES:
        return ""
    return (
        f"{waiting} requests are queued, with bodies of {waiting_bytes} bytes, and the body of this request has "
        f"{coming} bytes; the bodies of queued requests may have {MAX_WAITING_BYTES} bytes in total"
    )
