"""Our replacement of Mooncake's client. Unlike Mooncake's, a call uses no memory of the engine after its return."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from kvstore_backend.backend import ConfigError, Span, Status
from kvstore_backend.config import PoolConfig, list_rdma_devices
from kvstore_backend.integrations import mooncake_client
from kvstore_backend.integrations.mooncake_client import PooledClient
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import BlockPool
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from kvstore_backend.wrappers.tiered import TieredBackend
from tests.faults.blocks import NAMESPACE
from tests.faults.injector import Fault, FaultInjector
from tests.support.memory import Memory
from tests.support.mooncake import mooncake_master
from tests.support.strict_registration import Registered, StrictStore
from tests.support.waiting import wait_until

FAILED = -800


class ClientInNamespace(PooledClient):
    """A client with keys of the tests' namespace."""

    def namespace(self) -> Namespace:
        return NAMESPACE


@dataclass
class Client:
    """A client with short deadlines, and its store, to which tests add faults."""

    client: PooledClient
    store: FaultInjector
    guarded: GuardedBackend


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    store = FaultInjector(MemoryStore(1 << 20))
    guarded = GuardedBackend(lambda: CheckedBackend(store), Deadlines(0.2, 0.05, 1e9))
    wait_until(lambda: guarded.is_ready, "the store")
    monkeypatch.setattr(mooncake_client, "open_pool", lambda config, namespace, *_, **__: BlockPool(guarded, namespace))
    client = ClientInNamespace()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:1") == 0
    with contextlib.closing(client):
        yield Client(client, store, guarded)
        store.go_on()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PooledClient, Registered]]:
    """Yield a client of a store that transfers only registered memory, as with RDMA."""
    store = StrictStore(MemoryStore(1 << 20))
    guarded = GuardedBackend(lambda: CheckedBackend(store))
    wait_until(lambda: guarded.is_ready, "the store")
    monkeypatch.setattr(mooncake_client, "open_pool", lambda config, namespace, *_, **__: BlockPool(guarded, namespace))
    monkeypatch.setattr(mooncake_client, "_WARM_UP_SECONDS", 0.0)
    client = ClientInNamespace()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:1") == 0
    with contextlib.closing(client):
        yield client, store.registered


def test_bytes_are_copied_to_registered_memory(strict: tuple[PooledClient, Registered]) -> None:
    client, registered = strict
    assert client.put("warm-up", b"value") == 0
    for_headers = dict(registered.regions)
    assert (client.put("note", b"value"), client.get("note")) == (0, b"value")
    assert (registered.complaints, registered.regions) == ([], for_headers)


def test_every_call_before_setup_fails() -> None:
    client, memory = ClientInNamespace(), Memory(8)
    assert client.batch_put_from(["a", "b"], [memory.address] * 2, [8] * 2) == [FAILED] * 2
    assert client.batch_get_into(["a", "b"], [memory.address] * 2, [8] * 2) == [FAILED] * 2
    assert client.batch_remove(["a", "b"]) == [FAILED] * 2
    assert client.batch_is_exist(["a", "b"]) == [0, 0]
    assert (client.put("a", b"value"), client.get("a"), client.remove_all()) == (FAILED, b"", FAILED)
    assert (client.register_buffer(memory.address, 8), client.health_check()) == (FAILED, 1)


def test_a_client_that_is_dropped_closes_its_pool(faulty: Client) -> None:
    client = ClientInNamespace()
    client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:1")
    del client
    assert not faulty.guarded.is_ready


def test_the_removal_of_a_value_removes_its_size(faulty: Client) -> None:
    assert faulty.client.put("a", b"value") == 0
    assert faulty.client.batch_remove(["a", "b"]) == [0, -704]
    assert (faulty.client.get("a"), faulty.client.is_exist("a\0size")) == (b"", 0)


def test_a_value_in_several_buffers_is_read_into_other_buffers(faulty: Client) -> None:
    source, target = Memory(b"three pieces"), Memory(12)
    put, got = (
        [[span.address for span in spans], [span.nbytes for span in spans]]
        for spans in (source.spans(5, 1, 6), target.spans(6, 6))
    )
    assert faulty.client.batch_put_from_multi_buffers(["a"], [put[0]], [put[1]]) == [0]
    assert faulty.client.batch_get_into_multi_buffers(["a"], [got[0]], [got[1]]) == [12]
    assert target.content == b"three pieces"
    assert faulty.client.batch_get_into_multi_buffers(["b"], [got[0]], [got[1]]) == [-704]


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_late_call_returns_when_it_no_longer_uses_the_memory(faulty: Client, call: Literal["put", "get"]) -> None:
    memory = Memory(1000)
    [span] = memory.value
    ask = faulty.client.batch_put_from if call == "put" else faulty.client.batch_get_into
    faulty.store.faults = [Fault.HANGS]
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(ask, ["a"], [span.address], [span.nbytes])
        wait_until(lambda: faulty.guarded.late_calls == 1, "the deadline")
        assert not wait([future], timeout=0.3).done
        faulty.store.go_on()
        assert future.result(10) == [FAILED]


