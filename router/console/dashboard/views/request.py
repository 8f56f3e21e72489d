"""One request: its attempts with their reasons and times, and where its prompt came from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nicegui import ui

from router.console.client import RouterError
from router.console.dashboard.figures import COMPUTED, OWN_CACHE, POOL
from router.console.dashboard.views.frame import Context, View, link_request
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
from router.console.dashboard.words import NOTHING, format_count, format_seconds, make_sentence

__all__ = ["REQUEST", "draw_request"]

LISTED = 30


class _RequestView:
    """The view in one browser."""

    def __init__(self, context: Context) -> None:
        self._router = context.site.collector.router
        put_head("One request", "How a request was placed, why there, and how long each part of its way took.")
        with ui.element("form").classes("ask").on("submit.prevent", self._look_up):
            self._field = ui.input("Id of the request", placeholder="as in its answer").classes("grow")
            self._field.props("outlined dense autofocus").value = context.request.query_params.get("id", "")
            put_button("Look up", None, "strong").props('type="submit"')
        self._banner = Banner()
        self._found = put_html("").classes("stack")
        with ui.element("section").classes("card"):
            with ui.element("div").classes("card-head"):
                put_text("h2", "The last requests")
                put_button("Refresh", self._list_last)
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
        try:
            self._last.show(_draw_list(await self._router.list_requests(LISTED)))
        except RouterError as exc:
            self._last.show(f'<div class="empty">{escape(make_sentence(exc))}</div>')


def _draw_list(requests: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for each in requests:
        name = str(each.get("request_id", ""))
        served = " → ".join(escape(str(each[role])) for role in ("mixed", "prefill", "decode") if each.get(role))
        prompt, cached = each.get("prompt_tokens"), each.get("cached_tokens")
        rows.append(
            [
                f'<a class="code" href="{escape(link_request(name))}">{escape(name)}</a>' if name else NOTHING,
                _draw_age(float(each["time"])),
                escape(str(each.get("status", ""))),
                served or NOTHING,
                NOTHING if prompt is None else format_count(prompt),
                NOTHING if cached is None else format_count(cached),
                format_seconds(each["first_byte_ms"] / 1e3) if each.get("first_byte_ms") else NOTHING,
                format_seconds(float(each.get("total_ms") or 0.0) / 1e3),
            ]
        )
    if not rows:
        return '<div class="empty">No request has ended since the router started.</div>'
    heads = ["Id", "When", "Status", "Served by", "Prompt tokens", "Cached", "First byte", "Total"]
    return draw_table(heads, rows, numbers=(4, 5, 6, 7))


def draw_request(told: Mapping[str, Any]) -> str:
    """Render one request from the answer of ``/admin/explain``. Other versions may send other members."""
    return "".join((_draw_outcome(told), _draw_origin(told), _draw_times(told), _draw_attempts(told)))


def _draw_outcome(told: Mapping[str, Any]) -> str:
    status = told.get("status")
    end = "Answered" if status == 200 else "The client left before the end" if status == 499 else f"Status {status}"
    if told.get("error"):
        end += f": {told['error']}"
    arrived = told.get("time")
    facts = {
        "Arrived": "" if arrived is None else time.strftime("%d %b %Y, %H:%M:%S", time.localtime(float(arrived))),
        "First byte after": _format_ms(told.get("first_byte_ms")),
        "Ended after": _format_ms(told.get("total_ms")),
        "Prompt": _format_tokens(told.get("prompt_tokens")),
        "Answer": _format_tokens(told.get("completion_tokens")),
        "Path": str(told.get("path", "")),
        "Client": str(told.get("client", "")),
        "Trace": str(told.get("trace_id", "")),
    }
    colour = "good" if status == 200 else "warn" if status == 499 else "bad"
    return (
        f'<section class="card"><div><h2 class="state"><span class="dot {colour}"></span>{escape(end)}</h2>'
        f'<p class="note code">{escape(str(told.get("request_id", "")))}</p></div>'
        f"{draw_facts(facts)}</section>"
    )


def _draw_origin(told: Mapping[str, Any]) -> str:
    prompt, cached = told.get("prompt_tokens"), told.get("cached_tokens")
    if not prompt or cached is None:
        return ""
    own, computed = told.get("own_cached_tokens"), max(0, prompt - cached)
    if own is None:
        tokens: dict[str, float] = {"cached": cached, COMPUTED: computed}
        parts = f"{format_count(cached)} came from a cache"
    else:
        tokens = {OWN_CACHE: own, POOL: max(0, cached - own), COMPUTED: computed}
        parts = (
            f"{format_count(own)} came from the instance's own cache, "
            f"{format_count(max(0, cached - own))} from the pool"
        )
    said = f"Of {format_count(prompt)} prompt tokens {parts}, and {format_count(computed)} were computed."
    if (expected := told.get("predicted_cached_tokens")) is not None:
        said += f" The router had expected {format_count(expected)} in that cache."
    squares, size = draw_blocks(tokens)
    a_square = f"A square is {format_count(size)} token{'s' if size > 1 else ''}."
    return (
        f'<section class="card"><h2>Where its prompt came from</h2>{squares}'
        f'<p>{said}</p><p class="note">{a_square}</p></section>'
    )


def _draw_times(told: Mapping[str, Any]) -> str:
    """Render the legs of all attempts on one time scale; without legs, the request's own times."""
    total = float(told.get("total_ms") or 0.0)
    if total <= 0:
        return ""
    legs: list[tuple[str, float, float | None, float | None]] = []
    for attempt in told.get("attempts", ()):
        for leg in attempt.get("legs") or ():
            if leg.get("sent_ms") is not None:
                name = " ".join(filter(None, (str(leg.get("role", "")), str(leg.get("instance", "")))))
                legs.append((name, float(leg["sent_ms"]), leg.get("first_byte_ms"), leg.get("ended_ms")))
    note = "Dark: until the first byte came. Light: from there to the last."
    if not legs:
        note += " This router does not tell the times of single attempts."
    legs.insert(0, ("whole request", 0.0, told.get("first_byte_ms") or None, total))
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


