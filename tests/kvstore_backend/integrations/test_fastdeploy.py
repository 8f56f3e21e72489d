"""FastDeploy's storage contract in both its shapes, with a real Mooncake pool and a double of FastDeploy."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from kvstore_backend.backend import ConfigError
from kvstore_backend.cli import main as why_miss
from kvstore_backend.config import MemorySettings, PoolConfig, describe_url
from kvstore_backend.integrations import fastdeploy
from kvstore_backend.integrations.fastdeploy import FastDeployClient, activate, process_namespace
from kvstore_backend.integrations.fastdeploy_engine import Engine, parse_arguments
from kvstore_backend.integrations.fastdeploy_settings import (
    CAN_CHANGE_KV,
    CANNOT_CHANGE_KV,
    KV_VARIABLES,
    NEUTRAL_VARIABLES,
)
from kvstore_backend.manifest import Manifest
from kvstore_backend.stores import mooncake_joining
from kvstore_backend.why_miss import compare_setups
from tests.kvstore_backend.integrations.fastdeploy_double import (
    OneClass,
    SchedulerAndWorker,
    Storage,
    TransferProcess,
    block_hashes,
    engine_of,
    start_under,
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
    """Return two fine-tuned models with equal configurations and file names, but different weights."""
    folders = []
    for name, weights in (("one", b"\1" * 4096), ("two", b"\2" * 4096)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps({"model_type": "ernie4_5", "num_hidden_layers": 2}))
        (folder / "model.pdparams").write_bytes(weights)
        folders.append(folder)
    return folders


def argv(model: Path, **changes: object) -> list[str]:
    """Return the command line of a transfer process."""
    flags: dict[str, object] = {
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
    return [
        "cache_transfer_manager.py",
        *(str(word) for name, value in flags.items() for word in (f"--{name}", value)),
    ]


@pytest.fixture(scope="module")
def our_client() -> Iterator[None]:
    """Replace Mooncake's client, as in a process of FastDeploy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FD_PLUGINS", "kvstore")
        activate()
        yield
    mooncake_store = importlib.import_module("mooncake.store")
    mooncake_store.MooncakeDistributedStore = mooncake_joining._REPLACED.pop()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with mooncake_master(tmp_path_factory.mktemp("master") / "log", "--default_kv_lease_ttl=200") as master:
        yield master


