"""Charts of values over time. ECharts draws them as SVG, so that style sheets set their colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nicegui import ui

from router.console.dashboard.views.parts import put_text

__all__ = ["Chart", "Series", "put_chart"]

AXIS_LINE = "rgba(128, 140, 155, 0.28)"
_FORMAT_AXIS = "value => value >= 1000 ? (value / 1000) + ' k' : +value.toPrecision(3)"
_FORMAT_VALUE = (
    "value => value == null ? '\\u2013' : (+value).toLocaleString('en', {maximumSignificantDigits: 3}) + '%s'"
)


@dataclass(frozen=True)
class Series:
    """Values of a chart, one per piece of time."""

    name: str
    colour: str
    values: Sequence[float | None]
    is_dashed: bool = False


class Chart:
    """Chart of values over time, as stacked bars or as lines; a sentence if there are no values.

    Args:
        title: description for screen readers.
        unit: text after the numbers in the tooltip.
        kind: ``bars`` or ``lines``.
        is_whole: whether the axis has whole numbers only.
    """

    def __init__(self, title: str, unit: str, kind: str = "lines", *, is_whole: bool = False) -> None:
        self._unit = unit
        self._kind = kind
        self._is_whole = is_whole
        with ui.element("div").classes("chart-box"):
            self._element = ui.echart(self._make_options([], []), renderer="svg").classes("chart")
            self._element.props(f'role="img" aria-label="{escape(title)}"')
            self._empty = put_text("div", "Nothing in this time.", "chart-empty")

    def draw(self, labels: Sequence[str], series: Sequence[Series]) -> None:
        """Show these values from now on."""
        made = self._make_options(labels, series)
        if made != self._element.options:
            self._element.options.clear()
            self._element.options.update(made)
            self._element.update()
        self._empty.set_visibility(_is_empty(series, self._kind))

    def _make_options(self, labels: Sequence[str], series: Sequence[Series]) -> dict[str, Any]:
        is_empty = _is_empty(series, self._kind)
        legend_text = {"color": "var(--muted)", "fontSize": 13}
        box_text = {"color": "var(--text)", "fontSize": 13}
        axis_line, names = {"lineStyle": {"color": AXIS_LINE}}, [each.name for each in series]
        axis_text = {"fontSize": 12, "showMaxLabel": True, "hideOverlap": True}
        every_fifth = f"index => ({len(labels)} - 1 - index) % {max(1, len(labels) // 5)} === 0"
        return {
            "animation": False,
            "grid": {"left": 4, "right": 8, "top": 36, "bottom": 4, "containLabel": True},
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
            "series": [self._make_series(each) for each in series],
        }

    def _make_series(self, series: Series) -> dict[str, Any]:
        values = [None if value is None else float(f"{value:.5g}") for value in series.values]
        common = {"name": series.name, "itemStyle": {"color": series.colour}, "emphasis": {"disabled": True}}
        if self._kind == "bars":
            return {**common, "data": values, "type": "bar", "stack": "all", "barCategoryGap": "18%"}
        around = [None, *values, None]
        # A value without neighbours draws no line, so it is shown as a point.
        points = [
            {"value": value, "symbolSize": 6 if around[number] is None and around[number + 2] is None else 0}
            for number, value in enumerate(values)
        ]
        line = {"color": series.colour, "width": 2, "type": "dashed" if series.is_dashed else "solid"}
        return {**common, "data": points, "type": "line", "lineStyle": line, "symbol": "circle"}


def put_chart(title: str, unit: str, kind: str = "lines", note: str = "", *, is_whole: bool = False) -> Chart:
    """Put a chart into its own card, with its unit, and a sentence below."""
    with ui.element("section").classes("card"):
        with ui.element("div").classes("card-head"):
            put_text("h2", title)
            put_text("span", "" if is_whole else f"in {unit}", "note")
        chart = Chart(f"{title}, over time", unit, kind, is_whole=is_whole)
        if note:
            put_text("p", note, "note")
    return chart


def _is_empty(series: Sequence[Series], kind: str) -> bool:
    """Return whether there is nothing to draw: no line, or only bars of height 0."""
    return not any(value is not None and (value or kind == "lines") for each in series for value in each.values)
