"""The view "Request": one request, with its attempts, their reasons and times, and where the prompt's KV came from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nicegui import ui

from router.console.client import RouterError
from router.console.dashboard.figures import COMPUTED, OWN_CACHE, POOL
from router.console.dashboard.summaries import pick_requests
from router.console.dashboard.views.frame import TOGGLE_PROPS, Context, View, link_request
from router.console.dashboard.views.parts import (
    Banner,
    draw_blocks,
    draw_facts,
    draw_table,
    put_button,
    put_head,
    put_html,
    put_text,
)
from router.console.dashboard.words import NOTHING, REASON_TEXTS, format_count, format_seconds, make_sentence

__all__ = ["REQUEST", "draw_request"]

LISTED = 30
ESTIMATES = {"own tokens", "pool tokens", "cached tokens expected"}
# Number of last requests in which requests of one kind are searched: the maximum that the router lists.
SEARCHED = 1000
KINDS = {"": "All", "slow": "Slow", "failed": "Failed", "missed": "Missed"}
_MEANINGS = {
    "": f"The {LISTED} requests that ended last.",
    "slow": f"Of the last {SEARCHED:,} requests, those with the latest first byte.",
    "failed": f"Of the last {SEARCHED:,} requests, those with status 4xx or 5xx, but not 499, or with an error.",
    "missed": f"Of the last {SEARCHED:,} requests, those with less than half of the prompt from a cache.",
}


class _RequestView:
    """The view "Request" in one browser."""

    def __init__(self, context: Context) -> None:
        self._router = context.site.collector.router
        put_head("One request", "Which instance served a request, why, and how long each part took.")
        with ui.element("form").classes("ask").on("submit.prevent", self._look_up):
            self._field = ui.input("Id of the request", placeholder="as in its answer").classes("grow")
            self._field.props("outlined dense autofocus").value = context.request.query_params.get("id", "")
            put_button("Look up", None, "strong").props('type="submit"')
        self._banner = Banner()
        self._found = put_html("").classes("stack")
        with ui.element("section").classes("card"):
            with ui.element("div").classes("card-head"):
                put_text("h2", "The last requests")
                with ui.element("div").classes("ask"):
                    chosen = context.request.query_params.get("show", "")
                    self._kind = ui.toggle(KINDS, value=chosen if chosen in KINDS else "", on_change=self._list_last)
                    self._kind.classes("choice").props(f'{TOGGLE_PROPS} aria-label="Requests shown"')
                    put_button("Refresh", self._list_last)
            self._meaning = put_text("p", "", "note")
            self._last = put_html("")
        ui.timer(0.05, self._look_at_all, once=True)

    async def _look_at_all(self) -> None:
        await self._look_up()
        await self._list_last()

    async def _look_up(self) -> None:
        wanted = (self._field.value or "").strip()
        self._found.show("")
        self._banner.hide()
        if not wanted:
            return
        try:
            explanation = await self._router.explain_request(wanted)
        except RouterError as exc:
            self._banner.show("bad", make_sentence(exc))
            return
        self._found.show(draw_request(explanation))
        ui.run_javascript(f"history.replaceState(null, '', '{link_request(wanted)}')")

    async def _list_last(self) -> None:
        kind = str(self._kind.value)
        self._meaning.set_text(_MEANINGS[kind])
        try:
            found = await self._router.list_requests(SEARCHED if kind else LISTED)
            self._last.show(_draw_list(pick_requests(found, kind)[:LISTED]))
        except RouterError as exc:
            self._last.show(f'<div class="empty">{escape(make_sentence(exc))}</div>')


def _draw_list(requests: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in requests:
        name = str(each.get("request_id", ""))
        served = " → ".join(escape(str(each[role])) for role in ("mixed", "prefill", "decode") if each.get(role))
        rows.append(
            [
                f'<a class="code" href="{escape(link_request(name))}">{escape(name)}</a>' if name else NOTHING,
                _draw_age(float(each["time"])),
                escape(str(each.get("status", ""))),
                served or NOTHING,
                format_count(each.get("prompt_tokens")),
                format_count(each.get("cached_tokens")),
                format_seconds(each["first_byte_ms"] / 1e3) if each.get("first_byte_ms") else NOTHING,
                format_seconds(float(each.get("total_ms") or 0.0) / 1e3),
            ]
        )
    if not rows:
        return '<div class="empty">There are no such requests.</div>'
    heads = ["Id", "When", "Status", "Served by", "Prompt tokens", "Cached", "First byte", "Total"]
    return draw_table(heads, rows, numbers=(4, 5, 6, 7))


def draw_request(explanation: Mapping[str, Any]) -> str:
    """Return the HTML of one request.

    Args:
        explanation: the response of ``/admin/explain``. In other versions of the router, it may have other members.
    """
    return "".join(
        (_draw_outcome(explanation), _draw_origin(explanation), _draw_times(explanation), _draw_attempts(explanation))
    )


def _draw_outcome(explanation: Mapping[str, Any]) -> str:
    status = explanation.get("status")
    end = "Answered" if status == 200 else "The client left before the end" if status == 499 else f"Status {status}"
    if explanation.get("error"):
        end += f": {explanation['error']}"
    arrived = explanation.get("time")
    facts = {
        "Arrived": "" if arrived is None else time.strftime("%d %b %Y, %H:%M:%S", time.localtime(float(arrived))),
        "First byte after": _format_ms(explanation.get("first_byte_ms")),
        "Ended after": _format_ms(explanation.get("total_ms")),
        "Prompt": _format_tokens(explanation.get("prompt_tokens")),
        "Answer": _format_tokens(explanation.get("completion_tokens")),
        "Path": str(explanation.get("path", "")),
        "Client": str(explanation.get("client", "")),
        "Trace": str(explanation.get("trace_id", "")),
    }
    colour = "good" if status == 200 else "warn" if status == 499 else "bad"
    return (
        f'<section class="card"><div><h2 class="state"><span class="dot {colour}"></span>{escape(end)}</h2>'
        f'<p class="note code">{escape(str(explanation.get("request_id", "")))}</p></div>'
        f"{draw_facts(facts)}</section>"
    )


def _draw_origin(explanation: Mapping[str, Any]) -> str:
    prompt, cached = explanation.get("prompt_tokens"), explanation.get("cached_tokens")
    if not prompt or cached is None:
        return ""
    own, computed = explanation.get("own_cached_tokens"), max(0, prompt - cached)
    if own is None:
        tokens: dict[str, float] = {"cached": cached, COMPUTED: computed}
        parts = f"{format_count(cached)} came from a cache"
    else:
        tokens = {OWN_CACHE: own, POOL: max(0, cached - own), COMPUTED: computed}
        parts = (
            f"{format_count(own)} came from the instance's own cache, "
            f"{format_count(max(0, cached - own))} from the pool"
        )
    text = f"Of {format_count(prompt)} prompt tokens {parts}, and {format_count(computed)} were computed."
    if (expected := explanation.get("predicted_cached_tokens")) is not None:
        text += f" The router had expected {format_count(expected)} cached tokens."
    squares, size = draw_blocks(tokens)
    a_square = f"A square is {format_count(size)} token{'s' if size > 1 else ''}."
    return (
        f'<section class="card"><h2>Where its prompt came from</h2>{squares}'
        f'<p>{text}</p><p class="note">{a_square}</p></section>'
    )


def _draw_times(explanation: Mapping[str, Any]) -> str:
    """Return the HTML of the legs of all attempts on one time scale; without legs, the times of the request."""
    total = float(explanation.get("total_ms") or 0.0)
    if total <= 0:
        return ""
    legs: list[tuple[str, float, float | None, float | None]] = []
    for attempt in explanation.get("attempts", ()):
        for leg in attempt.get("legs") or ():
            if leg.get("sent_ms") is not None:
                name = " ".join(filter(None, (str(leg.get("role", "")), str(leg.get("instance", "")))))
                legs.append((name, float(leg["sent_ms"]), leg.get("first_byte_ms"), leg.get("ended_ms")))
    note = "Strong colour: until the first byte. Weak colour: from the first byte to the last."
    if not legs:
        note += " This router does not report the times of single attempts."
    legs.insert(0, ("whole request", 0.0, explanation.get("first_byte_ms") or None, total))
    end = max([total, *(leg[3] or 0.0 for leg in legs)])
    rows = "".join(_draw_leg(name, sent, first, ended, end) for name, sent, first, ended in legs)
    scale = "".join(f"<span>{format_seconds(end * step / 4e3) if step else '0'}</span>" for step in range(5))
    return (
        f'<section class="card"><h2>Timeline</h2><div class="timeline">{rows}'
        f'<div class="leg"><span></span><div class="scale">{scale}</div><span></span></div></div>'
        f'<p class="note">{note}</p></section>'
    )


def _draw_leg(name: str, sent: float, first: float | None, ended: float | None, end: float) -> str:
    until = end if ended is None else ended
    turn = until if not first else min(max(float(first), sent), until)

    def draw_part(kind: str, begin: float, stop: float) -> str:
        width = max(0.0, stop - begin) / end * 100
        return f'<i class="{kind}" style="left:{begin / end * 100:.2f}%;width:{width:.2f}%"></i>' if width else ""

    words = f"{name}: from {format_seconds(sent / 1e3)} to {format_seconds(until / 1e3)} after arrival"
    if first:
        words += f", first byte at {format_seconds(float(first) / 1e3)}"
    length = NOTHING if ended is None else format_seconds((until - sent) / 1e3)
    return (
        f'<div class="leg"><span class="name-line">{escape(name)}</span>'
        f'<div class="track" role="img" aria-label="{escape(words)}" title="{escape(words)}">'
        f"{draw_part('before', sent, turn)}{draw_part('after', turn, until)}</div>"
        f'<span class="num">{length}</span></div>'
    )


def _draw_attempts(explanation: Mapping[str, Any]) -> str:
    attempts: Sequence[Mapping[str, Any]] = explanation.get("attempts", ())
    prompt = explanation.get("prompt_tokens")
    parts = [_draw_attempt(number, attempt, prompt) for number, attempt in enumerate(attempts, start=1)]
    text = "".join(parts) or '<p class="empty">The request was sent to no instance.</p>'
    return f'<section class="card"><h2>Attempts, with reasons</h2>{text}</section>'


def _draw_attempt(number: int, attempt: Mapping[str, Any], prompt_tokens: int | None) -> str:
    decisions = "".join(_draw_decision(each, prompt_tokens) for each in attempt.get("decisions", ()))
    begun, ended = attempt.get("began_ms"), attempt.get("ended_ms")
    times = ""
    if begun is not None and ended is not None:
        words = f"from {format_seconds(float(begun) / 1e3)} to {format_seconds(float(ended) / 1e3)} after arrival"
        times = f' <span class="note">{words}</span>'
    outcome = escape(str(attempt.get("ended", "")))
    return f'<div class="attempt"><h3>{number}. {outcome}{times}</h3>{decisions}</div>'


def _draw_decision(decision: Mapping[str, Any], prompt_tokens: int | None) -> str:
    shown = {str(name).replace("_", " "): value for name, value in (decision.get("reasons") or {}).items()}
    if (expected := decision.get("predicted_cached_tokens")) is not None:
        shown["cached tokens expected"] = expected
    # The policy's number is an estimate, which may be larger than the engine's count.
    for name in shown.keys() & ESTIMATES if prompt_tokens is not None else ():
        shown[name] = min(shown[name], prompt_tokens)
    reasons = "".join(_draw_reason(name, value) for name, value in shown.items())
    name = escape(str(decision.get("instance", "")))
    return f'<div><span class="name-line">{name}</span><ul class="reasons">{reasons}</ul></div>'


def _draw_reason(name: str, value: Any) -> str:
    """Return the HTML of a reason. Its meaning is shown under the mouse, and when it has the focus or is touched."""
    words = f"{escape(name)} <b>{escape(_format_reason(value))}</b>"
    if (text := REASON_TEXTS.get(name)) is None:
        return f"<li>{words}</li>"
    return f'<li tabindex="0">{words}<span class="meaning" role="tooltip">{escape(text)}</span></li>'


def _draw_age(unix: float) -> str:
    seconds = max(0.0, time.time() - unix)
    if seconds < 90:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 5400 else f"{seconds / 3600:.0f} h ago"


def _format_reason(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _format_ms(milliseconds: float | None) -> str:
    return format_seconds(milliseconds / 1e3) if milliseconds else ""


def _format_tokens(count: int | None) -> str:
    return "" if count is None else f"{format_count(count)} tokens"


REQUEST = View("/request", "Request", "One request", _RequestView)
