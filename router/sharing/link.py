"""Link: a worker's tie to the other workers of its router, and by way of the supervisor to other routers.

Everything a worker says reaches the others in the order it was said. There are three kinds of talk:

    event      something has happened; the others may care
    record     those who come later must have it, too; the others get it at once
    question   each of the others answers

A router that is one process has no others: its link is ``NO_LINK``, which says nothing and hears nothing.
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

# The others answer from memory. One that does not in this time hangs, and the answer is made without it.
ANSWER_SECONDS = 1.0


class Link:
    """The link of a router that is one process. ``WorkerLink`` is that of one of several."""

    name = "router"
    """This process, as the others know it."""
    is_alone = True
    """Whether there are no others, ever."""
    is_first = True
    """Whether this process has the work that one of them should do for all."""
    is_late = False
    """Whether this process has taken the place of one that died."""
    num_replaced = 0
    """How many of the router's processes had died and been replaced when this one started."""
    trouble = ""
    """Why other routers are not heard of; ``""`` if they are, or there are none."""

    def is_of_same_router(self, name: str) -> bool:
        """Whether the process of this name is one of the same router, whose log is the same, too."""
        return name.partition("-")[0] == self.name.partition("-")[0]

    def publish_event(self, topic: str, content: Any) -> None:
        """Tell the others of something that has happened."""

    def keep_record(self, key: str, record: dict[str, Any]) -> None:
        """Tell the others a record that replaces an earlier one of this key; those that come later get it, too.

        Args:
            record: of two, the later parts count, as ``records.py`` says.
        """

    async def wait_for_entry(self, client: str, priority: int, tokens: int) -> list[Any] | None:
        """Wait until the supervisor lets a request in; why not, if it does not. Cancelling this leaves the line."""
        raise NotImplementedError("a router that is one process has no supervisor")

    def report_end(self, client: str, tokens: int) -> None:
        """Tell the supervisor that a request that was let in has ended."""

    async def ask_others(self, topic: str, content: Any = None, *, everywhere: bool = False) -> list[Any]:
        """The answers of the others, of those that answered in time.

        Args:
            everywhere: ask the other routers, too.
        """
        return []

    def subscribe_to_topic(self, topic: str, callback: Callable[[str, Any], None]) -> None:
        """Call ``callback`` with the sender and the content of all that others publish on ``topic``."""

    def subscribe_to_records(self, callback: Callable[[str, Any], None]) -> None:
        """Call ``callback`` with key and record of all that others keep, now and later."""

    def subscribe_to_departures(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the name of each other process that is gone."""

    def answer_topic(self, topic: str, respond: Callable[[Any], Any | Awaitable[Any]]) -> None:
        """Answer those who ask on ``topic`` with the result of ``respond``, which is given their content."""


NO_LINK = Link()


class WorkerLink(Link):
    """A worker's end of the wire to its supervisor, whose ``Hub`` passes everything on."""

    is_alone = False

    def __init__(self, name: str, *, is_first: bool, is_late: bool, num_replaced: int = 0) -> None:
        self.name = name
        self.is_first, self.is_late, self.num_replaced = is_first, is_late, num_replaced
        self._has_records = asyncio.Event()
        self.is_leaving = False
        """Whether the router is to end soon."""
        self._grace: float | None = None  # once the supervisor has said to stop
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
        """Connect to the supervisor, and wait for the records that there are."""
        self._wire = await open_wire(channel, self.on_message, self._on_lost)
        await self._has_records.wait()

    def disconnect(self) -> None:
        """Disconnect, at the process's end."""
        self._grace = 0.0
        if self._wire is not None:
            self._wire.close()

    def declare_ready(self) -> None:
        """Tell the supervisor that this process can serve clients."""
        self.tell_supervisor("ready")

    def report_refusal(self, sentence: str) -> None:
        """Tell the supervisor why this process cannot start."""
        self.tell_supervisor("refuse", sentence)

    def send_log_line(self, level: int, logger: str, text: str) -> None:
        """Let the supervisor log this."""
        self.tell_supervisor("log", level, logger, text)

    def subscribe_to_leave(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the router is to end soon, or is already to."""
        self._leave_callback = callback
        if self.is_leaving:
            callback()

    def subscribe_to_stop(self, callback: Callable[[float], None]) -> None:
        """Call ``callback`` with seconds of grace when this process is to end, or is already."""
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
        """Tell the supervisor how busy this process is."""
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
                self.report_end(client, -tokens)  # it was let in, but its task was cancelled before it could know
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
            # The supervisor keeps the time; it may be gone itself.
            return await asyncio.wait_for(answers, 2 * ANSWER_SECONDS)
        except asyncio.TimeoutError:  # in Python 3.10 none of its TimeoutErrors
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
        """Send a message: its kind, and the parts of it. All that this process says goes this way."""
        if self._wire is not None:
            self._wire.send_message(*message)

    def on_message(self, message: list[Any]) -> None:
        """Take a message from the supervisor. All that this process hears comes this way."""
        kind, *rest = message
        _HANDLERS[kind](self, *rest)

    def _on_publication(self, sender: str, topic: str, content: Any) -> None:
        if callback := self._topics.get(topic):
            callback(sender, content)

    def _on_record(self, key: str, record: Any) -> None:
        if not self._record_callbacks:
            self._records[key] = record  # for those that subscribe when the router's parts are put together
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
        elif refusal is None:  # it left the line while it was let in, or was cancelled and does not know yet
            self.report_end(client, -tokens)

    def _on_answers(self, number: int, answers: list[Any]) -> None:
        waiting = self._asked.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answers)

    def _on_state(self, trouble: str) -> None:
        self.trouble = trouble
        self._has_records.set()  # the first message of this kind follows them

    def _on_leave(self) -> None:
        self.is_leaving = True
        if self._leave_callback is not None:
            self._leave_callback()

    def _on_stop(self, grace: float) -> None:
        self._grace = grace
        if self._stop_callback is not None:
            self._stop_callback(grace)

    def _on_lost(self) -> None:
        """The supervisor is gone, and with it the way for new connections."""
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
