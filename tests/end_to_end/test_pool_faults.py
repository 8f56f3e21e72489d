"""A conversation goes on whatever becomes of the master, with the right answers; hits come back by themselves."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.cluster import Instance, ask, instance
from tests.end_to_end.test_prefill_decode import BLOCK, conversation, text
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.processes import child
from tests.support.waiting import wait_until

HUNG_SECONDS = 20


@pytest.fixture
def pair(tmp_path: Path, model: Path) -> Iterator[tuple[MooncakeMaster, Instance, Instance]]:
    """Two mixed instances on a pool of their own."""
    with (
        mooncake_master(tmp_path / "master.log") as master,
        instance(tmp_path, model, "--enable-output-caching", master=master) as first,
        instance(tmp_path, model, "--enable-output-caching", master=master) as second,
    ):
        yield master, first, second


def hit(first: Instance, second: Instance, about: str) -> bool:
    """Whether ``second`` finds in the pool what ``first`` has just computed."""
    messages = conversation(about)
    ask(first.url, messages, max_tokens=1)
    first.wait_for_saves()
    details = ask(second.url, messages, max_tokens=1)["usage"]["prompt_tokens_details"]
    return bool(details["pool_cached_tokens"] >= BLOCK)


def keeps_talking(first: Instance, second: Instance, cold: Instance, turns: int) -> None:
    """Turns of one conversation, at either instance in turn, with the answers of an instance without a pool."""
    messages = conversation("through thick and thin")
    for turn in range(turns):
        answer = text(ask((first, second)[turn % 2].url, messages, max_tokens=20))
        assert answer == text(ask(cold.url, messages, max_tokens=20))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]


def test_master_killed_and_started_anew(
    pair: tuple[MooncakeMaster, Instance, Instance], cold: Instance, tmp_path: Path
) -> None:
    master, first, second = pair
    assert hit(first, second, "before")
    master.kill()
    keeps_talking(first, second, cold, 4)
    with child(master.process.argv, tmp_path / "anew.log"):
        attempts = iter(range(1000))
        wait_until(lambda: hit(first, second, f"after {next(attempts)}"), "hits to come back", 60, 0.5)
        keeps_talking(first, second, cold, 2)


def test_master_hung_for_a_while(pair: tuple[MooncakeMaster, Instance, Instance], cold: Instance) -> None:
    master, first, second = pair
    assert hit(first, second, "before")
    master.process.signal(signal.SIGSTOP)
    began = time.monotonic()
    for moment in (0.0, 0.5, 1.0):
        at = began + moment * HUNG_SECONDS
        wait_until(lambda at=at: time.monotonic() >= at, "a moment of its hang", 2 * HUNG_SECONDS, 0.2)  # type: ignore[misc]
        keeps_talking(first, second, cold, 3)
    master.process.signal(signal.SIGCONT)
    attempts = iter(range(1000))
    wait_until(lambda: hit(first, second, f"after {next(attempts)}"), "hits to come back", 60, 0.5)
    keeps_talking(first, second, cold, 2)
