"""The frame of every view: the way to the others, whether the figures are fresh, light or dark, and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

from fastapi import Request
from nicegui import ui
from starlette.datastructures import URL

from router.console.dashboard.collector import Collector
from router.console.dashboard.history import Span
from router.console.dashboard.views.look import ICON, STYLE
from router.console.dashboard.views.parts import Banner, put_html, put_text
from router.console.dashboard.words import make_sentence

__all__ = ["SPANS", "Context", "Site", "View", "link_request", "open_frame"]

SPANS = (Span("5 min", 300, 60), Span("15 min", 900, 60), Span("1 hour", 3600, 60))
REFRESH_SECONDS = 0.5
# So many looks may fail to come before the page says so.
MAX_LATE_LOOKS = 5
COOKIE = "kvrouter_look"
_SPAN_COOKIE = "kvrouter_span"


@dataclass
class Site:
    """All that views share."""

    collector: Collector
    api_key: str = ""
    views: tuple[View, ...] = ()


@dataclass
class Context:
    """One view in one browser."""

    site: Site
    request: Request
    span: Span
    refreshers: list[Callable[[], None]] = field(default_factory=list)
    """Called when there are new figures."""

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the browser has left the view."""
        ui.context.client.on_delete(callback)

    def refresh_now(self) -> None:
        """Show the figures of now."""
        for refresh in self.refreshers:
            refresh()

    def choose_span(self) -> None:
        """Put the choice of a length of time here."""

        def choose(title: str) -> None:
            self.span = next(span for span in SPANS if span.title == title)
            ui.run_javascript(
                f"document.cookie = '{_SPAN_COOKIE}=' + {SPANS.index(self.span)} + ';path=/;SameSite=Strict'"
            )
            self.refresh_now()

        toggle = ui.toggle([span.title for span in SPANS], value=self.span.title, on_change=lambda e: choose(e.value))
        toggle.classes("choice").props(
            "unelevated no-caps toggle-color=chosen toggle-text-color=chosen text-color=plain "
            'aria-label="Length of time shown"'
        )


@dataclass(frozen=True)
class View:
    """A page of the dashboard."""

    path: str
    name: str
    """In the navigation."""
    title: str
    build: Callable[[Context], None]


def link_request(request_id: str) -> str:
    """Where the page shows this request."""
    return str(URL("/request").include_query_params(id=request_id))


def open_frame(site: Site, view: View, request: Request) -> None:
    """Show ``view`` to the browser that asks."""
    ui.add_head_html(f"<style>{STYLE}</style>")
    ui.query("html").props('lang="en"')
    context = Context(site, request, _read_span(request))
    dark = ui.dark_mode({"dark": True, "light": False}.get(request.cookies.get(COOKIE, "")))
    put_html('<a class="skip" href="#content">To the content</a>')
    with ui.element("header").classes("top"), ui.element("div").classes("top-row"):
        put_html(f'<a class="brand" href="/">{ICON}<span>KV pool</span></a>')
        _put_navigation(site, view)
        with ui.element("div").classes("side"):
            alive = _put_liveness(context)
            _put_switch(dark)
    with ui.element("main").classes("main").props('id="content" tabindex="-1"'):
        banner = Banner()
        view.build(context)
    seen: list[object] = [object()]

    def tick() -> None:
        alive()
        last = site.collector.history.last
        if last is not seen[0]:
            seen[0] = last
            if last is None:
                banner.show("plain", f"Asking the router at {site.collector.router.url} for its figures …")
            elif last.trouble:
                said = make_sentence(f"No news of the router: {last.trouble}")
                banner.show("bad", f"{said} Instances and pool are asked all the same.")
            else:
                banner.hide()
            context.refresh_now()

    tick()
    ui.timer(REFRESH_SECONDS, tick)


def _put_navigation(site: Site, view: View) -> None:
    links = "".join(
        f'<a href="{each.path}"{" aria-current=page" if each is view else ""}>{escape(each.name)}</a>'
        for each in site.views
    )
    put_html(links, tag="nav").classes("nav").props('aria-label="Views"')


def _put_liveness(context: Context) -> Callable[[], None]:
    collector = context.site.collector
    with ui.element("div").classes("alive"):
        dot = ui.element("span").classes("dot").props('aria-hidden="true"')
        words = put_text("span", "", "words")

    def refresh() -> None:
        last = collector.history.last
        late = last is not None and time.time() - last.time > collector.seconds * MAX_LATE_LOOKS + 5
        address = collector.router.url.partition("://")[2]
        if last is None:
            colour, said = "warn", "starting"
        elif last.trouble or late:
            colour, said = "bad", f"no answer from {address}"
        else:
            colour, said = "good", address
        dot.classes(replace=f"dot {colour}")
        words.set_text(said)

    return refresh


def _put_switch(dark: ui.dark_mode) -> None:
    names = {None: ("As the system", "contrast"), False: ("Light", "light_mode"), True: ("Dark", "dark_mode")}
    following: dict[bool | None, bool | None] = {None: False, False: True, True: None}

    def turn() -> None:
        dark.value = following[dark.value]
        show()
        kept = {None: "", False: "light", True: "dark"}[dark.value]
        ui.run_javascript(f"document.cookie = '{COOKIE}={kept};path=/;SameSite=Strict;max-age=31536000'")

    def show() -> None:
        name, icon = names[dark.value]
        button.props(f'icon="{icon}" aria-label="Colours: {name}" title="Colours: {name}"')

    button = ui.button(on_click=turn, color=None).classes("button look").props("flat dense no-caps")
    show()


def _read_span(request: Request) -> Span:
    kept = request.cookies.get(_SPAN_COOKIE, "")
    return SPANS[int(kept)] if kept.isdecimal() and int(kept) < len(SPANS) else SPANS[0]
