"""Admission: how many requests are served concurrently, in total and per client, and which waiting request is next.

A request that cannot be served immediately waits in one bounded queue. Higher priorities come first. Clients of one
priority take turns: a client with 1,000 waiting requests delays the only request of another client by one turn, not by
1,000. When the queue is full, a new request replaces the last request of a lower priority. If there is none, it
replaces the last request of the client with the most requests in the queue, provided that its own client has fewer. The
total size of the bodies that wait in one process is bounded, too.

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

# Limit of the total size of queued bodies in one process. A single larger body may wait if no other one does.
MAX_WAITING_BYTES = 256 * 1024 * 1024

_NO_RATES: Mapping[str, float] = MappingProxyType({})


class Admission:
    """Counts the requests that are being served, and manages the queue of waiting requests."""

    def __init__(self, settings: RouterSettings, token_rates: Mapping[str, float] = _NO_RATES) -> None:
        """
        Args:
            token_rates: tokens per second of the clients that have their own limit; 0 means no limit.
        """
        self.running = 0
        """Number of requests that were admitted and have not left yet."""
        self.refused: dict[str, int] = {"queue_full": 0, "queue_timeout": 0}
        """Number of rejected requests so far, by error code."""
        rates = TokenRates(settings.max_tokens_per_sec_per_key, token_rates)
        self._rates = rates if rates.is_limited else None
        if self._rates is not None:
            self.refused["rate_limit_exceeded"] = 0
        self.is_limited = self._rates is not None or bool(
            settings.max_concurrent_requests or settings.max_concurrent_requests_per_key
        )
        """Whether any limit is set. Without limits, a request's priority and token count have no effect."""
        self._limit = settings.max_concurrent_requests or sys.maxsize
        self._client_limit = settings.max_concurrent_requests_per_key or sys.maxsize
        self._line_limit = settings.max_queued_requests
        self._patience = settings.queue_timeout_secs
        self._running_of: dict[str, int] = {}
        self._running_elsewhere: dict[str, Mapping[str, int]] = {}
        self._num_elsewhere = 0
        self.waiting_bytes = 0
        """Total size in bytes of the queued bodies that are in this process."""
        self._line: WaitingLine[_Turn] = WaitingLine()
        self._usual_wait = 1.0

    def __repr__(self) -> str:
        return f"<Admission {self.running} running, {self.waiting} waiting of {self._line.num_clients} clients>"

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return self._line.waiting

    @property
    def waiting_by_priority(self) -> dict[int, int]:
        """Number of queued requests of each priority that has any."""
        return self._line.count_by_priority()

    def try_enter(self, client: str, tokens: int = 0) -> bool:
        """Admit a request of ``client`` if there is capacity for it now.

        This is fair: if requests wait although there is capacity, they wait because of the limit of their own client.

        Args:
            tokens: estimated number of prompt tokens.

        Raises:
            Refused: 429: the client has used up its tokens.
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
        """Admit a request of ``client`` when its turn comes. If this task is cancelled, the request leaves the queue.

        Args:
            priority: higher values come first.
            tokens: estimated number of prompt tokens.
            body_bytes: size of its body, if the body is in this process.

        Raises:
            Refused: 429: the queue is full, the request waited too long, or the client has used up its tokens.
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
        """Note that an admitted request of ``client`` has ended, and admit the next requests in the queue.

        Args:
            tokens: tokens used beyond the estimate that was charged at admission; negative if it used fewer.
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
        """Set the running requests per client of another router, which count here, too; empty if there are none."""
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
                self.leave(client)  # it was admitted, but its task was cancelled before it was notified
            else:
                self._line.leave_line(place)
            raise
        finally:
            timer.cancel()
        if refused is not None:
            try:
                raise refused
            finally:
                del refused, place  # its traceback leads here: only the collector could free both
        self._usual_wait += 0.1 * (loop.time() - since - self._usual_wait)

    def _admit_waiting(self) -> None:
        """Admit as many requests as there is capacity for, one of each client in turn."""
        while self.running + self._num_elsewhere < self._limit:
            place = self._line.take_next(self._has_room_for)
            if place is None:
                return
            if not place.turn.done():  # else it was just cancelled, and its task has not run since
                self.running += 1
                self._running_of[place.client] = self._running_of.get(place.client, 0) + 1
                place.turn.set_result(None)

    def _has_room_for(self, client: str) -> bool:
        return self._running_of.get(client, 0) + self._count_elsewhere(client) < self._client_limit

    def _count_elsewhere(self, client: str) -> int:
        return sum(running.get(client, 0) for running in self._running_elsewhere.values())

    def _take_tokens(self, rates: TokenRates, client: str, tokens: int) -> None:
        """Charge the client for a prompt; refuse the request if the client has used up its tokens."""
        seconds = rates.seconds_to_wait(client)
        if seconds:
            rate = rates.rate_of(client)
            message = f"this API key may use {rate:g} tokens a second, and has used them; try again in {seconds:.1f} s"
            raise self._count_refusal("rate_limit_exceeded", message, seconds)
        rates.charge_tokens(client, tokens)

    def _make_room(self, client: str, priority: int) -> None:
        """Reject a queued request to make room for one of ``client``, or reject the new one if none has to give way."""
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
        """Reject a request that has waited too long."""
        if not place.turn.done():
            self._line.leave_line(place)
            message = f"it was not this request's turn within {self._patience:g} s; {self.running} requests run"
            place.turn.set_result(self._count_refusal("queue_timeout", message, self._guess_wait()))

    def _guess_wait(self) -> float:
        # Other clients wait this long at present. A client that retries after this time probably finds a shorter queue.
        return min(self._usual_wait, self._patience)

    def _count_refusal(self, code: str, message: str, seconds: float) -> Refused:
        """Return the refusal of a request that the client may send again after ``seconds``."""
        self.refused[code] += 1
        return Refused(ApiError(429, message, code), max(1, math.ceil(seconds)))


class AdmissionClient:
    """Forwards to the process that has the ``Admission`` of all workers, and counts the requests of this process."""

    is_limited = True
    """Whether any limit is set, as in ``Admission``."""

    def __init__(
        self,
        wait_for_entry: Callable[[str, int, int], Awaitable[Sequence[Any] | None]],
        report_end: Callable[[str, int], None],
    ) -> None:
        """
        Args:
            wait_for_entry: takes client, priority and tokens. Returns None once the request is admitted, else the parts
                of its refusal: status, message, code, and the seconds until a retry.
            report_end: takes the client and the tokens of a request that has ended.
        """
        self.running = 0
        """Number of this process's requests that were admitted and have not left yet."""
        self.refused: Counter[str] = Counter(queue_full=0, queue_timeout=0)
        """Number of this process's rejected requests, by error code."""
        self.waiting_bytes = 0
        """Total size in bytes of the queued bodies of this process."""
        self.waiting_by_priority: Counter[int] = Counter()
        """Number of queued requests of this process."""
        self._wait_for_entry = wait_for_entry
        self._report_end = report_end

    def __repr__(self) -> str:
        return f"<AdmissionClient {self.running} running, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """Number of queued requests of this process."""
        return self.waiting_by_priority.total()

    def try_enter(self, client: str, tokens: int = 0) -> bool:
        """Return False: only the other process knows whether there is capacity."""
        return False

    async def enter(self, client: str, priority: int = 0, tokens: int = 0, body_bytes: int = 0) -> None:
        """See ``Admission.enter``.

        Raises:
            Refused: for the same reasons.
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
        """See ``Admission.leave``."""
        self.running -= 1
        self._report_end(client, tokens)


Limits = Admission | AdmissionClient


def _explain_bytes(waiting: int, waiting_bytes: int, coming: int) -> str:
    """Return why a request may not wait, if the queued bodies are too large together; ``""`` if it may."""
    if not waiting_bytes or not coming or waiting_bytes + coming <= MAX_WAITING_BYTES:
        return ""
    return (
        f"{waiting} requests wait, with bodies of {waiting_bytes} bytes, and this one has {coming}; "
        f"{MAX_WAITING_BYTES} may wait"
    )
