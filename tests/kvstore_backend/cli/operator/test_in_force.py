"""Commands of an operator stay in force under traffic: no instance, heartbeat or refill reverses them.

Refills look up blocks every 20 ms here, not every 5 s, so twelve periods take a quarter of a second, not a minute.
``tests/router/fleet/test_orders_in_force.py`` tests commands to the router.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from kvstore_backend.backend import Status
from kvstore_backend.cli.commands import COMMANDS
from kvstore_backend.cli.operator import clear
from kvstore_backend.config import load_config
from kvstore_backend.pool import BlockPool, open_pool, open_store
from kvstore_backend.refill import Refill
from kvstore_backend.stores.mooncake_admin import MasterAdmin
from tests.faults.blocks import NAMESPACE, conversation
from tests.kvstore_backend.cli.operator.pools import Commands, folder_url
from tests.kvstore_backend.cli.operator.test_mooncake import MIB, count_pins, pool, tenants
from tests.kvstore_backend.test_refill import HASHES, Instance
from tests.support.clearing import looks
from tests.support.memory import Memory
from tests.support.mooncake import MooncakeMaster
from tests.support.waiting import wait_until

__all__ = ["looks", "tenants"]

PERIOD = 0.02
PERIODS = 12
NAMED = ["--namespace", NAMESPACE.digest]
OTHERS = conversation(1, 40)

TESTED_HERE = {"clear", "unpin", "pin"}
"""Commands that this file tests."""

WITHOUT_LASTING_EFFECT = {"ls", "why-miss", "doctor", "bench", "certify", "stats", "master"}
"""Commands that only read, that remove the blocks that they store, or that break a pool for tests."""


def test_every_command_is_tested_here_or_has_no_lasting_effect() -> None:
    assert set(COMMANDS) == TESTED_HERE | WITHOUT_LASTING_EFFECT, (
        "a command that changes a pool for its instances needs a test here that it stays in force under traffic"
    )


class Traffic:
    """An instance that caches ``HASHES`` and refills the pool, and requests that save and read other blocks."""

    def __init__(self, opened: BlockPool, looks: list[bool | None]) -> None:
        self.pool = opened
        self.looks = looks
        self.instance = Instance(opened)
        self.instance.save_again(HASHES)
        self.turn = threading.Lock()
        """Lock that stops the requests while a test has it."""
        self._memory = Memory(64)
        opened.register(self._memory.address, self._memory.nbytes)
        self._refill = Refill(opened, self.instance, lambda _: None, period=PERIOD)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run_requests, daemon=True)
        self._thread.start()
        self.wait_for_periods(2)

    def _run_requests(self) -> None:
        while not self._is_over.wait(PERIOD / 4):
            with self.turn:
                self.pool.save(OTHERS, [self._memory.value] * len(OTHERS))
                self.pool.get_blocks(OTHERS, [self._memory.value] * len(OTHERS))
                self.pool.lookup(HASHES)

    def wait_for_periods(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the refill has looked ``count`` times more; call ``check`` meanwhile."""
        until = len(self.looks) + count

        def has_looked() -> bool:
            check()
            return len(self.looks) >= until

        wait_until(has_looked, f"{count} periods")

    def count(self, hashes: list[bytes]) -> int:
        """Count these blocks in the pool."""
        return self.pool.exists(hashes).count(Status.OK)

    def end(self) -> None:
        self._refill.close()
        self._refill._thread.join()
        self._is_over.set()
        self._thread.join()
        self.instance.free_memory()
        self.pool.unregister(self._memory.address, self._memory.nbytes)


@pytest.fixture(params=["folder", "folder, written later", "mooncake"])
def named(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A pool: its URL for an instance, and its arguments for a command."""
    if request.param == "mooncake":
        master: MooncakeMaster = request.getfixturevalue("mooncake_master")
        owner = open_store(master.config())
        yield "", pool(master)
        owner.close()
    else:
        url = folder_url(tmp_path / "pool")
        yield url + ("&async_write=true" if "later" in request.param else ""), [url]


@pytest.fixture
def traffic(
    named: tuple[str, list[str]], looks: list[bool | None], request: pytest.FixtureRequest
) -> Iterator[Traffic]:
    url, _ = named
    config = load_config(url) if url else request.getfixturevalue("mooncake_master").config(global_segment_size=0)
    with open_pool(config, NAMESPACE, background=False, facts={}) as opened:
        running = Traffic(opened, looks)
        try:
            yield running
        finally:
            running.end()
            opened.clear()


def test_cleared_blocks_stay_removed(
    traffic: Traffic, named: tuple[str, list[str]], kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, where = named

    def settle(_: float) -> None:
        """Wait as ``clear`` does, until instances have seen the mark and written their queues."""
        traffic.wait_for_periods(3)
        assert traffic.pool.flush_writes(30.0)

    monkeypatch.setattr(clear, "time", SimpleNamespace(sleep=settle))

    def check() -> None:
        assert traffic.count(HASHES) == 0

    ended = kvstore("clear", *where, *NAMED)
    assert (ended.status, ended.errors) == (0, "")
    traffic.instance.cached.append(HASHES[0])
    traffic.wait_for_periods(PERIODS, check)
    # Later requests can still save their blocks.
    wait_until(lambda: traffic.count(OTHERS) == len(OTHERS), "the other blocks")


@pytest.mark.parametrize("named", ["mooncake"], indirect=True)
def test_pins_stay_until_an_unpin_or_a_clear(
    traffic: Traffic, named: tuple[str, list[str]], kvstore: Commands, mooncake_master: MooncakeMaster
) -> None:
    _, where = named
    before = count_pins(mooncake_master)

    def expect(count: int) -> None:
        wait_until(lambda: count_pins(mooncake_master) - before == count, f"{count} pins")
        traffic.wait_for_periods(PERIODS)
        assert count_pins(mooncake_master) - before == count

    def change_pins(*command: str) -> None:
        # The pool does not change a block during its read or put, and the command must be repeated.
        with traffic.turn:
            wait_until(lambda: kvstore(*command, *where, *NAMED).status == 0, " ".join(command))

    wait_until(lambda: traffic.count(OTHERS) == len(OTHERS), "the other blocks")
    change_pins("pin", "--for", "1h")
    expect(len(HASHES) + len(OTHERS))
    change_pins("unpin")
    expect(0)
    assert traffic.count(HASHES) == len(HASHES)

    change_pins("pin", "--for", "1h")
    assert kvstore("clear", *where, *NAMED).status == 0
    traffic.wait_for_periods(PERIODS)
    assert traffic.count(HASHES) == 0
    assert count_pins(mooncake_master) - before == 1  # the mark of the clear


def test_a_quota_does_not_change_while_its_tenant_writes(tenants: MooncakeMaster) -> None:
    admin = MasterAdmin(tenants.metrics_url.split("/")[2])
    url = f"http://{admin.address}/api/v1/tenant_quotas"
    quota = {"requested_quota_bytes": 12 * MIB}
    store, memory = open_store(tenants.config(tenant_id="loud")), Memory(MIB)
    store.register(memory.address, memory.nbytes)
    try:
        answer = httpx.put(url, params={"tenant_id": "loud"}, json=quota, trust_env=False)
        assert answer.status_code == 200, answer.text
        for number in range(PERIODS):
            for part in range(16):
                store.put([f"loud-{number}-{part}"], [memory.value])
            [account] = [each for each in admin.fetch_accounts() if each.name == "loud"]
            assert (account.quota, account.used <= 12 * MIB) == (12 * MIB, True)
    finally:
        store.unregister(memory.address, memory.nbytes)
        store.close()
