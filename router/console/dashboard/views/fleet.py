"""The fleet: instances by role with their state and load, and the operator's commands for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from html import escape
from typing import Any

from nicegui import ui

from router.console.client import ROLES, RouterError
from router.console.dashboard.figures import describe_loss
from router.console.dashboard.history import InstanceReport, Moment
from router.console.dashboard.views.frame import Context, View
from router.console.dashboard.views.parts import Banner, put_button, put_head, put_html, put_text, put_tiles
from router.console.dashboard.words import NOTHING, describe_trouble, format_count, format_share, make_sentence

__all__ = ["FLEET"]

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
    """The view in one browser."""

    def __init__(self, context: Context) -> None:
        self._collector = context.site.collector
        put_head("Fleet", "The instances that serve requests, and what each of them does now.")
        self._banner = Banner()
        self._tiles = put_tiles("Instances", "Ready for requests", "Requests running", "Trouble")
        self._groups = {role: _Group(context, role) for role in ROLES}
        self._empty = put_html("").classes("card")
        context.refreshers.append(self.refresh)

    def refresh(self) -> None:
        """Show the present values."""
        last = self._collector.history.last
        if last is None:
            return
        reports = list(last.instances.values())
        if last.listing_trouble:
            said = make_sentence(last.listing_trouble)
            self._banner.show("warn", f"{said} Until then only loads are known, and no orders are taken.")
        else:
            self._banner.hide()
        for role, group in self._groups.items():
            group.place_rows([report for report in reports if report.listed.role == role], last)
        self._say_if_empty(bool(reports or last.trouble))
        self._count_instances(reports, is_known=not last.listing_trouble and not last.trouble)

    def _say_if_empty(self, is_any_known: bool) -> None:
        if is_any_known:
            self._empty.classes(add="hidden")
            return
        self._empty.classes(remove="hidden")
        address = escape(self._collector.router.url.partition("://")[2])
        self._empty.show(
            '<div class="empty">The router has no instances. Start one with '
            f"<code>--router {address}</code>, and it shows here.</div>"
        )

    def _count_instances(self, reports: Sequence[InstanceReport], *, is_known: bool) -> None:
        ready = sum(_is_ready(report) for report in reports)
        running = sum(report.listed.running for report in reports if report.listed.role != "prefill")
        self._tiles["Instances"].show(format_count(len(reports)))
        self._tiles["Ready for requests"].show(format_count(ready) if is_known else NOTHING)
        self._tiles["Requests running"].show(format_count(running))
        self._tiles["Trouble"].show(format_count(sum(bool(describe_trouble(report)) for report in reports)))


class _Group:
    """The instances of one role."""

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

    def place_rows(self, reports: list[InstanceReport], moment: Moment) -> None:
        """Show exactly these instances."""
        self._card.classes(remove="hidden") if reports else self._card.classes(add="hidden")
        keys = {report.listed.key for report in reports}
        for gone in self._rows.keys() - keys:
            self._rows.pop(gone).delete()
        for report in reports:
            key = report.listed.key
            if key not in self._rows:
                with self._list:
                    self._rows[key] = _Row(self._context, key)
            self._rows[key].show_report(report, is_open=not moment.listing_trouble and not moment.trouble)


class _Row:
    """One instance. Its elements are reused, so that a button keeps the keyboard focus."""

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

    def delete(self) -> None:
        """Remove it from the page."""
        self._row.delete()

    def show_report(self, report: InstanceReport, *, is_open: bool) -> None:
        """Show its present state. Enable the command buttons if ``is_open``."""
        listed, figures = report.listed, report.figures
        colour, state = _STATES.get(listed.state, ("bad", listed.state))
        self._dot.classes(replace=f"dot {colour}")
        self._state.set_text(state)
        about = [listed.engine if listed.engine != "fastdeploy" else "", ", ".join(map(_shorten_model, listed.models))]
        if figures is not None and figures.pool_open is not None:
            about.append("in the pool" if figures.pool_open else "not in the pool")
        self._about.set_text(" · ".join(filter(None, about)))
        waiting = None if figures is None else figures.waiting
        used = None if figures is None else figures.memory_used
        self._figures["Running"].set_text(format_count(listed.running))
        self._figures["Waiting"].set_text(NOTHING if waiting is None else format_count(waiting))
        self._figures["Memory used"].set_text(NOTHING if used is None else format_share(used))
        self._figures["Weight"].set_text(NOTHING if listed.weight is None else f"{listed.weight:.2g}")
        self._weight = 1.0 if listed.weight is None else listed.weight
        is_out = listed.state in ("draining", "paused")
        self._stop.set_visibility(not is_out)
        self._go.set_visibility(is_out)
        for button in (self._stop, self._go, self._weigh):
            button.set_enabled(is_open)
        trouble = describe_trouble(report)
        self._trouble.set_text(trouble)
        self._trouble.classes(remove="hidden") if trouble else self._trouble.classes(add="hidden")

    def _ask_to_drain(self) -> None:
        said = "It takes no new requests from then on; those it runs go on to their end."
        last = self._context.site.collector.history.last
        listed = [report.listed for report in last.instances.values()] if last else []
        if loss := describe_loss(listed, [self._key]):
            said += f" After that {loss}."
        self._confirm(f"Drain {self._key}?", said, "Drain", partial(self._order, "drain"), kind="danger")

    def _ask_to_resume(self) -> None:
        said = "It gets its share of new requests again."
        self._confirm(f"Let {self._key} take requests again?", said, "Resume", partial(self._order, "resume"))

    def _ask_for_weight(self) -> None:
        with ui.dialog() as dialog, ui.element("div").classes("dialog"):
            put_text("h2", f"Weight of {self._key}")
            put_text(
                "p",
                "The part of its share that it gets: 1 is all of it, 0 only what no other instance can take.",
                "note",
            )
            number = ui.number("Weight, 0 to 1", value=self._weight, min=0, max=1, step=0.05, format="%.2f").props(
                "outlined autofocus"
            )
            self._put_answers(dialog, "Set weight", lambda: self._order("weight", weight=number.value), "strong")
        dialog.open()

    def _confirm(
        self, question: str, said: str, verb: str, act: Callable[[], Awaitable[None]], kind: str = "strong"
    ) -> None:
        with ui.dialog() as dialog, ui.element("div").classes("dialog"):
            put_text("h2", question)
            put_text("p", said)
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
        await self._context.site.collector.look()


def _shorten_model(name: str) -> str:
    """Return the last part of a path."""
    return name.rpartition("/")[2] if name.startswith("/") else name


def _is_ready(report: InstanceReport) -> bool:
    return report.listed.state == "healthy" and report.listed.breaker != "open"


FLEET = View("/fleet", "Fleet", "Fleet", _FleetView)
