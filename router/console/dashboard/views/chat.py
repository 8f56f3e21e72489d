"""Try it: a conversation through the router, and where each of its prompts came from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import quote

from nicegui import ui

from router.console.client import RouterError
from router.console.dashboard.figures import COMPUTED, ORIGINS, OWN_CACHE, POOL
from router.console.dashboard.views.frame import Context, View
from router.console.dashboard.views.parts import Banner, draw_blocks, put_button, put_html, put_text
from router.console.dashboard.words import ORIGIN_NAMES, format_count, format_seconds

__all__ = ["CHAT", "split_usage"]

MAX_TOKENS = 120
SAMPLE = (
    "Here are the house rules of a library. Please keep them in mind for all that follows. "
    + " ".join(
        f"Rule {number}: books from shelf {number} may be kept for {number + 6} days, "
        f"and then go back to desk {number % 4 + 1}."
        for number in range(1, 41)
    )
    + " Which desk takes a book from shelf 17?"
)


def _build(context: Context) -> None:
    messages: list[dict[str, str]] = []
    running: dict[str, bool] = {}
    with ui.element("div").classes("head"), ui.element("div"):
        put_text("h1", "Try it")
        said = (
            "Ask through the router, and see where each prompt came from. Go on: what was said is in a cache by then."
        )
        put_text("p", said, "lead")
    banner = Banner()
    with ui.element("section").classes("card").props('aria-label="Conversation"'):
        turns = (
            ui.element("div")
            .classes("turns")
            .props('role="log" aria-live="polite" aria-label="Conversation" tabindex="0"')
        )
        with turns:
            empty = put_html("Nothing said yet. Only whole blocks are shared: a long question shows the most.").classes(
                "empty"
            )
        with ui.element("form").classes("ask").on("submit.prevent", lambda: ask()):
            field = (
                ui.textarea("Your question")
                .classes("grow")
                .props("outlined autogrow autofocus input-style=max-height:180px")
            )
            field.on(
                "keydown.enter", lambda: ask(), js_handler="(e) => { if (!e.shiftKey) { e.preventDefault(); emit(); } }"
            )
            send = put_button("Send", None, "strong").props('type="submit"')
            stop = put_button("Stop", lambda: running.clear())
            stop.set_visibility(False)
        with ui.element("div").classes("ask"):
            put_button("Take a long question", lambda: field.set_value(SAMPLE))
            put_button("Begin anew", lambda: begin_anew())
            put_text(
                "span", f"Enter sends, Shift and Enter begin a new line. Answers end after {MAX_TOKENS} tokens.", "note"
            )

    def begin_anew() -> None:
        running.clear()
        messages.clear()
        turns.clear()
        banner.hide()

    async def ask() -> None:
        question = (field.value or "").strip()
        if not question or running:
            return
        empty.classes(add="hidden")
        banner.hide()
        field.set_value("")
        messages.append({"role": "user", "content": question})
        with turns:
            turn = _Turn(question)
        running["on"] = True
        send.set_visibility(False)
        stop.set_visibility(True)
        began = time.monotonic()
        answer, usage, first = "", None, None
        request_id = ""
        try:
            body = {"model": "default", "messages": messages, "max_tokens": MAX_TOKENS}
            async with context.site.collector.router.open_chat(body, context.site.api_key) as stream:
                request_id = stream.request_id
                async for event in stream.read_events():
                    usage = event.get("usage") or usage
                    piece = "".join(
                        (each.get("delta") or {}).get("content") or "" for each in event.get("choices") or ()
                    )
                    if piece:
                        first = first or time.monotonic() - began
                        answer += piece
                        turn.show_answer(answer)
                    if not running:
                        break
        except RouterError as exc:
            banner.show("bad", f"{exc}.")
        finally:
            running.clear()
            send.set_visibility(True)
            stop.set_visibility(False)
        if answer:
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()
            field.set_value(question)
        turn.show_end(answer, usage, first, time.monotonic() - began, request_id)


class _Turn:
    """A question, its answer as it comes, and where its prompt came from."""

    def __init__(self, question: str) -> None:
        with ui.element("div").classes("turn"):
            put_text("span", "You", "said-by unseen")
            put_text("div", question, "bubble mine long" if len(question) > 600 else "bubble mine").props(
                "tabindex=0" if len(question) > 600 else ""
            )
            put_text("span", "Answer", "said-by unseen")
            self._answer = put_text("div", "…", "bubble theirs")
            self._origin = put_html("")

    def show_answer(self, text: str) -> None:
        self._answer.set_text(text)

    def show_end(
        self, answer: str, usage: Mapping[str, Any] | None, first: float | None, seconds: float, request_id: str
    ) -> None:
        if not answer:
            self._answer.set_text("No answer.")
        self._origin.show(_draw_end(usage, first, seconds, request_id))


def split_usage(usage: Mapping[str, Any]) -> dict[str, float]:
    """A prompt's tokens by their origin, as an answer's ``usage`` tells them.

    An engine that tells only how many were cached somewhere gets ``cached`` for those.
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
        parts.append('<p class="note">The engine did not say where the prompt came from.</p>')
    link = f' · <a href="/request?id={quote(request_id, safe="")}">see its way</a>' if request_id else ""
    generated = (
        f" for {format_count(usage['completion_tokens'])} tokens" if usage and usage.get("completion_tokens") else ""
    )
    parts.append(
        f'<p class="note">First token after {format_seconds(first)}, '
        f"{format_seconds(seconds)} in all{escape(generated)}{link}</p>"
    )
    return f'<div class="from">{"".join(parts)}</div>'


CHAT = View("/try", "Try it", "Try it", _build)