def test_nothing_is_stored_after_a_put_so_long_that_the_next_ones_may_have_other_bytes(faulty: Client) -> None:
    memory = Memory(1000)
    [span] = memory.value
    put = (["a"], [span.address], [span.nbytes])
    faulty.client._longest_put = 0.0
    faulty.store.faults = [Fault.HANGS]
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(faulty.client.batch_put_from, *put)
        wait_until(lambda: faulty.guarded.late_calls == 1, "the deadline")
        faulty.store.go_on()
        assert future.result(10) == [FAILED]
    faulty.client._no_puts_before += 3600
    wait_until(lambda: faulty.guarded.is_ready, "the store")
    assert faulty.client.batch_put_from(*put) == [FAILED]
    faulty.client._no_puts_before -= 7200
    assert faulty.client.batch_put_from(*put) == [0]


@pytest.mark.parametrize("has_fast_tier", [False, True])
def test_reads_end_at_their_deadline_if_the_engine_uses_their_memory_for_nothing_else(
    faulty: Client, has_fast_tier: bool
) -> None:
    """No read is successful before the late call has ended, so that no bytes of the late call are used."""
    if has_fast_tier:
        large = GuardedBackend(lambda: CheckedBackend(MemoryStore(1 << 20)))
        wait_until(lambda: large.is_ready, "the large tier")
        faulty.client._pool = BlockPool(TieredBackend(faulty.guarded, large, "through"), NAMESPACE)
    memory = Memory(1000)
    [span] = memory.value
    read = (["a"], [span.address], [span.nbytes])
    faulty.client._ends_reads_late = False
    assert faulty.client.batch_put_from(*read) == [0]
    faulty.store.faults = [Fault.HANGS]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(faulty.client.batch_get_into, *read).result(10) == [FAILED]
    assert (faulty.guarded.wait_for_late_calls(0), faulty.client.batch_get_into(*read)) == (False, [FAILED])
    faulty.store.go_on()
    wait_until(lambda: faulty.guarded.is_ready, "the store")
    assert faulty.client.batch_get_into(*read) == [span.nbytes]


def test_reads_of_a_fast_tier_go_on_while_a_put_to_the_large_tier_hangs(faulty: Client) -> None:
    fast = GuardedBackend(lambda: CheckedBackend(MemoryStore(1 << 20)))
    wait_until(lambda: fast.is_ready, "the fast tier")
    faulty.client._pool = BlockPool(TieredBackend(fast, faulty.guarded, "through"), NAMESPACE)
    faulty.client._ends_reads_late = False
    memory = Memory(1000)
    [span] = memory.value
    assert faulty.client.put_from("a", *span) == 0
    faulty.store.faults = [Fault.HANGS]
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(faulty.client.put_from, "b", *span)
        wait_until(lambda: faulty.guarded.late_calls == 1, "the deadline")
        read = faulty.client.batch_get_into(["a"], [span.address], [span.nbytes])
        faulty.store.go_on()
        assert (future.result(10), read) == (FAILED, [span.nbytes])


def test_the_warm_up_is_repeated_until_it_succeeds(faulty: Client) -> None:
    faulty.store.faults = [Fault.FAILED] * 3
    assert faulty.client.put("warm-up", b"value") == 0
    assert faulty.client.get("warm-up") == b"value"


def test_a_put_after_the_warm_up_is_not_repeated(faulty: Client) -> None:
    assert faulty.client.put("warm-up", b"value") == 0
    faulty.store.faults = [Fault.FAILED]
    assert faulty.client.put("later", b"value") == FAILED
    assert faulty.client.put("later", b"value") == 0


def test_a_warm_up_that_cannot_succeed_ends_with_an_error(faulty: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_client, "_WARM_UP_SECONDS", 0.5)
    assert faulty.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:1") == 0
    assert faulty.client.put("larger than the store", bytes(2 << 20)) == FAILED


class PatientClient(ClientInNamespace):
    """A client of an engine that cannot continue without its blocks."""

    def patience(self, config: PoolConfig) -> float:
        return 30.0


@pytest.fixture
def patient(faulty: Client) -> Iterator[Client]:
    client = PatientClient()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:1") == 0
    with contextlib.closing(client):
        yield Client(client, faulty.store, faulty.guarded)


