"""A conversation goes on whatever happens to the master, with the right answers; hits come back by themselves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.cluster import Instance, ask, instance
from tests.end_to_end.test_prefill_decode import BLOCK, conversation, text
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.processes import child
from tests.support.waiting import wait_until


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


def test_a_master_hangs_for_a_while_then_is_killed_and_started_again(
    pair: tuple[MooncakeMaster, Instance, Instance], cold: Instance, tmp_path: Path
) -> None:
    master, first, second = pair
    attempts = iter(range(1000))

    def wait_for_hits() -> None:
        wait_until(lambda: hit(first, second, f"attempt {next(attempts)}"), "hits to come back", 60, 0.5)
        keeps_talking(first, second, cold, 2)

    assert hit(first, second, "before")
    master.process.signal(signal.SIGSTOP)
    keeps_talking(first, second, cold, 3)  # until the first calls have missed their deadlines ...
    wait_until(lambda: not first.metric("kvstore_pool_open"), "the instance to give the pool up")
    keeps_talking(first, second, cold, 3)  # ... and after the pool is out of use
    master.process.signal(signal.SIGCONT)
    wait_for_hits()
    master.kill()
    keeps_talking(first, second, cold, 4)
    with child(master.process.argv, tmp_path / "again.log"):
        wait_for_hits()
