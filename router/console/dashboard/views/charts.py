"""Charts of values over time. ECharts draws them as SVG, so that style sheets can set their colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nicegui import ui

from router.console.dashboard.history import History, Span
from router.console.dashboard.views.parts import put_text

__all__ = ["Chart", "Series", "Trend", "draw_trend", "put_chart"]

AXIS_LINE = "rgba(128, 140, 155, 0.28)"
TREND_HEIGHT = 30
SHADE = "rgba(128, 140, 155, 0.12)"
BEFORE_START = "before the start"
_FORMAT_AXIS = "value => value >= 1000 ? (value / 1000) + ' k' : +value.toPrecision(3)"
_FORMAT_VALUE = (
    "value => value == null ? '\\u2013' : (+value).toLocaleString('en', {maximumSignificantDigits: 3}) + '%s'"
)


@dataclass(frozen=True)
class Series:
    """A line of a chart, or its bars of one colour: one value for each piece of the chart's time range."""

    name: str
    colour: str
    values: Sequence[float | None]
    is_dashed: bool = False


@dataclass(frozen=True)
class Trend:
    """A small line chart without axes: one value for each piece of its time range."""

    name: str
    text: str
    """The value for the whole time range, as text."""
    values: Sequence[float | None]
    highest: float = 0.0
    """The value that the top edge of the chart stands for; 0: the highest of ``values``."""


class Chart:
    """A chart of values over time, with stacked bars or with lines. Without values, it shows a sentence.

    Args:
        title: description for screen readers.
        unit: text after the numbers in the tooltip.
        kind: ``bars`` or ``lines``.
        is_whole: whether the axis has only whole numbers.
    """

    def __init__(self, title: str, unit: str, kind: str = "lines", *, is_whole: bool = False) -> None:
        self._unit = unit
        self._kind = kind
        self._is_whole = is_whole
        with ui.element("div").classes("chart-box"):
            self._element = ui.echart(self._make_options([], []), renderer="svg").classes("chart")
            self._element.props(f'role="img" aria-label="{escape(title)}"')
            self._empty = put_text("div", "Nothing in this time.", "chart-empty")

    def draw(self, history: History, span: Span, series: Sequence[Series]) -> None:
        """Show the values of ``series``. The pieces of the time range before the first poll are shaded."""
        made = self._make_options(span.label_pieces(), series, history.count_unknown_pieces(span))
        if made != self._element.options:
            self._element.options.clear()
            self._element.options.update(made)
            self._element.update()
        self._empty.set_visibility(_is_empty(series, self._kind))

    def _make_options(self, labels: Sequence[str], series: Sequence[Series], unknown: int = 0) -> dict[str, Any]:
        is_empty = _is_empty(series, self._kind)
        legend_text = {"color": "var(--muted)", "fontSize": 13}
        box_text = {"color": "var(--text)", "fontSize": 13}
        axis_line, names = {"lineStyle": {"color": AXIS_LINE}}, [each.name for each in series]
        axis_text = {"fontSize": 12, "showMaxLabel": True, "hideOverlap": True}
        every_fifth = f"index => ({len(labels)} - 1 - index) % {max(1, len(labels) // 5)} === 0"
        return {
            "animation": False,
            "grid": {"left": 4, "right": 8, "top": 36, "bottom": 9, "containLabel": True},
            "legend": {
                "top": 0,
                "left": 0,
                "icon": "roundRect",
                "itemWidth": 13,
                "itemHeight": 13,
                "itemGap": 18,
                "textStyle": legend_text,
                "data": names,
                "selectedMode": False,
            },
            "tooltip": {
                "trigger": "axis",
                "axisPointer": {"type": "shadow" if self._kind == "bars" else "line"},
                "backgroundColor": "var(--card)",
                "borderColor": "var(--rule)",
                "textStyle": box_text,
                "confine": True,
                ":valueFormatter": _FORMAT_VALUE % f" {self._unit}",
            },
            "xAxis": {
                "type": "category",
                "data": list(labels),
                "axisTick": {"show": False},
                "axisLine": axis_line,
                "axisLabel": {**axis_text, ":interval": every_fifth},
            },
            "yAxis": {
                "type": "value",
                "min": 0,
                "max": 1 if is_empty else None,
                "splitNumber": 4,
                "minInterval": int(self._is_whole),
                "axisLabel": {"show": not is_empty, "fontSize": 12, ":formatter": _FORMAT_AXIS},
                "splitLine": {**axis_line, "show": not is_empty},
            },
            # On a phone, the names of four series need two lines.
            "media": [{"query": {"maxWidth": 400}, "option": {"grid": {"top": 60 if len(series) > 3 else 36}}}],
            "series": [*(self._make_series(each) for each in series), _make_shade(unknown)],
        }

    def _make_series(self, series: Series) -> dict[str, Any]:
        values = [None if value is None else float(f"{value:.5g}") for value in series.values]
        common = {"name": series.name, "itemStyle": {"color": series.colour}, "emphasis": {"disabled": True}}
        if self._kind == "bars":
            return {**common, "data": values, "type": "bar", "stack": "all", "barCategoryGap": "18%"}
        around = [None, *values, None]
        # A value without neighbours would not be visible in a line, so it is shown as a point.
        points = [
            {"value": value, "symbolSize": 6 if around[number] is None and around[number + 2] is None else 0}
            for number, value in enumerate(values)
        ]
        line = {"color": series.colour, "width": 2, "type": "dashed" if series.is_dashed else "solid"}
        # Without showAllSymbol, ECharts shows only the points above labels of the axis.
        shown = {"symbol": "circle", "showAllSymbol": True}
        return {**common, "data": points, "type": "line", "lineStyle": line, **shown}


