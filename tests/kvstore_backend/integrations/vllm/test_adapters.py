"""LoRA adapters: blocks are shared only if the bytes with which vLLM computed them are known."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_backend import StorageBackend
from kvstore_backend.integrations.vllm import adapters
from kvstore_backend.integrations.vllm.adapters import Adapter, KnownAdapters, LoadedAdapters, name_adapter
from kvstore_backend.integrations.vllm.messages import Report
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.kvstore_backend.integrations.vllm.test_halves import NUM_BLOCKS, Instance, make_request
from tests.support.waiting import wait_until

WEIGHTS = "adapter_model.safetensors"


@dataclass
class Lora:
    """vLLM's ``LoRARequest``."""

    lora_name: str
    lora_path: str
    lora_int_id: int = 1
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class Manager:
    """The part of vLLM's ``WorkerLoRAManager`` that reads adapters."""

    def _load_adapter(self, lora: Any) -> bytes:
        return (Path(lora.lora_path) / WEIGHTS).read_bytes()


class LoraInstance(Instance):
    """An instance with workers that read adapters."""

    def __init__(self, store: StorageBackend, **options: Any) -> None:
        super().__init__(store, **options)
        self.managers = [type("ManagerOfRank", (Manager,), {}) for _ in self.workers]
        for worker, manager in zip(self.workers, self.managers, strict=True):
            worker.adapters.watch(manager)

    def read(self, lora: Lora, ranks: int | None = None) -> None:
        """Let ranks read an adapter, without a report to the scheduler."""
        for manager in self.managers[:ranks]:
            manager()._load_adapter(lora)

    def add(self, lora: Lora) -> None:
        """Let all ranks read an adapter, and wait until the scheduler knows its digest."""
        self.read(lora)
        wait_until(lambda: self.knows(lora), "the digest of an adapter")

    def knows(self, lora: Lora) -> bool:
        self.step({}, {})
        return self.scheduler._adapters.find_digest(lora, len(self.workers)) is not None

    def compute_prompt(self, lora: Lora, name: str = "computed") -> None:
        """Compute a prompt with the adapter."""
        self.compute(make_request(name=name, lora_request=lora), [0, 1, 2, 3, 4, 5])

    def count_found(self, lora: Lora | None, name: str = "asked") -> int:
        """Return how many tokens of the prompt are in the pool."""
        return self.match_request(make_request(name=name, lora_request=lora))


@pytest.fixture
def two() -> Iterator[tuple[LoraInstance, LoraInstance]]:
    store = CheckedBackend(MemoryStore(1 << 20))
    with contextlib.closing(LoraInstance(store)) as first, contextlib.closing(LoraInstance(store)) as second:
        yield first, second


@pytest.fixture
def lora(tmp_path: Path) -> Lora:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / WEIGHTS).write_bytes(b"one")
    return Lora("ad", str(tmp_path))


def replace_weights(lora: Lora, weights: bytes = b"two") -> None:
    _write_in_place(Path(lora.lora_path) / WEIGHTS, weights)


def test_only_requests_with_the_adapter_find_its_blocks(two: tuple[LoraInstance, LoraInstance], lora: Lora) -> None:
    first, second = two
    first.add(lora)
    second.add(lora)
    first.compute_prompt(lora)
    assert second.count_found(lora) == 20
    assert second.count_found(None, "without adapter") == 0


def test_another_adapter_with_the_same_name_and_path_finds_no_block(
    two: tuple[LoraInstance, LoraInstance], lora: Lora
) -> None:
    first, second = two
    first.add(lora)
    first.compute_prompt(lora)
    replace_weights(lora)
    second.add(lora)
    assert second.count_found(lora) == 0


def test_blocks_of_an_adapter_are_not_saved_after_its_files_changed(
    two: tuple[LoraInstance, LoraInstance], lora: Lora
) -> None:
    first, second = two
    first.add(lora)
    replace_weights(lora)  # before the first request
    first.compute_prompt(lora)
    second.add(lora)
    assert second.count_found(lora) == 0
    assert first.blocks.held == [0] * NUM_BLOCKS


