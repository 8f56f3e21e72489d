"""kvrouter epp: the router as endpoint picker, for gateways that send the requests themselves.

This is the router with ``--epp-port`` (default 9002). All flags of the router can be used. Its HTTP port is open, too:
instances register there, and operators query it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from router.settings import FlagParser
from router.settings import make_parser as make_router_parser

__all__ = ["main", "make_parser"]

DEFAULT_PORT = 9002


def main(argv: Sequence[str]) -> int:
    """Run the router with the endpoint picker until a signal arrives. Return the exit status."""
    if argv[:1] in (["-h"], ["--help"]):
        make_parser().parse_args(["--help"])  # the parser of ``router.launch`` would print another program name
    status: int = importlib.import_module("router.launch").main(argv, epp_port=DEFAULT_PORT)
    return status


def make_parser() -> FlagParser:
    """Return the parser of the flags, which are the router's flags."""
    parser = make_router_parser()
    parser.prog = "kvrouter epp"
    parser.description = f"Chooses instances for Envoy's ext_proc filter, at --epp-port (default here {DEFAULT_PORT})."
    return parser