def _draw_attempts(told: Mapping[str, Any]) -> str:
    attempts: Sequence[Mapping[str, Any]] = told.get("attempts", ())
    parts = [_draw_attempt(number, attempt) for number, attempt in enumerate(attempts, start=1)]
    said = "".join(parts) or '<p class="empty">It was sent to no instance.</p>'
    return f'<section class="card"><h2>Attempts, with reasons</h2>{said}</section>'


def _draw_attempt(number: int, attempt: Mapping[str, Any]) -> str:
    decisions = "".join(_draw_decision(each) for each in attempt.get("decisions", ()))
    begun, ended = attempt.get("began_ms"), attempt.get("ended_ms")
    times = ""
    if begun is not None and ended is not None:
        words = f"from {format_seconds(float(begun) / 1e3)} to {format_seconds(float(ended) / 1e3)} after arrival"
        times = f' <span class="note">{words}</span>'
    outcome = escape(str(attempt.get("ended", "")))
    return f'<div class="attempt"><h3>{number}. {outcome}{times}</h3>{decisions}</div>'


def _draw_decision(decision: Mapping[str, Any]) -> str:
    told = dict(decision.get("reasons") or {})
    if (expected := decision.get("predicted_cached_tokens")) is not None:
        told["cached tokens expected"] = expected
    reasons = "".join(
        f"<li>{escape(str(name).replace('_', ' '))} <b>{escape(_format_reason(value))}</b></li>"
        for name, value in told.items()
    )
    name = escape(str(decision.get("instance", "")))
    return f'<div><span class="name-line">{name}</span><ul class="reasons">{reasons}</ul></div>'


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
