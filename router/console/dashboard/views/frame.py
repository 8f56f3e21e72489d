"""The frame of every view: navigation, state of the router, light or dark colours, and a timer for updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from fastapi import Request
from nicegui import ui
from nicegui.events import ValueChangeEventArguments
from starlette.datastructures import URL

from router.console.dashboard.collector import Collector
from router.console.dashboard.history import History, Span
from router.console.dashboard.views.parts import Banner, put_html, put_text
from router.console.dashboard.views.style import ICON, STYLE
from router.console.dashboard.words import make_sentence

__all__ = ["SPANS", "TOGGLE_PROPS", "Context", "Site", "View", "link_request", "open_frame"]

SPANS = (Span("5 min", 300, 60), Span("15 min", 900, 60), Span("1 hour", 3600, 60))
TOGGLE_PROPS = "unelevated no-caps toggle-color=chosen toggle-text-color=chosen text-color=plain"
REFRESH_SECONDS = 0.5
# Number of missing polls after which the page shows a warning.
MAX_LATE_POLLS = 5
COOKIE = "kvrouter_look"
_SPAN_COOKIE = "kvrouter_span"
# For each choice of colours (whether they are dark): its name, its icon, and its value of the cookie.
_LOOKS: Mapping[bool | None, tuple[str, str, str]] = {
    None: ("As the system", "contrast", ""),
    False: ("Light", "light_mode", "light"),
    True: ("Dark", "dark_mode", "dark"),
}


@dataclass
class Site:
    """The objects that all views share: the collector of the values, a client's API key, and the list of views."""

    collector: Collector
    api_key: str = ""
    views: tuple[View, ...] = ()


@dataclass
class Context:
    """A view in one browser, with the time range that its user has chosen."""

    site: Site
    request: Request
    span: Span
    refreshers: list[Callable[[], None]] = field(default_factory=list)
    """Functions that are called after each new poll."""

    @property
    def history(self) -> History:
        """The results of the last polls."""
        return self.site.collector.history

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the browser has left the view."""
        ui.context.client.on_delete(callback)

    def refresh_now(self) -> None:
        """Call all ``refreshers``, so that the view shows the values of the last poll."""
        for refresh in self.refreshers:
            refresh()

    def put_span_choice(self) -> None:
        """Add the selector of the time range to the page, inside NiceGUI's current ``with`` block."""
        toggle = ui.toggle([span.title for span in SPANS], value=self.span.title, on_change=self._on_span)
        toggle.classes("choice").props(f'{TOGGLE_PROPS} aria-label="Length of time shown"')

    def _on_span(self, change: ValueChangeEventArguments[Any]) -> None:
        self.span = next(span for span in SPANS if span.title == change.value)
        ui.run_javascript(f"document.cookie = '{_SPAN_COOKIE}=' + {SPANS.index(self.span)} + ';path=/;SameSite=Strict'")
        self.refresh_now()


@dataclass(frozen=True)
class View:
    """A page of the dashboard."""

    path: str
    name: str
    """Title of the view in the navigation."""
    title: str
    build: Callable[[Context], object]
    """Puts the view into the page. A view that shows metrics adds a function to the context's ``refreshers``."""


def link_request(request_id: str) -> str:
    """Return the URL of the view that shows this request."""
    return str(URL("/request").include_query_params(id=request_id))


def open_frame(site: Site, view: View, request: Request) -> None:
    """Show ``view`` to the browser that requests it."""
    ui.add_head_html(f"<style>{STYLE}</style>")
    ui.query("html").props('lang="en"')
    context = Context(site, request, _read_span(request))
    dark = ui.dark_mode({"dark": True, "light": False}.get(request.cookies.get(COOKIE, "")))
    put_html('<a class="skip" href="#content">To the content</a>')
    with ui.element("header").classes("top"), ui.element("div").classes("top-row"):
        put_html(f'<a class="brand" href="/">{ICON}<span>KV pool</span></a>')
        _put_navigation(site, view)
        with ui.element("div").classes("side"):
            liveness = _Liveness(site.collector)
            _Switch(dark)
    with ui.element("main").classes("main").props('id="content" tabindex="-1"'):
        news = _News(context)
        view.build(context)

    def tick() -> None:
        liveness.update()
        news.update()

    tick()
    ui.timer(REFRESH_SECONDS, tick)


class _News:
    """Updates the view after each new poll, and shows a banner with the reason if the router does not respond."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._banner = Banner()
        self._shown: object = self  # before the first update, a value that is neither None nor the result of a poll

    def update(self) -> None:
        """Show the result of the last poll, unless this result is shown already."""
        last = self._context.history.last
        if last is self._shown:
            return
        self._shown = last
        if last is None:
            self._banner.show(
                "plain", f"Waiting for the metrics of the router at {self._context.site.collector.router.url} …"
            )
        elif last.trouble:
            text = make_sentence(f"No answer from the router: {last.trouble}")
            self._banner.show("bad", f"{text} Instances and pool are still polled.")
        else:
            self._banner.hide()
        self._context.refresh_now()


def _put_navigation(site: Site, view: View) -> None:
    links = "".join(
        f'<a href="{each.path}"{" aria-current=page" if each is view else ""}>{escape(each.name)}</a>'
        for each in site.views
    )
    put_html(links, tag="nav").classes("nav").props('aria-label="Views"')


class _Liveness:
    """Shows the router's address, and whether the router responds."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        with ui.element("div").classes("alive"):
            self._dot = ui.element("span").classes("dot").props('aria-hidden="true"')
            self._words = put_text("span", "", "words")

    def update(self) -> None:
        """Show the present state of the router."""
        collector = self._collector
        last, address = collector.history.last, collector.router.url.partition("://")[2]
        late = last is not None and time.time() - last.time > collector.seconds * MAX_LATE_POLLS + 5
        if last is None:
            colour, text = "warn", "starting"
        elif last.trouble or late:
            colour, text = "bad", f"no answer from {address}"
        else:
            colour, text = "good", address
        self._dot.classes(replace=f"dot {colour}")
        self._words.set_text(text)


class _Switch:
    """The button that switches between the system's colours, light and dark."""

    def __init__(self, dark: ui.dark_mode) -> None:
        self._dark = dark
        self._button = ui.button(on_click=self._turn, color=None).classes("button look").props("flat dense no-caps")
        self._name_choice()

    def _turn(self) -> None:
        following = {None: False, False: True, True: None}
        self._dark.value = following[self._dark.value]
        choice = self._name_choice()
        ui.run_javascript(f"document.cookie = '{COOKIE}={choice};path=/;SameSite=Strict;max-age=31536000'")

    def _name_choice(self) -> str:
        """Show the chosen colours on the button. Return the value of the cookie that stores the choice."""
        name, icon, cookie = _LOOKS[self._dark.value]
        self._button.props(f'icon="{icon}" aria-label="Colours: {name}" title="Colours: {name}"')
        return cookie


def _read_span(request: Request) -> Span:
    number = request.cookies.get(_SPAN_COOKIE, "")
    return SPANS[int(number)] if number.isdecimal() and int(number) < len(SPANS) else SPANS[0]
