"""FastDeploy's storage contract over a real Mooncake pool, in both its shapes; FastDeploy itself is a double."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from kvstore_backend.backend import ConfigError
from kvstore_backend.integrations.fastdeploy import FastDeployClient, activate, process_namespace
from kvstore_backend.stores.mooncake import restore_client
from tests.kvstore_backend.integrations.fastdeploy_double import (
    OneClass,
    SchedulerAndWorker,
    Storage,
    TransferProcess,
    block_hashes,
)
from tests.support.memory import Memory
from tests.support.mooncake import MooncakeMaster, mooncake_master

BLOCK = 2 * 2 * 64 * 16 * 2  # two layers, two heads, 64 tokens, head_dim 16, bfloat16
SCALES = 2 * 2 * 64 * 2
HASHES = block_hashes([[block] * 64 for block in range(4)])
CONTENTS = [b"first", b"second", b"third", b"fourth"]
Shape = Callable[[dict[str, Any]], Storage]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two fine-tunes of one base: equal configurations, equal files, other weights."""
    folders = []
    for name, weights in (("one", b"\1" * 4096), ("two", b"\2" * 4096)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps({"model_type": "ernie4_5", "num_hidden_layers": 2}))
        (folder / "model.pdparams").write_bytes(weights)
        folders.append(folder)
    return folders


def argv(model: Path, **changes: object) -> list[str]:
    """The command line of a transfer process."""
    told: dict[str, object] = {
        "device_id": 0,
        "rank": 0,
        "splitwise_role": "prefill",
        "num_layers": 2,
        "mp_num": 1,
        "cache_dtype": "bfloat16",
        "key_cache_shape": "100,2,64,16",
        "value_cache_shape": "100,2,64,16",
        "speculative_config": "{}",
        "default_dtype": "bfloat16",
        "kvcache_storage_backend": "mooncake",
        "max_model_len": 512,
        "model_path": model,
        **changes,
    }
    return ["cache_transfer_manager.py", *(str(word) for name, value in told.items() for word in (f"--{name}", value))]


