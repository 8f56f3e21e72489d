"""One request: its attempts with their reasons and times, and where its prompt came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from nicegui import ui

from router.console.client import RouterError
from router.console.dashboard.figures import COMPUTED
from router.console.dashboard.views.frame import Context, View
from router.console.dashboard.views.parts import Banner, draw_blocks, put_button, put_html, put_text
from router.console.dashboard.words import format_count, format_seconds

__all__ = ["REQUEST", "draw_request"]


def _build(context: Context) -> None:
    with ui.element("div").classes("head"), ui.element("div"):
        put_text("h1", "One request")
        put_text("p", "How a request was placed, why there, and how long each part of its way took.", "lead")
    with ui.element("form").classes("ask").on("submit.prevent", lambda: look_up()):
        field = ui.input("Id of the request", placeholder="as in the answer's header X-Request-Id, or its id").classes(
            "grow"
        )
        field.props("outlined dense autofocus").value = context.request.query_params.get("id", "")
        put_button("Look up", None, "strong").props('type="submit"')
    banner = Banner()
    found = put_html("")

    async def look_up() -> None:
        wanted = (field.value or "").strip()
        found.show("")
        if not wanted:
            banner.show("plain", "The router knows the last 10,000 requests that have ended, by their ids.")
            return
        try:
            explanation = await context.site.collector.router.explain_request(wanted)
        except RouterError as exc:
            banner.show("bad", f"{exc}.")
            return
        banner.hide()
        found.show(draw_request(explanation))
        ui.run_javascript(f"history.replaceState(null, '', '/request?id={quote(wanted, safe='')}')")

    ui.timer(0.05, look_up, once=True)


def draw_request(told: Mapping[str, Any]) -> str:
    """The page's part about one request, as ``/admin/explain`` tells it; with what other versions tell more, or less."""
    return "".join((_draw_outcome(told), _draw_origin(told), _draw_times(told), _draw_attempts(told)))


def _draw_outcome(told: Mapping[str, Any]) -> str:
    status = told.get("status")
    end = {200: "Answered", 499: "The client left before the end"}.get(status, f"Ended with status {status}")  # type: ignore[arg-type]
    if told.get("error"):
        end += f": {told['error']}"
    facts = [
        (
            "Arrived",
            None
            if told.get("time") is None
            else f'<time data-unix="{float(told["time"])}">{_format_time(told["time"])}</time>',
        ),
        ("First token after", _format_ms(told.get("first_byte_ms"))),
        ("Ended after", _format_ms(told.get("total_ms"))),
        ("Prompt", _format_tokens(told.get("prompt_tokens"))),
        ("Answer", _format_tokens(told.get("completion_tokens"))),
        ("Path", escape(str(told.get("path", "")))),
        ("Client", escape(str(told.get("client", "")))),
        ("Trace", escape(str(told.get("trace_id", "")))),
    ]
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts if value)
    colour = "good" if status == 200 else "warn" if status == 499 else "bad"
    return (
        f'<section class="card"><h2 class="state"><span class="dot {colour}"></span>{escape(end)}</h2>'
        f'<p class="note code">{escape(str(told.get("request_id", "")))}</p><dl class="facts">{listed}</dl></section>'
    )


def _draw_origin(told: Mapping[str, Any]) -> str:
    prompt, cached = told.get("prompt_tokens"), told.get("cached_tokens")
    if not prompt or cached is None:
        return ""
    own, computed = told.get("own_cached_tokens"), max(0, prompt - cached)
    if own is None:
        tokens: dict[str, float] = {"cached": cached, COMPUTED: computed}
        said = f"{format_count(cached)} of {format_count(prompt)} prompt tokens came from a cache, {format_count(computed)} were computed."
    else:
        tokens = {"own_cache": own, "pool": cached - own, COMPUTED: computed}
        said = (
            f"{format_count(own)} of {format_count(prompt)} prompt tokens came from the instance's own cache, "
            f"{format_count(cached - own)} from the pool, {format_count(computed)} were computed."
        )
    if (expected := told.get("predicted_cached_tokens")) is not None:
        said += f" The router had expected {format_count(expected)} in a cache."
    squares, size = draw_blocks(tokens)
    return (
        f'<section class="card"><h2>Where its prompt came from</h2>{squares}<p>{said}</p>'
        f'<p class="note">A square is {format_count(size)} token{"s" if size > 1 else ""}.</p></section>'
    )


