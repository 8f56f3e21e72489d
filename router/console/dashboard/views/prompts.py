"""Where prompts come from: the share of their tokens that nobody had to compute, over time and by instance."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from html import escape

from nicegui import ui

from router.console.dashboard.figures import COMPUTED, HANDED_OVER, ORIGINS, OWN_CACHE, POOL
from router.console.dashboard.history import Moment, count_origins, share_origins
from router.console.dashboard.views.charts import Chart, Series
from router.console.dashboard.views.frame import Context, View
from router.console.dashboard.views.look import COLOURS
from router.console.dashboard.views.parts import draw_parts, draw_table, put_html, put_text
from router.console.dashboard.words import NOTHING, ORIGIN_NAMES, ORIGIN_TEXTS, format_count, format_share

__all__ = ["PROMPTS"]

ALL = "All instances"


def _build(context: Context) -> None:
    history = context.site.collector.history
    chosen = {"instance": ""}
    with ui.element("div").classes("head"):
        with ui.element("div"):
            put_text("h1", "Where prompts come from")
            put_text("p", "A prompt's tokens that some cache still has need not be computed again.", "lead")
        context.choose_span()
    with ui.element("section").classes("card"):
        hero = put_html("")
        legend = put_html("", "ul").classes("legend")
    with ui.element("section").classes("card"):
        with ui.element("div").classes("card-head"):
            put_text("h2", "Over time, in tokens a second")
            select = ui.select({"": ALL}, value="", on_change=lambda e: choose(e.value)).props(
                'outlined dense options-dense aria-label="Instance shown"'
            )
        chart = Chart("Prompt tokens a second by origin, over time", "tokens/s", "bars")
    with ui.element("section").classes("card"):
        put_text("h2", "Instance by instance")
        table = put_html("")
        note = put_text("p", "", "note")

    def choose(key: str | None) -> None:
        chosen["instance"] = key or ""
        refresh()

    def refresh() -> None:
        last, span = history.last, context.span
        tokens = history.count_span(span, count_origins)
        hero.show(_draw_hero(tokens, span.title, last))
        legend.show(_draw_legend(tokens))
        known = {"": ALL, **{key: key for key in (last.instances if last else ())}}
        if select.options != known:
            select.set_options(known, value=chosen["instance"] if chosen["instance"] in known else "")
        pieces = history.count_pieces(span, partial(count_origins, instance=chosen["instance"]))
        shown = [origin for origin in ORIGINS if origin != HANDED_OVER or chosen["instance"]]
        chart.show(
            span.label_pieces(),
            [
                Series(
                    ORIGIN_NAMES[origin],
                    COLOURS[origin],
                    [each.get(origin, 0.0) / span.piece_seconds for each in pieces],
                )
                for origin in shown
            ],
        )
        table.show(_draw_instances(context, last))
        silent = [each.listed.key for each in last.instances.values() if each.figures is None] if last else []
        note.set_text(
            f"Without figures: {', '.join(silent)}. They do not answer, or are no instances that count."
            if silent
            else ""
        )

    context.refreshers.append(refresh)


def _draw_hero(tokens: Mapping[str, float], title: str, last: Moment | None) -> str:
    shares = share_origins(tokens, with_handed_over=False)
    if not shares:
        said = "No prompt has been answered in this time. "
        said += "Ask something under <a href='/try'>Try it</a>, and it shows here."
        if last is not None and not last.trouble and not last.instances:
            said = "The router has no instances yet. They show here once they have registered."
        return f'<div class="empty">{said}</div>'
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
        beside = ", beside these" if origin == HANDED_OVER else ""
        entries.append(
            f'<li><span class="swatch {origin}"></span><span class="name">{ORIGIN_NAMES[origin]}</span>'
            f'<span class="figure">{share}<small>{count}{beside}</small></span>'
            f'<span class="note">{ORIGIN_TEXTS[origin]}</span></li>'
        )
    return "".join(entries)


def _draw_instances(context: Context, last: Moment | None) -> str:
    rows = []
    for key, report in (last.instances if last else {}).items():
        tokens = context.site.collector.history.count_span(context.span, partial(count_origins, instance=key))
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


PROMPTS = View("/", "Prompts", "Where prompts come from", _build)
