"""AdmissionServer: applies the limits of one router in its supervisor. Workers call it through ``AdmissionClient``.

There is only one ``Admission`` for all workers, so concurrency and token limits are exact. This costs one message in
each direction per request. If no limits are set, no such messages are sent. The requests of other routers count, too,
but with a short delay: several routers together can exceed a limit slightly before they receive each other's messages.
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

# Changes of this router's usage are collected for this time. Then they are sent to the other routers.
SEND_SECONDS = 0.05


class AdmissionServer:
    """Admits the requests of all workers, and counts the running requests of each worker."""

    def __init__(self, admission: Admission, send_limits: Callable[[dict[str, int], dict[str, int]], None]) -> None:
        """
        Args:
            send_limits: sends the usage to the other routers: the running requests of each client, and the tokens
                charged to each client since the last call.
        """
        self._admission = admission
        self._send_limits = send_limits
        self._running: dict[str, Counter[str]] = {}
        self._entering: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._charged: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def admit_request(
        self, worker: str, number: int, client: str, priority: int, tokens: int, answer: Callable[..., None]
    ) -> None:
        """Admit or refuse a request of a worker, as soon as the limits allow a decision.

        Args:
            worker: name of the worker.
            number: id that the worker gave the request.
            client: client of the request.
            priority: priority of the request.
            tokens: tokens to charge.
            answer: called with three arguments: None on admission, or the refusal; ``client``; ``tokens``.
        """
        work = asyncio.ensure_future(self._admit(worker, client, priority, tokens, answer))
        self._entering[worker, number] = work
        work.add_done_callback(lambda _: self._entering.pop((worker, number), None))

    def cancel_request(self, worker: str, number: int) -> None:
        """Remove a worker's request from the queue. A request that was admitted already stays admitted."""
        if (work := self._entering.get((worker, number))) is not None:
            work.cancel()

    def release_request(self, worker: str, client: str, tokens: int) -> None:
        """Record that an admitted request of a worker has ended."""
        self._running[worker][client] -= 1
        self._note_charge(client, tokens)
        self._admission.leave(client, tokens)

    def remove_worker(self, worker: str) -> None:
        """Remove a worker that has ended, with its waiting and its running requests."""
        for (name, _), work in list(self._entering.items()):
            if name == worker:
                work.cancel()
        for client, count in self._running.pop(worker, Counter()).items():
            for _ in range(count):
                self._admission.leave(client)
        self.send_soon()

    def note_elsewhere(self, router: str, running: dict[str, int], charged: dict[str, int]) -> None:
        """Count another router's running requests and charged tokens, by client. Empty ``running``: it runs none."""
        self._admission.note_elsewhere(router, running)
        for client, tokens in charged.items():
            self._admission.charge_tokens(client, tokens)

    def send_soon(self) -> None:
        """Send this router's running requests and charged tokens to the other routers after ``SEND_SECONDS``."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SEND_SECONDS, self._send_usage)

    async def _admit(self, worker: str, client: str, priority: int, tokens: int, answer: Callable[..., None]) -> None:
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
        self.send_soon()

    def _send_usage(self) -> None:
        self._timer = None
        running: Counter[str] = Counter()
        for counts in self._running.values():
            running.update(counts)
        self._send_limits(+running, {client: tokens for client, tokens in self._charged.items() if tokens})
        self._charged.clear()