def test_an_adapter_that_vllm_reads_again_after_a_change_is_no_longer_cached(
    two: tuple[LoraInstance, LoraInstance], lora: Lora
) -> None:
    first, second = two
    first.add(lora)
    first.compute_prompt(lora)
    replace_weights(lora)
    first.read(lora)  # vLLM has evicted the adapter, or has a new number for the same name and path
    second.add(lora)
    first.step({}, {})
    assert first.count_found(lora) == 0
    first.compute_prompt(lora, "computed again")
    assert second.count_found(lora) == 0


def test_an_adapter_that_vllm_reads_again_without_a_change_is_still_cached(
    two: tuple[LoraInstance, LoraInstance], lora: Lora
) -> None:
    first, _ = two
    first.add(lora)
    first.compute_prompt(lora)
    first.read(lora)
    assert first.count_found(lora) == 20


def test_an_adapter_that_is_loaded_in_place_is_no_longer_cached(
    two: tuple[LoraInstance, LoraInstance], lora: Lora
) -> None:
    first, second = two
    first.add(lora)
    second.add(lora)
    first.compute_prompt(lora)
    in_place = Lora(lora.lora_name, lora.lora_path, load_inplace=True)
    first.read(in_place)
    first.step({}, {})
    assert first.count_found(in_place, "in place") == 0
    assert first.count_found(lora) == 0, "earlier requests still run with the adapter's number"
    assert second.count_found(lora) == 20


def test_a_request_with_load_inplace_ends_caching_before_any_report_of_a_worker(
    two: tuple[LoraInstance, LoraInstance], lora: Lora
) -> None:
    first, _ = two
    first.add(lora)
    first.compute_prompt(lora)
    assert first.count_found(Lora(lora.lora_name, lora.lora_path, load_inplace=True), "in place") == 0
    assert first.count_found(lora) == 0


def test_blocks_are_computed_if_the_adapters_files_change_during_the_load(
    two: tuple[LoraInstance, LoraInstance], lora: Lora
) -> None:
    first, second = two
    first.add(lora)
    second.add(lora)
    first.compute_prompt(lora)
    request = make_request(name="b", lora_request=lora)
    matched = second.match_request(request)
    replace_weights(lora)
    second.scheduler.on_allocation(request, lambda: [4, 8, 11, 10, 6, 0], matched)
    loaded = second.step({}, {})
    assert (loaded.requests, loaded.blocks) == ({"b"}, {4, 8, 11, 10, 6})
    assert second.count_found(lora, "later") == 0
    assert second.blocks.held == [0] * NUM_BLOCKS


def test_an_adapter_that_changes_while_vllm_reads_it_is_not_cached(tmp_path: Path, lora: Lora) -> None:
    class Slow(Manager):
        def _load_adapter(self, lora: Any) -> bytes:
            read = super()._load_adapter(lora)
            replace_weights(lora)
            return read

    loaded = LoadedAdapters()
    loaded.watch(Slow)
    Slow()._load_adapter(lora)
    assert loaded.take_digests() == {name_adapter(lora): None}


def test_an_adapter_that_changes_during_its_hash_is_not_cached(lora: Lora, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(path: str, kind: bytes) -> bytes:
        replace_weights(lora)
        return b"d" * 32

    monkeypatch.setattr(adapters, "_digest_files", digest)
    assert wait_for_digests(load_adapter(lora)) == {name_adapter(lora): None}


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: os.utime(folder / WEIGHTS, ns=(1, 1)),
        lambda folder: (folder / "more.json").write_text("{}"),
        lambda folder: (folder / WEIGHTS).unlink(),
        lambda folder: os.replace(_write(folder / "new", b"two"), folder / WEIGHTS),
        lambda folder: _write_in_place(folder / WEIGHTS, b"two", keeps_time=True),
    ],
    ids=["time", "added file", "removed file", "replaced file", "same size and time"],
)
def test_any_change_of_the_files_is_detected(lora: Lora, change: Callable[[Path], object]) -> None:
    loaded = load_adapter(lora)
    wait_for_digests(loaded)
    assert loaded.is_unchanged(name_adapter(lora))
    change(Path(lora.lora_path))
    assert not loaded.is_unchanged(name_adapter(lora))
    assert loaded.take_digests() == {name_adapter(lora): None}
    assert not loaded.is_unchanged(name_adapter(lora))
    assert loaded.take_digests() == {}, "a change is reported once"


