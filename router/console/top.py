"""kvrouter top: shows the state of the router and its instances in a terminal, updated every two seconds.

kvrouter top --router 10.0.0.8:9000 --token-file admin-token      # q ends it; l, t, w, m, r, s and a set the order
kvrouter top --once --sort tokens                                 # one report, for example into a pipe
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvcommon.waiting import wait_for_event
from router.console.client import RouterClient, add_interval_flag, add_router_flags
from router.console.dashboard.collector import Collector
from router.console.dashboard.figures import COMPUTED, OWN_CACHE, POOL
from router.console.dashboard.history import History, InstanceReport, Moment, Span
from router.console.dashboard.scraper import Scraper
from router.console.dashboard.summaries import (
    count_origins,
    count_origins_by_instance,
    estimate_quantile,
    read_router,
    share_origins,
    sum_answers,
)
from router.console.dashboard.words import (
    NOTHING,
    ORIGIN_NAMES,
    describe_trouble,
    format_count,
    format_rate,
    format_seconds,
    format_share,
    make_sentence,
)
from router.settings import FlagParser, SettingsError, read_authorities

__all__ = ["main", "make_parser"]

# Time range for which the increase of counters is shown. One poll interval has too few events for quantiles.
SPAN = Span("the last minute", 60.0, 60)
MIN_WIDTH, MAX_BAR = 110, 60

# Each origin has a different character, because the terminal may have no colours.
_BAR_SIGNS: Mapping[str, tuple[str, str]] = {
    OWN_CACHE: ("█", "blue"),
    POOL: ("▓", "green"),
    COMPUTED: ("░", "yellow"),
}
_STATE_COLOURS = {"healthy": "green", "paused": "yellow", "draining": "yellow", "unhealthy": "red"}
_BREAKER_COLOURS = {"half_open": "yellow", "open": "red"}


class _Order(NamedTuple):
    """A sort order of the table, by the value that ``read`` returns."""

    key: str
    read: Callable[[InstanceReport], tuple[float, float] | str]
    is_largest_first: bool = True


ORDERS: Mapping[str, _Order] = {
    "load": _Order("l", lambda report: (report.listed.running, report.listed.running_tokens)),
    "tokens": _Order("t", lambda report: (report.listed.running_tokens, report.listed.running)),
    "waiting": _Order("w", lambda report: (_read_waiting(report) or 0.0, report.listed.running)),
    "memory": _Order("m", lambda report: (_read_memory(report) or 0.0, report.listed.running)),
    "role": _Order("r", lambda report: report.listed.role, False),
    "state": _Order("s", lambda report: report.listed.state, False),
    "address": _Order("a", lambda report: report.listed.key, False),
}
"""The sort orders, by the values of ``--sort``."""


def main(argv: Sequence[str]) -> int:
    """Show the report until the user types q; with ``--once`` only once.

    Returns:
        The exit status: 0; 1 if the router does not respond to ``--once``; 2 if the flags are wrong; 130 after Ctrl-C.
    """
    try:
        flags = make_parser().parse_args(argv)
        router = RouterClient.from_flags(flags)
        verify = read_authorities(str(flags.ca_file), "--ca-file") if flags.ca_file else True
    except SettingsError as exc:
        print(f"kvrouter top: {exc}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    collector = Collector(router, Scraper(verify), [], flags.interval)
    show = _show_once if flags.once or not console.is_terminal else _keep_showing
    try:
        return asyncio.run(show(collector, console, flags.sort))
    except KeyboardInterrupt:
        return 130


def make_parser() -> FlagParser:
    """Return the parser of the flags of ``kvrouter top``."""
    parser = FlagParser(
        prog="kvrouter top", description="Shows the state of the router and its instances in a terminal."
    )
    add_interval_flag(parser)
    parser.add_argument("--sort", choices=ORDERS, default="load", help="order of the instances (default: load)")
    parser.add_argument(
        "--once",
        action="store_true",
        help="poll twice, print the report, and end; default if the output is not a terminal",
    )
    add_router_flags(parser)
    return parser


async def _show_once(collector: Collector, console: Console, order: str) -> int:
    """Print one report. This needs two polls, because the increase of counters is shown."""
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    try:
        for pause in (collector.seconds, 0.0):
            moment = await collector.poll()
            if moment.trouble:
                print(f"kvrouter top: {moment.trouble}", file=sys.stderr)
                return 1
            await asyncio.sleep(pause)
    finally:
        await collector.close()
    console.print(_draw(collector, order, console.width))
    return 0


async def _keep_showing(collector: Collector, console: Console, order: str) -> int:
    polling = asyncio.ensure_future(collector.keep_polling())
    ended = asyncio.Event()

    def draw() -> RenderableType:
        drawn = _draw(collector, order, console.width, console.height - 1)
        return Group(drawn, _draw_keys(order))

    def on_key(typed: str) -> None:
        nonlocal order
        if typed == "q":
            ended.set()
        order = next((name for name, each in ORDERS.items() if each.key == typed), order)
        live.update(draw(), refresh=True)

    try:
        with _listen_for_keys(on_key), Live(console=console, screen=True, auto_refresh=False) as live:
            shown: Moment | None = None
            while not ended.is_set():
                if shown is None or collector.history.last is not shown:
                    shown = collector.history.last
                    live.update(draw(), refresh=True)
                await wait_for_event(ended, 0.1)
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await collector.close()
    return 0


@contextlib.contextmanager
def _listen_for_keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_key`` with each typed key. If standard input is not a terminal, do nothing."""
    if not sys.stdin.isatty():
        yield
        return
    fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(fd)

    def on_input() -> None:
        typed = os.read(fd, 64)
        if not typed:  # the terminal was closed
            loop.remove_reader(fd)
        for each in typed.decode(errors="replace"):
            on_key(each)

    tty.setcbreak(fd, termios.TCSANOW)
    loop.add_reader(fd, on_input)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSANOW, before)


