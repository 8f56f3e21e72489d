"""Link: a worker's connection to the other workers of its router and, through the supervisor, to other routers.

The others receive all messages of a worker in the order of sending. There are three kinds:

event      something has happened that may concern the others
record     data that processes started later need, too; the others get it immediately
question   a query that each of the others answers

A router with a single process has no others: its link is ``NO_LINK``, which sends and receives nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from router.sharing.wire import Wire, open_wire

__all__ = ["NO_LINK", "Link", "WorkerLink"]

_log = logging.getLogger("router.sharing.link")

# The others answer from memory. If one does not answer in this time, it hangs, and the result lacks its answer.
ANSWER_SECONDS = 1.0


class Link:
    """The link of a router with a single process. ``WorkerLink`` is that of one of several."""

    name = "router"
    """Name of this process for the others."""
    is_alone = True
    """Whether there are never any others."""
    is_first = True
    """Whether this process does the work that one of them should do for all."""
    is_late = False
    """Whether this process has replaced one that died."""
    num_replaced = 0
    """How many of the router's processes had died and been replaced when this one started."""
    trouble = ""
    """Why other routers cannot be reached; ``""`` if they can, or there are none."""

    def is_of_same_router(self, name: str) -> bool:
        """Return whether the process with this name belongs to the same router, which has one common log."""
        return name.partition("-")[0] == self.name.partition("-")[0]

    def publish_event(self, topic: str, content: Any) -> None:
        """Send an event to the others."""

    def keep_record(self, key: str, record: dict[str, Any]) -> None:
        """Send a record to the others. It replaces an earlier one of this key; processes that start later get it, too.

        Args:
            record: its later parts replace those of the stored record; see ``records.py``.
        """

    async def wait_for_entry(self, client: str, priority: int, tokens: int) -> list[Any] | None:
        """Wait until the supervisor admits a request; else return the refusal. If cancelled, it leaves the queue."""
        raise NotImplementedError("a router that is one process has no supervisor")

    def report_end(self, client: str, tokens: int) -> None:
        """Notify the supervisor that an admitted request has ended."""

    async def ask_others(self, topic: str, content: Any = None, *, everywhere: bool = False) -> list[Any]:
        """Return the answers of those others that answered in time.

        Args:
            everywhere: whether to query the other routers, too.
        """
        return []

    def subscribe_to_topic(self, topic: str, callback: Callable[[str, Any], None]) -> None:
        """Call ``callback`` with the sender and the content of each event that others publish on ``topic``."""

    def subscribe_to_records(self, callback: Callable[[str, Any], None]) -> None:
        """Call ``callback`` with key and record of all present and later records from others."""

    def subscribe_to_departures(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the name of each other process that ends."""

    def answer_topic(self, topic: str, respond: Callable[[Any], Any | Awaitable[Any]]) -> None:
        """Answer queries on ``topic`` with the result of ``respond``, which gets their content."""


NO_LINK = Link()


class WorkerLink(Link):
    """A worker's end of the wire to its supervisor. The supervisor's ``Hub`` forwards all messages."""

    is_alone = False

    def __init__(self, name: str, *, is_first: bool, is_late: bool, num_replaced: int = 0) -> None:
        self.name = name
        self.is_first, self.is_late, self.num_replaced = is_first, is_late, num_replaced
        self._has_records = asyncio.Event()
        self.is_leaving = False
        """Whether the router ends soon."""
        self._grace: float | None = None  # set when the supervisor orders a stop
        self._leave_callback: Callable[[], None] | None = None
        self._stop_callback: Callable[[float], None] | None = None
        self._wire: Wire | None = None
        self._topics: dict[str, Callable[[str, Any], None]] = {}
        self._responders: dict[str, Callable[[Any], Any]] = {}
        self._record_callbacks: list[Callable[[str, Any], None]] = []
        self._departure_callbacks: list[Callable[[str], None]] = []
        self._records: dict[str, Any] = {}
        self._asked: dict[int, asyncio.Future[list[Any]]] = {}
        self._entering: dict[int, asyncio.Future[list[Any] | None]] = {}
        self._num_asked = 0
        self._answering: set[asyncio.Task[None]] = set()

    async def connect(self, channel: socket.socket) -> None:
        """Connect to the supervisor, and wait for the stored records."""
        self._wire = await open_wire(channel, self.on_message, self._on_lost)
        await self._has_records.wait()

    def disconnect(self) -> None:
        """Disconnect, at the process's end."""
        self._grace = 0.0
        if self._wire is not None:
            self._wire.close()

    def declare_ready(self) -> None:
        """Notify the supervisor that this process can serve clients."""
        self.tell_supervisor("ready")

    def report_refusal(self, sentence: str) -> None:
        """Send the supervisor the reason why this process cannot start."""
        self.tell_supervisor("refuse", sentence)

    def send_log_line(self, level: int, logger: str, text: str) -> None:
        """Send a log line to the supervisor, which writes it."""
        self.tell_supervisor("log", level, logger, text)

    def subscribe_to_leave(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the router is about to end; immediately if it already is."""
        self._leave_callback = callback
        if self.is_leaving:
            callback()

    def subscribe_to_stop(self, callback: Callable[[float], None]) -> None:
        """Call ``callback`` with the grace time in seconds when this process has to end, or immediately if it has
        to.
        """
        self._stop_callback = callback
        if self._grace is not None:
            callback(self._grace)

    def publish_event(self, topic: str, content: Any) -> None:
        """See ``Link.publish_event``."""
        self.tell_supervisor("publish", topic, content)

    def keep_record(self, key: str, record: dict[str, Any]) -> None:
        """See ``Link.keep_record``."""
        self.tell_supervisor("keep", key, record)

    def report_connections(self, figures: dict[str, int]) -> None:
        """Send the supervisor the load of this process."""
        self.tell_supervisor("count", figures)

    async def wait_for_entry(self, client: str, priority: int, tokens: int) -> list[Any] | None:
        """See ``Link.wait_for_entry``."""
        self._num_asked += 1
        number, answer = self._num_asked, asyncio.get_running_loop().create_future()
        try:
            self._entering[number] = answer
            self.tell_supervisor("enter", number, client, priority, tokens)
            refusal: list[Any] | None = await answer
        except asyncio.CancelledError:
            if answer.cancelled():
                self.tell_supervisor("leave_line", number)
            elif answer.result() is None:
                self.report_end(client, -tokens)  # it was admitted, but its task was cancelled before it was notified
            raise
        finally:
            self._entering.pop(number, None)
        return refusal

    def report_end(self, client: str, tokens: int) -> None:
        """See ``Link.report_end``."""
        self.tell_supervisor("leave", client, tokens)

    async def ask_others(self, topic: str, content: Any = None, *, everywhere: bool = False) -> list[Any]:
        """See ``Link.ask_others``."""
        self._num_asked += 1
        number, answers = self._num_asked, asyncio.get_running_loop().create_future()
        try:
            self._asked[number] = answers
            self.tell_supervisor("ask", number, topic, content, everywhere)
            # The supervisor has its own time-out, but it may be gone.
            return await asyncio.wait_for(answers, 2 * ANSWER_SECONDS)
        except asyncio.TimeoutError:  # in Python 3.10, this is not the built-in TimeoutError
            return []
        finally:
            self._asked.pop(number, None)

    def subscribe_to_topic(self, topic: str, callback: Callable[[str, Any], None]) -> None:
        """See ``Link.subscribe_to_topic``."""
        self._topics[topic] = callback

    def subscribe_to_records(self, callback: Callable[[str, Any], None]) -> None:
        """See ``Link.subscribe_to_records``."""
        self._record_callbacks.append(callback)
        for key, record in self._records.items():
            callback(key, record)
        self._records.clear()

    def subscribe_to_departures(self, callback: Callable[[str], None]) -> None:
        """See ``Link.subscribe_to_departures``."""
        self._departure_callbacks.append(callback)

    def answer_topic(self, topic: str, respond: Callable[[Any], Any | Awaitable[Any]]) -> None:
        """See ``Link.answer_topic``."""
        self._responders[topic] = respond

    def tell_supervisor(self, *message: Any) -> None:
        """Send a message: its kind and its parts. All messages of this process use this method."""
        if self._wire is not None:
            self._wire.send_message(*message)

    def on_message(self, message: list[Any]) -> None:
        """Handle a message from the supervisor. All messages to this process use this method."""
        kind, *rest = message
        _HANDLERS[kind](self, *rest)

    def _on_publication(self, sender: str, topic: str, content: Any) -> None:
        if callback := self._topics.get(topic):
            callback(sender, content)

    def _on_record(self, key: str, record: Any) -> None:
        if not self._record_callbacks:
            self._records[key] = record  # for subscribers that are created later, when the router is assembled
        for callback in self._record_callbacks:
            callback(key, record)

    def _on_departure(self, name: str) -> None:
        for callback in self._departure_callbacks:
            callback(name)

    def _on_question(self, sender: str, number: int, topic: str, content: Any) -> None:
        task = asyncio.ensure_future(self._give_answer(sender, number, topic, content))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _give_answer(self, sender: str, number: int, topic: str, content: Any) -> None:
        given = None
        try:
            given = self._responders[topic](content)
            if inspect.isawaitable(given):
                given = await given
        except Exception:
            _log.exception("a question of another process was not answered: %s", topic)
        self.tell_supervisor("answer", sender, number, given)

    def _on_entered(self, number: int, refusal: list[Any] | None, client: str, tokens: int) -> None:
        waiting = self._entering.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(refusal)
        elif refusal is None:  # it left the queue while it was admitted, or was cancelled and does not know yet
            self.report_end(client, -tokens)

    def _on_answers(self, number: int, answers: list[Any]) -> None:
        waiting = self._asked.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answers)

    def _on_state(self, trouble: str) -> None:
        self.trouble = trouble
        self._has_records.set()  # the first message of this kind follows the records

    def _on_leave(self) -> None:
        self.is_leaving = True
        if self._leave_callback is not None:
            self._leave_callback()

    def _on_stop(self, grace: float) -> None:
        self._grace = grace
        if self._stop_callback is not None:
            self._stop_callback(grace)

    def _on_lost(self) -> None:
        """Handle the loss of the supervisor, which also passed the new connections."""
        self._has_records.set()
        if self._grace is None:
            _log.error("the supervisor of worker %s is gone: it ends", self.name)
        self._on_stop(0.0)


_HANDLERS: dict[str, Callable[..., None]] = {
    "publish": WorkerLink._on_publication,
    "keep": WorkerLink._on_record,
    "gone": WorkerLink._on_departure,
    "ask": WorkerLink._on_question,
    "answers": WorkerLink._on_answers,
    "entered": WorkerLink._on_entered,
    "state": WorkerLink._on_state,
    "leave": WorkerLink._on_leave,
    "stop": WorkerLink._on_stop,
}
