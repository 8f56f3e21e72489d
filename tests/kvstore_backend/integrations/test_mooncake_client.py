"""A promise to engines beyond Mooncake's own client's: memory is theirs again when a call returns."""

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
from tests.faults.blocks import NAMESPACE
from tests.faults.injector import Fault, FaultInjector
from tests.support.memory import Memory
from tests.support.mooncake import mooncake_master
from tests.support.strict_registration import Registered, StrictStore
from tests.support.waiting import wait_until

GIVEN_UP = -800


class InNamespace(PooledClient):
    """A client whose keys are of the tests' namespace."""

    def namespace(self) -> Namespace:
        return NAMESPACE


@dataclass
class Client:
    """A client whose store does as it is told, behind short deadlines."""

    client: PooledClient
    store: FaultInjector
    guarded: GuardedBackend


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    store = FaultInjector(MemoryStore(1 << 20))
    guarded = GuardedBackend(lambda: CheckedBackend(store), Deadlines(0.2, 0.05, 1e9))
    wait_until(lambda: guarded.is_ready, "the store")
    monkeypatch.setattr(mooncake_client, "open_pool", lambda config, namespace, *_, **__: BlockPool(guarded, namespace))
    client = InNamespace()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:1") == 0
    with contextlib.closing(client):
        yield Client(client, store, guarded)
        store.go_on()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PooledClient, Registered]]:
    """A client of a store that moves bytes from and to registered memory alone, as over RDMA."""
    store = StrictStore(MemoryStore(1 << 20))
    guarded = GuardedBackend(lambda: CheckedBackend(store))
    wait_until(lambda: guarded.is_ready, "the store")
    monkeypatch.setattr(mooncake_client, "open_pool", lambda config, namespace, *_, **__: BlockPool(guarded, namespace))
    monkeypatch.setattr(mooncake_client, "_WARM_UP_SECONDS", 0.0)
    client = InNamespace()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:1") == 0
    with contextlib.closing(client):
        yield client, store.registered


def test_values_of_bytes_lie_in_memory_that_rdma_was_told_of(strict: tuple[PooledClient, Registered]) -> None:
    client, registered = strict
    assert client.put("warm-up", b"value") == 0
    for_headers = dict(registered.regions)
    assert (client.put("note", b"value"), client.get("note")) == (0, b"value")
    assert (registered.complaints, registered.regions) == ([], for_headers)


def test_before_it_is_set_up_a_client_fails_every_call() -> None:
    client, memory = InNamespace(), Memory(8)
    assert client.batch_put_from(["a", "b"], [memory.address] * 2, [8] * 2) == [GIVEN_UP] * 2
    assert client.batch_get_into(["a", "b"], [memory.address] * 2, [8] * 2) == [GIVEN_UP] * 2
    assert client.batch_remove(["a", "b"]) == [GIVEN_UP] * 2
    assert client.batch_is_exist(["a", "b"]) == [0, 0]
    assert (client.put("a", b"value"), client.get("a"), client.remove_all()) == (GIVEN_UP, b"", GIVEN_UP)
    assert (client.register_buffer(memory.address, 8), client.health_check()) == (GIVEN_UP, 1)


def test_with_a_value_its_size_is_removed(one: Client) -> None:
    assert one.client.put("a", b"value") == 0
    assert one.client.batch_remove(["a", "b"]) == [0, -704]
    assert (one.client.get("a"), one.client.is_exist("a\0size")) == (b"", 0)


def test_a_value_in_several_pieces_is_read_into_several_others(one: Client) -> None:
    source, target = Memory(b"three pieces"), Memory(12)
    put, got = (
        [[span.address for span in each], [span.nbytes for span in each]]
        for each in (source.spans(5, 1, 6), target.spans(6, 6))
    )
    assert one.client.batch_put_from_multi_buffers(["a"], [put[0]], [put[1]]) == [0]
    assert one.client.batch_get_into_multi_buffers(["a"], [got[0]], [got[1]]) == [12]
    assert target.content == b"three pieces"
    assert one.client.batch_get_into_multi_buffers(["b"], [got[0]], [got[1]]) == [-704]


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_call_that_was_given_up_returns_when_it_no_longer_touches_memory(
    one: Client, call: Literal["put", "get"]
) -> None:
    memory = Memory(1000)
    [span] = memory.value
    ask = one.client.batch_put_from if call == "put" else one.client.batch_get_into
    one.store.faults = [Fault.HANGS]
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, ["a"], [span.address], [span.nbytes])
        wait_until(lambda: one.guarded.late_calls == 1, "the deadline")
        assert not wait([asked], timeout=0.3).done
        one.store.go_on()
        assert asked.result(10) == [GIVEN_UP]