@pytest.fixture(scope="module")
def activated() -> Iterator[None]:
    """Mooncake's client replaced, as in a process of FastDeploy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FD_PLUGINS", "kvstore")
        activate()
        yield
    restore_client()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with mooncake_master(tmp_path_factory.mktemp("master") / "log", "--default_kv_lease_ttl=200") as master:
        yield master


@contextlib.contextmanager
def storage(shape: Shape, master: MooncakeMaster, command: list[str]) -> Iterator[Storage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        opened = shape(master.settings())
    yield opened
    for client in filter(None, (opened.client, getattr(opened, "scheduler", None))):
        client.close()


@pytest.fixture(scope="module", params=[OneClass, SchedulerAndWorker])
def shape(request: pytest.FixtureRequest) -> Shape:
    kind: Shape = request.param
    return kind


@pytest.fixture(scope="module")
def stored(activated: None, master: MooncakeMaster, shape: Shape, models: list[Path]) -> Iterator[Storage]:
    """The storage of an instance of model one."""
    with storage(shape, master, argv(models[0])) as opened:
        opened.client.remove_all()
        yield opened


@pytest.fixture(scope="module")
def instance(stored: Storage) -> TransferProcess:
    """An instance of model one that has written four blocks."""
    process = TransferProcess(stored, BLOCK)
    assert process.write(HASHES, CONTENTS) == [0] * 8
    return process


def filled(content: bytes, size: int) -> bytes:
    return (content * (size // len(content) + 1))[:size]


def test_a_hit_is_read_whole_by_another_process_of_the_model(
    instance: TransferProcess, master: MooncakeMaster, models: list[Path]
) -> None:
    with storage(OneClass, master, argv(models[0], splitwise_role="decode", device_id=3)) as other:
        assert TransferProcess(other, BLOCK).read(HASHES) == [[filled(content, BLOCK)] * 2 for content in CONTENTS]


def test_a_miss_matches_nothing(instance: TransferProcess) -> None:
    assert instance.match(block_hashes([[9] * 64])) == 0


def test_of_a_partial_hit_the_leading_blocks_are_matched_and_read(instance: TransferProcess) -> None:
    assert instance.read([*HASHES[:2], *block_hashes([[8] * 64]), HASHES[3]]) == [
        [filled(content, BLOCK)] * 2 for content in CONTENTS[:2]
    ]


def test_a_block_without_its_value_is_no_hit(instance: TransferProcess) -> None:
    half = block_hashes([[7] * 64])
    key = instance.keys(half)[0]
    buffer = instance.write_buffers[0]
    assert instance.storage.batch_set(keys=key, target_locations=[buffer.address], target_sizes=[BLOCK]) == [0]
    assert instance.match(half) == 0


def test_fp8_blocks_come_with_their_scales(activated: None, master: MooncakeMaster, models: list[Path]) -> None:
    command = argv(models[0], cache_dtype="block_wise_fp8")
    with storage(OneClass, master, command) as opened:
        process = TransferProcess(opened, BLOCK // 2, SCALES)
        assert process.write(HASHES, CONTENTS) == [0] * 16
        assert process.read(HASHES)[1] == [filled(b"second", size) for size in (BLOCK // 2, BLOCK // 2, SCALES, SCALES)]
        (lost,) = process.keys(HASHES[1:2])[3]
        assert opened.client.remove(lost, True) == 0
        assert process.match(HASHES) == 1


def test_two_models_on_one_pool_never_read_each_other(
    instance: TransferProcess, shape: Shape, master: MooncakeMaster, models: list[Path]
) -> None:
    with storage(shape, master, argv(models[1])) as opened:
        other = TransferProcess(opened, BLOCK)
        assert other.match(HASHES) == 0
        assert other.write(HASHES, CONTENTS[::-1]) == [0] * 8
        assert other.read(HASHES)[0] == [filled(b"fourth", BLOCK)] * 2
        assert instance.read(HASHES)[0] == [filled(b"first", BLOCK)] * 2
        opened.client.remove_all()
        assert other.match(HASHES) == 0
    assert instance.match(HASHES) == 4


def test_an_object_shorter_than_asked_for_is_no_read(instance: TransferProcess) -> None:
    small = Memory(b"short")
    client = instance.storage.client
    assert client.put_from("short", small.address, 5) == 0
    buffer = instance.read_buffers[0]
    assert instance.storage.batch_get(keys=["short"], target_locations=[buffer.address], target_sizes=[BLOCK])[0] < 0


def test_a_read_into_less_memory_than_stored_is_refused(instance: TransferProcess) -> None:
    target = Memory(BLOCK)
    (key,) = instance.keys(HASHES[:1])[0]
    assert instance.storage.client.get_into(key, target.address, 100) < 0
    assert target.content[100:] == b"\xee" * (BLOCK - 100)


def test_side_data_is_read_by_a_single_get(instance: TransferProcess) -> None:
    written, read = Memory(b"logits of the last token"), Memory(24)
    client = instance.storage.client
    assert client.put_from("side", written.address, 24) == 0
    assert client.get_into("side", read.address, 24) == 24
    assert read.content == b"logits of the last token"


def test_bytes_come_back_in_their_own_length(instance: TransferProcess) -> None:
    client = instance.storage.client
    assert client.put("note", b"anything") == 0
    assert (client.get("note"), client.get("nothing"), client.put("empty", b"") < 0) == (b"anything", b"", True)


def test_a_deleted_block_is_gone(instance: TransferProcess) -> None:
    block = block_hashes([[6] * 64])
    instance.write(block, [b"x"])
    for (key,) in instance.keys(block):
        assert instance.storage.client.remove(key, True) == 0
    assert instance.match(block) == 0
    assert instance.storage.client.remove("never stored") == -704


def found_blocks(folder: Path) -> float | None:
    """What FastDeploy's ``/metrics`` would tell of look-ups: it gathers what its processes leave in that folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return registry.get_sample_value("kvstore_blocks_total", {"operation": "exists", "status": "ok"})


# In a process of its own, as Mooncake's client takes long to end without its master.
SURVIVOR = """
import json, os, sys
from kvstore_backend.integrations.fastdeploy import activate
from tests.kvstore_backend.integrations.fastdeploy_double import OneClass, SchedulerAndWorker, TransferProcess
from tests.kvstore_backend.integrations.test_fastdeploy import BLOCK, CONTENTS, HASHES
settings = json.loads(sys.stdin.readline())
activate()
processes = [TransferProcess(shape(settings), BLOCK) for shape in (OneClass, SchedulerAndWorker)]
written = [process.write(HASHES, CONTENTS) for process in processes]
print([process.match(HASHES) for process in processes], flush=True)
sys.stdin.readline()
for process in processes:
    print(process.match(HASHES), flush=True)
print([(len(process.read(HASHES)), max(process.write(HASHES, CONTENTS)) < 0) for process in processes], flush=True)
os._exit(0)
"""


