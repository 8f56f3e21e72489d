"""Hub: the supervisor's part of the communication. It forwards messages, and stores records for new workers."""

from __future__ import annotations

import asyncio
import logging
import reprlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from router.sharing.gate import Gate
from router.sharing.kept_figures import KeptFigures
from router.sharing.link import ANSWER_SECONDS
from router.sharing.records import STALE_SECONDS, merge_records, read_versions
from router.sharing.wire import Wire

__all__ = ["Hub", "Uplink"]

_log = logging.getLogger("router.sharing.hub")

# The number of a query from a router; workers never use it.
_FOR_ROUTER = 0


class Uplink(Protocol):
    """The connection to the other routers."""

    name: str

    def list_routers(self) -> list[str]:
        """Return the names of the other routers."""

    def send_to_routers(self, *message: Any) -> None:
        """Send a message to all of them."""

    def send_prefixes(self, router: str, answers: list[dict[str, Any]]) -> None:
        """Send a router the prefixes that it has requested."""

    async def fetch_prefixes(self) -> dict[str, Any]:
        """Return the prefixes that the other routers know."""


class Hub:
    """Workers by name, and the messages between them."""

    def __init__(
        self, on_count: Callable[[str, dict[str, int]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            on_count: called with a worker's name and its load.
            clock: monotonic clock in seconds; records without renewal are dropped by it.
        """
        self.uplink: Uplink | None = None
        """The connection to the other routers, if there are any."""
        self.gate: Gate | None = None
        """Admits requests, if there are limits."""
        self._on_count = on_count
        self._workers: dict[str, Wire] = {}
        self._clock = clock
        self._records: dict[str, dict[str, Any]] = {}  # for each key the latest registration and the latest commands
        self._renewed_at: dict[str, float] = {}
        self._trouble = ""
        self._figures = KeptFigures()
        self._questions: dict[tuple[str, int], _Question] = {}

    def __repr__(self) -> str:
        return f"<Hub {list(self._workers)} {len(self._records)} records>"

    def add_worker(self, name: str, wire: Wire) -> None:
        """Add a worker that has started, and send it the records."""
        self._workers[name] = wire
        for key, record in self.list_records().items():
            wire.send_message("keep", key, record)
        wire.send_message("state", self._trouble)

    def forget_worker(self, name: str) -> None:
        """Remove a worker that is gone."""
        if self._workers.pop(name, None) is None:
            return
        self.announce_departure(name)
        self._figures.remove_worker(name)
        if self.gate is not None:
            self.gate.remove_worker(name)
        if self.uplink is not None:
            self.uplink.send_to_routers("gone", name)
        for key, question in list(self._questions.items()):
            if name in question.waiting_for:
                self._note_answer(key, name, [])

    def announce_leave(self) -> None:
        """Notify all workers that the router ends soon, and that load balancers should stop using it."""
        self._send_to_workers("leave")

    def stop_workers(self, grace: float) -> None:
        """Make all workers end within ``grace`` seconds."""
        self._send_to_workers("stop", grace)

    def list_workers(self) -> list[str]:
        """Return the names of this router's workers."""
        return list(self._workers)

    def announce_state(self, trouble: str) -> None:
        """Send all workers the state of the connection to the other routers: ``""`` if it works."""
        self._trouble = trouble
        self._send_to_workers("state", trouble)

    def announce_departure(self, name: str) -> None:
        """Notify all workers that a process is gone, one of this router or of another."""
        self._send_to_workers("gone", name)

    def on_message(self, sender: str, message: list[Any]) -> None:
        """Handle a message from a worker."""
        kind, *rest = message
        match kind, rest:
            case "publish", [topic, content]:
                self._send_to_workers("publish", sender, topic, content, but=sender)
                self._send_up("publish", sender, topic, content)
            case "keep", [str(key), record]:
                self._on_record(sender, key, record)
            case "count", [figures]:
                self._on_count(sender, figures)
            case "enter", [number, client, priority, tokens] if self.gate is not None:
                answer = partial(self._answer_entry, sender, number, client, tokens)
                self.gate.admit_request(sender, number, client, priority, tokens, answer)
            case "leave_line", [number] if self.gate is not None:
                self.gate.leave_line(sender, number)
            case "leave", [client, tokens] if self.gate is not None:
                self.gate.release_request(sender, client, tokens)
            case "ask", [number, "figures", figures, _]:
                self._figures.note_figures(sender, figures)
                workers = [name for name in self._workers if name != sender]
                self._put_question(
                    (sender, number), "figures", None, workers, [], partial(self._send_figures, sender, number)
                )
            case "ask", [number, topic, content, everywhere]:
                workers = [name for name in self._workers if name != sender]
                routers = self.uplink.list_routers() if everywhere and self.uplink is not None else []
                deliver = partial(self._send_to_worker, sender, "answers", number)
                self._put_question((sender, number), topic, content, workers, routers, deliver)
            case "answer", [asker, number, content]:
                self._note_answer((asker, number), sender, [] if content is None else [content])
            case _:
                _log.error("worker %s sent a message that is none: %s", sender, reprlib.repr(message))

    def on_distant_message(self, message: list[Any]) -> None:
        """Handle a message from another router."""
        kind, *rest = message
        match kind, rest:
            case "publish", [sender, topic, content]:
                self._send_to_workers("publish", sender, topic, content)
            case "keep", [str(key), record]:
                if (kept := self._keep_record(key, record)) is not None:
                    self._send_to_workers("keep", key, kept)
            case "hello", []:
                self.tell_all_limits()
            case "gone", [name]:
                self.announce_departure(name)
            case "limits", [router, running, charged]:
                if self.gate is not None:
                    self.gate.note_elsewhere(router, running, charged)
            case "ask", [sender, number, topic, content] if self.uplink is not None:
                deliver = partial(self.uplink.send_to_routers, "answers", sender, number, self.uplink.name)
                self._put_question((sender, number), topic, content, list(self._workers), [], deliver)
            case "want_prefixes", [router, asker] if self.uplink is not None:
                if router == self.uplink.name:  # one worker is enough, because all have the same prefixes
                    deliver = partial(self.uplink.send_prefixes, asker)
                    self._put_question((asker, _FOR_ROUTER), "prefixes", None, list(self._workers)[:1], [], deliver)
            case "answers", [asker, number, router, answers]:
                self._note_answer((asker, number), router, answers)
            case _:
                _log.error("another router sent a message that is none: %s", reprlib.repr(message))

    async def share_prefixes(self, prefixes: dict[str, Any]) -> None:
        """Send all workers the prefixes from another router, and wait until they have them."""
        done = asyncio.Event()
        self._send_to_workers("publish", "", "prefixes", prefixes)
        key = (self.uplink.name if self.uplink is not None else "", _FOR_ROUTER)
        self._put_question(key, "heard", None, list(self._workers), [], lambda _: done.set())
        await done.wait()

    def list_records(self) -> dict[str, dict[str, Any]]:
        """Return the record of each key, except those without renewal for a long time."""
        stale_before = self._clock() - STALE_SECONDS
        for key in [key for key, renewed_at in self._renewed_at.items() if renewed_at < stale_before]:
            del self._records[key], self._renewed_at[key]
        return self._records

    def tell_all_limits(self) -> None:
        """Send the other routers the usage of the limits here, because one of them does not know it yet."""
        if self.gate is not None:
            self.gate.tell_all()

    def tell_limits(self, running: dict[str, int], charged: dict[str, int]) -> None:
        """Send the other routers the usage of the limits here."""
        if self.uplink is not None:
            self.uplink.send_to_routers("limits", self.uplink.name, running, charged)

    def _answer_entry(self, worker: str, number: int, client: str, tokens: int, refusal: list[Any] | None) -> None:
        self._send_to_worker(worker, "entered", number, refusal, client, tokens)

    def _on_record(self, sender: str, key: str, record: Any) -> None:
        """Forward a worker's record, merged with the stored one; also to the worker itself if that had older parts."""
        kept = self._keep_record(key, record)
        if kept is not None:
            self._send_to_workers("keep", key, kept, but=sender)
            self._send_up("keep", key, kept)
        known = self._records.get(key)
        if known is not None and (kept is None or read_versions(kept) != read_versions(record)):
            self._send_to_worker(sender, "keep", key, known)

    def _keep_record(self, key: str, record: Any) -> dict[str, Any] | None:
        """Store the later parts of a record and of the stored one.

        Returns:
            The record that is stored now; None if ``record`` is invalid or completely outdated.
        """
        known = self._records.get(key)
        try:
            kept = merge_records(known, record)
        except ValueError as exc:
            _log.error("a record of %.100s is left aside: %s", key, exc)
            return None
        if known is None:
            self.list_records()  # one more record: others may be dropped
        elif kept == known != record:
            return None
        self._records[key] = kept
        self._renewed_at[key] = self._clock()
        return kept

    def _put_question(
        self,
        key: tuple[str, int],
        topic: str,
        content: Any,
        workers: Sequence[str],
        routers: Sequence[str],
        deliver: Callable[[list[Any]], None],
    ) -> None:
        """Send a query to these workers and other routers.

        Args:
            key: the querying process, and its own number for the query.
            deliver: called with the answers, once all have arrived or the time is over.
        """
        timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._close_question, key)
        self._questions[key] = _Question({*workers, *routers}, timer, deliver)
        for name in workers:
            self._workers[name].send_message("ask", *key, topic, content)
        if routers:
            self._send_up("ask", *key, topic, content)
        if not workers and not routers:
            self._close_question(key)

    def _note_answer(self, key: tuple[str, int], sender: str, answers: list[Any]) -> None:
        question = self._questions.get(key)
        if question is None or sender not in question.waiting_for:
            return
        question.waiting_for.remove(sender)
        question.answers += answers
        if not question.waiting_for:
            self._close_question(key)

    def _close_question(self, key: tuple[str, int]) -> None:
        question = self._questions.pop(key, None)
        if question is None:
            return
        question.timer.cancel()
        question.deliver(question.answers)

    def _send_figures(self, asker: str, number: int, answers: list[Any]) -> None:
        """Send a worker the metrics of all others; for those that have not answered in time, the last ones."""
        for name, figures in answers:
            self._figures.note_figures(name, figures)
        self._send_to_worker(asker, "answers", number, self._figures.list_others(asker))

    def _send_to_worker(self, name: str, *message: Any) -> None:
        if name in self._workers:
            self._workers[name].send_message(*message)

    def _send_to_workers(self, *message: Any, but: str = "") -> None:
        for name, wire in self._workers.items():
            if name != but:
                wire.send_message(*message)

    def _send_up(self, *message: Any) -> None:
        if self.uplink is not None:
            self.uplink.send_to_routers(*message)


class _Question:
    """A query that some workers have not answered yet."""

    def __init__(self, waiting_for: set[str], timer: asyncio.TimerHandle, deliver: Callable[[list[Any]], None]) -> None:
        self.waiting_for = waiting_for
        self.timer = timer
        self.deliver = deliver
        self.answers: list[Any] = []
