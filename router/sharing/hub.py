"""Hub: the supervisor's part in the workers' talk. It passes everything on, and keeps the records for newcomers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from router.sharing.link import ANSWER_SECONDS
from router.sharing.wire import Wire

__all__ = ["Hub", "Uplink"]

_log = logging.getLogger("router.sharing.hub")


class Uplink(Protocol):
    """The way to the other routers."""

    def send(self, *message: Any) -> None:
        """Send what a worker published, kept, asked or answered to all other routers."""

    def list_routers(self) -> list[str]:
        """The names of the other routers that were heard of lately."""


class Hub:
    """Workers by name, and what passes between them."""

    def __init__(self, on_count: Callable[[str, dict[str, int]], None]) -> None:
        """
        Args:
            on_count: called with a worker's name and its figures.
        """
        self.uplink: Uplink | None = None
        self._on_count = on_count
        self._workers: dict[str, Wire] = {}
        self._records: dict[str, Any] = {}
        self._questions: dict[tuple[str, int], _Question] = {}

    def __repr__(self) -> str:
        return f"<Hub {list(self._workers)} {len(self._records)} records>"

    def add_worker(self, name: str, wire: Wire) -> None:
        """A worker has started; it gets the records."""
        self._workers[name] = wire
        for key, record in self._records.items():
            wire.send("keep", key, record)

    def remove_worker(self, name: str) -> None:
        """A worker is gone."""
        if self._workers.pop(name, None) is None:
            return
        self.announce_departure(name)
        if self.uplink is not None:
            self.uplink.send("gone", name)
        for key, question in list(self._questions.items()):
            if key[0] == name:
                self._close_question(key)
            elif name in question.waiting_for:
                self._note_answer(key, name, None)

    def stop_workers(self, grace: float) -> None:
        """Tell all workers to end within ``grace`` seconds."""
        self._send_to_workers("stop", grace)

    def announce_departure(self, name: str) -> None:
        """Tell all workers that a process is gone, one of theirs or another router's."""
        self._send_to_workers("gone", name)

    def on_message(self, sender: str, message: list[Any]) -> None:
        """Take a message of a worker."""
        kind, *rest = message
        match kind, rest:
            case "publish", [topic, content]:
                self._send_to_workers("publish", sender, topic, content, but=sender)
                self._send_up("publish", sender, topic, content)
            case "keep", [key, record]:
                self._records[key] = record
                self._send_to_workers("keep", key, record, but=sender)
                self._send_up("keep", key, record)
            case "count", [figures]:
                self._on_count(sender, figures)
            case "ask", [number, topic, content]:
                self._put_question(sender, number, topic, content)
            case "answer", [asker, number, content]:
                if asker in self._workers:
                    self._note_answer((asker, number), sender, content)
                else:
                    self._send_up("answer", asker, number, content)
            case _:
                _log.error("worker %s sent a message that is none: %.200r", sender, message)

    def on_distant_message(self, message: list[Any]) -> None:
        """Take a message of another router."""
        kind, *rest = message
        match kind, rest:
            case "publish", [sender, topic, content]:
                self._send_to_workers("publish", sender, topic, content)
            case "keep", [key, record]:
                self._records[key] = record
                self._send_to_workers("keep", key, record)
            case "gone", [name]:
                self.announce_departure(name)
            case _:
                _log.error("another router sent a message that is none: %.200r", message)

    def _put_question(self, asker: str, number: int, topic: str, content: Any) -> None:
        others = [name for name in self._workers if name != asker]
        key = (asker, number)
        timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._close_question, key)
        self._questions[key] = _Question(set(others), timer)
        for name in others:
            self._workers[name].send("ask", asker, number, topic, content)
        if not others:
            self._close_question(key)

    def _note_answer(self, key: tuple[str, int], sender: str, content: Any) -> None:
        question = self._questions.get(key)
        if question is None or sender not in question.waiting_for:
            return
        question.waiting_for.remove(sender)
        if content is not None:
            question.answers.append(content)
        if not question.waiting_for:
            self._close_question(key)

    def _close_question(self, key: tuple[str, int]) -> None:
        question = self._questions.pop(key, None)
        if question is None:
            return
        question.timer.cancel()
        asker, number = key
        if asker in self._workers:
            self._workers[asker].send("answers", number, question.answers)

    def _send_to_workers(self, *message: Any, but: str = "") -> None:
        for name, wire in self._workers.items():
            if name != but:
                wire.send(*message)

    def _send_up(self, *message: Any) -> None:
        if self.uplink is not None:
            self.uplink.send(*message)


class _Question:
    """A question that some workers have not answered yet."""

    def __init__(self, waiting_for: set[str], timer: asyncio.TimerHandle) -> None:
        self.waiting_for = waiting_for
        self.timer = timer
        self.answers: list[Any] = []