def test_with_the_master_dead_nothing_is_matched_and_that_is_said_in_time(models: list[Path], tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as doomed, ThreadPoolExecutor(1) as reader:
        survivor = subprocess.Popen(
            [sys.executable, "-c", SURVIVOR, *argv(models[0])[1:]],
            env={**os.environ, "FD_PLUGINS": "kvstore", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert survivor.stdin is not None
        assert survivor.stdout is not None
        try:
            print(json.dumps(doomed.settings()), file=survivor.stdin, flush=True)
            assert survivor.stdout.readline() == "[4, 4]\n"
            doomed.kill()
            print(file=survivor.stdin, flush=True)
            for _shape in range(2):
                # The deadline is 0.5 s; Mooncake's own client says, at once or after up to 4.5 s, that all is there.
                assert reader.submit(survivor.stdout.readline).result(timeout=4) == "0\n"
            assert survivor.stdout.readline() == "[(0, True), (0, True)]\n"
            assert found_blocks(tmp_path)
        finally:
            survivor.kill()
            survivor.communicate()


def test_after_it_was_closed_a_client_fails_every_call_and_crashes_nothing(
    activated: None, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, memory = FastDeployClient(), Memory(8)
    assert client.close() == client.close() == 0
    assert client.batch_is_exist(["a"]) == [0]
    assert client.batch_get_into(["a"], [memory.address], [8]) == client.batch_put_from(["a"], [memory.address], [8])
    assert (client.get("a"), client.remove_all() < 0, client.health_check()) == (b"", True, 1)


# What the namespace is made of.


def test_ranks_and_roles_share_a_namespace_as_keys_name_the_rank(models: list[Path]) -> None:
    one, other = (
        argv(models[0]),
        argv(models[0], rank=1, device_id=1, splitwise_role="decode", key_cache_shape="7,2,64,16"),
    )
    assert process_namespace(one) == process_namespace(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"mp_num": 2},
        {"cache_dtype": "uint8"},
        {"default_dtype": "float16"},
        {"num_layers": 3},
        {"key_cache_shape": "100,4,64,16"},
        {"key_cache_shape": "100,2,128,16"},
        {"value_cache_shape": "100,2,64,8"},
        {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 1}'},
    ],
    ids=str,
)
def test_whatever_changes_a_blocks_bytes_changes_the_namespace(models: list[Path], changes: dict[str, object]) -> None:
    assert process_namespace(argv(models[0])).digest != process_namespace(argv(models[0], **changes)).digest


def test_the_engine_and_its_worker_agree(models: list[Path]) -> None:
    model = str(models[0])
    engine = [
        "api_server.py",
        "--model",
        model,
        "--tensor-parallel-size",
        "2",
        "--quantization=wint4",
        "--port",
        "8000",
    ]
    worker = ["worker_process.py", "--model", model, "--tensor_parallel_size", "2", "--block_size", "64"]
    worker += ["--dtype", "bfloat16", "--quantization", '{"quantization": "wint4"}', "--enable_prefix_caching"]
    assert process_namespace(engine) == process_namespace(worker)
    assert process_namespace(worker).digest != process_namespace(worker[:-3]).digest


def test_a_process_that_is_not_told_the_model_takes_the_one_named_beside(models: list[Path]) -> None:
    untold = argv(models[0])[:-2]
    with pytest.raises(ConfigError, match="set KVSTORE_MODEL to the model's folder"):
        process_namespace(untold, {})
    assert process_namespace(untold, {"KVSTORE_MODEL": str(models[0])}) == process_namespace(argv(models[0]))


def test_a_hubs_name_is_the_folder_that_fastdeploy_downloads_it_to(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "PaddlePaddle").mkdir()
    (tmp_path / "PaddlePaddle" / "ERNIE").symlink_to(models[0])
    named = process_namespace(argv(models[0], model_path="PaddlePaddle/ERNIE"), {"FD_MODEL_CACHE": str(tmp_path)})
    assert named == process_namespace(argv(models[0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_path": "PaddlePaddle/ERNIE"}, "no folder here"),
        ({"key_cache_shape": "100,2"}, "--key_cache_shape is '100,2'; four numbers are known here"),
        ({"mp_num": "two"}, "--mp_num is 'two'; it must be a number"),
    ],
)
def test_what_makes_no_namespace_is_refused(models: list[Path], changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        process_namespace(argv(models[0], **changes))


# How FastDeploy loads it.

LOADER = """
import mooncake.store
from importlib.metadata import entry_points
for plugin in {plugin.name: plugin for plugin in entry_points(group="fastdeploy.tool_parser_plugins")}.values():
    plugin.load()()
print(mooncake.store.MooncakeDistributedStore.__name__)
"""


@pytest.mark.parametrize(
    ("named", "client"), [("kvstore", "FastDeployClient"), ("other,kvstore", "FastDeployClient"), ("", "native")]
)
def test_the_entry_point_replaces_the_client_only_where_it_is_named(named: str, client: str) -> None:
    environ = {**os.environ, "FD_PLUGINS": named}
    run = subprocess.run([sys.executable, "-c", LOADER], env=environ, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [client if named else "MooncakeDistributedStore"]


def test_it_loads_no_tensor_library() -> None:
    code = "import sys, kvstore_backend.integrations.fastdeploy; print({'torch', 'paddle'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
