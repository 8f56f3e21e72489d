"""The view "Pool": capacity, masters, evicted blocks, and the blocks that instances look up, load and save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from nicegui import ui

from kvcommon.formats import format_bytes
from router.console.dashboard.figures import MasterFigures
from router.console.dashboard.history import MasterReport, Moment
from router.console.dashboard.views.charts import Series, put_chart
from router.console.dashboard.views.frame import Context, View
from router.console.dashboard.views.parts import Banner, draw_table, put_head, put_html, put_text, put_tiles
from router.console.dashboard.views.style import COLOURS
from router.console.dashboard.words import format_count, format_share, make_sentence

__all__ = ["POOL"]

MIB, GIB = 1024.0**2, 1024.0**3
# For each part of a chart: its title, the name of its counter, and its colour.
_OUTCOMES = (("Found", "ok", "pool"), ("Not found", "absent", "computed"), ("No answer", "failed", "bad"))
_WAYS = (("Read", "get", "pool"), ("Written", "put", "accent"))


class _PoolView:
    """The view "Pool" in one browser."""

    def __init__(self, context: Context) -> None:
        self._context = context
        with put_head("Pool", "Memory that all instances share: each can read blocks that another one has computed."):
            context.put_span_choice()
        self._banner = Banner()
        self._tiles = put_tiles("Used", "Capacity", "Blocks", "Clients with memory", "Evicted")
        with ui.element("div").classes("grid"):
            self._room = put_chart("Memory", "GiB")
            self._blocks = put_chart("Blocks", "blocks", is_whole=True)
            text = "Blocks of prompts that instances looked up, by result."
            self._found = put_chart("Looked up by instances", "blocks/s", "bars", text)
            self._moved = put_chart("Moved", "MiB/s", "bars", "Between instances and the pool.")
        with ui.element("section").classes("card"):
            put_text("h2", "Masters")
            self._masters = put_html("")
        with ui.element("section").classes("card"):
            put_text("h2", "Memory by client")
            self._segments = put_html("")
            text = "Masters do not report the models of blocks. The command kvstore stats counts blocks by model."
            put_text("p", text, "note")
        context.refreshers.append(self.refresh)

    def refresh(self) -> None:
        """Show the values of the last poll."""
        last = self._context.history.last
        serving = _find_serving(last)
        _show_trouble(self._banner, last, len(self._context.site.collector.pools))
        if serving is not None:
            self._show_tiles(serving)
        self._draw_room()
        self._draw_traffic()
        self._masters.show(_draw_masters(last.masters if last else ()))
        self._segments.show(_draw_segments(serving))

    def _show_tiles(self, serving: MasterFigures) -> None:
        history, span = self._context.history, self._context.span
        share = serving.used / serving.capacity if serving.capacity else 0.0
        evicted = history.count_span(span, _read_evicted).get("evicted", 0.0)
        for name, content in (
            ("Used", f"{format_bytes(serving.used)} <small>{format_share(share)}</small>"),
            ("Capacity", format_bytes(serving.capacity)),
            ("Blocks", format_count(serving.keys)),
            ("Clients with memory", format_count(serving.clients)),
            ("Evicted", f"{format_count(evicted)} <small>blocks, last {escape(span.title)}</small>"),
        ):
            self._tiles[name].show(content)

    def _draw_room(self) -> None:
        history, span = self._context.history, self._context.span
        capacity = history.average_pieces(span, _read_serving(lambda each: each.capacity / GIB))
        used = history.average_pieces(span, _read_serving(lambda each: each.used / GIB))
        keys = history.average_pieces(span, _read_serving(lambda each: each.keys))
        in_all = Series("Capacity", COLOURS["muted"], capacity, is_dashed=True)
        self._room.draw(history, span, [in_all, Series("Used", COLOURS["pool"], used)])
        self._blocks.draw(history, span, [Series("Blocks", COLOURS["pool"], keys)])

    def _draw_traffic(self) -> None:
        """Draw the blocks that instances look up in the pool, and the bytes that they read and write."""
        span, history = self._context.span, self._context.history
        for chart, pieces, unit, parts in (
            (self._found, history.count_pieces(span, _read_look_ups), 1.0, _OUTCOMES),
            (self._moved, history.count_pieces(span, _read_bytes), MIB, _WAYS),
        ):
            each_second = unit * span.piece_seconds
            chart.draw(
                history,
                span,
                [
                    Series(name, COLOURS[colour], [piece.get(part, 0.0) / each_second for piece in pieces])
                    for name, part, colour in parts
                ],
            )


def _show_trouble(banner: Banner, last: Moment | None, number: int) -> None:
    if not number:
        text = "No master of the pool is configured: start the dashboard with --pool HOST:PORT"
        banner.show("plain", f"{text}, the metrics port of a mooncake_master.")
    elif last is not None and not any(each.figures for each in last.masters):
        text = make_sentence("The pool is unreachable: " + "; ".join(each.trouble for each in last.masters))
        banner.show("bad", f"{text} Instances continue without it, and compute what they have not cached.")
    elif last is not None and _find_serving(last) is None:
        banner.show("warn", "No master of the pool serves at the moment: one is being elected.")
    elif last is not None and any(each.trouble for each in last.masters):
        troubles = "; ".join(each.trouble for each in last.masters if each.trouble)
        banner.show("warn", make_sentence(f"A master is unreachable: {troubles}"))
    else:
        banner.hide()


def _draw_masters(masters: tuple[MasterReport, ...]) -> str:
    rows = []
    for each in masters:
        if each.figures is None:
            dot, role, text = "bad", "unreachable", each.trouble
        else:
            dot = "good" if each.figures.serves or each.figures.role == "standby" else "warn"
            role = each.figures.role
            text = f"follows {each.figures.leader}" if each.figures.leader and each.figures.role != "leader" else ""
            text = text or ("serves" if each.figures.serves else "does not serve")
        rows.append(
            [
                f'<span class="state"><span class="dot {dot}"></span>{escape(each.address)}</span>',
                escape(role),
                escape(text),
            ]
        )
    if not rows:
        return '<div class="empty">No master is configured.</div>'
    return draw_table(["Master", "Role", "State"], rows)


def _draw_segments(serving: MasterFigures | None) -> str:
    if serving is None or not serving.segments:
        return '<div class="empty">No client with memory is known.</div>'
    rows = []
    for each in serving.segments:
        share = each.used / each.capacity if each.capacity else 0.0
        bar = (
            f'<div class="parts thin" role="img" aria-label="{format_share(share)} used">'
            f'<i class="pool" style="width:{share * 100:.1f}%"></i></div>'
        )
        rows.append([escape(each.name), bar, format_share(share), format_bytes(each.used), format_bytes(each.capacity)])
    return draw_table(["Client", "Fill level", "Share", "Used", "Capacity"], rows, numbers=(2, 3, 4))


def _find_serving(moment: Moment | None) -> MasterFigures | None:
    figures = [each.figures for each in moment.masters if each.figures] if moment else []
    return next((each for each in figures if each.serves and each.role != "standby"), None)


def _read_evicted(moment: Moment) -> Mapping[str, Mapping[str, float]]:
    return {each.address: {"evicted": each.figures.evicted} for each in moment.masters if each.figures}


def _read_look_ups(moment: Moment) -> Mapping[str, Mapping[str, float]]:
    return {key: each.figures.looked_up for key, each in moment.instances.items() if each.figures}


def _read_bytes(moment: Moment) -> Mapping[str, Mapping[str, float]]:
    return {key: each.figures.moved_bytes for key, each in moment.instances.items() if each.figures}


def _read_serving(read: Callable[[MasterFigures], float]) -> Callable[[Moment], float | None]:
    """Return a function that reads a metric of the leading master from a poll, for the methods of ``History``."""

    def read_figure(moment: Moment) -> float | None:
        serving = _find_serving(moment)
        return None if serving is None else read(serving)

    return read_figure


POOL = View("/pool", "Pool", "Pool", _PoolView)
