"""The view "Prompts": the fraction of prompt tokens that were not computed, over time and for each instance."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from html import escape
from typing import Any

from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from router.console.dashboard.figures import COMPUTED, HANDED_OVER, ORIGINS, OWN_CACHE, POOL
from router.console.dashboard.history import History, Moment, Span
from router.console.dashboard.summaries import count_origins, count_origins_by_instance, share_origins
from router.console.dashboard.views.charts import Chart, Series
from router.console.dashboard.views.frame import Context, View
from router.console.dashboard.views.parts import draw_parts, draw_table, put_head, put_html, put_text
from router.console.dashboard.views.style import COLOURS
from router.console.dashboard.words import NOTHING, ORIGIN_NAMES, ORIGIN_TEXTS, format_count, format_share

__all__ = ["PROMPTS"]

ALL = "All instances"


class _PromptsView:
    """The view "Prompts" in one browser."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._instance = ""
        """The instance in the chart over time; ``""`` for all instances."""
        lead = "Prompt tokens that are in a cache need not be computed again."
        with put_head("Where prompts come from", lead):
            context.put_span_choice()
        with ui.element("section").classes("card"):
            self._hero = put_html("")
            self._legend = put_html("", "ul").classes("legend")
        with ui.element("section").classes("card"):
            with ui.element("div").classes("card-head"):
                put_text("h2", "Over time, in tokens a second")
                self._select = ui.select({"": ALL}, value="", on_change=self._on_instance)
                self._select.props('outlined dense options-dense aria-label="Instance shown"')
            self._chart = Chart("Prompt tokens a second by origin, over time", "tokens/s", "bars")
        with ui.element("section").classes("card"):
            put_text("h2", "Instance by instance")
            self._table = put_html("")
            self._note = put_text("p", "", "note")
        context.refreshers.append(self.refresh)

    def refresh(self) -> None:
        """Show the values of the last poll."""
        history, span = self._context.history, self._context.span
        last = history.last
        tokens = history.count_span(span, count_origins)
        self._hero.show(_draw_hero(tokens, span.title, last))
        self._legend.show(_draw_legend(tokens))
        self._offer_instances(last)
        self._draw_chart()
        self._table.show(_draw_instances(history, span))
        silent = [each.listed.key for each in last.instances.values() if each.figures is None] if last else []
        text = f"No metrics of {', '.join(silent)}: they do not respond, or do not report their prompt tokens."
        self._note.set_text(text if silent else "")

    def _on_instance(self, change: ValueChangeEventArguments[Any]) -> None:
        self._instance = change.value or ""
        self.refresh()

    def _offer_instances(self, last: Moment | None) -> None:
        known = {"": ALL, **{key: key for key in (last.instances if last else ())}}
        if self._select.options != known:
            self._select.set_options(known, value=self._instance if self._instance in known else "")

    def _draw_chart(self) -> None:
        span = self._context.span
        read = partial(count_origins, instance=self._instance)
        pieces = self._context.history.count_pieces(span, read)
        self._chart.draw(
            self._context.history,
            span,
            [
                Series(
                    ORIGIN_NAMES[origin],
                    COLOURS[origin],
                    [each.get(origin, 0.0) / span.piece_seconds for each in pieces],
                )
                for origin in ORIGINS
                if origin != HANDED_OVER or self._instance
            ],
        )


def _draw_hero(tokens: Mapping[str, float], title: str, last: Moment | None) -> str:
    shares = share_origins(tokens, with_handed_over=False)
    if not shares:
        text = "No prompt has been answered in this time. "
        text += "Ask something under <a href='/try'>Try it</a>, and it appears here."
        if last is not None and not last.trouble and not last.instances:
            text = "The router has no instances yet. They appear here when they have registered."
        return f'<div class="empty">{text}</div>'
    saved = 1 - shares[COMPUTED]
    total = sum(tokens.get(origin, 0.0) for origin in shares)
    found = f"{format_count(total - tokens.get(COMPUTED, 0.0))} of {format_count(total)}"
    return (
        f'<div class="hero"><div class="headline">{format_share(saved)}</div>'
        f'<div class="said">of prompt tokens needed no computing in the last {escape(title)}: {found} '
        f"were in a cache.</div></div>{draw_parts(shares)}"
    )


def _draw_legend(tokens: Mapping[str, float]) -> str:
    shares = share_origins(tokens, with_handed_over=False)
    entries = []
    for origin in (OWN_CACHE, POOL, COMPUTED, HANDED_OVER):
        count = f"{format_count(tokens.get(origin, 0.0))} tokens"
        share = f"<b>{format_share(shares[origin])}</b> " if origin in shares else ""
        addition = ", not in the total" if origin == HANDED_OVER else ""
        entries.append(
            f'<li><span class="swatch {origin}"></span><span class="name">{ORIGIN_NAMES[origin]}</span>'
            f'<span class="figure">{share}<small>{count}{addition}</small></span>'
            f'<span class="note">{ORIGIN_TEXTS[origin]}</span></li>'
        )
    return "".join(entries)


def _draw_instances(history: History, span: Span) -> str:
    rows = []
    by_instance = count_origins_by_instance(history, span)
    for key, report in (history.last.instances if history.last else {}).items():
        tokens = by_instance.get(key, {})
        shares = share_origins(tokens, with_handed_over=True)
        cells = [format_count(tokens.get(origin, 0.0)) if tokens else NOTHING for origin in ORIGINS]
        rows.append(
            [
                f'<span class="name-line">{escape(key)}</span>',
                escape(report.listed.role),
                draw_parts(shares, is_thin=True),
                *cells,
            ]
        )
    if not rows:
        return '<div class="empty">No instances.</div>'
    heads = ["Instance", "Role", "Its prompts", *(f"{ORIGIN_NAMES[origin]}" for origin in ORIGINS)]
    return draw_table(heads, rows, numbers=(3, 4, 5, 6)) + '<p class="note">In tokens.</p>'


PROMPTS = View("/", "Prompts", "Where prompts come from", _PromptsView)