def test_an_engines_warm_up_waits_out_anothers_crash(one: Client) -> None:
    one.store.faults = [Fault.FAILED] * 3
    assert one.client.put("warm-up", b"value") == 0
    assert one.client.get("warm-up") == b"value"


def test_a_put_after_the_warm_up_is_tried_once(one: Client) -> None:
    assert one.client.put("warm-up", b"value") == 0
    one.store.faults = [Fault.FAILED]
    assert one.client.put("later", b"value") == GIVEN_UP
    assert one.client.put("later", b"value") == 0


def test_a_warm_up_that_cannot_succeed_ends(one: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_client, "_WARM_UP_SECONDS", 0.5)
    assert one.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:1") == 0
    assert one.client.put("larger than the store", bytes(2 << 20)) == GIVEN_UP


class PatientClient(InNamespace):
    """A client of an engine that cannot go on without its blocks."""

    def patience(self, config: PoolConfig) -> float:
        return 30.0


@pytest.fixture
def patient(one: Client) -> Iterator[Client]:
    client = PatientClient()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:1") == 0
    with contextlib.closing(client):
        yield Client(client, one.store, one.guarded)


class TestPatience:
    def test_what_fails_is_tried_again(self, patient: Client) -> None:
        source, target = Memory(b"block"), Memory(5)
        faults = patient.store.faults
        faults[:] = [Fault.FAILED] * 2
        assert patient.client.put_from("a", source.address, 5) == 0
        faults[:] = [Fault.FAILED] * 2
        assert patient.client.is_exist("a") == 1
        faults[:] = [Fault.FAILED] * 2
        assert patient.client.get_into("a", target.address, 5) == 5
        assert target.content == b"block"

    def test_only_what_failed_is_tried_again(self, patient: Client) -> None:
        asked: list[list[bytes]] = []

        def ask(hashes: list[bytes]) -> list[Status]:
            asked.append(hashes)
            return [Status.FAILED if each == b"b" and len(asked) == 1 else Status.OK for each in hashes]

        assert patient.client._call_patiently(ask, [b"a", b"b"]) == [Status.OK] * 2
        assert asked == [[b"a", b"b"], [b"b"]]

    def test_what_is_not_there_is_not_waited_for(self, patient: Client) -> None:
        patient.store.calls.clear()
        assert patient.client.is_exist("a") == 0
        assert patient.store.calls == ["exists"]

    def test_a_put_is_done_when_others_can_read_the_block(self, patient: Client) -> None:
        """Mooncake says that a block is stored while another instance is still writing it."""
        source = Memory(b"block")
        patient.store.calls.clear()
        patient.store.faults[:] = [Fault.NOTHING, Fault.FALSE_ABSENT]
        assert patient.client.put_from("a", source.address, 5) == 0
        assert patient.store.calls == ["put", "exists"] * 2

    def test_it_ends(self, patient: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(patient.client, "_patience", 0.5)
        assert patient.client.put_from("larger than the store", Memory(2 << 20).address, 2 << 20) == GIVEN_UP

    def test_a_call_waits_for_an_answer_beyond_its_deadline(self, patient: Client) -> None:
        """Else it would be given up, and the one after it would say that the block is not there."""
        patient.store.faults[:] = [Fault.HANGS]
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(patient.client.is_exist, "a")
            assert patient.store.hanging.acquire(timeout=10)
            assert not wait([asked], timeout=1).done
            patient.store.go_on()
            assert asked.result(10) == 1
        assert patient.guarded.late_calls == 0

    def test_no_try_lasts_longer_than_patience(self, patient: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(patient.client, "_patience", 0.5)
        monkeypatch.setattr(patient.guarded, "deadlines", Deadlines(3600, 3600))
        patient.store.faults[:] = [Fault.HANGS]
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(patient.client.is_exist, "a")
            given_up = not wait([asked], timeout=20).not_done
            patient.store.go_on()
        assert given_up

    def test_an_outage_is_waited_for_once(self, patient: Client, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert count_tries() > 1, "that was the next outage"

    def test_a_transfer_has_the_time_of_its_bytes_besides(
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
        assert too_large - lookup == pytest.approx(60, abs=5), "no longer than twice its patience of 30 s"


class NamedClient(PooledClient):
    """A client that knows whose blocks it holds."""

    def namespace(self) -> Namespace:
        return Namespace("model", "float32", 64, 1, 1, 1, "bytes")


def test_an_engine_that_read_rdma_from_its_file_is_served_by_the_variable_that_says_tcp(
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
