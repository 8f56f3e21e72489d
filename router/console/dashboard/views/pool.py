"""The pool: its room, its masters, what it throws out, and what instances find in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from nicegui import ui

from router.console.dashboard.figures import MasterFigures
from router.console.dashboard.history import MasterReport, Moment
from router.console.dashboard.views.charts import Series, put_chart
from router.console.dashboard.views.frame import Context, View
from router.console.dashboard.views.look import COLOURS
from router.console.dashboard.views.parts import Banner, draw_table, put_html, put_text, put_tiles
from router.console.dashboard.words import format_bytes, format_count, format_share, make_sentence

__all__ = ["POOL"]

GIB = 1024.0**3
# Above this a master throws out blocks to make room, which is what a full cache does.
FULL_SHARE = 0.9


def _build(context: Context) -> None:
    history, addresses = context.site.collector.history, context.site.collector.pools
    with ui.element("div").classes("head"):
        with ui.element("div"):
            put_text("h1", "Pool")
            put_text(
                "p", "Memory that all instances share: what one has worked out, the others read from here.", "lead"
            )
        context.choose_span()
    banner = Banner()
    tiles = put_tiles("Used", "Room in all", "Blocks", "Clients that give memory", "Thrown out")
    with ui.element("div").classes("grid"):
        room = put_chart("Room", "GiB")
        blocks = put_chart("Blocks", "blocks", is_whole=True)
        found = put_chart(
            "Looked up by instances", "blocks/s", "bars", "Blocks that a prompt needed: whether the pool had them."
        )
        moved = put_chart("Moved", "MiB/s", "bars", "Between instances and the pool.")
    with ui.element("section").classes("card"):
        put_text("h2", "Masters")
        masters = put_html("")
    with ui.element("section").classes("card"):
        put_text("h2", "Who gives memory")
        segments = put_html("")
        put_text(
            "p",
            "Which models the blocks belong to, no master tells: the command kvstore stats counts that.",
            "note",
        )

    def refresh() -> None:
        last, span = history.last, context.span
        serving = _find_serving(last)
        _show_trouble(banner, last, len(addresses))
        labels = span.label_pieces()
        if serving is not None:
            share = serving.used / serving.capacity if serving.capacity else 0.0
            tiles["Used"].show(f"{format_bytes(serving.used)} <small>{format_share(share)}</small>")
            tiles["Room in all"].show(format_bytes(serving.capacity))
            tiles["Blocks"].show(format_count(serving.keys))
            tiles["Clients that give memory"].show(format_count(serving.clients))
            thrown = history.count_span(span, _read_masters).get("evicted_keys", 0.0)
            tiles["Thrown out"].show(f"{format_count(thrown)} <small>blocks, last {escape(span.title)}</small>")
        room.show(
            labels,
            [
                Series(
                    "Room in all",
                    COLOURS["muted"],
                    history.average_pieces(span, _now(lambda each: each.capacity / GIB)),
                    is_dashed=True,
                ),
                Series("Used", COLOURS["pool"], history.average_pieces(span, _now(lambda each: each.used / GIB))),
            ],
        )
        blocks.show(
            labels, [Series("Blocks", COLOURS["pool"], history.average_pieces(span, _now(lambda each: each.keys)))]
        )
        looked = history.count_pieces(span, _read_look_ups)
        found.show(
            labels,
            [
                Series(name, COLOURS[colour], [each.get(status, 0.0) / span.piece_seconds for each in looked])
                for name, status, colour in (
                    ("Found", "ok", "pool"),
                    ("Not there", "absent", "computed"),
                    ("No answer", "failed", "bad"),
                )
            ],
        )
        traffic = history.count_pieces(span, _read_bytes)
        moved.show(
            labels,
            [
                Series(name, COLOURS[colour], [each.get(way, 0.0) / 2**20 / span.piece_seconds for each in traffic])
                for name, way, colour in (("Read", "get", "pool"), ("Written", "put", "accent"))
            ],
        )
        masters.show(_draw_masters(last.masters if last else ()))
        segments.show(_draw_segments(serving))

    context.refreshers.append(refresh)


def _show_trouble(banner: Banner, last: Moment | None, number: int) -> None:
    if not number:
        said = "No master of the pool was named: start the dashboard with --pool HOST:PORT"
        banner.show("plain", f"{said}, the metrics port of a mooncake_master.")
    elif last is not None and not any(each.figures for each in last.masters):
        said = make_sentence("The pool is away: " + "; ".join(each.trouble for each in last.masters))
        banner.show("bad", f"{said} Instances go on without it, and compute what they do not have.")
    elif last is not None and _find_serving(last) is None:
        banner.show("warn", "No master of the pool serves at the moment: one is being elected.")
    elif last is not None and any(each.trouble for each in last.masters):
        troubles = "; ".join(each.trouble for each in last.masters if each.trouble)
        banner.show("warn", make_sentence(f"A master is away: {troubles}"))
    else:
        banner.hide()


def _draw_masters(masters: tuple[MasterReport, ...]) -> str:
    rows = []
    for each in masters:
        if each.figures is None:
            dot, role, said = "bad", "away", each.trouble
        else:
            dot = "good" if each.figures.serves or each.figures.role == "standby" else "warn"
            role = {"leader": "leads", "standby": "stands by"}.get(each.figures.role, each.figures.role)
            said = f"follows {each.figures.leader}" if each.figures.leader and each.figures.role != "leader" else ""
            said = said or ("serves" if each.figures.serves else "does not serve")
        rows.append(
            [
                f'<span class="state"><span class="dot {dot}"></span>{escape(each.address)}</span>',
                escape(role),
                escape(said),
            ]
        )
    if not rows:
        return '<div class="empty">None was named.</div>'
    return draw_table(["Master", "Role", "State"], rows)


def _draw_segments(serving: MasterFigures | None) -> str:
    if serving is None or not serving.segments:
        return '<div class="empty">Nobody, as far as is known.</div>'
    rows = []
    for each in serving.segments:
        share = each.used / each.capacity if each.capacity else 0.0
        bar = (
            f'<div class="parts thin" role="img" aria-label="{format_share(share)} used">'
            f'<i class="pool" style="width:{share * 100:.1f}%"></i></div>'
        )
        rows.append([escape(each.name), bar, format_share(share), format_bytes(each.used), format_bytes(each.capacity)])
    return draw_table(["Client", "How full", "Share", "Used", "Gives"], rows, numbers=(2, 3, 4))


def _find_serving(moment: Moment | None) -> MasterFigures | None:
    figures = [each.figures for each in moment.masters if each.figures] if moment else []
    return next((each for each in figures if each.serves and each.role != "standby"), None)


def _read_masters(moment: Moment) -> Mapping[str, Mapping[str, float]]:
    return {each.address: each.figures.counters for each in moment.masters if each.figures}


def _read_look_ups(moment: Moment) -> Mapping[str, Mapping[str, float]]:
    return {key: each.figures.looked_up for key, each in moment.instances.items() if each.figures}


def _read_bytes(moment: Moment) -> Mapping[str, Mapping[str, float]]:
    return {key: each.figures.moved_bytes for key, each in moment.instances.items() if each.figures}


def _now(read: Callable[[MasterFigures], float]) -> Callable[[Moment], float | None]:
    def read_moment(moment: Moment) -> float | None:
        serving = _find_serving(moment)
        return None if serving is None else read(serving)

    return read_moment


POOL = View("/pool", "Pool", "Pool", _build)
