"""Behaviour of Mooncake only, with real masters and clients; ``..conformance`` has the contract of all stores."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_backend.backend import PoolUnavailable, Status, StorageBackend
from kvstore_backend.config import MooncakeSettings, PoolConfig, load_config, read_config
from kvstore_backend.pool import open_backend, open_store
from kvstore_backend.stores import mooncake
from kvstore_backend.stores.mooncake import MooncakeStore
from tests.support.etcd import running_etcd
from tests.support.memory import Memory
from tests.support.mooncake import MooncakeMaster
from tests.support.mooncake import mooncake_master as running_mooncake_master
from tests.support.peer import Peer
from tests.support.ports import free_port
from tests.support.waiting import wait_until

OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED
MIB = 1 << 20


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """A master for one test, which may kill or stop it."""
    with running_mooncake_master(tmp_path / "master.log") as master:
        yield master


@pytest.fixture(scope="module")
def store(mooncake_master: MooncakeMaster) -> Iterator[StorageBackend]:
    opened = open_store(mooncake_master.config())
    yield opened
    opened.close()


def new_key() -> str:
    return f"mooncake-{secrets.token_hex(8)}"


def try_opening(config: PoolConfig) -> StorageBackend | None:
    """Open the store; return ``None`` if no master is elected yet."""
    try:
        return open_store(config)
    except PoolUnavailable:
        return None


def read_opening_error(config: PoolConfig) -> str:
    """Return the sentence of the error that the opening raises."""
    with pytest.raises(PoolUnavailable) as caught:
        open_store(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestTwoProcesses:
    def test_a_client_finds_gets_and_removes_the_value_of_another(
        self, store: StorageBackend, mooncake_master: MooncakeMaster
    ) -> None:
        config = mooncake_master.config(global_segment_size=0, local_buffer_size=0)
        key, content = new_key(), secrets.token_bytes(3 * MIB)
        source = Memory(content)
        with Peer(partial(open_store, config)) as peer:
            assert peer.exists(key) is ABSENT
            assert store.put([key], [source.spans(MIB, 2 * MIB)]) == [OK]
            assert peer.exists(key) is OK
            assert peer.get(key, 3 * MIB) == content
            assert peer.get(key, 3 * MIB - 1) is ABSENT
            assert peer.get(key, 3 * MIB + 1) is ABSENT
            wait_until(lambda: peer.remove(key) is OK, "the end of the reader's lease")
            assert store.exists([key]) == [ABSENT]
            assert peer.put(key, content[:MIB]) is OK
            target = Memory(MIB)
            assert store.get([key], [target.value]) == [OK]
            assert target.content == content[:MIB]

    def test_a_get_after_the_death_of_the_owner_is_a_failure_or_a_miss(self, own_master: MooncakeMaster) -> None:
        # Only the owner gives memory to the pool, so it stores the value.
        config = own_master.config(global_segment_size=0)
        with Peer(partial(open_store, config)) as reader:
            with Peer(partial(open_store, own_master.config())) as owner:
                assert reader.put("key", b"value" * 1000) is OK
                owner.kill()
            assert reader.get("key", 5000) in (FAILED, ABSENT)


class TestTransfersWithoutEnd:
    """Mooncake returns after 60 s from a transfer that continues; here each failed transfer counts as such a one."""

    def test_the_client_is_closed_before_the_call_of_the_transfer_ends(
        self, own_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mooncake, "_GIVEN_UP_SECONDS", 0.0)
        reader, target = open_store(own_master.config(global_segment_size=0)), Memory(5000)
        with Peer(partial(open_store, own_master.config())) as owner:
            assert owner.put("key", b"value" * 1000) is OK
            owner.kill()
        with pytest.raises(PoolUnavailable, match="the Mooncake client was closed"):
            reader.get(["key"], [target.value])
        assert isinstance(reader, MooncakeStore)
        assert reader._has_left
        with pytest.raises(PoolUnavailable, match="the Mooncake client was closed"):
            reader.exists(["key"])
        reader.close()

    def test_the_client_is_also_closed_if_the_clock_was_set_forward_during_the_transfer(
        self, own_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader, target = open_store(own_master.config(global_segment_size=0)), Memory(5000)
        with Peer(partial(open_store, own_master.config())) as owner:
            assert owner.put("key", b"value" * 1000) is OK
            owner.kill()
        days = itertools.count(step=86400.0)
        clocks = SimpleNamespace(monotonic=time.monotonic, sleep=time.sleep, time=lambda: next(days))
        monkeypatch.setattr(mooncake, "time", clocks)
        with pytest.raises(PoolUnavailable, match="the Mooncake client was closed"):
            reader.get(["key"], [target.value])
        reader.close()

    def test_the_client_is_not_closed_while_the_master_hangs(
        self, own_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader, pauses = open_store(own_master.config(global_segment_size=0)), threading.Semaphore(0)
        assert isinstance(reader, MooncakeStore)
        clocks = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pauses.release())
        monkeypatch.setattr(mooncake, "time", clocks)
        own_master.process.signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as threads:
            closing = threads.submit(reader._end_transfers)
            wait_until(lambda: closing.done() or pauses.acquire(blocking=False), "a try to reach the master")
            assert not closing.done()
            own_master.process.signal(signal.SIGCONT)
            closing.result(30)
        assert reader._has_left
        reader.close()

    def test_a_pool_is_used_again_after_a_transfer_without_end(
        self, own_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend, target = open_backend(own_master.config(global_segment_size=0), background=False), Memory(5000)
        with Peer(partial(open_store, own_master.config())) as owner:
            assert backend.put(["key"], [target.value]) == [OK]
            owner.kill()
        monkeypatch.setattr(mooncake, "_GIVEN_UP_SECONDS", 0.0)
        assert backend.get(["key"], [target.value]) == [FAILED]
        monkeypatch.undo()
        wait_until(lambda: backend.is_ready, "another client")
        with Peer(partial(open_store, own_master.config())):
            wait_until(lambda: backend.put(["other"], [target.value]) == [OK], "a put")
            assert backend.get(["other"], [target.value]) == [OK]
        backend.close()


class TestLeases:
    def test_a_value_with_a_lease_is_not_removed(self, own_master: MooncakeMaster) -> None:
        with Peer(partial(open_store, own_master.config())) as peer:
            peer.put("key", b"value")
            assert peer.exists("key") is OK
            assert peer.remove("key") is FAILED
            assert peer.get("key", 5) == b"value"


class TestCrashes:
    """The master assigns the memory of a crashed client to puts for about 10 s, and these puts fail."""

    BLOCKS = 12  # with a chance of 1 in 4096, none gets the memory of the dead client

    @staticmethod
    def put_blocks(store: StorageBackend) -> list[Status]:
        source = Memory(secrets.token_bytes(1000))
        return [store.put([new_key()], [source.value])[0] for _ in range(TestCrashes.BLOCKS)]

    @pytest.mark.parametrize("metadata", [{}, {"metadata_server": "P2PHANDSHAKE"}], ids=["http", "p2p"])
    def test_every_put_after_a_crash_succeeds(self, own_master: MooncakeMaster, metadata: dict[str, object]) -> None:
        config = own_master.config(**metadata)
        with Peer(partial(open_store, config)) as crashed, Peer(partial(_open_patiently, config)) as other:
            crashed.kill()
            assert other.call(self.put_blocks) == [OK] * self.BLOCKS

    def test_every_put_of_a_client_that_expects_no_crash_succeeds(self, own_master: MooncakeMaster) -> None:
        config = own_master.config()
        with Peer(partial(open_store, config)) as crashed, Peer(partial(_open_long_ago, config)) as other:
            crashed.kill()
            assert other.call(self.put_blocks) == [OK] * self.BLOCKS

    def test_a_client_without_memory_finds_an_owner_that_is_alive(self, own_master: MooncakeMaster) -> None:
        # Without a metadata server each failure is fast, so there is time for enough retries.
        config, none = (
            own_master.config(metadata_server="P2PHANDSHAKE", global_segment_size=size) for size in ("64MiB", 0)
        )
        with Peer(partial(open_store, config)), Peer(partial(open_store, config)) as crashed:
            crashed.kill()
            with Peer(partial(_open_patiently, none)) as other:
                assert other.call(self.put_blocks) == [OK] * self.BLOCKS

    def test_every_put_of_a_crashed_client_that_returns_with_its_name_succeeds(
        self, own_master: MooncakeMaster
    ) -> None:
        config = own_master.config(local_hostname=f"127.0.0.1:{free_port()}")
        with Peer(partial(open_store, config)) as crashed:
            assert crashed.put("key", b"value") is OK
            crashed.kill()
        with Peer(partial(_open_patiently, config)) as back:
            assert back.call(self.put_blocks) == [OK] * self.BLOCKS


class TestFullPool:
    def test_a_value_that_is_larger_than_the_pool_fails(self, store: StorageBackend) -> None:
        source = Memory(65 * MIB)
        assert store.put([new_key()], [source.value]) == [FAILED]

    def test_a_pool_without_memory_stores_nothing(self, own_master: MooncakeMaster) -> None:
        with Peer(partial(open_store, own_master.config(global_segment_size=0))) as peer:
            assert peer.put("key", b"value") is FAILED
            assert peer.exists("key") is ABSENT


class TestDeadMaster:
    def test_no_call_returns_ok_or_raises(self, own_master: MooncakeMaster) -> None:
        with Peer(partial(open_store, own_master.config())) as peer:
            assert peer.put("key", b"value") is OK
            own_master.kill()
            answers = peer.call(_make_all_calls, "key")
            assert answers.pop("health") is False
            assert set(answers.values()) <= {FAILED, ABSENT}
            assert answers["exists"] is FAILED

    def test_calls_fail_while_the_master_hangs(self, own_master: MooncakeMaster) -> None:
        with Peer(partial(open_store, own_master.config())) as peer:
            assert peer.put("key", b"value") is OK
            own_master.process.signal(signal.SIGSTOP)
            answers = peer.call(_make_all_calls, "key")
            assert answers.pop("health") is False
            assert set(answers.values()) == {FAILED}
            own_master.process.signal(signal.SIGCONT)
            wait_until(lambda: peer.put("new key", b"value") is OK, "the master's return")


class TestOpening:
    def test_an_unreachable_master_is_reported(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        config = load_config("mooncake", explicit={"master_server_addr": address, "protocol": "tcp"}, environ={})
        assert read_opening_error(config) == (
            f"no Mooncake master answers at {address} (Connection refused): "
            "start mooncake_master there, or correct the address"
        )

    def test_a_host_that_does_not_exist_is_reported(self) -> None:
        config = load_config(
            "mooncake", explicit={"master_server_addr": "no-such-host.invalid:1", "protocol": "tcp"}, environ={}
        )
        assert read_opening_error(config).startswith("no Mooncake master answers at no-such-host.invalid:1 (")

    def test_an_unreachable_metadata_server_is_reported(self, mooncake_master: MooncakeMaster) -> None:
        address = f"127.0.0.1:{free_port()}"
        assert read_opening_error(mooncake_master.config(metadata_server=f"http://{address}/metadata")) == (
            f"no Mooncake metadata server answers at {address} (Connection refused): start mooncake_master with "
            "--enable_http_metadata_server=true, or use P2PHANDSHAKE in every client, or correct the address"
        )

    def test_another_server_at_the_address_of_the_master_is_reported(self, mooncake_master: MooncakeMaster) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            sentence = read_opening_error(mooncake_master.config(master_server_addr=address))
        assert sentence == (
            f"the server at {address} does not answer: it is not a Mooncake master, or it hangs; restart it, "
            "or correct the address"
        )

    def test_a_master_that_hangs_is_reported_before_the_native_client_is_called(
        self, own_master: MooncakeMaster
    ) -> None:
        own_master.process.signal(signal.SIGSTOP)
        assert "or it hangs" in read_opening_error(own_master.config())
        own_master.process.signal(signal.SIGCONT)

    def test_a_metadata_server_that_hangs_is_reported(self, mooncake_master: MooncakeMaster) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            sentence = read_opening_error(mooncake_master.config(metadata_server=f"http://{address}/metadata"))
        assert sentence.startswith(f"the server at {address} does not answer as a metadata server: ")

    def test_a_failed_join_is_not_retried_soon_because_it_blocks_the_process(
        self, mooncake_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def setup(_: object, *arguments: object) -> int:  # Mooncake's own takes 6 s
            time.sleep(0.01)
            return -1

        native = type("Native", (), {"setup": setup})
        monkeypatch.setattr("kvstore_backend.stores.mooncake_joining.load_client_class", lambda: native)
        with pytest.raises(PoolUnavailable, match="failed with code -1") as caught:
            open_store(mooncake_master.config())
        assert caught.value.pause_seconds >= 10 * 0.01

    @pytest.mark.parametrize(
        ("name", "host"),
        [("10.0.0.7:17812", "10.0.0.7"), ("node7", "node7"), ("[fd00::7]:17812", "[fd00::7]"), ("fd00::7", "fd00::7")],
    )
    @pytest.mark.parametrize("bound", [False, True])
    def test_the_port_is_passed_to_mooncake_only_if_it_listens_there(
        self, mooncake_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch, name: str, host: str, bound: bool
    ) -> None:
        names: list[str] = []

        def setup(_: object, local_hostname: str, *arguments: object) -> int:
            names.append(local_hostname)
            return -1

        native = type("Native", (), {"setup": setup})
        monkeypatch.setattr("kvstore_backend.stores.mooncake_joining.load_client_class", lambda: native)
        if bound:
            monkeypatch.setenv("MC_LEGACY_RPC_PORT_BINDING", "1")
        read_opening_error(mooncake_master.config(local_hostname=name))
        assert names == [name if bound else host]

    @pytest.mark.parametrize(
        ("network", "message"),
        [
            (":", "no network except loopback; Mooncake uses loopback only if you set MC_TCP_BIND_ADDRESS"),
            ("ip addr add 10.0.0.1/24 dev one; ip link set one up", "no network except loopback"),
            ("ip addr add 10.0.0.1/24 dev one; ip link set one up; ip link set other up", ""),
            ("ip addr add 10.0.0.1/24 dev one label one:1; ip link set one up; ip link set other up", ""),
        ],
        ids=["loopback", "not connected", "no route to other networks", "address with a label"],
    )
    def test_only_a_machine_without_a_network_gets_the_error_about_loopback(
        self, network: str, message: str, tmp_path: Path
    ) -> None:
        links = "ip link set lo up; ip link add one type veth peer name other"
        alone = ["unshare", "--net", "--map-root-user", "sh", "-ec", f'{links}; {network}; exec "$@"', "sh"]
        try:
            subprocess.run([*alone, "true"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as exc:
            pytest.skip(f"no network namespace can be made here: {exc}")
        code = (
            "from pathlib import Path\n"
            "from tests.support.mooncake import mooncake_master\n"
            "from kvstore_backend.pool import open_store\n"
            f"with mooncake_master(Path({str(tmp_path / 'log')!r})) as master:\n"
            "    open_store(master.config())\n"
        )
        ended = subprocess.run([*alone, sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert message in ended.stderr
        assert bool(ended.returncode) is bool(message), ended.stderr

    def test_clients_find_each_other_without_hostnames_and_without_a_metadata_server(
        self, own_master: MooncakeMaster
    ) -> None:
        config = own_master.config(local_hostname=None, metadata_server=None)
        with Peer(partial(open_store, config)) as one, Peer(partial(open_store, config)) as other:
            assert one.put("key", b"value") is OK
            assert other.get("key", 5) == b"value"

    def test_clients_share_a_pool_with_the_file_of_fastdeploys_ha_example(self, tmp_path: Path) -> None:
        with running_etcd(tmp_path) as address:
            dead = f"127.0.0.1:{free_port()}"
            path = tmp_path / "ha_mooncake_config.json"
            servers = f"etcd://{dead};{address}"
            settings = {"metadata_server": servers, "global_segment_size": 67108864, "master_server_addr": servers}
            path.write_text(json.dumps({**settings, "protocol": "rdma", "rdma_devices": ""}))
            config = read_config(path, environ={"MOONCAKE_PROTOCOL": "tcp"})
            assert config is not None
            flags = ("--enable_ha=true", f"--etcd_endpoints=http://{address}", "--cluster_id=mooncake_cluster")
            with running_mooncake_master(tmp_path / "master.log", *flags):
                opened = wait_until(lambda: try_opening(config), "a leader elected")
                key, content = new_key(), secrets.token_bytes(MIB)
                assert opened is not None
                with contextlib.closing(opened), Peer(partial(open_store, config)) as peer:
                    wait_until(lambda: peer.put(key, content) is OK, "the leader taking blocks")
                    target = Memory(MIB)
                    assert opened.get([key], [target.value]) == [OK]
                    assert target.content == content

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            (
                {"master_server_addr": "redis://127.0.0.1:1"},
                "this build of Mooncake has no Redis backend (UNAVAILABLE_",
            ),
            ({"master_server_addr": "k8s://default/lease"}, "this build of Mooncake has no Kubernetes backend (UNAVAI"),
            (
                {"metadata_server": "redis://127.0.0.1:1"},
                "this build of Mooncake has no client for Redis there; set P2P",
            ),
        ],
    )
    def test_a_client_that_this_build_of_mooncake_lacks_is_reported_and_does_not_end_the_process(
        self, changes: dict[str, object], sentence: str
    ) -> None:
        settings = {"master_server_addr": "127.0.0.1:1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
        config = load_config("mooncake", explicit={**settings, **changes}, environ={})
        assert sentence in read_opening_error(config)
        with pytest.raises(PoolUnavailable):
            open_backend(config)

    def test_an_unreachable_etcd_for_metadata_is_reported(self, mooncake_master: MooncakeMaster) -> None:
        port = free_port()
        error = read_opening_error(mooncake_master.config(metadata_server=f"etcd://127.0.0.1:{port}"))
        assert f"no etcd answers at 127.0.0.1:{port}" in error

    def test_the_native_library_logs_no_information_and_no_warnings(self, mooncake_master: MooncakeMaster) -> None:
        code = (
            "from tests.support.memory import Memory\n"
            "from kvstore_backend.config import load_config\n"
            "from kvstore_backend.pool import open_store\n"
            f"store = open_store(load_config('mooncake', explicit={mooncake_master.settings()!r}))\n"
            "memory = Memory(10)\n"
            f"store.put([{new_key()!r}], [memory.value])\n"
            "store.close()\n"
        )
        logged = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
        assert [line for line in logged.splitlines() if line.startswith(("I", "W1", "W0"))] == []


class TestCodes:
    """Answers of the native client that a test cannot cause; a stand-in for the client returns them."""

    class Native:
        """A stand-in for ``MooncakeDistributedStore`` that returns the answers of a test."""

        def __init__(self, answer: Any) -> None:
            self._answer = answer
            self.closed = 0
            self.sizes: dict[str, int | Exception] = {}
            self.calls: list[tuple[Any, ...]] = []

        def _reply(self, *arguments: object) -> Any:
            self.calls.append(arguments)
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer(*arguments) if callable(self._answer) else self._answer

        def get_hostname(self) -> str:
            return "127.0.0.1:12345"

        def get_size(self, key: str) -> int:
            size = self.sizes.get(key, -900)
            if isinstance(size, Exception):
                raise size
            return size

        batch_put_from_multi_buffers = batch_get_into_multi_buffers = batch_is_exist = batch_remove = _reply
        register_buffer = unregister_buffer = _reply

        def close(self) -> int:
            self.closed += 1
            return 0

    @pytest.fixture
    def make_store(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def make(answer: Any, address: str = "127.0.0.1:1") -> MooncakeStore:
            native = answer if isinstance(answer, self.Native) else self.Native(answer)
            monkeypatch.setattr("kvstore_backend.stores.mooncake.join_cluster", lambda _: native)
            return MooncakeStore(MooncakeSettings(address, protocol="tcp"))

        return make

    CODES = (-1, -200, -600, -601, -703, -706, -707, -800, -900, -901, -1000)

    @pytest.mark.parametrize("code", CODES)
    def test_no_negative_code_is_ok_or_absent(self, make_store: Any, code: int) -> None:
        store, memory = make_store([code]), Memory(8)
        assert store.put(["k"], [memory.value]) == [FAILED]
        # Mooncake returns -600 for a read into a target that is smaller than the value.
        assert store.get(["k"], [memory.value]) == [ABSENT if code == -600 else FAILED]
        assert store.exists(["k"]) == store.remove(["k"]) == [FAILED]

    def test_not_found_is_absent_for_get_and_remove(self, make_store: Any) -> None:
        store, memory = make_store([-704]), Memory(8)
        assert store.get(["k"], [memory.value]) == store.remove(["k"]) == [ABSENT]
        assert store.put(["k"], [memory.value]) == store.exists(["k"]) == [FAILED]

    @pytest.mark.parametrize("code", [1, 7, 9, 2**40])
    def test_a_get_of_another_size_than_the_target_is_absent(self, make_store: Any, code: int) -> None:
        memory = Memory(8)
        assert make_store([code]).get(["k"], [memory.value]) == [ABSENT]
        assert make_store([0]).get(["k"], [memory.value]) == [FAILED]

    def test_the_size_distinguishes_a_smaller_value_from_a_dead_owner(self, make_store: Any) -> None:
        memory = Memory(8)
        sizes: dict[str, int | Exception] = {"smaller": 7, "gone": -704, "away": 8, "not asked": 7}
        native = self.Native([-800] * 4)
        native.sizes = sizes
        statuses = make_store(native).get(list(sizes), [memory.value] * 4)
        assert statuses == [ABSENT, ABSENT, FAILED, FAILED], "a value of the right size has a dead owner"

    @pytest.mark.parametrize("answer", [-900, -1, RuntimeError("a broken library")])
    def test_a_get_fails_if_the_master_does_not_report_the_size(self, make_store: Any, answer: Any) -> None:
        memory, native = Memory(8), self.Native([-800])
        native.sizes = {"k": answer}
        assert make_store(native).get(["k"], [memory.value]) == [FAILED]

    @pytest.mark.parametrize("code", [2, 8, 100])
    def test_exists_is_ok_only_for_code_one(self, make_store: Any, code: int) -> None:
        assert make_store([code]).exists(["k"]) == [FAILED]

    def test_keys_without_an_answer_fail(self, make_store: Any) -> None:
        memory = Memory(8)
        assert make_store([0]).put(["a", "b", "c"], [memory.value] * 3) == [OK, FAILED, FAILED]
        assert make_store([]).exists(["a", "b"]) == [FAILED, FAILED]

    @pytest.mark.parametrize("error", [RuntimeError("from C++"), TypeError("no such overload")])
    def test_an_exception_of_the_library_is_a_failure(self, make_store: Any, error: Exception) -> None:
        store, memory = make_store(error), Memory(8)
        assert store.put(["k"], [memory.value]) == store.get(["k"], [memory.value]) == [FAILED]
        assert store.exists(["k"]) == store.remove(["k"]) == [FAILED]

    def test_only_puts_to_a_dead_client_are_retried_and_prefer_the_own_memory(
        self, make_store: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore_backend.stores.mooncake._ORPHANED_SECONDS", 0.0)
        native = self.Native(
            lambda keys, addresses, sizes, *config: [-800, -200, 0][: len(keys)] if not config else [0]
        )
        store, memory = make_store(native), Memory(8)
        monkeypatch.undo()
        assert store.put(["a", "b", "c"], [memory.value] * 3) == [OK, FAILED, OK]
        assert [call[0] for call in native.calls] == [["a", "b", "c"], ["a"]]
        assert native.calls[1][3].preferred_segment == "127.0.0.1:12345"

    def test_retries_of_puts_to_dead_clients_end(self, make_store: Any) -> None:
        native, memory = self.Native([-800]), Memory(8)
        assert make_store(native).put(["k"], [memory.value]) == [FAILED]
        assert 1 < len(native.calls) < 40

    def test_a_put_succeeds_after_twenty_failures_at_memory_of_dead_clients(
        self, make_store: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore_backend.stores.mooncake._RETRY_SECONDS", 60.0)
        codes = iter([-800] * 20 + [0])
        store, memory = make_store(lambda *_: [next(codes)]), Memory(8)
        assert store.put(["k"], [memory.value]) == [OK]

    def test_a_put_to_a_client_that_hangs_is_not_retried(
        self, make_store: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore_backend.stores.mooncake._MAX_FAILING_SECONDS", 0.0)
        native, memory = self.Native([-800]), Memory(8)
        assert make_store(native).put(["k"], [memory.value]) == [FAILED]
        assert len(native.calls) == 1

    def test_memory_that_cannot_be_registered_is_logged(
        self, make_store: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        make_store(-600).register(0x1000, 64)
        assert caplog.messages[0].startswith("Mooncake cannot register 64 bytes at 0x1000: code -600")
        assert len(caplog.messages) == 1

    def test_the_native_client_is_closed_once(self, make_store: Any) -> None:
        native = self.Native([0])
        with socket.create_server(("127.0.0.1", 0)) as master:
            store = make_store(native, f"127.0.0.1:{master.getsockname()[1]}")
            for _ in range(3):
                store.close()
        assert native.closed == 1

    def test_the_native_client_of_a_dead_master_is_not_closed(self, make_store: Any) -> None:
        native = self.Native([-900])
        store = make_store(native)
        store.close()
        assert native.closed == 0
        assert store.exists(["k"]) == [FAILED]


def _open_patiently(config: PoolConfig) -> StorageBackend:
    """Open a store that limits its retries only by their number, because they take long on a busy machine."""
    pytest.MonkeyPatch().setattr("kvstore_backend.stores.mooncake._RETRY_SECONDS", 60.0)
    pytest.MonkeyPatch().setattr("kvstore_backend.stores.mooncake._MAX_FAILING_SECONDS", 60.0)
    return open_store(config)


def _open_long_ago(config: PoolConfig) -> StorageBackend:
    """Open a store that behaves as after a long time: it does not expect that a client has just crashed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore_backend.stores.mooncake._ORPHANED_SECONDS", 0.0)
        return _open_patiently(config)


def _make_all_calls(store: StorageBackend, key: str) -> dict[str, object]:
    """Make all kinds of calls in parallel, because each may wait seconds for a dead master."""
    source, target = Memory(b"value"), Memory(5)
    calls = {
        "exists": lambda: store.exists([key])[0],
        "get": lambda: store.get([key], [target.value])[0],
        "put": lambda: store.put(["other"], [source.value])[0],
        "put again": lambda: store.put([key], [source.value])[0],
        "remove": lambda: store.remove([key])[0],
        "health": lambda: store.health().ok,
    }
    with ThreadPoolExecutor(len(calls)) as threads:
        answers = {name: threads.submit(call) for name, call in calls.items()}
    return {name: answer.result() for name, answer in answers.items()}
