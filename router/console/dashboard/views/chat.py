"""The view "Try it": a conversation through the router, and how much of each prompt was cached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from html import escape
from typing import Any

from nicegui import ui

from router.console.dashboard.figures import COMPUTED, ORIGINS, OWN_CACHE, POOL
from router.console.dashboard.views.frame import Context, View, link_request
from router.console.dashboard.views.parts import Banner, Markup, draw_blocks, put_button, put_head, put_html, put_text
from router.console.dashboard.words import ORIGIN_NAMES, format_count, format_seconds, make_sentence

__all__ = ["CHAT", "split_usage"]

MAX_TOKENS = 120
# A question that is longer than this gets a scroll bar.
LONG_CHARACTERS = 600
SAMPLE = (
    "Here are the house rules of a library. Please keep them in mind for all that follows. "
    + " ".join(
        f"Rule {number}: books from shelf {number} may be kept for {number + 6} days, "
        f"and then go back to desk {number % 4 + 1}."
        for number in range(1, 41)
    )
    + " Which desk takes a book from shelf 17?"
)


class _Conversation:
    """The conversation in one browser: the input form, and each question with its answer.

    Each new conversation has a new list ``_messages``. So an answer that is still running stays in its own
    conversation.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._messages: list[dict[str, str]] = []
        self._reading: asyncio.Future[None] | None = None
        text = (
            "Ask a question through the router, and see where its prompt came from. The next prompt begins with this "
            "prompt, which is then cached."
        )
        put_head("Try it", text)
        self._banner = Banner()
        with ui.element("section").classes("card").props('aria-label="Conversation"'):
            self._turns = ui.element("div").classes("turns")
            self._turns.props('role="log" aria-live="polite" aria-label="Conversation" tabindex="0"')
            self._empty = self._put_empty()
            with ui.element("form").classes("ask").on("submit.prevent", self._send_question):
                self._put_question()
            with ui.element("div").classes("ask"):
                put_button("Use a long question", lambda: self._field.set_value(SAMPLE))
                put_button("New chat", self._begin_anew)
                text = f"Enter sends, Shift+Enter begins a new line. Answers end after {MAX_TOKENS} tokens."
                put_text("span", text, "note")
        context.on_leave(self._drop_answer)

    def _put_empty(self) -> Markup:
        with self._turns:
            text = "No messages yet. Only whole blocks are shared: a long question shows the most."
            return put_html(text).classes("empty")

    def _put_question(self) -> None:
        """Put the input field, the button that sends a question, and the button that stops its answer."""
        self._field = ui.textarea("Your question").classes("grow")
        self._field.props("outlined autogrow autofocus input-style=max-height:180px")
        sends = "(e) => { if (!e.shiftKey) { e.preventDefault(); emit(); } }"
        self._field.on("keydown.enter", self._send_question, js_handler=sends)
        self._send_button = put_button("Send", None, "strong").props('type="submit"')
        self._stop_button = put_button("Stop", self._stop_answer)
        self._stop_button.set_visibility(False)

    def _stop_answer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def _drop_answer(self) -> None:
        """Stop the answer, and make ``_send_question`` ignore it."""
        self._stop_answer()
        self._reading = None

    def _begin_anew(self) -> None:
        self._drop_answer()
        self._show_buttons()
        self._messages = []
        self._turns.clear()
        self._empty = self._put_empty()
        self._banner.hide()

    def _show_buttons(self) -> None:
        is_running = self._reading is not None
        self._send_button.set_visibility(not is_running)
        self._stop_button.set_visibility(is_running)

    async def _send_question(self) -> None:
        question = (self._field.value or "").strip()
        if not question or self._reading is not None:
            return
        self._empty.classes(add="hidden")
        self._banner.hide()
        self._messages.append({"role": "user", "content": question})
        with self._turns:
            turn = _Turn(question)
        # A separate task can be cancelled while it waits for the next token.
        reading = self._reading = asyncio.ensure_future(self._read_answer(self._messages, turn))
        self._show_buttons()
        await asyncio.wait([reading])
        trouble = None if reading.cancelled() else reading.exception()
        if self._reading is not reading:
            return  # the user has begun a new conversation, or left the page
        self._reading = None
        self._show_buttons()
        if trouble is not None:
            self._banner.show("bad", make_sentence(trouble))
        self._end_turn(turn)

    async def _read_answer(self, messages: list[dict[str, str]], turn: _Turn) -> None:
        """Send the question, and show the answer while it is generated.

        Raises:
            RouterError: there is no answer, or the answer is incomplete.
        """
        body = {"model": "default", "messages": messages, "max_tokens": MAX_TOKENS}
        site = self._context.site
        async with site.collector.router.open_chat(body, site.api_key) as stream:
            turn.request_id = stream.request_id
            # Not before: if the router refuses the question, its text must be in the field. The browser may ignore the
            # second of two changes that follow at once.
            if self._messages is messages and (self._field.value or "").strip() == turn.question:
                self._field.set_value("")
            async for event in stream.read_events():
                turn.take_event(event)

    def _end_turn(self, turn: _Turn) -> None:
        """Store the answer, even if it is incomplete. If there is none, put the question into the input field again."""
        if turn.answer:
            self._messages.append({"role": "assistant", "content": turn.answer})
        else:
            self._messages.pop()
            if not self._field.value:
                self._field.set_value(turn.question)
        turn.show_end()