def _draw(collector: Collector, order: str, width: int, height: int | None = None) -> RenderableType:
    """Render the report of the last poll.

    Args:
        collector: has the results of the polls.
        order: the sort order of the table.
        width: width of the report in characters.
        height: maximum number of lines, which limits the number of instances; None for no limit.
    """
    last = collector.history.last
    if last is None:
        return Text(f"asking the router at {collector.router.url} ...")
    above = [_draw_head(collector.history, collector.router.url, last), _draw_origins(collector.history, width)]
    if last.trouble:
        above.append(Text(f"{make_sentence(last.trouble)} The next poll follows.", "bold red"))
    elif last.listing_trouble:
        above.append(Text(f"{make_sentence(last.listing_trouble)} Without the token, only loads are known.", "yellow"))
    chosen = ORDERS[order]
    reports = sorted(last.instances.values(), key=lambda report: report.listed.key)
    reports.sort(key=chosen.read, reverse=chosen.is_largest_first)
    troubles = [
        Text(f"{report.listed.key}: {make_sentence(trouble)}", "red")
        for report in reports
        if (trouble := describe_trouble(report))
    ]
    if height is not None:
        room = height - sum(len(each.wrap(Console(width=width), width)) for each in above) - 3
        troubles = troubles[: max(0, min(len(troubles), room // 3))]
        room = max(1, room - len(troubles))
        if len(reports) > room:
            hidden, reports = len(reports) - room + 1, reports[: room - 1]
            troubles.insert(0, Text(f"and {hidden} more instances, for which the terminal is too small"))
    if not last.instances:
        return Group(*above, Text("\nno instances"))
    return Group(*above, Text(), _draw_instances(collector.history, reports, order, width), *troubles)


def _draw_head(history: History, url: str, last: Moment) -> Text:
    """Render the metrics of the router, in two lines."""
    answers = sum_answers(history.count_span(SPAN, read_router(lambda router: router.answers)))
    first = history.count_span(SPAN, read_router(lambda router: router.first_token))
    later = history.count_span(SPAN, read_router(lambda router: router.output_token))
    seconds = min(SPAN.seconds, last.time - history.list_moments(SPAN.seconds)[0].time)
    total = sum(answers.values())
    head = Text()
    head.append(url.partition("://")[2], "bold")
    head.append(f"  {format_rate(total / seconds) if seconds > 0 else NOTHING} requests/s")
    if last.router is not None:
        head.append(f"  running {format_count(last.router.running)}")
        head.append(f"  queued {format_count(last.router.queued)}", "yellow" if last.router.queued else "")
    head.append(f"  failed {format_count(answers['failed'])}", "bold red" if answers["failed"] else "")
    head.append(f"  refused {format_count(answers['refused'])}", "yellow" if answers["refused"] else "")
    head.append(f"  of {format_count(total)} in {format_seconds(seconds)}\n")
    for name, counts in (("first token", first), ("each further token", later)):
        if not sum(counts.values()):
            head.append(f"{name}: no streams  ")
            continue
        quantiles = " / ".join(format_seconds(estimate_quantile(quantile, counts)) for quantile in (0.5, 0.99))
        head.append(f"{name} p50/p99 {quantiles}  ")
    head.rstrip()
    return head


def _draw_origins(history: History, width: int) -> Text:
    """Render a bar that shows where prompt tokens came from: an own cache, the pool, or computation."""
    shares = share_origins(history.count_span(SPAN, count_origins), with_handed_over=False)
    if not shares:
        return Text("prompts  no tokens in this time")
    bar, legend, drawn, total = Text("prompts  "), Text("         "), 0, 0.0
    length = max(10, min(MAX_BAR, width - len(bar) - 1))
    for origin in shares:
        sign, colour = _BAR_SIGNS[origin]
        total += shares[origin]
        bar.append(sign * (round(total * length) - drawn), colour)
        drawn = round(total * length)
        legend.append(f"{sign} ", colour)
        legend.append(f"{ORIGIN_NAMES[origin].lower()} {format_share(shares[origin])}  ")
    legend.rstrip()
    return Text("\n").join((bar, legend))


def _draw_instances(history: History, reports: Sequence[InstanceReport], order: str, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2 if width >= MIN_WIDTH else 1, 0, 0), header_style="bold")
    for name, title, is_figure in (
        ("address", "instance", False),
        ("role", "role", False),
        ("state", "state", False),
        ("load", "running", True),
        ("tokens", "tokens", True),
        ("waiting", "waiting", True),
        ("memory", "memory", True),
        ("", "not computed", True),
        ("", "breaker", False),
        ("", "weight", True),
    ):
        style = "bold reverse" if name == order else None
        # Rich shortens other columns first: addresses without their ends may all look the same.
        table.add_column(
            Text(title, no_wrap=True),
            justify="right" if is_figure else "left",
            header_style=style,
            no_wrap=name == "address",
        )
    by_instance = count_origins_by_instance(history, SPAN)
    for report in reports:
        listed = report.listed
        shares = share_origins(by_instance.get(listed.key, {}), with_handed_over=True)
        cells = (
            (listed.key, ""),
            (listed.role, ""),
            (listed.state or NOTHING, _STATE_COLOURS.get(listed.state, "")),
            (format_count(listed.running), ""),
            (format_count(listed.running_tokens if listed.state else None), ""),
            (format_count(_read_waiting(report)), ""),
            (format_share(_read_memory(report)), ""),
            (format_share(1.0 - shares[COMPUTED] if shares else None), ""),
            (listed.breaker.replace("_", " "), _BREAKER_COLOURS.get(listed.breaker, "")),
            (NOTHING if listed.weight is None else f"{listed.weight:.2g}", ""),
        )
        table.add_row(*(Text(text, style, no_wrap=True) for text, style in cells))
    return table


def _draw_keys(order: str) -> Text:
    keys = "  ".join(f"{each.key} {name}" for name, each in ORDERS.items())
    return Text(f"\nby {order}; keys: {keys}  q quit", "dim", no_wrap=True, overflow="ellipsis")


def _read_waiting(report: InstanceReport) -> float | None:
    return None if report.figures is None else report.figures.waiting


def _read_memory(report: InstanceReport) -> float | None:
    return None if report.figures is None else report.figures.memory_used
