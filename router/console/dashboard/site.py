"""The web application of the dashboard: its paths, and the host names that it accepts. It imports NiceGUI."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from fastapi import FastAPI, Request
from nicegui import ui
from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.console.dashboard.collector import Collector
from router.console.dashboard.views import VIEWS, Site, View, open_frame
from router.console.dashboard.views.style import ICON

__all__ = ["serve_page"]

TITLE = "KV pool dashboard"
RECONNECT_SECONDS = 10.0


def serve_page(collector: Collector, listener: socket.socket, host: str, api_key: str = "") -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        collector: the source of the values.
        listener: a socket that listens on ``host``.
        host: an address, or the name under which browsers may open the page.
        api_key: API key for the view Try it; ``""`` if the router requires none.
    """
    app = build_app(collector, api_key)
    config = uvicorn.Config(_HostGuard(app, host), log_level="warning", access_log=False, lifespan="on")
    config.timeout_graceful_shutdown = 1  # open pages do not close their connections
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def build_app(collector: Collector, api_key: str) -> FastAPI:
    """Return the application with all views. It runs the collector while it serves."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        polling = asyncio.ensure_future(collector.keep_polling())
        yield
        polling.cancel()
        await collector.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    site = Site(collector, api_key, VIEWS)
    for view in VIEWS:
        ui.page(view.path, title=f"{view.title} · {TITLE}", dark=None)(_make_page(site, view))
    ui.run_with(
        app,
        title=TITLE,
        favicon=ICON,
        dark=None,
        language="en-US",
        tailwind=False,
        reconnect_timeout=RECONNECT_SECONDS,
        binding_refresh_interval=None,
        show_welcome_message=False,
    )
    return app


def _make_page(site: Site, view: View) -> Callable[[Request], None]:
    def show_page(request: Request) -> None:
        open_frame(site, view, request)

    # NiceGUI reads the annotations of this function, and cannot resolve annotations that are strings.
    show_page.__annotations__ = {"request": Request}
    return show_page


class _HostGuard:
    """Accepts only requests whose host is an IP address, ``localhost`` or the configured name.

    This prevents DNS rebinding: the owner of another site could let its host name point to this machine. The browser of
    a visitor would then treat both sites as one origin, and the other site could read this page. Browsers also do not
    show the page in a frame of another site, which could hide it, and let the visitor click on its buttons.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._names = {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._is_known(_read_host(scope)):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                text = "Open this page by an IP address, by localhost, or by the name given with --host.\n"
                refusal = PlainTextResponse(text, status_code=421)
                await refusal(scope, receive, send)
            return

        async def send_unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["content-security-policy"] = "frame-ancestors 'none'"
            await send(message)

        await self._app(scope, receive, send_unframed)

    def _is_known(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _read_host(scope: Scope) -> str:
    """Return the host name in the request's headers, in lower case and without the port."""
    header = next((value for name, value in scope["headers"] if name == b"host"), b"")
    host: str = header.decode("latin-1").lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