def test_files_are_hashed_in_a_daemon_thread(lora: Lora) -> None:
    loaded = load_adapter(lora)
    assert loaded._thread is not None
    assert loaded._thread.daemon


def test_an_adapter_is_not_cached_again_after_its_change_is_undone(lora: Lora) -> None:
    loaded = load_adapter(lora)
    wait_for_digests(loaded)
    os.rename(lora.lora_path, lora.lora_path + ".away")
    assert not loaded.is_unchanged(name_adapter(lora))
    os.rename(lora.lora_path + ".away", lora.lora_path)
    assert not loaded.is_unchanged(name_adapter(lora))


def test_a_digest_depends_on_the_names_bytes_and_kind_of_all_files(tmp_path: Path) -> None:
    digests = set()
    contents = [{WEIGHTS: b"one"}, {WEIGHTS: b"two"}, {"other": b"one"}, {WEIGHTS: b"one", "more": b""}]
    for number, files in enumerate(contents):
        for is_3d in (False, True):
            folder = tmp_path / f"{number}{is_3d}"
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
            (digest,) = wait_for_digests(load_adapter(Lora("ad", str(folder), is_3d_lora_weight=is_3d))).values()
            digests.add(digest)
    assert len(digests) == 8
    assert all(digest is not None and len(digest) == 32 for digest in digests)


