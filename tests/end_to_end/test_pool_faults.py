"""During faults of the master, a conversation continues with the right responses; afterwards the pool is used again."""

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
    """Run two mixed instances with a pool of their own."""
    with (
        mooncake_master(tmp_path / "master.log") as master,
        instance(tmp_path, model, "--enable-output-caching", master=master) as first,
        instance(tmp_path, model, "--enable-output-caching", master=master) as second,
    ):
        yield master, first, second


def hit(first: Instance, second: Instance, about: str) -> bool:
    """Return whether ``second`` reads a prompt from the pool that ``first`` has computed just before."""
    messages = conversation(about)
    ask(first.url, messages, max_tokens=1)
    first.wait_for_saves()
    details = ask(second.url, messages, max_tokens=1)["usage"]["prompt_tokens_details"]
    return bool(details["pool_cached_tokens"] >= BLOCK)


def check_conversation(first: Instance, second: Instance, cold: Instance, turns: int) -> None:
    """Send the turns of a conversation to the two instances in turn. The responses must equal those without a pool."""
    messages = conversation("through thick and thin")
    for turn in range(turns):
        answer = text(ask((first, second)[turn % 2].url, messages, max_tokens=20))
        assert answer == text(ask(cold.url, messages, max_tokens=20))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]


def test_a_master_hangs_for_a_time_then_is_killed_and_restarted(
    pair: tuple[MooncakeMaster, Instance, Instance], cold: Instance, tmp_path: Path
) -> None:
    master, first, second = pair
    attempts = iter(range(1000))

    def wait_for_hits() -> None:
        wait_until(lambda: hit(first, second, f"attempt {next(attempts)}"), "hits in the pool", 60, 0.5)
        check_conversation(first, second, cold, 2)

    assert hit(first, second, "before")
    master.process.signal(signal.SIGSTOP)
    check_conversation(first, second, cold, 3)  # until the first calls have exceeded their deadlines
    wait_until(lambda: not first.metric("kvstore_pool_open"), "the instance to give the pool up")
    check_conversation(first, second, cold, 3)  # after the instances have stopped to use the pool
    master.process.signal(signal.SIGCONT)
    wait_for_hits()
    master.kill()
    check_conversation(first, second, cold, 4)
    with child(master.process.argv, tmp_path / "again.log"):
        wait_for_hits()