class TestPatience:
    def test_a_failed_call_is_repeated(self, patient: Client) -> None:
        source, target = Memory(b"block"), Memory(5)
        faults = patient.store.faults
        faults[:] = [Fault.FAILED] * 2
        assert patient.client.put_from("a", source.address, 5) == 0
        faults[:] = [Fault.FAILED] * 2
        assert patient.client.is_exist("a") == 1
        faults[:] = [Fault.FAILED] * 2
        assert patient.client.get_into("a", target.address, 5) == 5
        assert target.content == b"block"

    def test_only_the_failed_keys_are_repeated(self, patient: Client) -> None:
        calls: list[list[bytes]] = []

        def answer(hashes: list[bytes]) -> list[Status]:
            calls.append(hashes)
            return [Status.FAILED if name == b"b" and len(calls) == 1 else Status.OK for name in hashes]

        assert patient.client._call_patiently(answer, [b"a", b"b"]) == [Status.OK] * 2
        assert calls == [[b"a", b"b"], [b"b"]]

    def test_a_look_up_of_an_absent_block_is_not_repeated(self, patient: Client) -> None:
        patient.store.calls.clear()
        assert patient.client.is_exist("a") == 0
        assert patient.store.calls == ["exists"]

    def test_a_put_ends_when_other_instances_can_read_the_block(self, patient: Client) -> None:
        """Mooncake reports that a block is stored while another instance still writes it."""
        source = Memory(b"block")
        patient.store.calls.clear()
        patient.store.faults[:] = [Fault.NOTHING, Fault.FALSE_ABSENT]
        assert patient.client.put_from("a", source.address, 5) == 0
        assert patient.store.calls == ["put", "exists"] * 2

    def test_repeated_calls_end_with_the_patience(self, patient: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(patient.client, "_patience", 0.5)
        assert patient.client.put_from("larger than the store", Memory(2 << 20).address, 2 << 20) == FAILED

    def test_a_call_waits_for_an_answer_beyond_its_deadline(self, patient: Client) -> None:
        """Otherwise the next call would report the block as absent."""
        patient.store.faults[:] = [Fault.HANGS]
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(patient.client.is_exist, "a")
            assert patient.store.hanging.acquire(timeout=10)
            assert not wait([future], timeout=1).done
            patient.store.go_on()
            assert future.result(10) == 1
        assert patient.guarded.late_calls == 0

    def test_no_try_lasts_longer_than_patience(self, patient: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(patient.client, "_patience", 0.5)
        monkeypatch.setattr(patient.guarded, "deadlines", Deadlines(3600, 3600))
        patient.store.faults[:] = [Fault.HANGS]
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(patient.client.is_exist, "a")
            has_ended = not wait([future], timeout=20).not_done
            patient.store.go_on()
        assert has_ended

    def test_only_the_first_call_of_an_outage_is_repeated(
        self, patient: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(patient.client, "_patience", 0.5)
        monkeypatch.setattr(mooncake_client, "_PAUSE_SECONDS", 0.01)
        tries: list[list[bytes]] = []

        def fail(hashes: list[bytes]) -> list[Status]:
            tries.append(hashes)
            return [Status.FAILED]

        def count_tries() -> int:
            tries.clear()
            assert patient.client._call_patiently(fail, [b"a"]) == [Status.FAILED]
            return len(tries)

        assert count_tries() > 1
        assert [count_tries(), count_tries()] == [1, 1]
        assert patient.client._call_patiently(lambda hashes: [Status.ABSENT], [b"a"]) == [Status.ABSENT]
        assert count_tries() > 1, "this is the next outage"

    def test_the_deadline_of_a_transfer_grows_with_its_bytes(
        self, patient: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        moments: list[float] = []

        def note(moment: float) -> contextlib.AbstractContextManager[None]:
            moments.append(moment)
            return contextlib.nullcontext()

        def answer(*_: object) -> list[Status]:
            return [Status.OK]

        monkeypatch.setattr(mooncake_client, "end_calls_at", note)
        patient.client._call_patiently(answer, [b"a"])
        for nbytes in (10**9, 10**12):
            patient.client._call_patiently(answer, [b"a"], [[Span(0, nbytes)]])
        lookup, large, too_large = moments
        assert large - lookup == pytest.approx(10, abs=5)
        assert too_large - lookup == pytest.approx(60, abs=5), "at most twice the patience of 30 s"


class NamedClient(PooledClient):
    """A client with a namespace of its own."""

    def namespace(self) -> Namespace:
        return Namespace("model", "float32", 64, 1, 1, 1, "bytes")


def test_the_variable_for_tcp_overrides_rdma_in_an_engines_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mooncake_master(tmp_path / "log") as master:
        path = tmp_path / "mooncake_config.json"
        path.write_text(json.dumps(master.settings(protocol="rdma")))
        monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
        client = NamedClient()
        read = ("127.0.0.1", master.metadata_server, 64 << 20, 16 << 20, "rdma", "", master.address)
        if not list_rdma_devices():
            with pytest.raises(ConfigError, match=f'"protocol" in {path} is .rdma.; this machine has no RDMA device'):
                client.setup(*read)
        monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
        assert client.setup(*read) == 0
        client.close()
