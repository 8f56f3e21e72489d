"""The view "Fleet": instances by role with their state and load, and operator commands for them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from html import escape
from itertools import islice
from typing import Any

from nicegui import ui

from router.console.client import ROLES, RouterError
from router.console.dashboard.events import Event
from router.console.dashboard.figures import COMPUTED, ORIGINS, describe_loss
from router.console.dashboard.history import History, InstanceReport, Moment, Span
from router.console.dashboard.summaries import count_work
from router.console.dashboard.views.charts import Trend, draw_trend
from router.console.dashboard.views.frame import Context, View
from router.console.dashboard.views.parts import Banner, draw_table, put_button, put_head, put_html, put_text, put_tiles
from router.console.dashboard.words import (
    NOTHING,
    describe_trouble,
    format_count,
    format_rate,
    format_seconds,
    format_share,
    make_sentence,
)

__all__ = ["FLEET"]

LISTED_EVENTS = 50
# Interval for drawing the small lines, because they take long: half a second for 64 instances.
REDRAW_SECONDS = 5.0
_ROLE_NAMES = {"mixed": "Prefill and decode in one", "prefill": "Prefill", "decode": "Decode"}
_ROLE_TEXTS = {
    "mixed": "compute requests from the prompt to the last token",
    "prefill": "compute prompts, and transfer their KV",
    "decode": "receive the KV of prompts, and generate the answers",
}
_STATES = {
    "healthy": ("good", "Healthy"),
    "paused": ("warn", "Paused"),
    "draining": ("warn", "Draining"),
    "unhealthy": ("bad", "Unreachable"),
    "": ("", "Unknown"),
}


class _FleetView:
    """The view "Fleet" in one browser."""

    def __init__(self, context: Context) -> None:
        self._collector = context.site.collector
        self._context = context
        with put_head("Fleet", "The instances that serve requests, with their state and load."):
            context.put_span_choice()
        self._trends: dict[str, str] = {}
        self._trends_basis: object = None
        self._banner = Banner()
        self._tiles = put_tiles("Instances", "Ready for requests", "Requests running", "Trouble")
        self._groups = {role: _Group(context, role) for role in ROLES}
        self._empty = put_html("").classes("card")
        with ui.element("section").classes("card"):
            put_text("h2", "Events")
            self._events = put_html("")
        context.refreshers.append(self.refresh)

    def refresh(self) -> None:
        """Show the values of the last poll."""
        last = self._collector.history.last
        if last is None:
            return
        reports = list(last.instances.values())
        if last.listing_trouble:
            text = "Without the token, only loads are known, and operator commands are disabled."
            self._banner.show("warn", f"{make_sentence(last.listing_trouble)} {text}")
        else:
            self._banner.hide()
        self._draw_trends(reports, last)
        for role, group in self._groups.items():
            group.place_rows([report for report in reports if report.listed.role == role], last, self._trends)
        self._events.show(_draw_events(self._collector.events))
        self._show_if_empty(bool(reports or last.trouble))
        self._count_instances(reports, is_known=not last.listing_trouble and not last.trouble)

    def _draw_trends(self, reports: Sequence[InstanceReport], last: Moment) -> None:
        span = self._context.span
        basis = (span, tuple(last.instances), last.time // REDRAW_SECONDS)
        if basis != self._trends_basis:
            self._trends_basis = basis
            self._trends = draw_trends(self._collector.history, span, reports)

    def _show_if_empty(self, is_any_known: bool) -> None:
        if is_any_known:
            self._empty.classes(add="hidden")
            return
        self._empty.classes(remove="hidden")
        address = escape(self._collector.router.url.partition("://")[2])
        self._empty.show(
            '<div class="empty">The router has no instances. Start one with '
            f"<code>--router {address}</code>, and it appears here.</div>"
        )

    def _count_instances(self, reports: Sequence[InstanceReport], *, is_known: bool) -> None:
        ready = sum(_is_ready(report) for report in reports)
        running = sum(report.listed.running for report in reports if report.listed.role != "prefill")
        self._tiles["Instances"].show(format_count(len(reports)))
        self._tiles["Ready for requests"].show(format_count(ready if is_known else None))
        self._tiles["Requests running"].show(format_count(running))
        self._tiles["Trouble"].show(format_count(sum(bool(describe_trouble(report)) for report in reports)))


class _Group:
    """The card with the instances of one role."""

    def __init__(self, context: Context, role: str) -> None:
        self._context = context
        self._rows: dict[str, _Row] = {}
        with ui.element("section").classes("card hidden") as self._card:
            with ui.element("div").classes("card-head"):
                put_text("h2", _ROLE_NAMES[role])
                put_text("span", _ROLE_TEXTS[role], "note")
            with ui.element("div").classes("instances"):
                with ui.element("div").classes("instance title").props('aria-hidden="true"'):
                    for name, classes in (
                        ("Instance", ""),
                        ("State", ""),
                        ("Running", "figure"),
                        ("Waiting", "figure"),
                        ("Memory used", "figure"),
                        ("Weight", "figure"),
                    ):
                        put_text("span", name, classes)
                    put_text("span", "", "buttons")
                self._list = ui.element("ul")

    def place_rows(self, reports: list[InstanceReport], moment: Moment, trends: Mapping[str, str]) -> None:
        """Show the instances in ``reports``, with their values over time, and remove all other instances."""
        self._card.classes(remove="hidden") if reports else self._card.classes(add="hidden")
        keys = {report.listed.key for report in reports}
        for gone in self._rows.keys() - keys:
            self._rows.pop(gone).delete()
        for report in reports:
            key = report.listed.key
            if key not in self._rows:
                with self._list:
                    self._rows[key] = _Row(self._context, key)
            is_open = not moment.listing_trouble and not moment.trouble
            self._rows[key].show_report(report, trends[key], is_open=is_open)


class _Row:
    """The elements for one instance. They are updated, not replaced, so that a button keeps the keyboard focus."""

    def __init__(self, context: Context, key: str) -> None:
        self._context = context
        self._key = key
        self._weight = 1.0
        with ui.element("li").classes("instance") as self._row:
            with ui.element("div").classes("who"):
                put_text("div", key, "name-line")
                self._about = put_text("div", "", "note")
            with ui.element("div").classes("state"):
                self._dot = ui.element("span").classes("dot").props('aria-hidden="true"')
                self._state = put_text("span", "")
            self._figures = {}
            for name in ("Running", "Waiting", "Memory used", "Weight"):
                with ui.element("div").classes("figure"):
                    put_text("span", name, "cell-name")
                    self._figures[name] = put_text("span", NOTHING)
            with ui.element("div").classes("buttons"):
                self._stop = put_button("Drain", self._ask_to_drain).props(f'aria-label="Drain {key}"')
                self._go = put_button("Resume", self._ask_to_resume).props(f'aria-label="Resume {key}"')
                self._weigh = put_button("Weight", self._ask_for_weight).props(f'aria-label="Weight of {key}"')
            self._trouble = put_text("div", "", "trouble hidden")
            self._trends = put_html("").classes("trends")

    def delete(self) -> None:
        """Remove the instance from the page."""
        self._row.delete()

    def show_report(self, report: InstanceReport, trends: str, *, is_open: bool) -> None:
        """Show the state of the instance, and its values over time.

        Args:
            report: what the last poll found.
            trends: HTML of the values over time.
            is_open: whether the command buttons are enabled.
        """
        listed, figures = report.listed, report.figures
        colour, state = _STATES.get(listed.state, ("bad", listed.state))
        self._dot.classes(replace=f"dot {colour}")
        self._state.set_text(state)
        about = [listed.engine if listed.engine != "fastdeploy" else "", ", ".join(map(_shorten_model, listed.models))]
        if figures is not None and figures.pool_open is not None:
            about.append("in the pool" if figures.pool_open else "not in the pool")
        self._about.set_text(" · ".join(filter(None, about)))
        self._figures["Running"].set_text(format_count(listed.running))
        self._figures["Waiting"].set_text(format_count(figures.waiting if figures else None))
        self._figures["Memory used"].set_text(format_share(figures.memory_used if figures else None))
        self._figures["Weight"].set_text(NOTHING if listed.weight is None else f"{listed.weight:.2g}")
        self._weight = 1.0 if listed.weight is None else listed.weight
        is_out = listed.state in ("draining", "paused")
        self._stop.set_visibility(not is_out)
        self._go.set_visibility(is_out)
        for button in (self._stop, self._go, self._weigh):
            button.set_enabled(is_open)
        self._trends.show(trends)
        trouble = describe_trouble(report)
        self._trouble.set_text(trouble)
        self._trouble.classes(remove="hidden") if trouble else self._trouble.classes(add="hidden")

    def _ask_to_drain(self) -> None:
        text = "The instance gets no new requests. Its running requests continue to their end."
        last = self._context.site.collector.history.last
        listed = [report.listed for report in last.instances.values()] if last else []
        if loss := describe_loss(listed, [self._key]):
            text += f" After that {loss}."
        self._confirm(f"Drain {self._key}?", text, "Drain", partial(self._order, "drain"), kind="danger")

    def _ask_to_resume(self) -> None:
        text = "The instance gets its share of new requests again."
        self._confirm(f"Let {self._key} take requests again?", text, "Resume", partial(self._order, "resume"))

    def _ask_for_weight(self) -> None:
        with ui.dialog() as dialog, ui.element("div").classes("dialog"):
            put_text("h2", f"Weight of {self._key}")
            put_text(
                "p",
                "Factor for the instance's share of the requests. With 0, it gets only requests that no other instance "
                "can serve.",
                "note",
            )
            number = ui.number("Weight, 0 to 1", value=self._weight, min=0, max=1, step=0.05, format="%.2f").props(
                "outlined autofocus"
            )
            self._put_answers(dialog, "Set weight", lambda: self._order("weight", weight=number.value), "strong")
        dialog.open()

    def _confirm(
        self, question: str, text: str, verb: str, act: Callable[[], Awaitable[None]], kind: str = "strong"
    ) -> None:
        with ui.dialog() as dialog, ui.element("div").classes("dialog"):
            put_text("h2", question)
            put_text("p", text)
            self._put_answers(dialog, verb, act, kind)
        dialog.open()

    def _put_answers(self, dialog: ui.dialog, verb: str, act: Callable[[], Awaitable[None]], kind: str) -> None:
        trouble = Banner()

        async def carry_out() -> None:
            try:
                await act()
            except RouterError as exc:
                trouble.show("bad", make_sentence(exc))
            else:
                dialog.close()

        with ui.element("div").classes("row-end"):
            put_button("Cancel", dialog.close)
            put_button(verb, carry_out, kind)
        dialog.on("hide", dialog.delete)

    async def _order(self, order: str, **members: Any) -> None:
        await self._context.site.collector.router.give_order(order, self._key, **members)
        await self._context.site.collector.poll()


def draw_trends(history: History, span: Span, reports: Sequence[InstanceReport]) -> dict[str, str]:
    """Return the HTML of small charts by instance; ``""`` for an instance whose metrics are not known."""
    pieces, unknown = history.count_pieces(span, count_work), history.count_unknown_pieces(span)
    drawn = {}
    for report in reports:
        if report.figures is None:
            drawn[report.listed.key] = ""
            continue
        trends = _find_trends(history, span, pieces, report)
        drawn[report.listed.key] = "".join(draw_trend(trend, unknown) for trend in trends)
    return drawn


def _find_trends(
    history: History, span: Span, pieces: Sequence[Mapping[tuple[str, str], float]], report: InstanceReport
) -> list[Trend]:
    key = report.listed.key

    def read(name: str) -> list[float]:
        return [piece.get((key, name), 0.0) for piece in pieces]

    def read_memory(moment: Moment) -> float | None:
        found = moment.instances.get(key)
        return found.figures.memory_used if found and found.figures else None

    prompts, computed = [sum(found) for found in zip(*map(read, ORIGINS), strict=True)], read(COMPUTED)
    hits = [prompt - each for prompt, each in zip(prompts, computed, strict=True)]
    # A prefill instance generates hardly any tokens.
    is_prefill = report.listed.role == "prefill"
    name, tokens = ("Prompt tokens/s", prompts) if is_prefill else ("Tokens/s", read("generated"))
    unknown = history.count_unknown_pieces(span)
    rates = [None if number < unknown else count / span.piece_seconds for number, count in enumerate(tokens)]
    known_seconds = (span.pieces - unknown) * span.piece_seconds
    memory = history.average_pieces(span, read_memory)
    used = [value for value in memory if value is not None]
    seconds, first_tokens = read("first_token_seconds"), read("first_tokens")
    return [
        Trend(
            "TTFT, mean", format_seconds(_divide(sum(seconds), sum(first_tokens))), _divide_all(seconds, first_tokens)
        ),
        Trend(f"{name}, mean", format_rate(sum(tokens) / known_seconds), rates),
        Trend("Hit share", format_share(_divide(sum(hits), sum(prompts))), _divide_all(hits, prompts), 1.0),
        Trend("Memory, mean", format_share(_divide(sum(used), len(used))), memory, 1.0),
    ]


def _divide(amount: float, count: float) -> float | None:
    return amount / count if count else None


def _divide_all(amounts: Sequence[float], counts: Sequence[float]) -> list[float | None]:
    return list(map(_divide, amounts, counts))


def _draw_events(events: Sequence[Event]) -> str:
    rows = [
        [
            time.strftime("%H:%M:%S", time.localtime(event.time)),
            f'<span class="state"><span class="dot {event.kind}"></span>{escape(event.subject)}</span>',
            escape(event.text),
        ]
        for event in islice(reversed(events), LISTED_EVENTS)
    ]
    if not rows:
        return '<div class="empty">Nothing has changed since the dashboard started.</div>'
    return draw_table(["Time", "Subject", "Event"], rows)


def _shorten_model(name: str) -> str:
    """Return the last part of a model name that is a path; other names are returned unchanged."""
    return name.rpartition("/")[2] if name.startswith("/") else name


def _is_ready(report: InstanceReport) -> bool:
    return report.listed.state == "healthy" and report.listed.breaker != "open"


FLEET = View("/fleet", "Fleet", "Fleet", _FleetView)
