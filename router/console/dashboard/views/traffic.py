"""Traffic: requests, how long they take, who waits, and errors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from html import escape
from typing import TypeVar

from nicegui import ui

from router.console.dashboard.figures import RouterFigures
from router.console.dashboard.history import Moment, estimate_quantile, sum_answers
from router.console.dashboard.views.charts import Series, put_chart
from router.console.dashboard.views.frame import Context, View
from router.console.dashboard.views.look import COLOURS, LINE_COLOURS
from router.console.dashboard.views.parts import draw_table, put_html, put_text, put_tiles
from router.console.dashboard.words import NOTHING, format_count, format_rate, format_seconds

__all__ = ["TRAFFIC"]

K = TypeVar("K", bound=Hashable)

QUANTILES = (("Median", 0.5), ("95 of 100", 0.95), ("99 of 100", 0.99))
_ENDS = (
    ("answered", "Answered", LINE_COLOURS[1]),
    ("refused", "Refused (4xx)", COLOURS["warn"]),
    ("left", "Client left", COLOURS["muted"]),
    ("failed", "Failed (5xx)", COLOURS["bad"]),
)


def _build(context: Context) -> None:
    history = context.site.collector.history
    with ui.element("div").classes("head"):
        with ui.element("div"):
            put_text("h1", "Traffic")
            put_text("p", "What clients ask of the router, and how long they wait.", "lead")
        context.choose_span()
    tiles = put_tiles(
        "Requests a second",
        "First token, median",
        "Further tokens, median",
        "Running now",
        "Waiting now",
        "Failed",
    )
    with ui.element("div").classes("grid"):
        requests = put_chart("Requests a second", "requests/s", "bars")
        waiting = put_chart("Requests at once", "requests", is_whole=True)
        first = put_chart(
            "Time to the first token",
            "ms",
            note="Of streams; 95 of 100: so many had their first token within this time.",
        )
        later = put_chart("Time for each further token", "ms", note="Of streams: the mean time between tokens.")
    with ui.element("section").classes("card"):
        put_text("h2", "What went wrong")
        errors = put_html("")

    def refresh() -> None:
        span, last = context.span, history.last
        answers = [sum_answers(each) for each in history.count_pieces(span, _read(lambda router: router.answers))]
        labels = span.label_pieces()
        requests.show(
            labels,
            [Series(name, colour, [each[end] / span.piece_seconds for each in answers]) for end, name, colour in _ENDS],
        )
        waiting.show(
            labels,
            [
                Series(
                    "Being served", LINE_COLOURS[1], history.average_pieces(span, _now(lambda router: router.running))
                ),
                Series(
                    "Waiting in line",
                    COLOURS["warn"],
                    history.average_pieces(span, _now(lambda router: router.queued)),
                    is_dashed=True,
                ),
            ],
        )
        for chart, read in (
            (first, _read(lambda router: router.first_token)),
            (later, _read(lambda router: router.output_token)),
        ):
            pieces = history.count_pieces(span, read)
            chart.show(
                labels,
                [
                    Series(name, colour, [_to_ms(estimate_quantile(quantile, each)) for each in pieces])
                    for (name, quantile), colour in zip(QUANTILES, LINE_COLOURS, strict=True)
                ],
            )
        total = sum_answers(history.count_span(span, _read(lambda router: router.answers)))
        length = min(span.seconds, last.time - history.list_moments(span.seconds)[0].time) if last else 0.0
        tiles["Requests a second"].show(format_rate(sum(total.values()) / length if length > 0 else 0.0))
        for tile, read in (
            ("First token, median", _read(lambda router: router.first_token)),
            ("Further tokens, median", _read(lambda router: router.output_token)),
        ):
            tiles[tile].show(format_seconds(estimate_quantile(0.5, history.count_span(span, read))))
        router = last.router if last else None
        tiles["Running now"].show(format_count(router.running) if router else NOTHING)
        tiles["Waiting now"].show(format_count(router.queued) if router else NOTHING)
        tiles["Failed"].show(f"{format_count(total['failed'])} <small>of {format_count(sum(total.values()))}</small>")
        errors.show(_draw_errors(context, total))

    context.refreshers.append(refresh)


def _draw_errors(context: Context, total: Mapping[str, float]) -> str:
    history, span = context.site.collector.history, context.span
    statuses = history.count_span(span, _read(lambda router: router.answers))
    retries = history.count_span(span, _read(lambda router: router.retries))
    resumed = history.count_span(span, _read(lambda router: router.resumptions))
    rows = [
        ["Answers", f"status {escape(status)}", format_count(count)]
        for status, count in sorted(statuses.items())
        if count and not status.startswith(("2", "3"))
    ]
    for name, counts in (
        ("Attempts failed, and made good elsewhere", retries),
        ("Streams broken off, and taken over elsewhere", resumed),
    ):
        rows += [[name, escape(instance), format_count(count)] for instance, count in sorted(counts.items()) if count]
    if not rows:
        said = "Nothing in this time." if sum(total.values()) else "No request has ended in this time."
        return f'<div class="empty">{said}</div>'
    return draw_table(["What", "Where", "How often"], rows, numbers=(2,))


def _read(read: Callable[[RouterFigures], Mapping[K, float]]) -> Callable[[Moment], Mapping[str, Mapping[K, float]]]:
    """The router's counters, as a ``History`` reads them."""

    def read_moment(moment: Moment) -> Mapping[str, Mapping[K, float]]:
        return {} if moment.router is None else {"router": read(moment.router)}

    return read_moment


def _now(read: Callable[[RouterFigures], float]) -> Callable[[Moment], float | None]:
    return lambda moment: None if moment.router is None else read(moment.router)


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


TRAFFIC = View("/traffic", "Traffic", "Traffic", _build)
