"""Gate: the limits of one router, kept by its supervisor for all workers, which ask by ``SharedAdmission``.

There is one ``Admission``, so limits, turns and tokens are exact over all workers, at the price of a message there and
back for each request. Without limits nobody asks. Other routers' requests count, too, as they were a moment ago: so
several routers together may let in some more than a limit for as long as it takes them to hear of each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from router.http import Refused

if TYPE_CHECKING:
    from router.access import Admission

__all__ = ["Gate"]

# Other routers are told so often of what has changed here.
TELL_SECONDS = 0.05


class Gate:
    """Lets the requests of all workers in, and knows which worker has which."""

    def __init__(self, admission: Admission, tell_others: Callable[[dict[str, int], dict[str, int]], None]) -> None:
        """
        Args:
            tell_others: takes, for the other routers, the requests that run by client, and the tokens charged lately.
        """
        self._admission = admission
        self._tell_others = tell_others
        self._running: dict[str, Counter[str]] = {}
        self._entering: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._charged: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Gate {self._admission}>"

    def admit_request(
        self, worker: str, number: int, client: str, priority: int, tokens: int, answer: Callable[[Any], None]
    ) -> None:
        """A worker's request wants to be let in; ``answer`` is called with None when it is, or with its refusal."""
        work = asyncio.ensure_future(self._let_in(worker, client, priority, tokens, answer))
        self._entering[worker, number] = work
        work.add_done_callback(lambda _: self._entering.pop((worker, number), None))

    def leave_line(self, worker: str, number: int) -> None:
        """A worker's request waits no more; if it was let in meanwhile, it leaves."""
        if (work := self._entering.get((worker, number))) is not None:
            work.cancel()

    def release_request(self, worker: str, client: str, tokens: int) -> None:
        """A worker's request that was let in has ended."""
        self._running[worker][client] -= 1
        self._note_charge(client, tokens)
        self._admission.leave(client, tokens)

    def remove_worker(self, worker: str) -> None:
        """A worker is gone, and with it its requests."""
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
        """Tell the other routers soon which requests run here, and what was charged."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TELL_SECONDS, self._tell_routers)

    async def _let_in(
        self, worker: str, client: str, priority: int, tokens: int, answer: Callable[[Any], None]
    ) -> None:
        try:
            await self._admission.enter(client, priority, tokens)
        except Refused as refused:
            answer([refused.error.status, refused.error.message, refused.error.code, refused.retry_after])
            return
        self._running.setdefault(worker, Counter())[client] += 1
        self._note_charge(client, tokens)
        answer(None)

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