def test_equal_files_in_another_folder_have_the_same_digest(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        (folder / WEIGHTS).write_bytes(bytes(3 << 20))
        (folder / "folder").mkdir()
    one, two = (wait_for_digests(load_adapter(Lora("ad", str(folder)))) for folder in folders)
    assert list(one.values()) == list(two.values()) != [None]


def test_an_adapter_that_is_read_as_two_kinds_is_not_cached(lora: Lora) -> None:
    loaded = load_adapter(lora)
    wait_for_digests(loaded)
    loaded._note_read(Lora("ad", lora.lora_path, is_3d_lora_weight=True), *[adapters._read_marks(lora.lora_path)] * 2)
    assert loaded.take_digests() == {name_adapter(lora): None}


def test_an_adapter_without_a_folder_is_not_cached(lora: Lora) -> None:
    loaded = LoadedAdapters()
    nowhere = Lora("ad", "/nowhere/adapter")
    loaded._note_read(nowhere, None, None)
    assert loaded.take_digests() == {name_adapter(nowhere): None}


def test_an_adapter_that_vllm_could_not_read_can_be_read_later(lora: Lora) -> None:
    loaded = LoadedAdapters()
    loaded.watch(manager := type("Own", (Manager,), {}))
    (Path(lora.lora_path) / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError):
        manager()._load_adapter(lora)
    replace_weights(lora)
    assert manager()._load_adapter(lora) == b"two"
    assert None not in wait_for_digests(loaded).values()


def test_adapters_are_not_cached_if_vllm_reads_them_with_another_method(caplog: pytest.LogCaptureFixture) -> None:
    LoadedAdapters().watch(type("Other", (), {}))
    assert "requests with an adapter do not use the pool" in caplog.text


def test_requests_do_not_wait_for_a_digest_and_their_blocks_are_saved_after_it(
    two: tuple[LoraInstance, LoraInstance], lora: Lora, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    may_go_on = threading.Event()
    digest_files = adapters._digest_files

    def digest(path: str, kind: bytes) -> bytes | None:
        may_go_on.wait(30.0)
        return digest_files(path, kind)

    monkeypatch.setattr(adapters, "_digest_files", digest)
    first.read(lora)
    request, table = make_request(lora_request=lora), [0, 1, 2, 3, 4, 5]
    assert first.count_found(lora) == 0
    first.scheduler.on_allocation(request, lambda: table, 0)
    assert first.begin({"a": 12}, {"a": table}).saves == []
    may_go_on.set()
    wait_until(lambda: first.knows(lora), "the digest")
    request.num_computed_tokens = 12
    (save,) = first.begin({"a": 10}, {"a": table}).saves
    assert list(save.blocks) == [0, 1, 2, 3, 4]
    first.end_transfers()
    second.add(lora)
    assert second.count_found(lora) == 20


def test_blocks_of_a_request_that_is_not_cached_are_not_counted_as_dropped(
    two: tuple[LoraInstance, LoraInstance], lora: Lora
) -> None:
    first, _ = two
    first.compute_prompt(lora)
    assert first.scheduler.take_counts() == {}


def test_saves_that_a_worker_refuses_are_counted_as_dropped(two: tuple[LoraInstance, LoraInstance], lora: Lora) -> None:
    first, _ = two
    first.add(lora)
    replace_weights(lora)
    first.compute_prompt(lora)
    (counts,) = first.workers[0].take_counts().values()
    assert counts == {"save dropped": 5}


def test_all_ranks_must_have_read_the_same_bytes(lora: Lora) -> None:
    store = CheckedBackend(MemoryStore(1 << 20))
    with contextlib.closing(LoraInstance(store, ranks=2)) as instance:
        instance.read(lora, ranks=1)
        replace_weights(lora)
        instance.managers[1]()._load_adapter(lora)
        known: list[Report] = []

        def both_reported() -> bool:
            for worker in instance.workers:
                known.append(worker.take_outcomes()[1])
            return sum(len(report.adapters) for report in known) >= 2

        wait_until(both_reported, "both digests")
        for report in known:
            instance.scheduler.on_report(report)
        assert instance.count_found(lora) == 0


def test_the_scheduler_has_the_digest_of_an_adapter_when_all_ranks_agree(lora: Lora) -> None:
    known, adapter = KnownAdapters(), name_adapter(lora)
    assert known.find_digest(lora, 2) is None
    known.add_digests({adapter: [b"d"]})
    assert known.find_digest(lora, 2) is None
    known.add_digests({adapter: [b"d"]})
    assert known.find_digest(lora, 2) == b"d"
    assert known.find_digest(Lora("other", lora.lora_path), 2) is None
    known.add_digests({adapter: [None]})
    assert known.find_digest(lora, 2) is None


def test_requests_of_a_vllm_without_load_inplace_are_cached(lora: Lora) -> None:
    plain: Any = SimpleNamespace(lora_name=lora.lora_name, lora_path=lora.lora_path)
    known, (adapter, digest) = KnownAdapters(), *wait_for_digests(load_adapter(plain)).items()
    assert digest is not None
    known.add_digests({adapter: [digest]})
    assert known.find_digest(plain, 1) == digest
    assert [digest] == list(wait_for_digests(load_adapter(lora)).values()), "missing attributes have the same defaults"


def load_adapter(lora: Lora) -> LoadedAdapters:
    """Return the ``LoadedAdapters`` of a worker after vLLM has read an adapter."""
    loaded = LoadedAdapters()
    loaded.watch(manager := type("Own", (Manager,), {"_load_adapter": lambda self, lora: None}))
    manager()._load_adapter(lora)
    return loaded


def wait_for_digests(loaded: LoadedAdapters) -> dict[Adapter, bytes | None]:
    """Return the next reported digests."""
    digests: dict[Adapter, bytes | None] = {}
    wait_until(lambda: digests.update(loaded.take_digests()) or bool(digests), "the digest of an adapter")
    return digests


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _write_in_place(path: Path, content: bytes, *, keeps_time: bool = False) -> None:
    """Write until the file system has a later time of change than before."""
    before = path.stat() if path.exists() else None

    def write() -> bool:
        path.write_bytes(content)
        if before is not None and keeps_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return before is None or path.stat().st_ctime_ns > before.st_ctime_ns

    wait_until(write, "the clock of the file system")