def _make_shade(unknown: int) -> dict[str, Any]:
    """Return a series without values that shades the first ``unknown`` pieces."""
    label = {"show": unknown > 20, "position": "inside", "color": "var(--muted)", "fontSize": 12}
    area = [[{"name": BEFORE_START, "xAxis": 0}, {"xAxis": unknown - 1}]] if unknown else []
    style = {"color": SHADE}
    return {
        "type": "line",
        "data": [],
        "markArea": {"silent": True, "itemStyle": style, "label": label, "data": area},
    }


def put_chart(title: str, unit: str, kind: str = "lines", note: str = "", *, is_whole: bool = False) -> Chart:
    """Put a chart into a card of its own, with its unit in the head and the sentence ``note`` below.

    Args:
        title: title of the card.
        unit: unit of the values.
        kind: ``bars`` or ``lines``.
        note: a sentence; ``""``: none.
        is_whole: whether the axis has only whole numbers; the head then has no unit.
    """
    with ui.element("section").classes("card"):
        with ui.element("div").classes("card-head"):
            put_text("h2", title)
            put_text("span", "" if is_whole else f"in {unit}", "note")
        chart = Chart(f"{title}, over time", unit, kind, is_whole=is_whole)
        if note:
            put_text("p", note, "note")
    return chart


def draw_trend(trend: Trend, unknown: int) -> str:
    """Return the HTML of a small line of values over time, with its name and its value for the whole time range.

    Args:
        trend: the values.
        unknown: number of pieces before the first poll.
    """
    known = [value for value in trend.values if value is not None]
    highest = trend.highest or max(known, default=0.0) or 1.0
    runs: list[list[tuple[int, float]]] = [[]]
    for number, value in enumerate(trend.values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((number, TREND_HEIGHT * (1 - min(1.0, value / highest))))
    lines = "".join(
        f'<polyline points="{" ".join(f"{x},{y:.1f}" for x, y in [*run, (run[-1][0] + 1, run[-1][1])])}"/>'
        for run in runs
        if run
    )
    shade = f'<rect width="{unknown}" height="{TREND_HEIGHT}" fill="{SHADE}"/>' if unknown else ""
    box = f'viewBox="0 -1 {len(trend.values)} {TREND_HEIGHT + 2}" preserveAspectRatio="none"'
    words = f"{escape(trend.name)}, over time: {escape(trend.text)}"
    return (
        f'<div class="trend"><div class="note">{escape(trend.name)} <b>{escape(trend.text)}</b></div>'
        f'<svg {box} role="img" aria-label="{words}">{shade}{lines}</svg></div>'
    )


def _is_empty(series: Sequence[Series], kind: str) -> bool:
    """Return whether the chart shows nothing: it has no line, and all bars have height 0."""
    return not any(value is not None and (value or kind == "lines") for each in series for value in each.values)
