"""Hub: the supervisor's part of the communication. It forwards messages, and stores records for new workers.

The same messages pass over both transports: over the channels between supervisor and workers (``channels.py``), and
over Redis between routers (``shared_state.py``). Peers are all processes that exchange these messages::

    publish        sender, topic, content          an event
    keep           key, record                     a record of an instance; see ``records.py``
    gone           name                            a process has ended
    ask            asker, number, topic, content   a query; a worker adds a fifth part: whether to ask routers, too
    answers        asker, number, name, answers    the answers of the peer ``name`` to a query

The query ``heard`` has no content. A peer's answer shows that it has received all earlier messages of the asker.

These messages are exchanged only between workers and their supervisor: ``ready``, ``refuse``, ``log``, ``count``
(``supervisor.py``), ``state``, ``leave``, ``stop`` (``link.py``), and, for admission::

    enter          number, client, priority, tokens     entered        number, refusal, client, tokens
    cancel_request number                               leave          client, tokens

These are exchanged only between routers::

    hello                                          a router has connected, or hears another one again, and lacks
                                                   the others' data
    limits         router, running, charged        the usage of the limits at a router
    want_prefixes  router, asker                   a new router asks the other router for its prefixes
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

# Id of all queries that the hub itself sends to its workers. The ids of the workers' queries begin with 1.
_OWN_QUERY = 0

_Figures = Sequence[Any]


class Hub:
    """Forwards messages between the workers of this router, and between these workers and the other routers."""

    def __init__(self, name: str = "router", clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            name: name of this router for the other routers.
            clock: monotonic clock in seconds. It decides when a record without renewal is dropped.
        """
        self.name = name
        self.routers: SharedState | None = None
        """The connection to the other routers; None if there is no shared state."""
        self.admission: AdmissionServer | None = None
        """Admits requests; None if no limits are set."""
        self._workers: dict[str, MessageChannel] = {}
        self._clock = clock
        self._records: dict[str, dict[str, Any]] = {}  # for each key the latest registration and the latest commands
        self._renewed_at: dict[str, float] = {}
        self._trouble = ""
        self._counters = RetiredCounters()
        self._queries: dict[tuple[str, int], _Query] = {}

    def add_worker(self, name: str, channel: MessageChannel) -> None:
        """Add a worker that has started, and send it all records."""
        self._workers[name] = channel
        for key, record in self.list_records().items():
            channel.send_message("keep", key, record)
        channel.send_message("state", self._trouble)

    def forget_worker(self, name: str) -> None:
        """Remove the worker ``name``, which has ended; notify the other workers, and stop waiting for its answers."""
        if self._workers.pop(name, None) is None:
            return
        self._forward(name, "gone", name)
        self._counters.remove_worker(name)
        if self.admission is not None:
            self.admission.remove_worker(name)
        for key, query in list(self._queries.items()):
            if name in query.waiting_for:
                self._note_answers(key, name, [])

    def list_workers(self) -> list[str]:
        """Return the names of this router's workers."""
        return list(self._workers)

    def send_to_workers(self, *message: Any) -> None:
        """Send a message to all workers."""
        self._forward("", *message)

    def on_message(self, source: str, message: list[Any]) -> None:
        """Handle a message from a worker or from another router.

        Args:
            source: the worker that sent the message; ``""`` if it came from another router, or from ``self.routers``,
                which for example reports that another router has ended.
            message: the type of the message and its parts.
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
                if router == self.name:  # ask only one worker, because all workers have the same prefixes
                    self._ask((asker, _OWN_QUERY), "prefixes", None, self.list_workers()[:1], (), self._send_prefixes)
            case ["enter", number, client, priority, tokens] if self.admission is not None:
                answer = partial(self._send_to_worker, source, "entered", number)
                self.admission.admit_request(source, number, client, priority, tokens, answer)
            case ["cancel_request", number] if self.admission is not None:
                self.admission.cancel_request(source, number)
            case ["leave", client, tokens] if self.admission is not None:
                self.admission.release_request(source, client, tokens)
            case ["limits", router, running, charged]:
                if self.admission is not None:
                    self.admission.note_elsewhere(router, running, charged)
            case ["hello"]:
                if self.admission is not None:
                    self.admission.send_soon()
            case _:
                sender = f"worker {source}" if source else "another router"
                _log.error("%s sent an invalid message: %s", sender, reprlib.repr(message))

    async def share_prefixes(self, prefixes: dict[str, Any]) -> None:
        """Send the prefixes of another router to all workers, and wait until the workers have received them."""
        done = asyncio.Event()
        self.send_to_workers("publish", "", "prefixes", prefixes)
        self._ask((self.name, _OWN_QUERY), "heard", None, self.list_workers(), (), lambda *_: done.set())
        await done.wait()

    def list_records(self) -> dict[str, dict[str, Any]]:
        """Drop the records that were not renewed for ``STALE_SECONDS``, and return all other records by key."""
        stale_before = self._clock() - STALE_SECONDS
        for key in [key for key, renewed_at in self._renewed_at.items() if renewed_at < stale_before]:
            del self._records[key], self._renewed_at[key]
        return self._records

    def send_limits(self, running: dict[str, int], charged: dict[str, int]) -> None:
        """Send the other routers the running requests and charged tokens of each client at this router."""
        if self.routers is not None:
            self.routers.send_message("limits", self.name, running, charged)

    def _on_record(self, source: str, key: str, record: Any) -> None:
        """Merge a record with the stored record, and forward the result.

        The sender gets the result, too, if a part of its record was older than the stored part.
        """
        kept = self._keep_record(key, record)
        if kept is not None:
            self._forward(source, "keep", key, kept)
        known = self._records.get(key)
        if known is not None and (kept is None or read_versions(kept) != read_versions(record)):
            self._send_to_worker(source, "keep", key, known)

    def _keep_record(self, key: str, record: Any) -> dict[str, Any] | None:
        """Merge a record with the stored record, and store the result.

        Returns:
            The record that is stored now; None if ``record`` is invalid, or has no part later than the stored record.
        """
        known = self._records.get(key)
        try:
            kept = merge_records(known, record)
        except ValueError as exc:
            _log.error("an invalid record of instance %.100s is ignored: %s", key, exc)
            return None
        if known is None:
            self.list_records()  # drops old records, so that their number stays bounded
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
        """Send a query to ``workers``, except the asker, and to ``routers``.

        Args:
            key: name of the asker, and the id that it gave the query.
            deliver: called with asker, id and answers when all peers have answered, or when a time limit is over.
        """
        timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._close_query, key)
        asked = [name for name in workers if name != key[0]]
        self._queries[key] = _Query({*asked, *routers}, timer, deliver)
        for name in asked:
            self._workers[name].send_message("ask", *key, topic, content)
        if routers and self.routers is not None:
            self.routers.send_message("ask", *key, topic, content)
        if not asked and not routers:
            self._close_query(key)

    def _note_answers(self, key: tuple[str, int], name: str, answers: list[Any]) -> None:
        query = self._queries.get(key)
        if query is None or name not in query.waiting_for:
            return
        query.waiting_for.remove(name)
        query.answers += answers
        if not query.waiting_for:
            self._close_query(key)

    def _close_query(self, key: tuple[str, int]) -> None:
        query = self._queries.pop(key, None)
        if query is not None:
            query.timer.cancel()
            query.deliver(*key, query.answers)

    def _send_answers(self, source: str, asker: str, number: int, answers: list[Any]) -> None:
        """Send answers to the worker ``source``; if ``source`` is ``""``, to the router of the worker ``asker``."""
        message = ("answers", asker, number, self.name, answers)
        if source:
            self._send_to_worker(source, *message)
        elif self.routers is not None:
            self.routers.send_message(*message)

    def _send_figures(self, asker: str, number: int, answers: list[Any]) -> None:
        """Send a worker the metrics of all other workers. A worker without an answer counts with its previous ones."""
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
        """Send a message to all workers except ``source``. If ``source`` is a worker, also to the other routers."""
        for name, channel in self._workers.items():
            if name != source:
                channel.send_message(*message)
        if source and self.routers is not None:
            self.routers.send_message(*message)


class RetiredCounters:
    """Stores the last metrics of each worker, and the counters of dead workers. So the router's sums never decrease.

    Prometheus treats a decreasing counter as restarted, and would count its whole value again.
    """

    def __init__(self) -> None:
        self._last: dict[str, _Figures] = {}
        self._gone: _Figures = []

    def note_figures(self, worker: str, figures: _Figures) -> None:
        """Store the latest metrics of a worker."""
        self._last[worker] = figures

    def remove_worker(self, worker: str) -> None:
        """Remove a worker that has ended. Its last known counters stay in the sums."""
        figures = self._last.pop(worker, None)
        if figures is not None:
            from router.telemetry import add_counts  # imported here, because it is needed only if a worker dies

            self._gone = add_counts(self._gone, figures)

    def list_others(self, asker: str) -> list[_Figures]:
        """Return the metrics of all workers except ``asker``, and the counters of dead workers."""
        others = [figures for worker, figures in self._last.items() if worker != asker]
        return [*others, self._gone] if self._gone else others


class _Query:
    """A query that some peers have not answered yet."""

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
