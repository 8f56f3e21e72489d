"""The view "Traffic": requests, their latencies, the queue, and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from nicegui import ui

from router.console.dashboard.figures import RouterFigures
from router.console.dashboard.history import History, Moment, Span
from router.console.dashboard.summaries import estimate_quantile, read_router, sum_answers
from router.console.dashboard.views.charts import Series, put_chart
from router.console.dashboard.views.frame import Context, View
from router.console.dashboard.views.parts import draw_table, put_head, put_html, put_text, put_tiles
from router.console.dashboard.views.style import COLOURS, LINE_COLOURS
from router.console.dashboard.words import format_count, format_rate, format_seconds

__all__ = ["TRAFFIC"]

QUANTILES = (("Median", 0.5), ("p95", 0.95), ("p99", 0.99))
_ENDS = (
    ("answered", "Answered", LINE_COLOURS[1]),
    ("refused", "Refused", COLOURS["warn"]),
    ("left", "Client left", COLOURS["muted"]),
    ("failed", "Failed", COLOURS["bad"]),
)
_ANSWERS = read_router(lambda router: router.answers)
_FIRST_TOKEN = read_router(lambda router: router.first_token)
_OUTPUT_TOKEN = read_router(lambda router: router.output_token)


class _TrafficView:
    """The view "Traffic" in one browser."""

    def __init__(self, context: Context) -> None:
        self._context = context
        with put_head("Traffic", "Requests from clients, and their latencies."):
            context.put_span_choice()
        self._tiles = put_tiles(
            *("Requests per second", "First token, median", "Further tokens, median"),
            *("Running now", "Queued now", "Failed"),
        )
        with ui.element("div").classes("grid"):
            text = "Refused: status 4xx. Client left: 499. Failed: 5xx."
            self._requests = put_chart("Requests per second", "requests/s", "bars", text)
            self._at_once = put_chart("Concurrent requests", "requests", is_whole=True)
            note = "Streams only. p95: 95 % had their first token within this time."
            self._first = put_chart("Time to the first token", "ms", note=note)
            note = "Streams only: the mean time between tokens."
            self._later = put_chart("Time for each further token", "ms", note=note)
        with ui.element("section").classes("card"):
            put_text("h2", "Errors")
            self._errors = put_html("")
        context.refreshers.append(self.refresh)

    def refresh(self) -> None:
        """Show the values of the last poll."""
        history, span = self._context.history, self._context.span
        total = sum_answers(history.count_span(span, _ANSWERS))
        self._sum_up(total)
        self._draw_requests()
        self._draw_times()
        self._errors.show(_draw_errors(history, span, total))

    def _sum_up(self, total: Mapping[str, float]) -> None:
        history, span = self._context.history, self._context.span
        last, tiles = history.last, self._tiles
        length = min(span.seconds, last.time - history.list_moments(span.seconds)[0].time) if last else 0.0
        tiles["Requests per second"].show(format_rate(sum(total.values()) / length if length > 0 else 0.0))
        for name, read in (("First token, median", _FIRST_TOKEN), ("Further tokens, median", _OUTPUT_TOKEN)):
            within = history.count_span(span, read)
            seconds, number = format_seconds(estimate_quantile(0.5, within)), max(within.values(), default=0.0)
            tiles[name].show(f"{seconds} <small>of {format_count(number)} stream{'' if number == 1 else 's'}</small>")
        router = last.router if last else None
        tiles["Running now"].show(format_count(router.running if router else None))
        tiles["Queued now"].show(format_count(router.queued if router else None))
        tiles["Failed"].show(f"{format_count(total['failed'])} <small>of {format_count(sum(total.values()))}</small>")

    def _draw_requests(self) -> None:
        history, span = self._context.history, self._context.span
        answers = [sum_answers(each) for each in history.count_pieces(span, _ANSWERS)]
        self._requests.draw(
            history,
            span,
            [Series(name, colour, [each[end] / span.piece_seconds for each in answers]) for end, name, colour in _ENDS],
        )
        served = history.average_pieces(span, _read_now(lambda router: router.running))
        queued = history.average_pieces(span, _read_now(lambda router: router.queued))
        waiting = Series("Queued", COLOURS["warn"], queued, is_dashed=True)
        self._at_once.draw(history, span, [Series("Being served", LINE_COLOURS[1], served), waiting])

    def _draw_times(self) -> None:
        history, span = self._context.history, self._context.span
        for chart, read in ((self._first, _FIRST_TOKEN), (self._later, _OUTPUT_TOKEN)):
            pieces = history.count_pieces(span, read)
            chart.draw(
                history,
                span,
                [
                    Series(name, colour, [_to_ms(estimate_quantile(quantile, each)) for each in pieces])
                    for (name, quantile), colour in zip(QUANTILES, LINE_COLOURS, strict=True)
                ],
            )


def _draw_errors(history: History, span: Span, total: Mapping[str, float]) -> str:
    statuses = history.count_span(span, _ANSWERS)
    retries = history.count_span(span, read_router(lambda router: router.retries))
    resumed = history.count_span(span, read_router(lambda router: router.resumptions))
    rows = [
        ["Answers", f'<a href="/request?show=failed">status {escape(status)}</a>', format_count(count)]
        for status, count in sorted(statuses.items())
        if count and not status.startswith(("2", "3"))
    ]
    for name, counts in (
        ("Attempts that failed before the first byte", retries),
        ("Streams interrupted, resumed elsewhere", resumed),
    ):
        rows += [[name, escape(instance), format_count(count)] for instance, count in sorted(counts.items()) if count]
    if not rows:
        text = "Nothing in this time." if sum(total.values()) else "No request has ended in this time."
        return f'<div class="empty">{text}</div>'
    return draw_table(["What", "Where", "How often"], rows, numbers=(2,))


def _read_now(read: Callable[[RouterFigures], float]) -> Callable[[Moment], float | None]:
    """Return a function that reads a metric of the router from a poll, for the methods of ``History``."""
    return lambda moment: None if moment.router is None else read(moment.router)


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


TRAFFIC = View("/traffic", "Traffic", "Traffic", _TrafficView)
