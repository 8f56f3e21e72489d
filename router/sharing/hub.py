"""Hub: the supervisor's part of the communication. It forwards messages, and stores records for new workers.

The same messages pass over both transports: over the channels between supervisor and workers (``channels.py``), and
over Redis between routers (``shared_state.py``). Peers are all processes that exchange them::

    publish        sender, topic, content          an event
    keep           key, record                     a record of an instance; see ``records.py``
    gone           name                            a process has ended
    ask            asker, number, topic, content   a question; a worker's has a fifth part: whether routers get it, too
    answers        asker, number, name, answers    the answers of one peer to it

Some concern workers and their supervisor only: ``ready``, ``refuse``, ``log``, ``count`` (``supervisor.py``),
``state``, ``leave``, ``stop`` (``link.py``), and those about admission::

    enter          number, client, priority, tokens     entered        number, refusal, client, tokens
    leave_line     number                               leave          client, tokens

And some concern routers only::

    hello                                          a router has connected, and lacks the others' data
    limits         router, running, charged        the usage of the limits at a router
    want_prefixes  router, asker                   a router that starts requests the prefixes of another
"""

from __future__ import annotations

import asyncio
import logging
import reprlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from router.sharing.admission_server import AdmissionServer
from router.sharing.channels import MessageChannel
from router.sharing.link import ANSWER_SECONDS
from router.sharing.records import STALE_SECONDS, merge_records, read_versions
from router.sharing.shared_state import SharedState

__all__ = ["Hub", "RetiredCounters"]

_log = logging.getLogger("router.sharing.hub")

# Number of a question that the hub itself asks its workers; workers never use it.
_OWN_QUESTION = 0

_Figures = Sequence[Any]


