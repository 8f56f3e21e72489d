from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_backend.backend import PoolUnavailable, Status, StorageBackend
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.file import ledger as file_ledger
from tests.support.forking import in_forked_child
from tests.support.memory import Memory
from tests.support.peer import Peer
from tests.support.waiting import wait_until

OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED
BLOCK = 1000


class Accounts(NamedTuple):
    """The counts in the ledger of a folder."""

    keys: int
    used_bytes: int
    capacity_bytes: int


def measure(store: FileStore) -> Accounts:
    used, keys = store._ledger.read_accounts()
    return Accounts(keys, used, store._ledger.capacity)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def store(folder: Path) -> Iterator[FileStore]:
    opened = FileStore(folder, 100 * BLOCK)
    yield opened
    opened.close()


def put(store: StorageBackend, *keys: str, nbytes: int = BLOCK) -> list[Status]:
    source = Memory(nbytes)
    return store.put(keys, [source.value] * len(keys))


def get(store: StorageBackend, key: str, nbytes: int = BLOCK) -> Status:
    target = Memory(nbytes)
    return store.get([key], [target.value])[0]


def list_files(folder: Path) -> list[Path]:
    """Every stored value and every draft."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "ledger"]


def count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in list_files(folder))


def make_keys(count: int, start: int = 0) -> list[str]:
    return [f"key{i}" for i in range(start, start + count)]


class TestSharing:
    def test_a_process_finds_gets_and_removes_the_value_of_another(self, store: FileStore, folder: Path) -> None:
        with Peer(partial(FileStore, folder, 100 * BLOCK)) as peer:
            assert peer.put("theirs", b"from there") is OK
            assert get(store, "theirs", 10) is OK
            put(store, "ours")
            assert peer.exists("ours") is OK
            assert peer.get("ours", BLOCK) == b"\xee" * BLOCK
            assert peer.remove("ours") is OK
            assert store.exists(["ours"]) == [ABSENT]

    def test_values_outlive_the_process_that_put_them(self, folder: Path) -> None:
        with Peer(partial(FileStore, folder, 100 * BLOCK)) as peer:
            peer.put("key", b"value")
        store = FileStore(folder, 100 * BLOCK)
        assert get(store, "key", 5) is OK
        store.close()

    def test_all_processes_together_obey_one_limit(self, store: FileStore, folder: Path) -> None:
        with Peer(partial(FileStore, folder, 100 * BLOCK)) as peer:
            for key in make_keys(120):
                assert peer.put(f"theirs-{key}", bytes(BLOCK)) is OK
                assert put(store, f"ours-{key}") == [OK]
                assert count_bytes(folder) <= 100 * BLOCK
        assert measure(store).used_bytes == count_bytes(folder)
        assert measure(store).keys == len(list_files(folder))

    def test_parallel_writers_of_one_key_store_one_complete_value(self, folder: Path) -> None:
        stores = [FileStore(folder, 10**8) for _ in range(4)]
        sources = [Memory(bytes([number]) * 300_000) for number in range(4)]
        for key in make_keys(20):
            with ThreadPoolExecutor(4) as threads:
                answers = threads.map(lambda i, key=key: stores[i].put([key], [sources[i].value]), range(4))
            assert list(answers) == [[OK]] * 4
            target = Memory(300_000)
            assert stores[0].get([key], [target.value]) == [OK]
            assert target.content in [source.content for source in sources]
        assert measure(stores[0]).used_bytes == count_bytes(folder) == 20 * 300_000
        for store in stores:
            store.close()


class TestEviction:
    def test_the_least_recently_used_values_are_evicted_first(self, store: FileStore) -> None:
        put(store, *make_keys(100))
        for key in make_keys(90):
            assert get(store, key) is OK
        put(store, "one more")
        present = store.exists([*make_keys(100), "one more"])
        assert present[:90] == [OK] * 90
        assert present[-1] is OK
        assert ABSENT in present[90:100]

    def test_a_use_by_another_process_counts(self, store: FileStore, folder: Path) -> None:
        put(store, *make_keys(100))
        with Peer(partial(FileStore, folder, 100 * BLOCK)) as peer:
            assert isinstance(peer.get("key0", BLOCK), bytes)
            put(store, "one more")
        assert store.exists(["key0", "key1"]) == [OK, ABSENT]

    def test_old_values_are_evicted_first_after_the_clock_was_set_back(
        self, store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            ahead = time.time_ns() + 10**18
            patch.setattr(time, "time_ns", lambda: ahead)
            put(store, *make_keys(50))
        put(store, *make_keys(50, start=50))
        put(store, "one more")
        assert store.exists(make_keys(50, start=50)) == [OK] * 50
        assert ABSENT in store.exists(make_keys(50))

    def test_an_eviction_removes_the_oldest_values_of_a_sample(
        self, store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(store, *make_keys(100))
        monkeypatch.setattr(file_ledger, "SAMPLE_SIZE", 30)
        listed = _record_listed_folders(folder / "blocks", monkeypatch)
        assert put(store, "key100") == [OK]
        assert 0 < len(listed) <= 30
        assert put(store, *make_keys(9, start=101)) == [OK] * 9
        assert store.exists(make_keys(30, start=80)) == [OK] * 30
        assert measure(store).used_bytes == count_bytes(folder) <= 100 * BLOCK

    def test_opening_lists_no_folder_of_values(
        self, store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(store, *make_keys(50))
        listed = _record_listed_folders(folder / "blocks", monkeypatch)
        another = FileStore(folder, 100 * BLOCK)
        assert listed == []
        assert measure(another) == measure(store)
        another.close()

    def test_the_next_eviction_corrects_the_count_of_values_deleted_by_hand(
        self, store: FileStore, folder: Path
    ) -> None:
        put(store, *make_keys(100))
        for path in list_files(folder)[:90]:
            path.unlink()
        assert put(store, "one more") == [OK]
        assert measure(store).used_bytes == count_bytes(folder) == 11 * BLOCK

    def test_a_lookup_does_not_count_as_a_use(self, store: FileStore) -> None:
        put(store, *make_keys(100))
        store.exists(["key0"])
        put(store, "one more")
        assert store.exists(["key0"]) == [ABSENT]

    def test_a_value_larger_than_the_store_fails_and_evicts_nothing(self, store: FileStore) -> None:
        put(store, *make_keys(100))
        assert put(store, "huge", nbytes=100 * BLOCK + 1) == [FAILED]
        assert store.exists(make_keys(100)) == [OK] * 100

    def test_a_value_as_large_as_the_store_fits(self, store: FileStore) -> None:
        put(store, *make_keys(3))
        assert put(store, "whole", nbytes=100 * BLOCK) == [OK]
        assert store.exists([*make_keys(3), "whole"]) == [ABSENT, ABSENT, ABSENT, OK]

    def test_a_value_that_is_removed_while_it_is_read_is_read_completely(
        self, store: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, target = Memory(secrets.token_bytes(BLOCK)), Memory(BLOCK)
        store.put(["key"], [source.value])

        def remove_then_read(file: int, buffers: list[memoryview], offset: int) -> int:
            assert store.remove(["key"]) == [OK]
            return preadv(file, buffers, offset)

        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", remove_then_read)
        assert store.get(["key"], [target.value]) == [OK]
        assert target.content == source.content

    def test_the_free_space_of_the_filesystem_limits_the_capacity(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        statvfs = os.statvfs_result((4096, 4096, 100, 25, 25, 9, 9, 9, 0, 255))  # stands in for a small filesystem
        monkeypatch.setattr(os, "statvfs", lambda _: statvfs)
        store = FileStore(folder, 10**9)
        assert measure(store).capacity_bytes == int(25 * 4096 * 0.95)
        assert f"{folder} has space for only 97280 of the configured 1000000000 bytes" in caplog.text
        store.close()

    @given(st.lists(st.tuples(st.sampled_from("pgr"), st.sampled_from("abcdefgh"), st.integers(1, 40))))
    def test_any_sequence_of_calls_obeys_the_limit_and_counts_correctly(
        self, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int]]
    ) -> None:
        folder = tmp_path_factory.getbasetemp() / "accounts"
        shutil.rmtree(folder, ignore_errors=True)
        store = FileStore(folder, 100)
        for action, key, nbytes in steps:
            if action == "p":
                put(store, key, nbytes=nbytes)
            elif action == "g":
                get(store, key, nbytes)
            else:
                store.remove([key])
            stats = measure(store)
            assert stats.used_bytes == count_bytes(folder) <= 100
            assert stats.keys == len(list_files(folder))
        store.close()


class TestCrashes:
    @pytest.mark.parametrize("moment", ["in the middle of the write", "before the draft is published"])
    def test_a_writer_that_is_killed_during_a_put_leaves_no_value_and_no_draft(self, folder: Path, moment: str) -> None:
        with Peer(partial(FileStore, folder, 100 * BLOCK)) as peer:
            peer.begin(_put_and_die, "key", moment)
            assert peer.wait() == -signal.SIGKILL
        assert len(list_files(folder)) == 1
        store = FileStore(folder, 100 * BLOCK)
        assert store.exists(["key"]) == [ABSENT]
        assert get(store, "key") is ABSENT
        assert list_files(folder) == []
        assert measure(store).used_bytes == 0
        assert put(store, "key") == [OK]
        store.close()

    def test_an_eviction_removes_the_draft_of_a_killed_writer(self, store: FileStore, folder: Path) -> None:
        with Peer(partial(FileStore, folder, 100 * BLOCK)) as peer:
            peer.begin(_put_and_die, "key", "before the draft is published")
            peer.wait()
        put(store, *make_keys(100))
        assert measure(store).used_bytes == count_bytes(folder)
        assert all(path.name.endswith(".block") for path in list_files(folder))

    @pytest.mark.parametrize("change", ["put", "remove", "clear", "evict"])
    def test_the_count_is_correct_after_a_process_was_killed_during_a_change(
        self, store: FileStore, folder: Path, change: str
    ) -> None:
        put(store, *make_keys(100 if change == "evict" else 90))
        with Peer(partial(FileStore, folder, 100 * BLOCK)) as peer:
            peer.begin(_change_and_die, change)
            assert peer.wait() == -signal.SIGKILL
        assert measure(store).used_bytes == count_bytes(folder)
        assert measure(store).keys == len(list_files(folder))

    def test_a_store_that_is_closed_during_a_put_releases_the_reserved_bytes(
        self, store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closing = FileStore(folder, 100 * BLOCK)

        def close_first(*_: object) -> int:
            closing.close()
            raise OSError(5, os.strerror(5))

        monkeypatch.setattr(os, "pwritev", close_first)
        assert put(closing, "key") == [FAILED]
        assert measure(store).used_bytes == count_bytes(folder) == 0

    def test_every_readable_value_is_complete_after_a_writer_was_killed(self, folder: Path) -> None:
        nbytes = 1 << 20
        for death in range(3):
            with Peer(partial(FileStore, folder, 64 << 20)) as peer:
                peer.begin(_put_for_ever, f"{death}-", nbytes)
                wait_until(partial(_has_more, folder, f"{death}-*", 5 + death), "a few values")
                peer.kill()
        store = FileStore(folder, 64 << 20)
        names = [path.name.removesuffix(".block") for path in (folder / "blocks").rglob("*.block")]
        assert len(names) > 15
        for name in names:
            target = Memory(nbytes)
            assert store.get([name], [target.value]) == [OK]
            assert target.content == _content(name, nbytes)
        assert measure(store).used_bytes == count_bytes(folder)
        store.close()

    def test_values_from_before_the_last_start_of_the_machine_are_dropped(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = FileStore(folder, 100 * BLOCK)
        put(before, "key")
        before.close()
        next_boot = tmp_path / "boot_id"  # stands in for the kernel's, which only a restart changes
        next_boot.write_text("00000000-1111-2222-3333-444444444444\n")
        monkeypatch.setattr(file_ledger, "BOOT_ID_FILE", next_boot)
        after = FileStore(folder, 100 * BLOCK)
        assert after.exists(["key"]) == [ABSENT]
        assert measure(after).used_bytes == 0
        after.close()

    def test_a_process_of_another_machine_is_refused_while_the_folder_is_open(
        self, store: FileStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(store, "key")
        other = tmp_path / "boot_id"  # stands in for another kernel's
        other.write_text("00000000-1111-2222-3333-444444444444\n")
        monkeypatch.setattr(file_ledger, "BOOT_ID_FILE", other)
        with pytest.raises(PoolUnavailable, match="a process of another machine has the folder open"):
            FileStore(folder, 100 * BLOCK)
        assert store.exists(["key"]) == [OK]


class TestTheFolder:
    def test_a_closed_store_leaves_values_and_no_draft_folder(self, folder: Path) -> None:
        store = FileStore(folder, 100 * BLOCK)
        put(store, "key")
        store.close()
        assert list((folder / "writers").iterdir()) == []
        assert len(list_files(folder)) == 1

    def test_the_file_of_a_value_has_the_name_of_its_key(self, store: FileStore, folder: Path) -> None:
        put(store, "kv1-abc-def")
        assert [path.name for path in list_files(folder)] == ["kv1-abc-def.block"]

    def test_other_users_may_not_read_the_folder(self, store: FileStore, folder: Path) -> None:
        assert folder.stat().st_mode & 0o077 == 0

    def test_the_error_names_a_folder_that_cannot_be_created(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(PoolUnavailable, match=f"folder {tmp_path}/file/pool cannot be used as a store: Not a dir"):
            FileStore(tmp_path / "file" / "pool", BLOCK)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
    def test_a_folder_of_another_user_is_refused(self, folder: Path) -> None:
        folder.mkdir()
        os.chown(folder, 12345, 12345)
        with pytest.raises(PoolUnavailable, match="the folder belongs to user 12345"):
            FileStore(folder, BLOCK)

    @pytest.mark.parametrize("mode", [0o1777, 0o770, 0o702])
    def test_a_folder_that_others_may_write_to_is_refused_and_not_changed(self, folder: Path, mode: int) -> None:
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(
            PoolUnavailable, match=f"the folder is writable for other users .mode {mode:o}.* chmod go-w {folder}"
        ):
            FileStore(folder, BLOCK)
        assert list(folder.iterdir()) == []

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
    @pytest.mark.parametrize("part", ["ledger", "blocks", "writers"])
    def test_a_folder_with_a_part_of_another_user_is_refused(self, folder: Path, part: str) -> None:
        FileStore(folder, BLOCK).close()
        os.chown(folder / part, 12345, 12345)
        with pytest.raises(PoolUnavailable, match=f"the folder has a part, {part}, that belongs to user 12345"):
            FileStore(folder, BLOCK)

    def test_other_users_have_no_access_even_without_a_umask(self, folder: Path) -> None:
        before = os.umask(0)
        try:
            store = FileStore(folder, 100 * BLOCK)
            put(store, "key")
        finally:
            os.umask(before)
        assert [path for path in folder.rglob("*") if path.stat().st_mode & 0o077] == []
        store.close()

    @pytest.mark.parametrize(
        "contents", [["blocks/2024/photos.tar", "writers/alice/novel"], ["blocks/2024/photos.tar", "ledger"]]
    )
    def test_a_folder_with_foreign_files_is_refused_and_not_changed(self, folder: Path, contents: list[str]) -> None:
        for name in contents:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("somebody's own" * 100)
        with pytest.raises(
            PoolUnavailable, match=f"the folder contains blocks.* of a pool; name a new .* {folder}/kvpool"
        ):
            FileStore(folder, BLOCK)
        assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == contents

    def test_a_folder_that_a_killed_process_created_partly_can_be_opened(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "ledger").touch()
        store = FileStore(folder, 100 * BLOCK)
        assert put(store, "key") == [OK]
        store.close()

    def test_several_threads_may_open_a_new_folder_at_the_same_time(self, folder: Path) -> None:
        for number in range(20):
            with ThreadPoolExecutor(4) as threads:
                opened = threads.map(lambda _, path=folder / str(number): FileStore(path, BLOCK), range(4))
            for store in opened:
                store.close()

    def test_a_foreign_file_among_the_blocks_is_never_deleted(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        FileStore(folder, BLOCK).close()
        (folder / "blocks" / "2024").mkdir()
        (folder / "blocks" / "2024" / "photos.tar").write_text("somebody's own" * 100)
        monkeypatch.setattr(file_ledger, "BOOT_ID_FILE", tmp_path / "boot_id")
        (tmp_path / "boot_id").write_text("00000000-1111-2222-3333-444444444444\n")
        store = FileStore(folder, BLOCK)
        assert put(store, "one") == put(store, "two") == [OK]
        assert (folder / "blocks" / "2024" / "photos.tar").exists()
        store.close()

    def test_a_failed_opening_leaves_no_descriptor_and_no_folder_of_a_writer(
        self, store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_: object) -> None:
            raise OSError(5, os.strerror(5))

        before = os.listdir("/proc/self/fd"), os.listdir(folder / "writers")
        monkeypatch.setattr(os, "statvfs", refuse)
        with pytest.raises(PoolUnavailable, match="Input/output error"):
            FileStore(folder, 100 * BLOCK)
        assert (os.listdir("/proc/self/fd"), os.listdir(folder / "writers")) == before

    def test_a_forked_child_has_a_closed_store_and_no_lock_of_it(self, store: FileStore, folder: Path) -> None:
        def report() -> str:
            locked = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
            return f"{put(store, 'key')} {store.health().ok} {any('writers' in path for path in locked)}"

        assert in_forked_child(report) == "[<Status.FAILED: 'failed'>] False False"
        assert put(store, "key") == [OK]

    def test_a_child_that_is_forked_during_a_put_does_not_keep_the_folder_locked(
        self, store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        is_locked, (reading, writing) = threading.Event(), os.pipe()
        write_accounts = file_ledger.write_accounts

        def wait_for_child(ledger: int, accounts: file_ledger.Accounts) -> None:
            is_locked.set()
            os.read(reading, 1)
            write_accounts(ledger, accounts)

        def lock_folder() -> str:
            os.write(writing, b"!")
            ledger = os.open(folder / "ledger", os.O_RDWR)
            wait_until(lambda: _can_lock(ledger), "the end of the parent's lock", 10)
            return "locked"

        monkeypatch.setattr(file_ledger, "write_accounts", wait_for_child)
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(put, store, "key")
            assert is_locked.wait(30)
            assert in_forked_child(lock_folder) == "locked"
            assert answer.result() == [OK]
        os.close(reading)
        os.close(writing)

    def test_a_foreign_file_among_the_folders_prevents_no_opening(self, store: FileStore, folder: Path) -> None:
        put(store, "key")
        (folder / "blocks" / "README").touch()
        (folder / "writers" / "README").touch()
        another = FileStore(folder, 100 * BLOCK)
        assert another.exists(["key"]) == [OK]
        assert measure(another).keys == 1
        another.close()

    def test_calls_do_not_raise_after_the_folder_was_deleted(self, store: FileStore, folder: Path) -> None:
        put(store, "key")
        shutil.rmtree(folder)
        assert store.exists(["key"]) == [ABSENT]
        assert get(store, "key") is ABSENT
        assert store.remove(["key"]) == [FAILED]
        assert not store.health().ok

    @pytest.mark.parametrize("part", [".", "blocks", "writers"])
    def test_the_next_put_creates_a_deleted_folder_again(self, store: FileStore, folder: Path, part: str) -> None:
        put(store, "before")
        shutil.rmtree(folder / part)
        descriptors = len(os.listdir("/proc/self/fd"))
        assert put(store, "one", "two") == [OK, OK]
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert store.health().ok
        assert measure(store).used_bytes == count_bytes(folder) == (3000 if part == "writers" else 2000)
        assert len(list((folder / "writers").iterdir())) == 1

    def test_a_folder_that_another_store_created_again_is_shared_with_it(self, store: FileStore, folder: Path) -> None:
        shutil.rmtree(folder)
        another = FileStore(folder, 100 * BLOCK)
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda key: put(store, key), make_keys(20))) == [[OK]] * 20
        assert another.exists(make_keys(20)) == [OK] * 20
        assert measure(another).used_bytes == count_bytes(folder)
        another.close()

    def test_a_closed_store_does_not_create_the_folder_again(self, store: FileStore, folder: Path) -> None:
        shutil.rmtree(folder)
        store.close()
        assert put(store, "key") == [FAILED]
        assert not folder.exists()

    @pytest.mark.parametrize("harm", [os.unlink, lambda ledger: os.truncate(ledger, 7)], ids=["removed", "truncated"])
    def test_a_store_without_its_ledger_only_reads(
        self, store: FileStore, folder: Path, harm: Callable[[Path], None]
    ) -> None:
        put(store, "key")
        harm(folder / "ledger")
        assert put(store, "other") == store.remove(["key"]) == [FAILED]
        assert not store.health().ok
        assert get(store, "key") is OK

    def test_a_truncated_ledger_is_repaired_at_the_next_opening(self, store: FileStore, folder: Path) -> None:
        put(store, "key")
        os.truncate(folder / "ledger", 7)
        reopened = FileStore(folder, 100 * BLOCK)
        assert put(reopened, "other") == [OK]
        assert measure(reopened).used_bytes == count_bytes(folder)
        reopened.close()

    def test_a_truncated_value_is_absent(self, store: FileStore, folder: Path) -> None:
        put(store, "key")
        os.truncate(list_files(folder)[0], BLOCK - 1)
        assert get(store, "key") is ABSENT

    def test_reads_and_writes_that_transfer_only_a_part_are_continued(
        self, store: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        preadv, pwritev = os.preadv, os.pwritev
        monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:7]], at))
        monkeypatch.setattr(os, "pwritev", lambda file, buffers, at: pwritev(file, [buffers[0][:5]], at))
        source, target = Memory(secrets.token_bytes(100)), Memory(100)
        assert store.put(["key"], [source.spans(33, 60, 7)]) == [OK]
        assert store.get(["key"], [target.spans(10, 90)]) == [OK]
        assert target.content == source.content

    @pytest.mark.parametrize("error", [28, 5], ids=["no space left", "input/output error"])
    def test_a_failed_write_is_a_failure_and_leaves_no_file(
        self, store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch, error: int
    ) -> None:
        def refuse(*_: object) -> int:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, "pwritev", refuse)
        assert put(store, "key") == [FAILED]
        assert list_files(folder) == []
        assert measure(store).used_bytes == 0


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_is_positive(folder: Path, capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_bytes is {capacity}"):
        FileStore(folder, capacity)


def _content(key: str, nbytes: int) -> bytes:
    """Return bytes that only the value of this key has."""
    return (key.encode().ljust(16, b".") * (nbytes // 16 + 1))[:nbytes]


def _record_listed_folders(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each folder of values is added when it is listed."""
    listed: list[str] = []
    scandir = os.scandir

    def scan_and_record(path: Any) -> object:
        if not isinstance(path, int) and Path(path).parent == blocks:
            listed.append(os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan_and_record)
    return listed