@contextlib.contextmanager
def storage(
    shape: Shape,
    master: MooncakeMaster | dict[str, object],
    command: list[str],
    began: float = math.inf,
    **arguments: object,
) -> Iterator[Storage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        start_under(Engine(arguments, began=began), patch)
        opened = shape(master if isinstance(master, dict) else master.settings())
    yield opened
    for client in filter(None, (opened.client, getattr(opened, "scheduler", None))):
        client.close()


@pytest.fixture(scope="module", params=[OneClass, SchedulerAndWorker])
def shape(request: pytest.FixtureRequest) -> Shape:
    kind: Shape = request.param
    return kind


@pytest.fixture(scope="module")
def stored(our_client: None, master: MooncakeMaster, shape: Shape, models: list[Path]) -> Iterator[Storage]:
    """Yield the storage of an instance of model one."""
    with storage(shape, master, argv(models[0])) as opened:
        opened.client.remove_all()
        yield opened


@pytest.fixture(scope="module")
def instance(stored: Storage) -> TransferProcess:
    """Return an instance of model one that has written four blocks."""
    process = TransferProcess(stored, BLOCK)
    assert process.write(HASHES, CONTENTS) == [0] * 8
    return process


def repeat(content: bytes, size: int) -> bytes:
    return (content * (size // len(content) + 1))[:size]


def test_another_process_of_the_model_reads_a_complete_hit(
    instance: TransferProcess, master: MooncakeMaster, models: list[Path]
) -> None:
    with storage(OneClass, master, argv(models[0], splitwise_role="decode", device_id=3)) as other:
        assert TransferProcess(other, BLOCK).read(HASHES) == [[repeat(content, BLOCK)] * 2 for content in CONTENTS]


def test_present_blocks_can_be_written_again(instance: TransferProcess) -> None:
    """The newest form of the v1 storage does not look up blocks before it writes them."""
    assert instance.write(HASHES, CONTENTS) == [0] * 8


def test_a_miss_matches_no_block(instance: TransferProcess) -> None:
    assert instance.match(block_hashes([[9] * 64])) == 0


def test_a_partial_hit_matches_and_reads_the_leading_blocks(instance: TransferProcess) -> None:
    assert instance.read([*HASHES[:2], *block_hashes([[8] * 64]), HASHES[3]]) == [
        [repeat(content, BLOCK)] * 2 for content in CONTENTS[:2]
    ]


def test_a_block_without_v_is_not_a_hit(instance: TransferProcess) -> None:
    half = block_hashes([[7] * 64])
    key = instance.keys(half)[0]
    buffer = instance.write_buffers[0]
    assert instance.storage.batch_set(keys=key, target_locations=[buffer.address], target_sizes=[BLOCK]) == [0]
    assert instance.match(half) == 0


def test_fp8_blocks_are_read_with_their_scales(our_client: None, master: MooncakeMaster, models: list[Path]) -> None:
    command = argv(models[0], cache_dtype="block_wise_fp8")
    with storage(OneClass, master, command) as opened:
        process = TransferProcess(opened, BLOCK // 2, SCALES)
        assert process.write(HASHES, CONTENTS) == [0] * 16
        assert process.read(HASHES)[1] == [repeat(b"second", size) for size in (BLOCK // 2, BLOCK // 2, SCALES, SCALES)]
        (lost,) = process.keys(HASHES[1:2])[3]
        assert opened.client.remove(lost, True) == 0
        assert process.match(HASHES) == 1


def test_two_models_in_one_pool_do_not_read_each_others_blocks(
    instance: TransferProcess, shape: Shape, master: MooncakeMaster, models: list[Path]
) -> None:
    with storage(shape, master, argv(models[1])) as opened:
        other = TransferProcess(opened, BLOCK)
        assert other.match(HASHES) == 0
        assert other.write(HASHES, CONTENTS[::-1]) == [0] * 8
        assert other.read(HASHES)[0] == [repeat(b"fourth", BLOCK)] * 2
        assert instance.read(HASHES)[0] == [repeat(b"first", BLOCK)] * 2
        opened.client.remove_all()
        assert other.match(HASHES) == 0
    assert instance.match(HASHES) == 4


@pytest.mark.usefixtures("our_client")
def test_a_folder_in_place_of_the_masters_address_is_the_pool(shape: Shape, models: list[Path], tmp_path: Path) -> None:
    folder: dict[str, object] = {"master_server_addr": f"file://{tmp_path}/pool?size=64MiB", "protocol": "rdma"}
    folder |= {"metadata_server": "P2PHANDSHAKE", "local_hostname": "10.0.0.9"}
    with contextlib.ExitStack() as opened:
        first, second, other = (opened.enter_context(storage(shape, folder, argv(models[i]))) for i in (0, 0, 1))
        assert TransferProcess(first, BLOCK).write(HASHES, CONTENTS) == [0] * 8
        read = TransferProcess(second, BLOCK).read(HASHES)
        assert read == [[repeat(content, BLOCK)] * 2 for content in CONTENTS]
        assert TransferProcess(other, BLOCK).match(HASHES) == 0


def test_a_read_of_a_value_shorter_than_the_target_fails(instance: TransferProcess) -> None:
    small = Memory(b"short")
    client = instance.storage.client
    assert client.put_from("short", small.address, 5) == 0
    buffer = instance.read_buffers[0]
    assert instance.storage.batch_get(keys=["short"], target_locations=[buffer.address], target_sizes=[BLOCK])[0] < 0


def test_a_read_into_a_target_shorter_than_the_value_fails(instance: TransferProcess) -> None:
    target = Memory(BLOCK)
    (key,) = instance.keys(HASHES[:1])[0]
    assert instance.storage.client.get_into(key, target.address, 100) < 0
    assert target.content[100:] == b"\xee" * (BLOCK - 100)


def test_side_data_is_read_with_a_single_get(instance: TransferProcess) -> None:
    written, read = Memory(b"logits of the last token"), Memory(24)
    client = instance.storage.client
    assert client.put_from("side", written.address, 24) == 0
    assert client.get_into("side", read.address, 24) == 24
    assert read.content == b"logits of the last token"


def test_bytes_are_read_with_their_own_length(instance: TransferProcess) -> None:
    client = instance.storage.client
    assert client.put("note", b"anything") == 0
    assert (client.get("note"), client.get("nothing"), client.put("empty", b"") < 0) == (b"anything", b"", True)


def test_a_removed_block_is_absent(instance: TransferProcess) -> None:
    block = block_hashes([[6] * 64])
    instance.write(block, [b"x"])
    for (key,) in instance.keys(block):
        assert instance.storage.client.remove(key, True) == 0
    assert instance.match(block) == 0
    assert instance.storage.client.remove("never stored") == -704


def count_found_blocks(folder: Path) -> float | None:
    """Return the number of found blocks in FastDeploy's ``/metrics``, from the files of its processes in a folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return registry.get_sample_value("kvstore_blocks_total", {"operation": "exists", "status": "ok"})


# In a process of its own, because Mooncake's client needs a long time to end without its master.
SURVIVOR = """
import json, os, sys
import pytest
from kvstore_backend.integrations.fastdeploy import activate
from tests.kvstore_backend.integrations.fastdeploy_double import (
    OneClass, SchedulerAndWorker, TransferProcess, engine_of, start_under
)
from tests.kvstore_backend.integrations.test_fastdeploy import BLOCK, CONTENTS, HASHES
settings = json.loads(sys.stdin.readline())
activate()
start_under(engine_of(), pytest.MonkeyPatch())
processes = [TransferProcess(shape(settings), BLOCK) for shape in (OneClass, SchedulerAndWorker)]
written = [process.write(HASHES, CONTENTS) for process in processes]
print([process.match(HASHES) for process in processes], flush=True)
sys.stdin.readline()
for process in processes:
    print(process.match(HASHES), flush=True)
print([(len(process.read(HASHES)), max(process.write(HASHES, CONTENTS)) < 0) for process in processes], flush=True)
os._exit(0)
"""


def test_after_the_masters_end_no_block_is_matched_and_calls_end_soon(models: list[Path], tmp_path: Path) -> None:
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
                # The deadline is 0.5 s. Mooncake's own client reports, within 4.5 s, that all blocks are present.
                assert reader.submit(survivor.stdout.readline).result(timeout=4) == "0\n"
            assert survivor.stdout.readline() == "[(0, True), (0, True)]\n"
            assert count_found_blocks(tmp_path)
        finally:
            survivor.kill()
            survivor.communicate()


def test_every_call_of_a_closed_client_fails_without_an_exception(
    our_client: None, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, memory = FastDeployClient(), Memory(8)
    assert client.close() == client.close() == 0
    assert client.batch_is_exist(["a"]) == [0]
    assert client.batch_get_into(["a"], [memory.address], [8]) == client.batch_put_from(["a"], [memory.address], [8])
    assert (client.get("a"), client.remove_all() < 0, client.health_check()) == (b"", True, 1)


@pytest.mark.parametrize("kind", ["transfer", "worker"])
def test_only_the_transfer_process_limits_late_reads_and_long_puts(
    models: list[Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of the cache manager v1 may read to blocks that FastDeploy gives to other requests."""
    monkeypatch.setattr(sys, "argv", commands(models[0])[kind])
    client = FastDeployClient()
    assert (client._ends_reads_late, client._longest_put) == ((True, math.inf) if kind == "worker" else (False, 50))


# The contents of the namespace.

ENGINE_WITHOUT_MODEL = engine_of()


def digest_of(command: list[str], engine: Engine = ENGINE_WITHOUT_MODEL) -> str:
    return process_namespace(command, engine).digest


def test_ranks_and_roles_have_the_same_namespace(models: list[Path]) -> None:
    one, other = (
        argv(models[0]),
        argv(models[0], rank=1, device_id=1, splitwise_role="decode", key_cache_shape="7,2,64,16"),
    )
    assert process_namespace(one, ENGINE_WITHOUT_MODEL) == process_namespace(other, ENGINE_WITHOUT_MODEL)


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
    ],
    ids=str,
)
def test_arguments_that_change_blocks_change_the_namespace(models: list[Path], changes: dict[str, object]) -> None:
    assert digest_of(argv(models[0])) != digest_of(argv(models[0], **changes))


def commands(model: Path) -> dict[str, list[str]]:
    """Return the command lines with which FastDeploy 2.6 and its cache manager v1 start each kind of process."""
    defaults = '{"num_speculative_tokens": 1, "num_model_steps": 1, "num_extra_cache_layer": 0}'
    worker = ["worker_process.py", "--model", str(model), "--tensor_parallel_size", "2", "--block_size", "64"]
    worker += ["--quantization", "null", "--speculative_config", defaults, "--enable_prefix_caching"]
    return {"transfer": argv(model), "scheduler": ["api_server", "--model", str(model)], "worker": worker}


@pytest.mark.parametrize("kind", ["transfer", "scheduler", "worker"])
def test_each_setting_of_the_engine_that_can_change_kv_changes_the_namespace(models: list[Path], kind: str) -> None:
    command = commands(models[0])[kind]
    found = {digest_of(command, engine_of(models[0])): ""}
    arguments = {name: engine_of(models[0], None, **{name: "another value"}) for name in CAN_CHANGE_KV}
    drafting = {"method": "mtp", "model": str(models[1])}
    arguments["speculative_config"] = engine_of(models[0], speculative_config=json.dumps(drafting))
    variables = {name: engine_of(models[0], {name: "another value"}) for name in KV_VARIABLES}
    unknown = {"unknown": engine_of(models[0], nobody_knows=1), "FD_X": engine_of(models[0], {"FD_X": "1"})}
    for name, engine in {**arguments, **variables, **unknown}.items():
        digest = digest_of(command, engine)
        assert digest not in found, f"{name} does not change the namespace, or has the same one as {found.get(digest)}"
        found[digest] = name


PLAIN_LINE = "--kvcache-storage-backend mooncake"
CHANGES = {
    "quantization": ("--quantization wint4", {}),
    "int8 cache": ('--quantization {"kv_cache_quant_type":"int8"}', {}),
    "fp8 cache": ('--quantization {"kv_cache_quant_type":"float8_e4m3fn"}', {}),
    "attention": ("", {"FD_ATTENTION_BACKEND": "FLASH_ATTN"}),
    "other attention": ("", {"FD_ATTENTION_BACKEND": "APPEND_ATTN"}),
    "sparse prefill": ('--plas-attention-config {"plas_encoder_top_k_left":50}', {}),
    "draft model": ('--speculative-config {"method":"mtp","model":"/draft"}', {}),
    "images": ('--mm-processor-kwargs {"video_max_frames":30}', {}),
    "number of images": ('--limit-mm-per-prompt {"image":2}', {}),
    "gate": ("--moe-gate-fp32", {}),
    "experts' kernels": ("", {"FD_MOE_BACKEND": "triton"}),
    "deep gemm": ("", {"FD_USE_DEEP_GEMM": "1"}),
    "power of two scales": ("", {"FD_FP8_QUANT_WITH_POW2SCALE": "1"}),
    "implementation": ("--model-impl paddleformers", {}),
    "experts' balance": ("--enable-eplb", {}),
    "weights that change": ("--dynamic-load-weight", {}),
    "ranks": ("-tp 2", {}),
    "block size": ("--block-size 128", {}),
}
"""Command lines and environments of instances that all have different KV bytes."""


@pytest.mark.parametrize("kind", ["scheduler", "worker", "transfer"])
def test_command_lines_that_change_kv_have_different_namespaces(
    models: list[Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastdeploy", None)
    found: dict[str, str] = {}
    for name, (words, environ) in {"plain": ("", {}), **CHANGES}.items():
        arguments, _ = parse_arguments([*PLAIN_LINE.split(), *words.split()])
        # The transfer process gets these two in its own arguments.
        ranks = {"mp_num": arguments.get("tensor_parallel_size", 1)}
        shape = {"key_cache_shape": f"100,2,{arguments.get('block_size', 64)},16"}
        command = argv(models[0], **ranks, **shape) if kind == "transfer" else commands(models[0])[kind]
        digest = digest_of(command, Engine({**arguments, "model": str(models[0])}, environ=environ))
        assert digest not in found, f"{name} has the namespace of {found.get(digest)}"
        found[digest] = name


@pytest.mark.parametrize("kind", ["transfer", "scheduler", "worker"])
def test_settings_that_cannot_change_kv_do_not_change_the_namespace(models: list[Path], kind: str) -> None:
    command = commands(models[0])[kind]
    neutral = dict.fromkeys(CANNOT_CHANGE_KV, "another value")
    engine = engine_of(models[0], dict.fromkeys(NEUTRAL_VARIABLES, "another value"), **neutral)
    plain = engine_of(models[0])
    assert digest_of(command, engine) == digest_of(command, plain)


def test_some_arguments_have_a_field_of_the_namespace(models: list[Path]) -> None:
    scheduler = commands(models[0])["scheduler"]
    plain, changed = (
        process_namespace(scheduler, engine_of(models[0], None, **arguments))
        for arguments in ({}, {"tensor_parallel_size": 2, "block_size": 128})
    )
    assert (plain.tp_size, plain.block_size, changed.tp_size, changed.block_size) == (1, 64, 2, 128)
    assert process_namespace(scheduler, engine_of(models[1])).digest != plain.digest


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tensor_parallel_size": 2, "quantization": "wint4"},
        {"speculative_config": '{"method": "mtp", "model": "DRAFT"}'},
    ],
    ids=["plain", "quantized", "mtp"],
)
def test_the_engine_and_its_worker_have_the_same_namespace(models: list[Path], settings: dict[str, Any]) -> None:
    engine = engine_of(models[0], **settings)
    kinds = commands(models[0])
    assert process_namespace(kinds["scheduler"], engine) == process_namespace(kinds["worker"], engine)


@pytest.mark.parametrize("method", ["ngram", "suffix", "naive"])
def test_speculation_without_a_draft_model_does_not_change_the_namespace(models: list[Path], method: str) -> None:
    speculative = {"method": method, "num_speculative_tokens": 5}
    speculating = engine_of(models[0], speculative_config=json.dumps(speculative))
    assert digest_of(argv(models[0]), speculating) == digest_of(argv(models[0]), engine_of(models[0]))


def test_cuda_graphs_do_not_change_the_namespace(models: list[Path]) -> None:
    found = [
        digest_of(argv(models[0]), engine_of(models[0], graph_optimization_config=each))
        for each in (None, '{"use_cudagraph": true}', '{"use_cudagraph": true, "graph_opt_level": 2}')
    ]
    assert found[0] == found[1] != found[2]
    assert found[0] == digest_of(argv(models[0]), engine_of(models[0]))


def test_a_draft_model_counts_by_its_content(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "copy").symlink_to(models[0])
    texts = [json.dumps({"method": "mtp", "model": str(each)}) for each in (models[0], tmp_path / "copy", models[1])]
    one, copy, other = (digest_of(argv(models[0]), engine_of(models[0], speculative_config=text)) for text in texts)
    assert one == copy != other


def test_a_draft_model_counts_by_its_content_if_its_path_has_no_slash(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = set()
    for model in models:
        Path("draft").unlink(missing_ok=True)
        Path("draft").symlink_to(model)
        settings = '{"method": "mtp", "model": "draft"}'
        found.add(digest_of(argv(models[0]), engine_of(models[0], speculative_config=settings)))
    assert len(found) == 2


def test_the_method_of_speculation_may_have_capitals(models: list[Path]) -> None:
    texts = [json.dumps({"method": method, "model": str(models[1])}) for method in ("mtp", "MTP")]
    one, other = (digest_of(argv(models[0]), engine_of(models[0], speculative_config=text)) for text in texts)
    assert one == other


def test_int8_and_fp8_caches_share_no_blocks(models: list[Path]) -> None:
    command = argv(models[0], cache_dtype="uint8")
    kinds = [{"quantization": "wint4", "kv_cache_quant_type": kind} for kind in ("int8", "float8_e4m3fn")]
    assert len({digest_of(command, engine_of(models[0], quantization=each)) for each in kinds}) == 2


@pytest.mark.parametrize(
    ("quantization", "config", "is_shared"),
    [
        (None, {}, True),
        ("block_wise_fp8", {}, False),
        (None, {"quantization_config": {"quantization": "wint4"}}, False),
    ],
)
def test_blocks_of_quantized_weights_are_shared_only_by_the_same_kind_of_gpu(
    models: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str | None,
    config: dict[str, Any],
    is_shared: bool,
) -> None:
    """FastDeploy rounds the scales of block-wise fp8 to powers of two since compute capability 10.0."""
    (tmp_path / "model.pdparams").write_bytes((models[0] / "model.pdparams").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = set()
    for capability in ("9.0", "10.0"):
        monkeypatch.setattr(fastdeploy, "find_capability", lambda text=capability: text)
        found.add(digest_of(argv(tmp_path), engine_of(tmp_path, quantization=quantization)))
    assert (len(found) == 1) is is_shared


def test_versions_of_fastdeploy_share_no_blocks(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("fastdeploy")
    module.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "fastdeploy", module)
    for kind in ("transfer", "worker"):
        found = set()
        for build in ("2.6.0", "2.7.0"):
            (tmp_path / "version.txt").write_text(f"fastdeploy version: {build}")
            found.add(digest_of(commands(models[0])[kind], engine_of(models[0])))
        assert len(found) == 2


def test_why_miss_names_the_setting_in_which_two_instances_differ(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = []
    monkeypatch.setattr(sys, "argv", argv(models[0]))
    for settings in ({"quantization": "wint4"}, {"quantization": "wint8"}):
        start_under(engine_of(models[0], {"FD_ATTENTION_BACKEND": "APPEND_ATTN"}, **settings), monkeypatch)
        client = FastDeployClient()
        manifests.append(Manifest(client.namespace().fields, client.facts()))
    verdict = compare_setups(manifests[0], manifests[1])
    assert verdict.reason == "other_settings"
    assert "quantization ('wint4' of the first, 'wint8' of the second)" in verdict.sentence
    assert "FD_ATTENTION_BACKEND" not in verdict.sentence


def test_why_miss_finds_the_setting_in_the_pool(
    our_client: None, master: MooncakeMaster, models: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        storage(OneClass, master, argv(models[0]), quantization="wint4") as one,
        storage(OneClass, master, argv(models[0]), quantization="wint8") as other,
    ):
        digests = [opened.client._pool.namespace.digest for opened in (one, other)]
        why_miss(["why-miss", describe_url(master.config()), "--between", *digests])
    assert "quantization ('wint4' of" in capsys.readouterr().out


def test_a_process_without_a_model_argument_has_the_engines_model(models: list[Path]) -> None:
    without_model = argv(models[0])[:-2]
    for engine in (engine_of(models[0]), engine_of(environ={"KVSTORE_MODEL": str(models[0])})):
        assert digest_of(without_model, engine) == digest_of(argv(models[0]), engine_of(models[0]))
    with pytest.raises(ConfigError, match="set KVSTORE_MODEL to the model's folder"):
        process_namespace(without_model, engine_of())


def test_a_name_at_a_hub_is_the_folder_of_fastdeploys_download(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "PaddlePaddle").mkdir()
    (tmp_path / "PaddlePaddle" / "ERNIE").symlink_to(models[0])
    environ = {"FD_MODEL_CACHE": str(tmp_path)}
    named = digest_of(argv(models[0], model_path="PaddlePaddle/ERNIE"), engine_of(environ=environ))
    assert named == digest_of(argv(models[0]))


def test_kvstore_model_replaces_a_name_that_is_not_on_this_machine(models: list[Path], tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "KVSTORE_MODEL": str(models[0])}
    named = digest_of(argv(models[0], model_path="PaddlePaddle/ERNIE"), engine_of(environ=environ))
    assert named == digest_of(argv(models[0]))


def test_the_namespace_has_the_weights_of_the_served_revision(models: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    for name, model in (("main", models[0]), ("v2", models[1])):
        (cache / "refs").mkdir(parents=True, exist_ok=True)
        (cache / "snapshots").mkdir(exist_ok=True)
        (cache / "refs" / name).write_text(f"commit-of-{name}")
        (cache / "snapshots" / f"commit-of-{name}").symlink_to(model)
    environ = {"HF_HUB_CACHE": str(tmp_path), "HOME": str(tmp_path)}
    command = argv(models[0], model_path="org/name")
    for revision, model in (("master", models[0]), ("v2", models[1]), ("commit-of-v2", models[1])):
        assert digest_of(command, engine_of(environ=environ, revision=revision)) == digest_of(argv(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_path": "PaddlePaddle/ERNIE"}, "not a folder on this machine"),
        ({"model_path": "/nowhere"}, "'/nowhere' is not a folder on this machine"),
        ({"key_cache_shape": "100,2"}, "--key_cache_shape is '100,2'; it must be four numbers"),
        ({"mp_num": "two"}, "--mp_num is 'two'; it must be a whole number"),
    ],
)
def test_arguments_without_a_namespace_are_refused(
    models: list[Path], tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        process_namespace(argv(models[0], **changes), engine_of(environ={"HOME": str(tmp_path)}))


# Weights that change while instances run.


@pytest.fixture
def changing(models: list[Path], tmp_path: Path) -> Path:
    """Return the folder of a model in training, with the version of its weights."""
    for file in models[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "version.yaml").write_text("version: RL-STEP1-17-a")
    return tmp_path


class VersionedProcess(TransferProcess):
    """FastDeploy 2.6 in training: its keys begin with the training step from ``version.yaml``."""

    step = "RL-STEP1"

    def keys(self, hashes: Sequence[str]) -> list[list[str]]:
        kinds = super().keys(hashes)
        return [[key.replace("prefix_", f"prefix{self.step}_") for key in kind] for kind in kinds]


class UnversionedProcess(TransferProcess):
    """FastDeploy's cache manager v1: its keys have no version of the weights."""

    def keys(self, hashes: Sequence[str]) -> list[list[str]]:
        kinds = super().keys(hashes)
        return [[key.removeprefix("prefix_") for key in kind] for kind in kinds]


@pytest.mark.parametrize(("kind", "shape"), [(VersionedProcess, OneClass), (UnversionedProcess, SchedulerAndWorker)])
def test_after_an_update_blocks_of_old_weights_are_not_read(
    our_client: None, master: MooncakeMaster, changing: Path, kind: type[TransferProcess], shape: Shape
) -> None:
    with storage(shape, master, argv(changing), dynamic_load_weight=True) as opened:
        process = kind(opened, BLOCK)
        assert process.write(HASHES, CONTENTS) == [0] * 8
        assert process.match(HASHES) == 4
        (changing / "version.yaml").write_text("version: RL-STEP2-18-b")
        vars(process)["step"] = "RL-STEP2"
        assert process.match(HASHES) == 0
        assert process.write(HASHES[:1], [b"of the new weights"]) == [0, 0]
        with storage(shape, master, argv(changing), dynamic_load_weight=True) as started_later:
            other = kind(started_later, BLOCK)
            vars(other)["step"] = "RL-STEP2"
            assert other.read(HASHES) == [[repeat(b"of the new weights", BLOCK)] * 2]


def test_no_block_is_read_or_stored_while_keys_and_folder_have_different_versions(
    our_client: None, master: MooncakeMaster, changing: Path
) -> None:
    with storage(OneClass, master, argv(changing), dynamic_load_weight=True) as opened:
        process = VersionedProcess(opened, BLOCK)
        assert process.write(HASHES, CONTENTS) == [0] * 8
        (changing / "version.yaml").write_text("version: RL-STEP2-18-b")
        assert process.match(HASHES) == 0
        assert {code < 0 for code in process.write(HASHES, CONTENTS)} == {True}


def test_an_updated_instance_and_one_that_starts_after_the_update_share_blocks(
    our_client: None, master: MooncakeMaster, changing: Path
) -> None:
    with storage(OneClass, master, argv(changing), dynamic_load_weight=True) as updated:
        (changing / "model.pdparams").write_bytes(b"trained" * 600)
        process = UnversionedProcess(updated, BLOCK)
        assert process.match(HASHES) == 0
        assert {code < 0 for code in process.write(HASHES, CONTENTS)} == {True}, "the version of the weights is unknown"
        (changing / "version.yaml").write_text("version: RL-STEP2-18-b")
        assert process.write(HASHES, CONTENTS) == [0] * 8
        with storage(OneClass, master, argv(changing), dynamic_load_weight=True) as started_later:
            assert UnversionedProcess(started_later, BLOCK).match(HASHES) == 4


def test_no_block_is_read_or_stored_while_new_weights_are_incomplete(
    our_client: None, master: MooncakeMaster, changing: Path
) -> None:
    with storage(OneClass, master, argv(changing), dynamic_load_weight=True) as opened:
        process = UnversionedProcess(opened, BLOCK)
        (changing / "version.yaml").write_text("version: RL-STEP2-18-b")
        (changing / "model.safetensors").write_bytes(b"half")
        assert {code < 0 for code in process.write(HASHES, CONTENTS)} == {True}
        (changing / "model.safetensors").unlink()
        (changing / "version.yaml").write_text("version: RL-STEP2-18-c")
        assert process.write(HASHES, CONTENTS) == [0] * 8


def test_weights_that_can_change_need_a_version(
    our_client: None, master: MooncakeMaster, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(
            ConfigError, match=r"--dynamic-load-weight allows new weights, but .*version.yaml has no version"
        ),
        storage(OneClass, master, argv(models[0]), dynamic_load_weight=True),
    ):
        pass


# Files of weights that change while an instance loads them.


@pytest.mark.parametrize(
    ("has_changed", "named"), [(True, "folder"), (True, "draft"), (False, "folder"), (True, "hub")]
)
def test_an_instance_shares_no_blocks_if_its_weights_changed_after_its_start(
    our_client: None, master: MooncakeMaster, changing: Path, models: list[Path], has_changed: bool, named: str
) -> None:
    """A model of a hub is an exception, because FastDeploy downloads it after its start."""
    (changing / "version.yaml").unlink()
    draft = {"speculative_config": json.dumps({"method": "mtp", "model": str(changing)})}
    arguments = {"folder": {"model": str(changing)}, "draft": draft, "hub": {"model": "baidu/a-model"}}[named]
    command = argv(models[0] if named == "draft" else changing)
    began = 0.0 if has_changed else time.monotonic()
    with (
        storage(OneClass, master, command, began, **arguments) as first,
        storage(OneClass, master, command, began, **arguments) as second,
    ):
        writer, reader = TransferProcess(first, BLOCK), TransferProcess(second, BLOCK)
        assert writer.write(HASHES, CONTENTS) == [0] * 8
        assert (writer.match(HASHES), reader.match(HASHES)) == (4, 0 if has_changed and named != "hub" else 4)


# The transfer from prefill to decode through storage, in which a miss is an error.


def name_partial(block: str, tokens: int) -> str:
    """Return the key of a prompt's last block, which has ``tokens`` tokens."""
    return f"{block}:partial:{tokens}"


@pytest.fixture
def transfer_by_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "hands_over_by_storage", True)


@pytest.mark.usefixtures("our_client", "transfer_by_storage")
def test_decode_reads_all_blocks_and_the_partial_one_after_prefill_has_written_them(
    master: MooncakeMaster, models: list[Path]
) -> None:
    with (
        storage(OneClass, master, argv(models[0], splitwise_role="prefill")) as prefill,
        storage(OneClass, master, argv(models[0], splitwise_role="decode")) as decode,
    ):
        writer, reader = TransferProcess(prefill, BLOCK), TransferProcess(decode, BLOCK)
        for prompt in range(20):
            first, last = block_hashes([[100 + prompt] * 64, [prompt] * 5])
            blocks = [first, name_partial(last, 5)]
            assert reader.match(blocks) == 0
            assert writer.write(blocks, CONTENTS[:2]) == [0] * 4
            assert reader.read(blocks) == [[repeat(content, BLOCK)] * 2 for content in CONTENTS[:2]]
            assert reader.match([first, name_partial(last, 4)]) == 1


@pytest.mark.parametrize(("value", "seconds"), [(None, 0), ("0", 0), ("1", 10)])
def test_calls_wait_longer_if_a_miss_is_an_error(
    value: str | None, seconds: float, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {} if value is None else {"FD_PD_TRANSFER_VIA_STORAGE": value}
    start_under(engine_of(models[0], environ), monkeypatch)
    assert FastDeployClient().patience(PoolConfig(MemorySettings())) == seconds


def test_images_are_refused_if_a_key_lacks_them(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(models[0], tmp_path / "with images")
    (model / "config.json").write_text('{"model_type": "ernie4_5_moe_vl", "vision_config": {"depth": 32}}')
    client, config = FastDeployClient(), PoolConfig(MemorySettings())
    start_under(engine_of(model, {"FD_PD_TRANSFER_VIA_STORAGE": "1"}), monkeypatch)
    with pytest.raises(ConfigError, match=r"without its images.*--deploy-modality text"):
        client.patience(config)
    start_under(engine_of(model, {"FD_PD_TRANSFER_VIA_STORAGE": "1"}, deploy_modality="text"), monkeypatch)
    assert client.patience(config) == 10
    start_under(engine_of(model), monkeypatch)
    assert client.patience(config) == 0


@pytest.mark.usefixtures("our_client", "transfer_by_storage")
def test_asynchronous_writes_are_refused_if_a_miss_is_an_error(
    master: MooncakeMaster, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_ASYNC_WRITE", "1")
    with (
        pytest.raises(ConfigError, match=r"with FD_PD_TRANSFER_VIA_STORAGE=1 .*; leave async_write out"),
        storage(OneClass, master, argv(models[0])),
    ):
        pass


# The way in which FastDeploy loads our client.

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
def test_the_entry_point_replaces_the_client_only_if_fd_plugins_names_it(named: str, client: str) -> None:
    environ = {**os.environ, "FD_PLUGINS": named}
    run = subprocess.run([sys.executable, "-c", LOADER], env=environ, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [client if named else "MooncakeDistributedStore"]


def test_the_integration_imports_no_tensor_library() -> None:
    code = "import sys, kvstore_backend.integrations.fastdeploy; print({'torch', 'paddle'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