class Hub:
    """Workers by name, the other routers, and the messages between them."""

    def __init__(self, name: str = "router", clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            name: name of this router for the others.
            clock: monotonic clock in seconds; records without renewal are dropped by it.
        """
        self.name = name
        self.routers: SharedState | None = None
        """The connection to the other routers, if there are any."""
        self.admission: AdmissionServer | None = None
        """Admits requests, if there are limits."""
        self._workers: dict[str, MessageChannel] = {}
        self._clock = clock
        self._records: dict[str, dict[str, Any]] = {}  # for each key the latest registration and the latest commands
        self._renewed_at: dict[str, float] = {}
        self._trouble = ""
        self._counters = RetiredCounters()
        self._questions: dict[tuple[str, int], _Question] = {}

    def __repr__(self) -> str:
        return f"<Hub {list(self._workers)} {len(self._records)} records>"

    def add_worker(self, name: str, channel: MessageChannel) -> None:
        """Add a worker that has started, and send it the records."""
        self._workers[name] = channel
        for key, record in self.list_records().items():
            channel.send_message("keep", key, record)
        channel.send_message("state", self._trouble)

    def forget_worker(self, name: str) -> None:
        """Remove a worker that is gone."""
        if self._workers.pop(name, None) is None:
            return
        self._forward(name, "gone", name)
        self._counters.remove_worker(name)
        if self.admission is not None:
            self.admission.remove_worker(name)
        for key, question in list(self._questions.items()):
            if name in question.waiting_for:
                self._note_answers(key, name, [])

    def list_workers(self) -> list[str]:
        """Return the names of this router's workers."""
        return list(self._workers)

    def send_to_workers(self, *message: Any) -> None:
        """Send a message to all workers."""
        self._forward("", *message)

    def on_message(self, source: str, message: list[Any]) -> None:
        """Handle a message.

        Args:
            source: the worker that sent it; ``""`` if it came from another router or is about one.
        """
        match message:
            case ["publish", _, _, _] | ["gone", _]:
                self._forward(source, *message)
            case ["keep", str(key), record]:
                self._on_record(source, key, record)
            case ["ask", asker, number, "figures", figures, *_]:
                self._counters.note_figures(asker, figures)
                self._ask((asker, number), "figures", None, self.list_workers(), (), self._send_figures)
            case ["ask", asker, number, topic, content, *everywhere]:
                routers = self.routers.list_routers() if any(everywhere) and self.routers is not None else ()
                deliver = partial(self._send_answers, source)
                self._ask((asker, number), topic, content, self.list_workers(), routers, deliver)
            case ["answers", asker, number, name, answers]:
                self._note_answers((asker, number), name, answers)
            case ["state", trouble]:
                self._trouble = trouble
                self.send_to_workers("state", trouble)
            case ["want_prefixes", router, asker]:
                if router == self.name:  # one worker is enough, because all have the same prefixes
                    self._ask(
                        (asker, _OWN_QUESTION), "prefixes", None, self.list_workers()[:1], (), self._send_prefixes
                    )
            case ["enter", number, client, priority, tokens] if self.admission is not None:
                answer = partial(self._send_to_worker, source, "entered", number)
                self.admission.admit_request(source, number, client, priority, tokens, answer)
            case ["leave_line", number] if self.admission is not None:
                self.admission.leave_line(source, number)
            case ["leave", client, tokens] if self.admission is not None:
                self.admission.release_request(source, client, tokens)
            case ["limits", router, running, charged]:
                if self.admission is not None:
                    self.admission.note_elsewhere(router, running, charged)
            case ["hello"]:
                if self.admission is not None:
                    self.admission.tell_all()
            case _:
                sender = f"worker {source}" if source else "another router"
                _log.error("%s sent a message that is none: %s", sender, reprlib.repr(message))

    async def share_prefixes(self, prefixes: dict[str, Any]) -> None:
        """Send all workers the prefixes from another router, and wait until they have them."""
        done = asyncio.Event()
        self.send_to_workers("publish", "", "prefixes", prefixes)
        self._ask((self.name, _OWN_QUESTION), "heard", None, self.list_workers(), (), lambda *_: done.set())
        await done.wait()

    def list_records(self) -> dict[str, dict[str, Any]]:
        """Return the record of each key, except those without renewal for a long time."""
        stale_before = self._clock() - STALE_SECONDS
        for key in [key for key, renewed_at in self._renewed_at.items() if renewed_at < stale_before]:
            del self._records[key], self._renewed_at[key]
        return self._records

    def send_limits(self, running: dict[str, int], charged: dict[str, int]) -> None:
        """Send the other routers the usage of the limits here."""
        if self.routers is not None:
            self.routers.send_message("limits", self.name, running, charged)

    def _on_record(self, source: str, key: str, record: Any) -> None:
        """Forward a record, merged with the stored one; also to the worker that sent it, if that had older parts."""
        kept = self._keep_record(key, record)
        if kept is not None:
            self._forward(source, "keep", key, kept)
        known = self._records.get(key)
        if known is not None and (kept is None or read_versions(kept) != read_versions(record)):
            self._send_to_worker(source, "keep", key, known)

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

    def _ask(
        self,
        key: tuple[str, int],
        topic: str,
        content: Any,
        workers: Sequence[str],
        routers: Sequence[str],
        deliver: Callable[[str, int, list[Any]], None],
    ) -> None:
        """Send a question to these workers, except the asker, and to these routers.

        Args:
            key: the asker, and its own number for the question.
            deliver: called with the key and the answers, once all have arrived or the time is over.
        """
        timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._close_question, key)
        asked = [name for name in workers if name != key[0]]
        self._questions[key] = _Question({*asked, *routers}, timer, deliver)
        for name in asked:
            self._workers[name].send_message("ask", *key, topic, content)
        if routers and self.routers is not None:
            self.routers.send_message("ask", *key, topic, content)
        if not asked and not routers:
            self._close_question(key)

    def _note_answers(self, key: tuple[str, int], name: str, answers: list[Any]) -> None:
        question = self._questions.get(key)
        if question is None or name not in question.waiting_for:
            return
        question.waiting_for.remove(name)
        question.answers += answers
        if not question.waiting_for:
            self._close_question(key)

    def _close_question(self, key: tuple[str, int]) -> None:
        question = self._questions.pop(key, None)
        if question is not None:
            question.timer.cancel()
            question.deliver(*key, question.answers)

    def _send_answers(self, source: str, asker: str, number: int, answers: list[Any]) -> None:
        """Send answers to the worker that asked, or to the router where one did."""
        message = ("answers", asker, number, self.name, answers)
        if source:
            self._send_to_worker(source, *message)
        elif self.routers is not None:
            self.routers.send_message(*message)

    def _send_figures(self, asker: str, number: int, answers: list[Any]) -> None:
        """Send a worker the metrics of all others; for those that have not answered in time, the last ones."""
        for name, figures in answers:
            self._counters.note_figures(name, figures)
        self._send_answers(asker, asker, number, self._counters.list_others(asker))

    def _send_prefixes(self, asker: str, _: int, answers: list[Any]) -> None:
        if self.routers is not None:
            self.routers.send_prefixes(asker, answers)

    def _send_to_worker(self, name: str, *message: Any) -> None:
        if name in self._workers:
            self._workers[name].send_message(*message)

    def _forward(self, source: str, *message: Any) -> None:
        """Send a message to all workers except ``source``; if a worker sent it, to the other routers, too."""
        for name, channel in self._workers.items():
            if name != source:
                channel.send_message(*message)
        if source and self.routers is not None:
            self.routers.send_message(*message)


class RetiredCounters:
    """Last metrics of live workers, plus counters of dead ones: the router's sums never decrease.

    Prometheus regards a decreasing counter as restarted, and would add its whole value again.
    """

    def __init__(self) -> None:
        self._last: dict[str, _Figures] = {}
        self._gone: _Figures = []

    def __repr__(self) -> str:
        return f"<RetiredCounters of {list(self._last)} and those gone>"

    def note_figures(self, worker: str, figures: _Figures) -> None:
        """Store a worker's metrics."""
        self._last[worker] = figures

    def remove_worker(self, worker: str) -> None:
        """Remove a worker that is gone; its last known counters stay."""
        figures = self._last.pop(worker, None)
        if figures is not None:
            from router.telemetry import add_counts  # not needed while no worker dies

            self._gone = add_counts(self._gone, figures)

    def list_others(self, asker: str) -> list[_Figures]:
        """Return the metrics of all workers except ``asker``, including those that are gone."""
        others = [figures for worker, figures in self._last.items() if worker != asker]
        return [*others, self._gone] if self._gone else others


class _Question:
    """A question that some peers have not answered yet."""

    def __init__(
        self,
        waiting_for: set[str],
        timer: asyncio.TimerHandle,
        deliver: Callable[[str, int, list[Any]], None],
    ) -> None:
        self.waiting_for = waiting_for
        self.timer = timer
        self.deliver = deliver
        self.answers: list[Any] = []
