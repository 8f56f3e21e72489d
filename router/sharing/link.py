"""Link: a process's connection to its peers: the router's other workers and, through the supervisor, other routers.

The peers receive the messages of a process in the order of sending. There are three kinds:

event      something has happened; the peers that subscribed to its topic receive it
record     data of an instance; the present peers receive it now, and processes that start later receive it, too
query      a question that each of the peers answers

A router with a single process has no peers. Its link is never connected, and sends and receives nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import reprlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from router.sharing.channels import MessageChannel, open_channel

__all__ = ["Link"]

_log = logging.getLogger("router.sharing.link")

# Peers answer from memory. A peer that does not answer within this time hangs. The result then lacks its answer.
ANSWER_SECONDS = 1.0


class Link:
    """A worker's end of the channel to its supervisor. The supervisor's ``Hub`` forwards all messages."""

    def __init__(
        self, name: str = "router", *, is_first: bool = True, is_replacement: bool = False, num_replaced: int = 0
    ) -> None:
        """
        Args:
            name: name of this process for its peers.
            is_first: whether this process does the work that only one process of the router must do.
            is_replacement: whether this process has replaced a worker that died.
            num_replaced: number of the router's workers that had died and been replaced when this process started.
        """
        self.name, self.is_first = name, is_first
        self.is_replacement, self.num_replaced = is_replacement, num_replaced
        self.is_alone = True
        """Whether this process never has peers, because the router has no other process."""
        self.trouble = ""
        """Why the other routers cannot be reached; ``""`` if they can be reached, or if there is no shared state."""
        self.is_leaving = False
        """Whether the router will stop soon."""
        self._grace: float | None = None  # set when the supervisor orders a stop
        self._leave_callback: Callable[[], None] | None = None
        self._stop_callback: Callable[[float], None] | None = None
        self._channel: MessageChannel | None = None
        self._topics: dict[str, Callable[[str, Any], None]] = {}
        self._responders: dict[str, Callable[[Any], Any]] = {}
        self._record_callbacks: list[Callable[[str, Any], None]] = []
        self._departure_callbacks: list[Callable[[str], None]] = []
        self._records: dict[str, Any] = {}
        self._has_records = asyncio.Event()
        self._num_asked = 0
        self._asked: dict[int, asyncio.Future[list[Any]]] = {}
        self._entering: dict[int, asyncio.Future[list[Any] | None]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def connect(self, channel: socket.socket) -> None:
        """Connect to the supervisor, and wait until it has sent the stored records."""
        self.is_alone = False
        self._channel = await open_channel(channel, self.on_message, self._on_lost)
        await self._has_records.wait()

    def disconnect(self) -> None:
        """Close the connection to the supervisor, because this process ends."""
        self._grace = 0.0
        if self._channel is not None:
            self._channel.close()

    def is_of_same_router(self, name: str) -> bool:
        """Return whether the process ``name`` belongs to this router. A router's processes write one common log."""
        return name.partition("-")[0] == self.name.partition("-")[0]

    def subscribe_to_leave(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the router will stop soon; at once if the supervisor has announced the stop before."""
        self._leave_callback = callback
        if self.is_leaving:
            callback()

    def subscribe_to_stop(self, callback: Callable[[float], None]) -> None:
        """Call ``callback`` with the grace time in seconds when the supervisor orders this process to end.

        If the supervisor has ordered this before, call ``callback`` immediately.
        """
        self._stop_callback = callback
        if self._grace is not None:
            callback(self._grace)

    def subscribe_to_topic(self, topic: str, callback: Callable[[str, Any], None]) -> None:
        """Call ``callback`` with the sender and the content of each event that a peer publishes on ``topic``."""
        self._topics[topic] = callback

    def subscribe_to_records(self, callback: Callable[[str, Any], None]) -> None:
        """Call ``callback`` with the key and the record of each present and each later record."""
        self._record_callbacks.append(callback)
        for key, record in self._records.items():
            callback(key, record)
        self._records.clear()

    def subscribe_to_departures(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the name of each peer that ends."""
        self._departure_callbacks.append(callback)

    def answer_topic(self, topic: str, respond: Callable[[Any], Any | Awaitable[Any]]) -> None:
        """Answer queries on ``topic`` with the result of ``respond``, which is called with the content of the query."""
        self._responders[topic] = respond

    def send_message(self, *message: Any) -> None:
        """Send a message to the supervisor: its type, then its parts. Every message of this process is sent here."""
        if self._channel is not None:
            self._channel.send_message(*message)

    def publish_event(self, topic: str, content: Any) -> None:
        """Send an event to the peers."""
        self.send_message("publish", self.name, topic, content)

    def keep_record(self, key: str, record: dict[str, Any]) -> None:
        """Send a record to the peers, also to processes that start later. It replaces the earlier record of ``key``.

        Args:
            key: address of the instance.
            record: the record. Only parts with a later version replace the stored parts; see ``records.py``.
        """
        self.send_message("keep", key, record)

    async def wait_for_entry(self, client: str, priority: int, tokens: int) -> list[Any] | None:
        """Wait until the supervisor admits or refuses a request. Return None on admission, or else the refusal.

        If this task is cancelled, the request is removed from the queue. ``Admission.enter`` describes the arguments.
        """
        self._num_asked += 1
        number, answer = self._num_asked, asyncio.get_running_loop().create_future()
        try:
            self._entering[number] = answer
            self.send_message("enter", number, client, priority, tokens)
            refusal: list[Any] | None = await answer
        except asyncio.CancelledError:
            if answer.cancelled():
                self.send_message("cancel_request", number)
            elif answer.result() is None:
                self.report_end(client, -tokens)  # it was admitted, but its task was cancelled before it could run
            raise
        finally:
            self._entering.pop(number, None)
        return refusal

    def report_end(self, client: str, tokens: int) -> None:
        """Notify the supervisor that an admitted request has ended."""
        self.send_message("leave", client, tokens)

    async def ask_peers(self, topic: str, content: Any = None, *, everywhere: bool = False) -> list[Any]:
        """Send a query to the peers, and return the answers that arrive in time.

        Args:
            topic: decides which function of each peer answers; see ``answer_topic``.
            content: the argument of this function.
            everywhere: whether to ask the other routers, too.
        """
        try:
            return await self.ask_supervisor(topic, content, everywhere=everywhere)
        except asyncio.TimeoutError:  # in Python 3.10, this is not the built-in TimeoutError
            return []

    async def ask_supervisor(self, topic: str, content: Any = None, *, everywhere: bool = False) -> list[Any]:
        """Send a query to the peers, as ``ask_peers`` does.

        Raises:
            asyncio.TimeoutError: the supervisor does not answer, so it is unknown what the peers have answered.
        """
        if self.is_alone:
            return []
        self._num_asked += 1
        number, answers = self._num_asked, asyncio.get_running_loop().create_future()
        try:
            self._asked[number] = answers
            self.send_message("ask", self.name, number, topic, content, everywhere)
            # The supervisor has its own, shorter timeout, but the supervisor may have died.
            return await asyncio.wait_for(answers, 2 * ANSWER_SECONDS)
        finally:
            self._asked.pop(number, None)

    def on_message(self, message: list[Any]) -> None:
        """Handle a message from the supervisor: its type, then its parts."""
        match message:
            case ["publish", sender, topic, content]:
                if callback := self._topics.get(topic):
                    callback(sender, content)
            case ["keep", key, record]:
                self._on_record(key, record)
            case ["gone", name]:
                for note_departure in self._departure_callbacks:
                    note_departure(name)
            case ["ask", asker, number, topic, content]:
                task = asyncio.ensure_future(self._give_answer(asker, number, topic, content))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case ["answers", _, number, _, answers]:
                _resolve(self._asked.get(number), answers)
            case ["entered", number, refusal, client, tokens]:
                if not _resolve(self._entering.get(number), refusal) and refusal is None:
                    self.report_end(client, -tokens)  # the request was cancelled before this answer arrived
            case ["state", trouble]:
                self.trouble = trouble
                self._has_records.set()  # the supervisor sends the first message of this type after all records
            case ["leave"]:
                self.is_leaving = True
                if self._leave_callback is not None:
                    self._leave_callback()
            case ["stop", grace]:
                self._on_stop(grace)
            case _:
                _log.error("the supervisor sent an unknown message: %s", reprlib.repr(message))

    def _on_record(self, key: str, record: Any) -> None:
        if not self._record_callbacks:
            self._records[key] = record  # for subscribers, which are created after the connection
        for callback in self._record_callbacks:
            callback(key, record)

    async def _give_answer(self, asker: str, number: int, topic: str, content: Any) -> None:
        given = None
        try:
            given = self._responders[topic](content)
            if inspect.isawaitable(given):
                given = await given
        except Exception:
            _log.exception("the query %r of another process could not be answered", topic)
        self.send_message("answers", asker, number, self.name, [] if given is None else [given])

    def _on_stop(self, grace: float) -> None:
        self._grace = grace
        if self._stop_callback is not None:
            self._stop_callback(grace)

    def _on_lost(self) -> None:
        """End this process, because its supervisor, which passes it new connections, has died."""
        self._has_records.set()
        if self._grace is None:
            _log.error("the supervisor of worker %s has died, so the worker ends", self.name)
        self._on_stop(0.0)


def _resolve(waiting: asyncio.Future[Any] | None, result: Any) -> bool:
    """Set the result of the future ``waiting``. Return False if no task waits for this future any more."""
    if waiting is None or waiting.done():
        return False
    waiting.set_result(result)
    return True
