"""kvrouter drain: let an instance take no new requests and, with --wait, wait until it has none."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from router.console.client import RouterClient, RouterError, add_router_flags
from router.settings import FlagParser, SettingsError

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Give the order; the exit status: 0, 1 if the router does not carry it out, 2 for a bad command line."""
    parser = FlagParser(prog="kvrouter drain", description="Let an instance take no new requests.")
    parser.add_argument("instance", metavar="HOST:PORT", help="as /registered lists it")
    add_router_flags(parser)
    try:
        flags = parser.parse_args(argv)
        router = RouterClient.from_flags(flags)
        asyncio.run(_drain(router, flags.instance))
    except SettingsError as exc:
        print(f"kvrouter drain: {exc}", file=sys.stderr)
        return 2
    except RouterError as exc:
        print(f"kvrouter drain: {exc}", file=sys.stderr)
        return 1
    return 0


async def _drain(router: RouterClient, instance: str) -> None:
    try:
        outcome = await router.give_order("drain", instance)
        print(f"{instance} is {outcome['state']}, with {outcome['running_requests']} requests running")
    finally:
        await router.close()