class _Turn:
    """The elements for one question: its text, its streamed answer, and how much of its prompt was cached."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.answer = ""
        self.request_id = ""
        self._usage: Mapping[str, Any] | None = None
        self._began = time.monotonic()
        self._first: float | None = None
        is_long = len(question) > LONG_CHARACTERS
        with ui.element("div").classes("turn"):
            put_text("span", "You", "unseen")
            bubble = put_text("div", question, "bubble mine long" if is_long else "bubble mine")
            if is_long:
                bubble.props('tabindex="0"')  # so that the keyboard can scroll it
            put_text("span", "Answer", "unseen")
            self._answer = put_text("div", "\u2026", "bubble theirs")
            self._origin = put_html("")

    def take_event(self, event: Mapping[str, Any]) -> None:
        """Show the text of one event of the stream."""
        self._usage = event.get("usage") or self._usage
        piece = "".join((each.get("delta") or {}).get("content") or "" for each in event.get("choices") or ())
        if piece:
            self._first = self._first or time.monotonic() - self._began
            self.answer += piece
            self._answer.set_text(self.answer.lstrip())

    def show_end(self) -> None:
        """Show how many prompt tokens were cached and how many computed, and how long the answer took."""
        if not self.answer:
            self._answer.set_text("No answer.")
        self._origin.show(_draw_end(self._usage, self._first, time.monotonic() - self._began, self.request_id))


def split_usage(usage: Mapping[str, Any]) -> dict[str, float]:
    """Return the number of prompt tokens by origin, from the ``usage`` of a response.

    If the engine reports only the total number of cached tokens, their origin is ``cached``.
    """
    prompt = usage.get("prompt_tokens") or 0
    details = usage.get("prompt_tokens_details") or {}
    own, pool, cached = (details.get(name) for name in ("own_cached_tokens", "pool_cached_tokens", "cached_tokens"))
    if own is None and pool is None:
        return {COMPUTED: prompt} if cached is None else {"cached": cached, COMPUTED: max(0, prompt - cached)}
    own, pool = own or 0, pool or 0
    return {OWN_CACHE: own, POOL: pool, COMPUTED: max(0, prompt - own - pool)}


def _draw_end(usage: Mapping[str, Any] | None, first: float | None, seconds: float, request_id: str) -> str:
    parts = []
    if usage is not None:
        tokens = split_usage(usage)
        squares, size = draw_blocks(tokens)
        words = "".join(
            f'<li><span class="swatch {origin if origin in ORIGINS else "unknown"}"></span>'
            f"{ORIGIN_NAMES.get(origin, 'From a cache')} <b>{format_count(count)}</b></li>"
            for origin, count in tokens.items()
        )
        many = f"{format_count(usage.get('prompt_tokens') or 0)} prompt tokens; a square is {format_count(size)}"
        parts.append(f'{squares}<ul class="from-words">{words}<li class="note">of {many}</li></ul>')
    else:
        parts.append('<p class="note">The engine did not report where the prompt came from.</p>')
    link = f' · <a href="{escape(link_request(request_id))}">timeline</a>' if request_id else ""
    generated = (
        f" for {format_count(usage['completion_tokens'])} tokens" if usage and usage.get("completion_tokens") else ""
    )
    parts.append(
        f'<p class="note">First token after {format_seconds(first)}, '
        f"{format_seconds(seconds)} in total{escape(generated)}{link}</p>"
    )
    return f'<div class="from">{"".join(parts)}</div>'


CHAT = View("/try", "Try it", "Try it", _Conversation)
