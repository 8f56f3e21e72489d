"""The program ``kvrouter dashboard``: reads its flags, and opens its port."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from router.console.client import RouterClient, add_interval_flag, add_router_flags
from router.console.dashboard.collector import Collector
from router.console.dashboard.scraper import Scraper
from router.settings import FlagParser, SettingsError, read_authorities, read_token

__all__ = ["main", "make_parser"]

DEFAULT_PORT = 52790
LOOPBACK = "127.0.0.1"
MISSING = "the dashboard needs NiceGUI, which is not installed: pip install '/path/to/this/repository[dashboard]'"
_AUTHORITY = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:.]+\]):\d{1,5}", re.ASCII)


def main(argv: Sequence[str]) -> int:
    """Serve the page until a signal arrives.

    Returns:
        The exit status: 1 if the page cannot be served, 2 if the flags are wrong.
    """
    parser = make_parser()
    try:
        flags = parser.parse_args(argv)
        if importlib.util.find_spec("nicegui") is None:
            print(f"kvrouter dashboard: {MISSING}", file=sys.stderr)
            return 1
        router = RouterClient.from_flags(flags)
        api_key = read_token(flags.api_key_file, "--api-key-file") if flags.api_key_file else ""
        verify = read_authorities(str(flags.ca_file), "--ca-file") if flags.ca_file else True
    except SettingsError as exc:
        print(f"kvrouter dashboard: {exc}", file=sys.stderr)
        return 2
    try:
        family = socket.AF_INET6 if ":" in flags.host else socket.AF_INET
        listener = socket.create_server((flags.host, flags.port), family=family)
    except OSError as exc:
        where = f"{flags.host}:{flags.port}"
        why = os.strerror(exc.errno) if exc.errno else str(exc)
        print(f"kvrouter dashboard: cannot listen on {where}: {why}; choose another --port", file=sys.stderr)
        return 1
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    port = listener.getsockname()[1]
    host = f"[{flags.host}]" if family == socket.AF_INET6 else flags.host
    print(f"the dashboard of {flags.router} is at http://{host}:{port}", flush=True)
    if flags.token_file and flags.host not in (LOOPBACK, "localhost", "::1"):
        warning = "everybody who reaches the page can drain instances, because the dashboard has the admin token"
        print(f"kvrouter dashboard: {warning}", file=sys.stderr, flush=True)
    collector = Collector(router, Scraper(verify), flags.pool, flags.interval)
    # Imported only here, because the import takes a second.
    site = importlib.import_module("router.console.dashboard.site")
    site.serve_page(collector, listener, flags.host, api_key)
    return 0


def make_parser() -> FlagParser:
    """Return the parser of the flags of ``kvrouter dashboard``."""
    parser = FlagParser(
        prog="kvrouter dashboard",
        description="Shows the state of the router, its instances and the pool, in a browser.",
    )
    add_router_flags(parser)
    parser.add_argument(
        "--port",
        type=_parse_own_port,
        default=DEFAULT_PORT,
        help=f"port of the page (default: {DEFAULT_PORT}; 0: any free port)",
    )
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        metavar="ADDRESS",
        help=f"address to listen at (default: {LOOPBACK}, only this machine, because the page requires no password)",
    )
    parser.add_argument(
        "--pool",
        action="append",
        type=_parse_authority,
        default=[],
        metavar="HOST:PORT",
        help="metrics port of a mooncake_master; repeat the flag for each master",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with a client's API key for the view 'Try it', if the router requires a key",
    )
    add_interval_flag(parser)
    return parser


def _parse_own_port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, a number from 0 to 65535")
    return int(text)


def _parse_authority(text: str) -> str:
    if not _AUTHORITY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, such as 127.0.0.1:15003")
    return text