def _has_more(folder: Path, pattern: str, count: int) -> bool:
    return len(list(folder.rglob(pattern))) > count


def _can_lock(ledger: int) -> bool:
    try:
        fcntl.flock(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _put_for_ever(store: StorageBackend, prefix: str, nbytes: int) -> None:
    number = 0
    while True:
        key = f"{prefix}{number}"
        source = Memory(_content(key, nbytes))
        store.put([key], [source.value])
        number += 1


def _put_and_die(store: FileStore, key: str, moment: str) -> None:
    """Put a value and kill this process at the given moment, which a signal from outside would rarely hit."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_half_and_die(file: int, buffers: list[memoryview], offset: int) -> int:
        os.pwrite(file, buffers[0][: BLOCK // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    if moment == "in the middle of the write":
        os.pwritev = write_half_and_die  # type: ignore[assignment]
    else:
        file_ledger.Ledger.publish_draft = die  # type: ignore[method-assign, assignment]
    put(store, key)


def _change_and_die(store: FileStore, change: str) -> None:
    """Change the store and kill this process before it writes the change to the ledger."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    file_ledger.write_accounts = die  # type: ignore[assignment]
    if change == "remove":
        store.remove(["key0"])
    elif change == "clear":
        store.clear("key")
    else:
        put(store, "another")


class TestSize:
    def test_another_size_is_refused_while_the_folder_is_open(self, store: FileStore, folder: Path) -> None:
        assert put(store, *make_keys(40)) == [OK] * 40
        for size in (2 * BLOCK, 1000 * BLOCK):
            with pytest.raises(PoolUnavailable, match=f"with a size of {100 * BLOCK} bytes, .* requests {size}"):
                FileStore(folder, size)
        assert measure(store).keys == 40
        FileStore(folder, 100 * BLOCK).close()

    def test_a_store_without_a_size_takes_the_recorded_size(self, store: FileStore, folder: Path) -> None:
        put(store, *make_keys(40))
        tool = FileStore(folder, None)
        assert measure(tool).capacity_bytes == 100 * BLOCK
        assert put(tool, *make_keys(10, 50)) == [OK] * 10
        assert measure(store).keys == 50
        tool.close()
        store.close()
        assert file_ledger.find_size(folder, None) == 100 * BLOCK
        with contextlib.closing(FileStore(folder, None)) as later:
            assert measure(later).capacity_bytes == 100 * BLOCK

    def test_the_size_changes_if_the_folder_is_not_open_elsewhere(self, store: FileStore, folder: Path) -> None:
        put(store, *make_keys(40))
        store.close()
        with contextlib.closing(FileStore(folder, 20 * BLOCK)) as smaller:
            assert put(smaller, "one more") == [OK]
            assert measure(smaller).keys <= 20
        assert file_ledger.find_size(folder, None) == 20 * BLOCK
        assert file_ledger.find_size(folder, 30 * BLOCK) == 30 * BLOCK, "the next opening would use this size"

    def test_the_size_may_change_after_the_last_process_was_killed(self, folder: Path) -> None:
        with Peer(partial(FileStore, folder, 100 * BLOCK)), pytest.raises(PoolUnavailable, match="the same size"):
            FileStore(folder, 20 * BLOCK)
        FileStore(folder, 20 * BLOCK).close()

    def test_a_new_folder_without_a_size_has_the_default_size(self, folder: Path) -> None:
        assert file_ledger.find_size(folder, None) == file_ledger.DEFAULT_BYTES
        with contextlib.closing(FileStore(folder, None)) as opened:
            assert measure(opened).capacity_bytes == file_ledger.DEFAULT_BYTES

    def test_a_folder_without_a_recorded_size_takes_the_next_size(self, folder: Path) -> None:
        FileStore(folder, BLOCK).close()
        with (folder / "ledger").open("r+b") as ledger:
            ledger.seek(54)
            ledger.write(bytes(8))
        FileStore(folder, 20 * BLOCK).close()
        assert file_ledger.find_size(folder, None) == 20 * BLOCK

    def test_a_deleted_folder_is_created_again_with_its_size(self, store: FileStore, folder: Path) -> None:
        tool = FileStore(folder, None)
        shutil.rmtree(folder)
        assert put(tool, "a") == put(store, "b") == [OK]
        assert measure(tool).capacity_bytes == measure(store).capacity_bytes == 100 * BLOCK
        tool.close()