def _draw_times(told: Mapping[str, Any]) -> str:
    """The legs of all attempts on one scale; without them the request's own times."""
    total = float(told.get("total_ms") or 0.0)
    legs: list[tuple[str, float, float | None, float]] = []
    for attempt in told.get("attempts", ()):
        for leg in attempt.get("legs") or ():
            sent, ended = leg.get("sent_ms"), leg.get("ended_ms")
            if sent is not None:
                name = f"{leg.get('role', '')} {leg.get('instance', '')}"
                legs.append((name, float(sent), leg.get("first_byte_ms"), float(ended if ended is not None else total)))
    note = "Dark is the time until the first byte came, light the rest."
    if not legs:
        if total <= 0:
            return ""
        legs = [("the request", 0.0, told.get("first_byte_ms") or None, total)]
        note += " This router does not tell the times of single attempts."
    end = max([total, *(leg[3] for leg in legs)]) or 1.0
    rows = "".join(_draw_leg(name, sent, first, ended, end) for name, sent, first, ended in legs)
    scale = "".join(f"<span>{format_seconds(end * step / 4e3) if step else '0'}</span>" for step in range(5))
    return (
        f'<section class="card"><h2>Its way through time</h2><div class="timeline">{rows}'
        f'<div class="leg"><span></span><div class="scale">{scale}</div><span></span></div></div><p class="note">{note}</p></section>'
    )


def _draw_leg(name: str, sent: float, first: float | None, ended: float, end: float) -> str:
    until = ended if not first else min(max(float(first), sent), ended)

    def place(begin: float, stop: float) -> str:
        return f"left:{begin / end * 100:.2f}%;width:{max(0.0, stop - begin) / end * 100:.2f}%"

    words = f"{name}: from {format_seconds(sent / 1e3)} to {format_seconds(ended / 1e3)} after arrival"
    if first:
        words += f", first byte at {format_seconds(float(first) / 1e3)}"
    return (
        f'<div class="leg"><span class="name-line">{escape(name)}</span>'
        f'<div class="track" role="img" aria-label="{escape(words)}" title="{escape(words)}">'
        f'<i class="sending" style="{place(sent, until)}"></i><i class="waiting" style="{place(until, ended)}"></i></div>'
        f'<span class="num">{format_seconds((ended - sent) / 1e3)}</span></div>'
    )


def _draw_attempts(told: Mapping[str, Any]) -> str:
    attempts: Sequence[Mapping[str, Any]] = told.get("attempts", ())
    parts = [_draw_attempt(number, attempt) for number, attempt in enumerate(attempts, start=1)]
    said = "".join(parts) or '<p class="empty">It was sent to no instance.</p>'
    return f'<section class="card"><h2>Attempts</h2>{said}</section>'


def _draw_attempt(number: int, attempt: Mapping[str, Any]) -> str:
    decisions = "".join(_draw_decision(each) for each in attempt.get("decisions", ()))
    begun = attempt.get("began_ms")
    times = (
        "" if begun is None else f' <span class="note">from {format_seconds(float(begun) / 1e3)} after arrival</span>'
    )
    return f'<div class="attempt"><h3>Attempt {number}: {escape(str(attempt.get("ended", "")))}{times}</h3>{decisions}</div>'


def _draw_decision(decision: Mapping[str, Any]) -> str:
    told = dict(decision.get("reasons") or {})
    expected = decision.get("predicted_cached_tokens")
    if expected is not None:
        told["cached tokens expected"] = expected
    reasons = "".join(
        f"<li>{escape(str(name).replace('_', ' '))}: <b>{escape(_format_reason(value))}</b></li>"
        for name, value in told.items()
    )
    return f'<div><span class="name-line">{escape(str(decision.get("instance", "")))}</span><ul class="reasons">{reasons}</ul></div>'


def _format_reason(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _format_time(unix: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(unix).astimezone().strftime("%d %b %Y, %H:%M:%S")


def _format_ms(milliseconds: float | None) -> str:
    return format_seconds(milliseconds / 1e3) if milliseconds else ""


def _format_tokens(count: int | None) -> str:
    return "" if count is None else f"{format_count(count)} tokens"


REQUEST = View("/request", "One request", "One request", _build)
