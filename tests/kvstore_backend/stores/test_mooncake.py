"""What only Mooncake does, on real masters and clients; ``..conformance`` has the contract of all stores."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore_backend.backend import PoolUnavailable, Status, StorageBackend
from kvstore_backend.config import MooncakeSettings, PoolConfig, load_config, read_config
from kvstore_backend.pool import open_backend, open_store
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
def doomed_master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """A master of this test's own, to kill or stop."""
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
    """The store; ``None`` where no master leads yet."""
    try:
        return open_store(config)
    except PoolUnavailable:
        return None


def opening(config: PoolConfig) -> str:
    """The sentence that opening fails with."""
    with pytest.raises(PoolUnavailable) as caught:
        open_store(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestTwoProcesses:
    def test_what_one_puts_the_other_sees_gets_and_removes(
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

    def test_the_death_of_who_held_the_bytes_is_a_failure_never_a_wrong_byte(
        self, doomed_master: MooncakeMaster
    ) -> None:
        # The peer's memory is all there is, so it holds what is put.
        config = doomed_master.config(global_segment_size=0)
        with Peer(partial(open_store, config)) as reader:
            with Peer(partial(open_store, doomed_master.config())) as owner:
                assert reader.put("key", b"value" * 1000) is OK
                owner.kill()
            assert reader.get("key", 5000) in (FAILED, ABSENT)


class TestLeases:
    def test_what_is_being_read_is_not_removed(self, doomed_master: MooncakeMaster) -> None:
        with Peer(partial(open_store, doomed_master.config())) as peer:
            peer.put("key", b"value")
            assert peer.exists("key") is OK
            assert peer.remove("key") is FAILED
            assert peer.get("key", 5) == b"value"


class TestCrashes:
    """For some 10 s after a client crashed, its memory is given to puts, which fail there."""

    BLOCKS = 12  # by chance none is given the dead client's memory: once in 4096 times

    @staticmethod
    def put_blocks(store: StorageBackend) -> list[Status]:
        source = Memory(secrets.token_bytes(1000))
        return [store.put([new_key()], [source.value])[0] for _ in range(TestCrashes.BLOCKS)]

    @pytest.mark.parametrize("metadata", [{}, {"metadata_server": "P2PHANDSHAKE"}], ids=["http", "p2p"])
    def test_all_is_stored_that_is_put_after_a_crash(
        self, doomed_master: MooncakeMaster, metadata: dict[str, object]
    ) -> None:
        config = doomed_master.config(**metadata)
        with Peer(partial(open_store, config)) as crashed, Peer(partial(_open_patiently, config)) as other:
            crashed.kill()
            assert other.call(self.put_blocks) == [OK] * self.BLOCKS

    def test_the_first_failure_tells_a_client_that_has_long_been_there(self, doomed_master: MooncakeMaster) -> None:
        config = doomed_master.config()
        with Peer(partial(open_store, config)) as crashed, Peer(partial(_open_long_ago, config)) as other:
            crashed.kill()
            assert other.call(self.put_blocks) == [OK] * self.BLOCKS

    def test_a_client_without_memory_finds_another_that_lives(self, doomed_master: MooncakeMaster) -> None:
        # Without a metadata server a failure takes no time, and so there is time for as many tries as it takes.
        config, none = (
            doomed_master.config(metadata_server="P2PHANDSHAKE", global_segment_size=size) for size in ("64MiB", 0)
        )
        with Peer(partial(open_store, config)), Peer(partial(open_store, config)) as crashed:
            crashed.kill()
            with Peer(partial(_open_patiently, none)) as other:
                assert other.call(self.put_blocks) == [OK] * self.BLOCKS

    def test_a_client_that_comes_back_under_the_same_name_lives(self, doomed_master: MooncakeMaster) -> None:
        config = doomed_master.config(local_hostname=f"127.0.0.1:{free_port()}")
        with Peer(partial(open_store, config)) as crashed:
            assert crashed.put("key", b"value") is OK
            crashed.kill()
        with Peer(partial(_open_patiently, config)) as back:
            assert back.call(self.put_blocks) == [OK] * self.BLOCKS


class TestFullPool:
    def test_what_does_not_fit_fails(self, store: StorageBackend) -> None:
        source = Memory(65 * MIB)
        assert store.put([new_key()], [source.value]) == [FAILED]

    def test_a_pool_without_memory_stores_nothing(self, doomed_master: MooncakeMaster) -> None:
        with Peer(partial(open_store, doomed_master.config(global_segment_size=0))) as peer:
            assert peer.put("key", b"value") is FAILED
            assert peer.exists("key") is ABSENT


class TestDeadMaster:
    def test_no_answer_is_ok_and_nothing_raises(self, doomed_master: MooncakeMaster) -> None:
        with Peer(partial(open_store, doomed_master.config())) as peer:
            assert peer.put("key", b"value") is OK
            doomed_master.kill()
            answers = peer.call(_every_call_at_once, "key")
            assert answers.pop("health") is False
            assert set(answers.values()) <= {FAILED, ABSENT}
            assert answers["exists"] is FAILED

    def test_a_master_that_hangs_is_a_failure_within_seconds(self, doomed_master: MooncakeMaster) -> None:
        with Peer(partial(open_store, doomed_master.config())) as peer:
            assert peer.put("key", b"value") is OK
            doomed_master.process.signal(signal.SIGSTOP)
            answers = peer.call(_every_call_at_once, "key")
            assert answers.pop("health") is False
            assert set(answers.values()) == {FAILED}
            doomed_master.process.signal(signal.SIGCONT)
            wait_until(lambda: peer.put("new key", b"value") is OK, "the master's return")


class TestOpening:
    def test_an_unreachable_master_is_said_at_once(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        config = load_config("mooncake", explicit={"master_server_addr": address, "protocol": "tcp"}, environ={})
        assert opening(config) == (
            f"no Mooncake master answers at {address} (Connection refused): "
            "start mooncake_master there, or correct the address"
        )

    def test_a_host_that_does_not_exist_is_said(self) -> None:
        config = load_config(
            "mooncake", explicit={"master_server_addr": "no-such-host.invalid:1", "protocol": "tcp"}, environ={}
        )
        assert opening(config).startswith("no Mooncake master answers at no-such-host.invalid:1 (")

    def test_an_unreachable_metadata_server_is_said(self, mooncake_master: MooncakeMaster) -> None:
        address = f"127.0.0.1:{free_port()}"
        assert opening(mooncake_master.config(metadata_server=f"http://{address}/metadata")) == (
            f"no Mooncake metadata server answers at {address} (Connection refused): start mooncake_master with "
            "--enable_http_metadata_server=true, or use P2PHANDSHAKE in every client, or correct the address"
        )

    def test_something_else_at_the_masters_address_is_said(self, mooncake_master: MooncakeMaster) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            sentence = opening(mooncake_master.config(master_server_addr=address))
        assert sentence == (
            f"the server at {address} does not answer: it is not a Mooncake master, or it hangs; restart it, "
            "or correct the address"
        )

    def test_a_master_that_hangs_is_said_before_the_native_client_would_stop_the_process_for_it(
        self, doomed_master: MooncakeMaster
    ) -> None:
        doomed_master.process.signal(signal.SIGSTOP)
        assert "or it hangs" in opening(doomed_master.config())
        doomed_master.process.signal(signal.SIGCONT)

    def test_a_metadata_server_that_hangs_is_said(self, mooncake_master: MooncakeMaster) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            sentence = opening(mooncake_master.config(metadata_server=f"http://{address}/metadata"))
        assert sentence.startswith(f"the server at {address} does not answer as a metadata server: ")

    def test_joining_what_is_no_master_is_not_tried_again_soon_as_it_stops_the_process(
        self, mooncake_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def setup(_: object, *arguments: object) -> int:  # what the real one does takes 6 s
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
    def test_mooncake_chooses_the_port_unless_it_listens_there(
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
        opening(mooncake_master.config(local_hostname=name))
        assert names == [name if bound else host]

    def test_a_machine_with_no_network_but_loopback_is_told_what_mooncake_needs(self, tmp_path: Path) -> None:
        alone = ["unshare", "--net", "--map-root-user", "sh", "-ec", 'ip link set lo up; exec "$@"', "sh"]
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
        said = subprocess.run([*alone, sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
        assert "no network except loopback; Mooncake uses loopback only if you set MC_TCP_BIND_ADDRESS" in said

    def test_clients_find_each_other_without_hostnames_and_without_a_metadata_server(
        self, doomed_master: MooncakeMaster
    ) -> None:
        config = doomed_master.config(local_hostname=None, metadata_server=None)
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
    def test_what_this_build_of_mooncake_lacks_is_said_and_does_not_end_the_process(
        self, changes: dict[str, object], sentence: str
    ) -> None:
        settings = {"master_server_addr": "127.0.0.1:1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
        config = load_config("mooncake", explicit={**settings, **changes}, environ={})
        assert sentence in opening(config)
        with pytest.raises(PoolUnavailable):
            open_backend(config)

    def test_an_etcd_for_metadata_that_is_not_there_is_said(self, mooncake_master: MooncakeMaster) -> None:
        port = free_port()
        said = opening(mooncake_master.config(metadata_server=f"etcd://127.0.0.1:{port}"))
        assert f"no etcd answers at 127.0.0.1:{port}" in said

    def test_the_native_library_is_not_chatty(self, mooncake_master: MooncakeMaster) -> None:
        code = (
            "from tests.support.memory import Memory\n"
            "from kvstore_backend.config import load_config\n"
            "from kvstore_backend.pool import open_store\n"
            f"store = open_store(load_config('mooncake', explicit={mooncake_master.settings()!r}))\n"
            "memory = Memory(10)\n"
            f"store.put([{new_key()!r}], [memory.value])\n"
            "store.close()\n"
        )
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
        assert [line for line in shown.splitlines() if line.startswith(("I", "W1", "W0"))] == []


class TestCodes:
    """Answers of the native client that cannot be provoked at will, from a stand-in for it."""

    class Native:
        """Stands in for ``MooncakeDistributedStore``: answers what a test wants."""

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
    def answering(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def store_that_answers(answer: Any, address: str = "127.0.0.1:1") -> MooncakeStore:
            native = answer if isinstance(answer, self.Native) else self.Native(answer)
            monkeypatch.setattr("kvstore_backend.stores.mooncake.join_cluster", lambda _: native)
            return MooncakeStore(MooncakeSettings(address, protocol="tcp"))

        return store_that_answers

    CODES = (-1, -200, -600, -601, -703, -706, -707, -800, -900, -901, -1000)

    @pytest.mark.parametrize("code", CODES)
    def test_no_negative_code_is_ok_or_absent(self, answering: Any, code: int) -> None:
        store, memory = answering([code]), Memory(8)
        assert store.put(["k"], [memory.value]) == [FAILED]
        # It says -600 of a read whose target is smaller than the value.
        assert store.get(["k"], [memory.value]) == [ABSENT if code == -600 else FAILED]
        assert store.exists(["k"]) == store.remove(["k"]) == [FAILED]

    def test_not_found_is_absent_where_it_says_so_of_the_key(self, answering: Any) -> None:
        store, memory = answering([-704]), Memory(8)
        assert store.get(["k"], [memory.value]) == store.remove(["k"]) == [ABSENT]
        assert store.put(["k"], [memory.value]) == store.exists(["k"]) == [FAILED]

    @pytest.mark.parametrize("code", [1, 7, 9, 2**40])
    def test_a_get_of_another_size_than_the_target_is_absent(self, answering: Any, code: int) -> None:
        memory = Memory(8)
        assert answering([code]).get(["k"], [memory.value]) == [ABSENT]
        assert answering([0]).get(["k"], [memory.value]) == [FAILED]

    def test_a_value_smaller_than_the_target_is_told_from_a_dead_owner_by_its_size(self, answering: Any) -> None:
        memory = Memory(8)
        sizes: dict[str, int | Exception] = {"smaller": 7, "gone": -704, "away": 8, "not asked": 7}
        native = self.Native([-800] * 4)
        native.sizes = sizes
        statuses = answering(native).get(list(sizes), [memory.value] * 4)
        assert statuses == [ABSENT, ABSENT, FAILED, FAILED], "one whose size is right says that its owner is dead"

    @pytest.mark.parametrize("answer", [-900, -1, RuntimeError("a broken library")])
    def test_a_size_that_the_master_does_not_say_concludes_nothing(self, answering: Any, answer: Any) -> None:
        memory, native = Memory(8), self.Native([-800])
        native.sizes = {"k": answer}
        assert answering(native).get(["k"], [memory.value]) == [FAILED]

    @pytest.mark.parametrize("code", [2, 8, 100])
    def test_exists_is_ok_for_one_only(self, answering: Any, code: int) -> None:
        assert answering([code]).exists(["k"]) == [FAILED]

    def test_fewer_answers_than_keys_fail_for_the_rest(self, answering: Any) -> None:
        memory = Memory(8)
        assert answering([0]).put(["a", "b", "c"], [memory.value] * 3) == [OK, FAILED, FAILED]
        assert answering([]).exists(["a", "b"]) == [FAILED, FAILED]

    @pytest.mark.parametrize("error", [RuntimeError("from C++"), TypeError("no such overload")])
    def test_an_exception_of_the_library_is_a_failure(self, answering: Any, error: Exception) -> None:
        store, memory = answering(error), Memory(8)
        assert store.put(["k"], [memory.value]) == store.get(["k"], [memory.value]) == [FAILED]
        assert store.exists(["k"]) == store.remove(["k"]) == [FAILED]

    def test_only_what_met_a_dead_client_is_put_again_and_then_to_this_clients_memory(
        self, answering: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore_backend.stores.mooncake._ORPHANED_SECONDS", 0.0)
        native = self.Native(
            lambda keys, addresses, sizes, *config: [-800, -200, 0][: len(keys)] if not config else [0]
        )
        store, memory = answering(native), Memory(8)
        monkeypatch.undo()
        assert store.put(["a", "b", "c"], [memory.value] * 3) == [OK, FAILED, OK]
        assert [call[0] for call in native.calls] == [["a", "b", "c"], ["a"]]
        assert native.calls[1][3].preferred_segment == "127.0.0.1:12345"

    def test_puts_to_dead_clients_end(self, answering: Any) -> None:
        native, memory = self.Native([-800]), Memory(8)
        assert answering(native).put(["k"], [memory.value]) == [FAILED]
        assert 1 < len(native.calls) < 40

    def test_a_value_that_is_given_dead_memory_twenty_times_is_stored_at_last(
        self, answering: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore_backend.stores.mooncake._RETRY_SECONDS", 60.0)
        codes = iter([-800] * 20 + [0])
        store, memory = answering(lambda *_: [next(codes)]), Memory(8)
        assert store.put(["k"], [memory.value]) == [OK]

    def test_what_met_a_client_that_hangs_is_not_put_again(
        self, answering: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore_backend.stores.mooncake._MAX_FAILING_SECONDS", 0.0)
        native, memory = self.Native([-800]), Memory(8)
        assert answering(native).put(["k"], [memory.value]) == [FAILED]
        assert len(native.calls) == 1

    def test_memory_that_cannot_be_registered_is_logged(self, answering: Any, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        answering(-600).register(0x1000, 64)
        assert caplog.messages == ["Mooncake refused to register 64 bytes at 0x1000: code -600"]

    def test_the_native_client_is_closed_once(self, answering: Any) -> None:
        native = self.Native([0])
        with socket.create_server(("127.0.0.1", 0)) as master:
            store = answering(native, f"127.0.0.1:{master.getsockname()[1]}")
            for _ in range(3):
                store.close()
        assert native.closed == 1

    def test_the_native_client_of_a_dead_master_is_left_alone(self, answering: Any) -> None:
        native = self.Native([-900])
        store = answering(native)
        store.close()
        assert native.closed == 0
        assert store.exists(["k"]) == [FAILED]


def _open_patiently(config: PoolConfig) -> StorageBackend:
    """A store of this process that counts its tries only, not the time they take where the machine is busy."""
    pytest.MonkeyPatch().setattr("kvstore_backend.stores.mooncake._RETRY_SECONDS", 60.0)
    pytest.MonkeyPatch().setattr("kvstore_backend.stores.mooncake._MAX_FAILING_SECONDS", 60.0)
    return open_store(config)


def _open_long_ago(config: PoolConfig) -> StorageBackend:
    """A store that has been open for so long that it does not expect that somebody has just crashed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore_backend.stores.mooncake._ORPHANED_SECONDS", 0.0)
        return _open_patiently(config)


def _every_call_at_once(store: StorageBackend, key: str) -> dict[str, object]:
    """All kinds of calls in parallel, as each may wait seconds for a dead master."""
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
