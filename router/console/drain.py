"""kvrouter drain: stops new requests to instances and, with --wait, waits until they have no requests.

kvrouter drain 10.0.0.5:52400 10.0.0.6:52400 --wait 600 --until-restart --router 10.0.0.8:9000
kvrouter drain --self-port 52400 --wait 600 --router kvrouter:9000        # in the pod of the instance itself
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from rich.console import Console

from router.console.client import (
    RouterAway,
    RouterClient,
    RouterError,
    TokenWanted,
    UnknownInstance,
    add_router_flags,
    find_own_address,
)
from router.console.dashboard.figures import describe_loss, read_listed
from router.settings import FlagParser, SettingsError, parse_port

__all__ = ["main", "make_parser"]

POLL_SECONDS = 0.5
# An instance is empty if it has had no requests for this time. A request that was sent just before the drain is
# reported some milliseconds later.
EMPTY_SECONDS = 1.0
# Time for which the router may be unreachable during the wait, because it may be restarted, too.
AWAY_SECONDS = 30.0

T = TypeVar("T")


class NotEmptied(RouterError):
    """An instance still has requests after the time limit, or does not drain any more. The message is one sentence."""


def main(argv: Sequence[str]) -> int:
    """Drain the instances.

    Returns:
        The exit status: 0; 1 if the router refuses, or an instance is not empty in time; 2 if the flags are wrong.
    """
    try:
        flags = _parse_flags(argv)
        router = RouterClient.from_flags(flags)
        return asyncio.run(_carry_out(router, flags))
    except SettingsError as exc:
        print(f"kvrouter drain: {exc}", file=sys.stderr)
        return 2
    except RouterError as exc:
        print(f"kvrouter drain: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvrouter drain: stopped waiting; the instances continue to drain", file=sys.stderr)
        return 130


def _parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    flags: argparse.Namespace = make_parser().parse_args(argv)
    if not flags.instances and flags.self_port is None:
        raise SettingsError(
            "no instance to drain is named; give HOST:PORT or, for the instance on this machine, --self-port PORT"
        )
    for name in ("wait", "until_restart"):
        if flags.undrain and getattr(flags, name):
            raise SettingsError(
                f"--undrain cancels a drain and --{name.replace('_', '-')} is for a drain; give only one of them"
            )
    return flags


def make_parser() -> FlagParser:
    """Return the parser of the flags of ``kvrouter drain``."""
    parser = FlagParser(prog="kvrouter drain", description="Stops new requests to instances.")
    parser.add_argument("instances", nargs="*", metavar="HOST:PORT", help="instance as listed by /registered")
    parser.add_argument(
        "--self-port",
        type=parse_port,
        metavar="PORT",
        help="drain the instance at this port of this machine; for a hook that Kubernetes runs before it ends the "
        "instance (preStop); implies --until-restart",
    )
    parser.add_argument(
        "--wait",
        nargs="?",
        const=math.inf,
        type=_parse_seconds,
        metavar="SECONDS",
        help="wait until the instance has no running requests, at most for this time (default: no limit)",
    )
    parser.add_argument(
        "--until-restart",
        action="store_true",
        help="end the drain when another process uses the instance's address (default: only --undrain ends it)",
    )
    parser.add_argument(
        "--force", action="store_true", help="drain without confirmation, even the last usable instance of its role"
    )
    parser.add_argument("--undrain", action="store_true", help="end the drain, instead of beginning it")
    add_router_flags(parser)
    return parser


async def _carry_out(router: RouterClient, flags: argparse.Namespace) -> int:
    instances = list(dict.fromkeys(flags.instances))
    if flags.self_port is not None:
        instances.append(f"{find_own_address(router.url)}:{flags.self_port}")
    try:
        if not flags.undrain and not flags.force:
            await _check_loss(router, instances, flags)
        with _Progress() as progress:
            work = (_drain_one(router, instance, flags, progress) for instance in instances)
            outcomes = await asyncio.gather(*work, return_exceptions=True)
    finally:
        await router.close()
    failures = [each for each in outcomes if isinstance(each, BaseException)]
    for failure in failures:
        if not isinstance(failure, RouterError):
            raise failure
    for sentence in dict.fromkeys(map(str, failures)):  # prints a message only once, if it is the same for all
        print(f"kvrouter drain: {sentence}", file=sys.stderr)
    return 1 if failures else 0


async def _check_loss(router: RouterClient, instances: Sequence[str], flags: argparse.Namespace) -> None:
    """Ask for confirmation if ``instances`` are the last usable instances of a role or a model.

    With --self-port, only print a warning.
    """
    try:
        listed = await _ask(router.list_instances, AWAY_SECONDS if flags.wait is not None else 0.0)
    except TokenWanted:
        return  # a drain may be allowed with the registration token, which is not enough for a list
    loss = describe_loss([read_listed(each) for each in listed], instances)
    if not loss:
        return
    if flags.self_port is not None:
        print(f"kvrouter drain: warning: {loss}", file=sys.stderr, flush=True)
    elif not _is_terminal():
        raise RouterError(f"{loss}; nothing was drained. Start another instance first, or use --force")
    elif not await asyncio.to_thread(_is_confirmed, f"{loss}; drain anyway? [y/N] "):
        raise RouterError("nothing was drained, because the question was not answered with y")


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _is_confirmed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


async def _drain_one(router: RouterClient, instance: str, flags: argparse.Namespace, progress: _Progress) -> None:
    is_own = flags.self_port is not None
    members: dict[str, Any] = {"undrain": True} if flags.undrain else {}
    if flags.until_restart or (is_own and not flags.undrain):
        members["until_restart"] = True

    async def give_order() -> dict[str, Any]:
        return await router.give_order("drain", instance, **members)

    may_wait = flags.wait is not None
    outcome = await _ask(give_order, AWAY_SECONDS if may_wait else 0.0)
    progress.show_state(instance, outcome)
    if "until_restart" in members and not outcome.get("until_restart", True):  # earlier routers do not report it
        progress.warn(f"{instance} was already drained until --undrain; a restart does not end this drain")
    if flags.undrain:
        return
    if trouble := await _ask(router.read_shared_state, AWAY_SECONDS if may_wait else 0.0):
        progress.warn(f"the router is not connected to the other routers, which may still send requests: {trouble}")
    if may_wait:
        await _wait_until_empty(router, instance, flags.wait, progress, give_order if is_own else None)


async def _wait_until_empty(
    router: RouterClient,
    instance: str,
    limit: float,
    progress: _Progress,
    give_again: Callable[[], Awaitable[dict[str, Any]]] | None,
) -> None:
    """Wait until an instance has no requests.

    Args:
        limit: maximum time in seconds.
        give_again: sends the drain again, because a restarted router may not know it any more; None to send it once.

    Raises:
        NotEmptied: the instance still has requests after the time limit, or does not drain any more.
        RouterError: the router does not report the state of the instance.
    """
    began = time.monotonic()
    empty_since: float | None = None
    known_at = began
    while True:
        try:
            outcome = await _ask(lambda: router.read_drain(instance), AWAY_SECONDS)
            if not outcome["draining"] and give_again is not None:
                outcome = {**await _ask(give_again, AWAY_SECONDS), "draining": True}
            known_at = time.monotonic()
        except UnknownInstance:
            if give_again is None or time.monotonic() - known_at > AWAY_SECONDS:
                raise NotEmptied(f"{instance} is no longer registered at the router") from None
            await asyncio.sleep(POLL_SECONDS)
            continue
        if not outcome["draining"]:
            raise NotEmptied(f"{instance} takes requests again: it was restarted, or somebody cancelled the drain")
        running, now = outcome["running_requests"], time.monotonic()
        progress.show_state(instance, outcome)
        empty_since = None if running else empty_since or now
        if empty_since is not None and now - empty_since >= EMPTY_SECONDS:
            progress.show(instance, f"{instance} is empty after {now - began:.0f} s")
            return
        if now - began > limit:
            raise NotEmptied(f"{instance} still has {_count(running)} after {limit:g} s")
        await asyncio.sleep(POLL_SECONDS)


async def _ask(question: Callable[[], Awaitable[T]], patience: float) -> T:
    """Query the router, and retry while it does not respond.

    Args:
        question: sends the query.
        patience: seconds after which to give up.

    Raises:
        RouterError: the router refuses, or has not responded for ``patience`` seconds.
    """
    give_up_at = time.monotonic() + patience
    while True:
        try:
            return await question()
        except RouterAway:
            if time.monotonic() >= give_up_at:
                raise
        await asyncio.sleep(POLL_SECONDS)


class _Progress:
    """Shows the progress: on a terminal one line per instance, which changes; otherwise one line for each change."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self._console = console
        self._shown: dict[str, str] = {}
        self._warnings: set[str] = set()
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> _Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
            for sentence in self._shown.values():
                self._print(sentence)

    def show_state(self, instance: str, outcome: dict[str, Any]) -> None:
        """Show the state of an instance, and the number of its requests."""
        self.show(instance, f"{instance} is {outcome['state']}, with {_count(outcome['running_requests'])}")

    def show(self, instance: str, sentence: str) -> None:
        """Show a sentence about an instance, unless this sentence is shown already."""
        if self._shown.get(instance) == sentence:
            return
        self._shown[instance] = sentence
        if self._status is not None:
            self._status.update("\n  ".join(self._shown.values()))
        else:
            self._print(sentence)

    def warn(self, sentence: str) -> None:
        """Print a warning, unless it was printed before."""
        if sentence not in self._warnings:
            self._warnings.add(sentence)
            print(f"kvrouter drain: warning: {sentence}", file=sys.stderr, flush=True)

    def _print(self, sentence: str) -> None:
        self._console.print(sentence, markup=False, soft_wrap=True)


def _count(requests: int) -> str:
    return "1 request running" if requests == 1 else f"{requests} requests running"


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds above 0; if it is an instance, write it before --wait"
        )
    return seconds
