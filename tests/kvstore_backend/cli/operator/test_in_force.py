"""What an operator orders stays in force under traffic: no instance, heartbeat or refill takes it back.

Refills look every 20 ms here, not every 5 s, so that twelve of their periods, the minute of an operator who watches,
pass in a quarter of a second. Orders to the router: ``tests/router/fleet/test_orders_in_force.py``.
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
from tests.kvstore_backend.cli.operator.test_mooncake import MIB, kept_keys, pool, tenants
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

FOLLOWED = {"clear", "unpin", "pin"}
"""Commands that this file follows."""

CHANGE_NOTHING_THAT_LASTS = {"ls", "why-miss", "doctor", "bench", "certify", "stats", "master"}
"""They read, store blocks that they remove again, or break a pool that is there to be broken."""


def test_every_command_is_followed_or_orders_nothing() -> None:
    assert set(COMMANDS) == FOLLOWED | CHANGE_NOTHING_THAT_LASTS, (
        "a command that changes what instances see needs a test here that it stays in force under traffic"
    )


class Traffic:
    """An instance that holds ``HASHES`` and watches over them, and requests that save and read other blocks."""

    def __init__(self, opened: BlockPool, looks: list[bool | None]) -> None:
        self.pool = opened
        self.looks = looks
        self.instance = Instance(opened)
        self.instance.save_again(HASHES)
        self.turn = threading.Lock()
        """Whoever has it keeps the requests waiting."""
        self._memory = Memory(64)
        opened.register(self._memory.address, self._memory.nbytes)
        self._refill = Refill(opened, self.instance, lambda _: None, period=PERIOD)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        self.wait_for_periods(2)

    def _ask(self) -> None:
        while not self._is_over.wait(PERIOD / 4):
            with self.turn:
                self.pool.save(OTHERS, [self._memory.value] * len(OTHERS))
                self.pool.get_blocks(OTHERS, [self._memory.value] * len(OTHERS))
                self.pool.lookup(HASHES)

    def wait_for_periods(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        """Until the refill has looked so often more; ``check`` is made all the while."""
        until = len(self.looks) + count

        def has_looked() -> bool:
            check()
            return len(self.looks) >= until

        wait_until(has_looked, f"{count} periods")

    def count(self, hashes: list[bytes]) -> int:
        """How many of these blocks the pool has."""
        return self.pool.exists(hashes).count(Status.OK)

    def end(self) -> None:
        """End it."""
        self._refill.close()
        self._refill._thread.join()
        self._is_over.set()
        self._thread.join()
        self.instance.free_memory()
        self.pool.unregister(self._memory.address, self._memory.nbytes)


@pytest.fixture(params=["folder", "folder, written later", "mooncake"])
def named(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A pool: for an instance, and for a command."""
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


def test_what_clear_removes_stays_removed(
    traffic: Traffic, named: tuple[str, list[str]], kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = named

    def settle(_: float) -> None:
        """Wait for what the pause of ``clear`` is long enough for: instances see the mark and write their queues."""
        traffic.wait_for_periods(3)
        assert traffic.pool.flush_writes(30.0)

    monkeypatch.setattr(clear, "time", SimpleNamespace(sleep=settle))

    def check() -> None:
        assert traffic.count(HASHES) == 0

    ended = kvstore("clear", *there, *NAMED)
    assert (ended.status, ended.errors) == (0, "")
    traffic.instance.cached.append(HASHES[0])
    traffic.wait_for_periods(PERIODS, check)
    # Later requests can still save their blocks.
    wait_until(lambda: traffic.count(OTHERS) == len(OTHERS), "others' blocks")


@pytest.mark.parametrize("named", ["mooncake"], indirect=True)
def test_pins_stay_until_unpin_takes_them_back_and_a_clear_ends_them(
    traffic: Traffic, named: tuple[str, list[str]], kvstore: Commands, mooncake_master: MooncakeMaster
) -> None:
    _, there = named
    before = kept_keys(mooncake_master)

    def expect(count: int) -> None:
        wait_until(lambda: kept_keys(mooncake_master) - before == count, f"{count} pins")
        traffic.wait_for_periods(PERIODS)
        assert kept_keys(mooncake_master) - before == count

    def change_pins(*command: str) -> None:
        # The pool does not take blocks that are being read or put: then the command asks to try again.
        with traffic.turn:
            wait_until(lambda: kvstore(*command, *there, *NAMED).status == 0, " ".join(command))

    wait_until(lambda: traffic.count(OTHERS) == len(OTHERS), "others' blocks")
    change_pins("pin", "--for", "1h")
    expect(len(HASHES) + len(OTHERS))
    change_pins("unpin")
    expect(0)
    assert traffic.count(HASHES) == len(HASHES)

    change_pins("pin", "--for", "1h")
    assert kvstore("clear", *there, *NAMED).status == 0
    traffic.wait_for_periods(PERIODS)
    assert traffic.count(HASHES) == 0
    assert kept_keys(mooncake_master) - before == 1  # the mark of the clear


def test_a_quota_stays_as_it_was_set_while_its_tenant_writes(tenants: MooncakeMaster) -> None:
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
