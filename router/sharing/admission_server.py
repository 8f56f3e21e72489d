"""AdmissionServer: the limits of one router, in its supervisor. Workers use it through ``AdmissionClient``.

There is only one ``Admission``, so limits, turns and tokens are exact over all workers, at the cost of a message in
each direction per request. Without limits, no messages are sent. Other routers' requests count, too, with a short
delay: so several routers together may exceed a limit slightly until they receive each other's messages.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from router.http import Refused

if TYPE_CHECKING:
    from router.access import Admission

__all__ = ["AdmissionServer"]

# Interval at which changes are sent to other routers.
TELL_SECONDS = 0.05


class AdmissionServer:
    """Admits the requests of all workers, and stores which worker has which request."""

    def __init__(self, admission: Admission, tell_others: Callable[[dict[str, int], dict[str, int]], None]) -> None:
        """
        Args:
            tell_others: called with data for the other routers: running requests by client, and recently charged
                tokens.
        """
        self._admission = admission
        self._tell_others = tell_others
        self._running: dict[str, Counter[str]] = {}
        self._entering: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._charged: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<AdmissionServer {self._admission}>"

    def admit_request(
        self, worker: str, number: int, client: str, priority: int, tokens: int, answer: Callable[..., None]
    ) -> None:
        """Handle a worker's request for admission.

        Args:
            answer: called with None on admission, or with the refusal, and with client and tokens.
        """
        work = asyncio.ensure_future(self._let_in(worker, client, priority, tokens, answer))
        self._entering[worker, number] = work
        work.add_done_callback(lambda _: self._entering.pop((worker, number), None))

    def leave_line(self, worker: str, number: int) -> None:
        """Remove a worker's request from the queue; if it was admitted meanwhile, it leaves."""
        if (work := self._entering.get((worker, number))) is not None:
            work.cancel()

    def release_request(self, worker: str, client: str, tokens: int) -> None:
        """Note that an admitted request of a worker has ended."""
        self._running[worker][client] -= 1
        self._note_charge(client, tokens)
        self._admission.leave(client, tokens)

    def remove_worker(self, worker: str) -> None:
        """Remove a worker that is gone, and its requests."""
        for (name, _), work in list(self._entering.items()):
            if name == worker:
                work.cancel()
        for client, count in self._running.pop(worker, Counter()).items():
            for _ in range(count):
                self._admission.leave(client)
        self.tell_all()

    def note_elsewhere(self, router: str, running: dict[str, int], charged: dict[str, int]) -> None:
        """Count the requests of another router, which are all gone if ``running`` is empty."""
        self._admission.note_elsewhere(router, running)
        for client, tokens in charged.items():
            self._admission.charge_tokens(client, tokens)

    def tell_all(self) -> None:
        """Send the running requests of this router, and the charged tokens, to the other routers soon."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TELL_SECONDS, self._tell_routers)

    async def _let_in(self, worker: str, client: str, priority: int, tokens: int, answer: Callable[..., None]) -> None:
        try:
            await self._admission.enter(client, priority, tokens)
        except Refused as refused:
            error = refused.error
            answer([error.status, error.message, error.code, refused.retry_after], client, tokens)
            return
        self._running.setdefault(worker, Counter())[client] += 1
        self._note_charge(client, tokens)
        answer(None, client, tokens)

    def _note_charge(self, client: str, tokens: int) -> None:
        self._charged[client] += tokens
        self.tell_all()

    def _tell_routers(self) -> None:
        self._timer = None
        running: Counter[str] = Counter()
        for counts in self._running.values():
            running.update(counts)
        self._tell_others(+running, {client: tokens for client, tokens in self._charged.items() if tokens})
        self._charged.clear()
