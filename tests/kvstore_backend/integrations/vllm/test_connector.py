"""The vLLM connector with the classes of an installed vLLM. Without one, these tests are skipped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import pickle
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

import vllm
from prometheus_client import CollectorRegistry, Counter, generate_latest
from vllm.config import KVTransferConfig, MultiModalConfig, SpeculativeConfig
from vllm.config import ModelConfig as ModelConfigOfVllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms.interface import DeviceCapability
from vllm.renderers.base import BaseRenderer
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstore_backend import ConfigError, Namespace
from kvstore_backend.backend import Status
from kvstore_backend.config import MooncakeSettings
from kvstore_backend.integrations.vllm.clock import HostClock
from kvstore_backend.integrations.vllm.connector import KVStoreConnector
from kvstore_backend.integrations.vllm.fields import FIELDS, _find_default, collect_fields
from kvstore_backend.integrations.vllm.memory import KVMemory
from kvstore_backend.integrations.vllm.messages import Report
from kvstore_backend.integrations.vllm.metrics import KVStoreStats
from kvstore_backend.integrations.vllm.namespace import collect_instance_facts, find_readable_family
from kvstore_backend.integrations.vllm.scheduler import SchedulerHalf
from kvstore_backend.integrations.vllm.support import find_memory
from kvstore_backend.namespace import fingerprint_model, mark_changed_weights
from kvstore_backend.pool import BlockPool
from kvstore_backend.stores.memory import MemoryStore
from tests.kvstore_backend.integrations.vllm.test_halves import Blocks, Request
from tests.kvstore_backend.test_namespace import checkpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")
connector_module: Any = importlib.import_module("kvstore_backend.integrations.vllm.connector")
namespace_module: Any = importlib.import_module("kvstore_backend.integrations.vllm.namespace")
support_module: Any = importlib.import_module("kvstore_backend.integrations.vllm.support")


def transfer(role: str = "kv_both", **extra: object) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_connector_module_path="kvstore_backend.integrations.vllm",
        kv_role=role,
        kv_connector_extra_config=extra,
    )


def make_configs(spec: Any, extra: dict[str, Any], **changes: object) -> tuple[Any, Any]:
    """Return the parts of vLLM's two configurations that the connector uses."""
    sizes = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    parallel: dict[str, object] = {**dict.fromkeys(sizes, 1), "distributed_executor_backend": None}
    cache = {"prefix_caching_hash_algo": "sha256", "calculate_kv_scales": False, "block_size": 16}
    cache["enable_prefix_caching"] = True
    model: dict[str, object] = {"is_diffusion": False, "is_prefix_caching_supported": True, "multimodal_config": None}
    model |= {"model_weights": "", "is_mm_prefix_lm": False, "enable_sleep_mode": False}
    vllm_config = SimpleNamespace(
        kv_events_config=None,
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        kv_transfer_config=transfer(**extra),
        parallel_config=SimpleNamespace(**{key: changes.get(key, value) for key, value in parallel.items()}),
        cache_config=SimpleNamespace(**{key: changes.get(key, value) for key, value in cache.items()}),
        model_config=SimpleNamespace(**{key: changes.get(key, value) for key, value in model.items()}),
        attention_config=SimpleNamespace(use_non_causal=changes.get("use_non_causal", False)),
        load_config=SimpleNamespace(load_format=changes.get("load_format", "auto")),
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=changes.get("enable_chunked_prefill", True),
            disable_chunked_mm_input=changes.get("disable_chunked_mm_input", False),
        ),
    )
    cache_config = SimpleNamespace(
        kv_cache_groups=[KVCacheGroupSpec([], spec)],
        num_blocks=8,
        hash_block_size=16,
        prefix_cache_retention_interval=changes.get("retention", 0),
    )
    return vllm_config, cache_config


@pytest.fixture
def spec() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)


def test_vllm_finds_the_connector_by_its_module() -> None:
    assert KVConnectorFactory.get_connector_class(transfer()) is KVStoreConnector


def test_vllms_multi_connector_reads_the_counts_of_the_connector() -> None:
    stats = MultiConnector.build_kv_connector_stats({"KVStoreConnector": {"digest": {"save ok": 3}}})
    assert stats["KVStoreConnector"].data == {"digest": {"save ok": 3}}


def test_the_connector_has_no_abstract_method() -> None:
    assert not KVStoreConnector.__abstractmethods__


def test_failed_loads_are_recomputed_by_default(spec: Any, tmp_path: Any) -> None:
    vllm_config, kv_cache_config = make_configs(spec, {"pool": f"file://{tmp_path}/pool"})
    connector = KVStoreConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    try:
        assert vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        assert not connector.requires_kv_delivery
    finally:
        connector.shutdown()


@pytest.mark.parametrize("kind", FIELDS)
def test_every_counted_field_of_vllms_classes_changes_the_collected_fields(kind: str) -> None:
    """Fields with their default values are not collected."""
    import vllm.config as configs

    found = getattr(configs, kind, None) or importlib.import_module("vllm.config.diffusion").DiffusionConfig
    plain = make_plain(found)
    assert collect_fields(plain) == {}
    for name in FIELDS[kind].counted.split():
        changed = make_plain(found)
        object.__setattr__(changed, name, "another")
        assert len(collect_fields(changed)) == 1, name


def make_plain(kind: Any) -> Any:
    """Return an object with all fields at their defaults, without vLLM's validation."""
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        default = _find_default(field)
        object.__setattr__(made, field.name, None if dataclasses.is_dataclass(default) else default)
    return made


@pytest.mark.parametrize(
    ("extra", "changes", "sentence"),
    [
        ({"pol": "file:///tmp/pool"}, {}, 'unknown key "pol" in kv_connector_extra_config; did you mean pool'),
        ({"pool": "file:///tmp/pool", "prefill_wait_s": "long"}, {}, "prefill_wait_s .* must be a number of seconds"),
        ({"pool": "file:///tmp/pool", "memory": "gpu"}, {}, "memory in .* is 'gpu'; it must be \"staged\""),
        ({"pool": "memory:"}, {}, "a memory pool belongs to one process"),
        ({}, {"decode_context_parallel_size": 2}, "context parallelism is on"),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "it must be sha256 or sha256_cbor"),
        ({}, {"calculate_kv_scales": True}, "different scales"),
        ({}, {"load_format": "tensorizer"}, "--load-format tensorizer vLLM reads weights that are not in the model's"),
        ({}, {"model_weights": "s3://models/a"}, "model_weights s3://models/a vLLM reads weights"),
        ({"memory": "direct"}, {"enable_sleep_mode": True}, "when vLLM sleeps, it discards the memory that Mooncake"),
        ({}, {"is_diffusion": True}, "depends on later tokens"),
        ({}, {"use_non_causal": True}, "depends on later tokens"),
        ({}, {"is_prefix_caching_supported": False}, "vLLM supports no prefix caching for the model"),
        ({}, {"enable_prefix_caching": False, "enable_chunked_prefill": False}, "does not continue prompts"),
    ],
)
def test_an_unsupported_configuration_is_refused_in_one_sentence(
    spec: Any, extra: dict[str, object], changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        KVStoreConnector(*_ordered(make_configs(spec, extra, **changes)))


@pytest.mark.parametrize(
    ("caches", "cache_gb", "only_text", "is_refused"),
    [(False, 0, False, True), (False, 4, False, False), (True, 0, False, False), (False, 0, True, False)],
)
def test_images_without_content_hashes_are_refused(
    spec: Any, tmp_path: Path, caches: bool, cache_gb: int, only_text: bool, is_refused: bool
) -> None:
    """vLLM's renderer names images by their content only if one of its two caches is on."""
    media = MultiModalConfig(mm_processor_cache_gb=cache_gb, language_model_only=only_text)
    changes = {"multimodal_config": media, "enable_prefix_caching": caches}
    configs = make_configs(spec, {"pool": f"file://{tmp_path}/pool"}, **changes)
    with pytest.raises(ConfigError, match="numbers images") if is_refused else contextlib.nullcontext():
        KVStoreConnector(*_ordered(configs)).shutdown()
    renderer: Any = SimpleNamespace(
        model_config=configs[0].model_config, config=configs[0], _validate_mm_uuids=lambda *_: None
    )
    items: Any = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    named = BaseRenderer._process_mm_uuids(renderer, {}, items, {}, "renderer0-mm-1")
    assert (named == {"image": ["renderer0-mm-1-image-0"]}) is (is_refused or only_text)


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({}, False),
        ({"is_mm_prefix_lm": True}, True),
        ({"is_mm_prefix_lm": True, "disable_chunked_mm_input": True}, False),
        ({"is_mm_prefix_lm": True, "enable_chunked_prefill": False}, False),
    ],
)
def test_splits_media_is_true_if_chunks_can_split_images(spec: Any, changes: dict[str, object], splits: bool) -> None:
    assert support_module.splits_media(make_configs(spec, {}, **changes)[0]) is splits


def test_an_instance_that_only_saves_cannot_wait_for_blocks(spec: Any) -> None:
    vllm_config, kv_cache_config = make_configs(spec, {})
    vllm_config.kv_transfer_config = transfer("kv_producer", pool="file:///tmp/pool", prefill_wait_s=1)
    with pytest.raises(ConfigError, match="kv_role kv_producer loads nothing"):
        KVStoreConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)


def test_an_unknown_kind_of_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="stores its KV as SimpleNamespace"):
        KVStoreConnector(*_ordered(make_configs(SimpleNamespace(), {})))


@pytest.mark.parametrize("change", [{"enable_prefix_caching": False}, {"enable_chunked_prefill": False}])
def test_prefix_caching_or_chunked_prefill_can_be_off(spec: Any, tmp_path: Any, change: Any) -> None:
    connector = KVStoreConnector(*_ordered(make_configs(spec, {"pool": f"file://{tmp_path}/pool"}, **change)))
    connector.shutdown()


def test_batch_invariance_without_prefix_caching_is_refused(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT is set"):
        KVStoreConnector(*_ordered(make_configs(spec, {}, enable_prefix_caching=False)))


@pytest.mark.parametrize(
    ("executor", "num_stages", "variable", "is_refused"),
    [
        ("ray", 2, "0", True),
        ("ray", 2, "1", False),
        ("ray", 2, None, False),
        ("ray", 1, "0", False),
        ("mp", 2, "0", False),
    ],
)
def test_the_older_ray_executor_is_refused_with_pipeline_stages(
    spec: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
    num_stages: int,
    variable: str | None,
    is_refused: bool,
) -> None:
    monkeypatch.delenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", variable)
    changes = {"distributed_executor_backend": executor, "pipeline_parallel_size": num_stages}
    configs = make_configs(spec, {"pool": f"file://{tmp_path}/pool"}, **changes)
    with pytest.raises(ConfigError, match="would never end") if is_refused else contextlib.nullcontext():
        KVStoreConnector(*_ordered(configs)).shutdown()


@pytest.mark.parametrize("is_separate", [True, False])
def test_sleep_mode_is_refused_if_the_engine_runs_in_the_callers_process(
    spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_separate: bool
) -> None:
    """``InprocClient`` discards the KV at once; the engine's own process first makes the steps that the saves need."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(is_separate)))
    configs = make_configs(spec, {"pool": f"file://{tmp_path}/pool"}, enable_sleep_mode=True)
    with contextlib.nullcontext() if is_separate else pytest.raises(ConfigError, match="vLLM then sleeps while"):
        KVStoreConnector(*_ordered(configs)).shutdown()


def test_only_specs_of_known_causal_attention_are_accepted(tmp_path: Any) -> None:
    """The test tries all specs of vLLM. A class that is derived from a known one can have different semantics."""
    from vllm.v1 import kv_cache_interface as interface

    accepted = []
    for kind in _list_subclasses(interface.KVCacheSpec):
        made: Any = object.__new__(kind)  # the type is checked before the fields
        sizes = {"block_size": 16, "sliding_window": 64, "attention_chunk_size": 64, "mamba_cache_mode": "align"}
        for name, value in {**sizes, "dtype": torch.float32, "kv_cache_specs": {}}.items():
            object.__setattr__(made, name, value)
        with contextlib.suppress(ConfigError):
            KVStoreConnector(*_ordered(make_configs(made, {"pool": f"file://{tmp_path}/pool"}))).shutdown()
            accepted.append(kind.__name__)
    assert sorted(accepted) == [
        "ChunkedLocalAttentionSpec",
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "MambaSpec",
        "SlidingWindowSpec",
    ]


@pytest.mark.parametrize("flag", ["non_causal", "non_causal_multi_token_decode"])
def test_models_that_attend_to_later_tokens_are_refused(flag: str) -> None:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, **{flag: True})
    with pytest.raises(ConfigError, match="depends on later tokens"):
        KVStoreConnector(*_ordered(make_configs(spec, {})))


def test_vllms_cache_can_be_reset_while_transfers_hold_blocks() -> None:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
    scheduler = SchedulerHalf(MemoryStore(1 << 20), 16)
    scheduler.bind_blocks(pool)
    blocks = pool.get_new_blocks(3)
    pins = [scheduler._pin_blocks(None, [], [block.block_id for block in blocks[:n]], is_load=False) for n in (3, 2)]
    assert not pool.reset_prefix_cache(), "requests hold blocks"
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert [block.ref_cnt for block in blocks] == [2, 2, 1]
    assert pool.get_num_free_blocks() == 4
    scheduler._pools = [object()]  # type: ignore[list-item]
    for pin in pins:
        scheduler._free_pin(scheduler._pins.pop(pin.number))
    assert pool.get_num_free_blocks() == 7
    assert not {block.block_id for block in pool.get_new_blocks(7)} & {0}
    scheduler.close()


def test_vllm_reads_adapters_with_the_method_that_we_watch() -> None:
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

    assert list(inspect.signature(WorkerLoRAManager._load_adapter).parameters) == ["self", "lora_request"]
    assert LRUCacheWorkerLoRAManager._load_adapter is WorkerLoRAManager._load_adapter
    assert "self._load_adapter(lora_request)" in inspect.getsource(LRUCacheWorkerLoRAManager.add_adapter)


def test_aggregate_adds_statistics() -> None:
    stats = KVStoreStats({"abc": {"load ok": 2, "load bytes": 10}}).aggregate(
        KVStoreStats({"abc": {"load ok": 1}, "def": {"lookup absent": 4}})
    )
    assert stats.reduce() == {"abc load bytes": 10, "abc load ok": 3, "def lookup absent": 4}


class ModelConfig(ModelConfigOfVllm):  # type: ignore[misc]
    """vLLM's class, without a model to read."""

    use_mla = False
    is_diffusion = False
    is_prefix_caching_supported = True
    is_mm_prefix_lm = False

    def get_total_num_kv_heads(self) -> int:
        return HEADS

    def try_get_generation_config(self) -> dict[str, Any]:
        return {}


HEADS, NUM_BLOCKS, BLOCK = 2, 16, 4


def make_config(folder: Path, pool: Path, **extra: object) -> Any:
    """Return vLLM's configuration, as from its command line."""
    import vllm.config as configs

    config = make_plain(configs.VllmConfig)
    for name, kind in [("cache", "Cache"), ("parallel", "Parallel"), ("scheduler", "Scheduler"), ("load", "Load")]:
        setattr(config, f"{name}_config", make_plain(getattr(configs, f"{kind}Config")))
    config.attention_config = make_plain(configs.AttentionConfig)
    config.model_config = make_plain(ModelConfig)
    model: dict[str, object] = {"model": str(folder), "dtype": torch.float32, "max_model_len": 64, "hf_config": None}
    model |= {"override_generation_config": {}, "_architecture": "LlamaForCausalLM"}
    for name, value in {**model, "hf_text_config": SimpleNamespace(rope_parameters=None), "revision": None}.items():
        object.__setattr__(config.model_config, name, value)
    for name, value in {
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256",
    }.items():
        object.__setattr__(config.cache_config, name, value)
    for size in ("pipeline", "decode_context", "prefill_context", "tensor"):
        object.__setattr__(config.parallel_config, f"{size}_parallel_size", 1)
    config.kv_transfer_config = transfer(extra.pop("role", "kv_both"), pool=f"file://{pool}", **extra)  # type: ignore[arg-type]
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa="avx")
    config.compilation_config = SimpleNamespace(static_forward_context={"l0": layer, "l1": layer})
    return config


class LookUps:
    """An instance with a scheduler that looks up blocks."""

    scheduler: Any

    def match(self, request: Request) -> tuple[int, bool]:
        """Look up a request; return the number of tokens in the pool, and whether a load follows."""
        answers: list[Any] = []

        def is_known() -> bool:
            answers.append(self.scheduler.get_num_new_matched_tokens(request, 0))
            return answers[-1][0] is not None

        wait_until(is_known, "a look-up")
        return answers[-1]  # type: ignore[no-any-return]


class VllmInstance(LookUps):
    """A scheduler's connector and a worker's. The methods call them in vLLM's order."""

    def __init__(self, config: Any) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=3, dtype=torch.float32)
        groups = [SimpleNamespace(kv_cache_spec=spec)]
        self.kv = {f"l{layer}": torch.zeros(NUM_BLOCKS, HEADS, BLOCK, 6) for layer in range(2)}
        cache = SimpleNamespace(kv_cache_groups=groups, num_blocks=NUM_BLOCKS)
        self.worker = KVStoreConnector(config, KVConnectorRole.WORKER, cache)
        self.worker.register_kv_caches(self.kv)
        self.scheduler = KVStoreConnector(config, KVConnectorRole.SCHEDULER, cache)
        rank = self.worker.get_handshake_metadata()
        assert rank is not None
        self.rank: Any = rank
        self.scheduler.set_xfer_handshake_metadata({0: rank})
        self.blocks = Blocks()
        self.scheduler.bind_gpu_block_pool(self.blocks)

    def step(self, scheduled: dict[str, int], tables: dict[str, list[int]]) -> Any:
        """Run one step; return the requests with loads that ended."""
        state = SimpleNamespace(get_block_ids=lambda request_id: (tables[request_id],))
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        plan = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        self.worker.bind_connector_metadata(plan)
        self.worker.start_load_kv(None)
        self.worker.wait_for_layer_load("l0")
        self.worker.save_kv_layer("l0", None, None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        self.invalid = self.worker.get_block_ids_with_load_errors()
        meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta))
        return results

    def compute(self, request: Request, table: list[int]) -> None:
        """Compute a whole prompt, and end the request."""
        for layer, tensor in enumerate(self.kv.values()):
            for block_hash, block in zip(request.block_hashes, table, strict=False):
                tensor[block] = block_hash[0] + layer
        self.scheduler.update_state_after_alloc(request, Table(table), 0)
        self.step({request.request_id: request.num_tokens}, {request.request_id: table})
        request.num_computed_tokens = request.num_tokens
        assert self.scheduler.request_finished(request, table) == (False, None)
        wait_until(lambda: self.step({}, {}) and not self.scheduler.has_pending_push_work(), "the saves")

    def load(self, request: Request, table: list[int]) -> Any:
        """Load the blocks of a request; return the results of the step in which the load ended."""
        matched, is_async = self.match(request)
        assert is_async
        self.scheduler.update_state_after_alloc(request, Table(table), matched)
        ended: list[Any] = []

        def has_ended() -> bool:
            results = self.step({}, {})
            ended.append((results, self.invalid))
            return bool(results.finished_recving or results.failed_recving)

        wait_until(has_ended, "the load")
        return ended[-1]

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


class TickingClock(HostClock):
    """A clock that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self, num_tokens: int) -> None:
        self.calls.append(num_tokens)


class Table:
    """vLLM's ``KVCacheBlocks``."""

    def __init__(self, table: list[int]) -> None:
        self._table = table

    def get_block_ids(self) -> tuple[list[int]]:
        return (self._table,)


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the first rank without a process group."""
    monkeypatch.setattr(namespace_module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(namespace_module, "mark_changed_weights", lambda version, folder: version)
    monkeypatch.setattr(connector_module, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


class TestTwoInstances:
    """vLLM's calls of two instances with a file pool: one computes a prompt, the other loads it."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return checkpoint(tmp_path / "model")

    @pytest.fixture
    def two(self, folder: Path, tmp_path: Path) -> Iterator[tuple[VllmInstance, VllmInstance]]:
        with (
            contextlib.closing(VllmInstance(make_config(folder, tmp_path / "pool"))) as first,
            contextlib.closing(VllmInstance(make_config(folder, tmp_path / "pool"))) as second,
        ):
            yield first, second

    @pytest.mark.parametrize("is_enabled", [True, False])
    def test_vllms_kv_events_report_blocks_stored_in_the_pool(
        self, folder: Path, tmp_path: Path, is_enabled: bool
    ) -> None:
        config = make_config(folder, tmp_path / "pool")
        config.kv_events_config = SimpleNamespace(enable_kv_cache_events=is_enabled)
        request = Request("a", list(range(22)))
        with contextlib.closing(VllmInstance(config)) as instance:

            def compute() -> list[Any]:
                instance.compute(request, list(range(6)))
                return list(instance.scheduler.take_events())

            # On a busy machine, the pool can be too slow, so that a save is dropped. Then the blocks are saved again.
            events = wait_until(compute, "the event of a save") if is_enabled else compute()
            assert list(instance.scheduler.take_events()) == []
        if not is_enabled:
            assert events == []
            return
        [event] = events
        assert event.block_hashes == [int.from_bytes(block_hash[-8:], "big") for block_hash in request.block_hashes]
        assert (event.parent_block_hash, event.token_ids, event.block_size) == (None, [], BLOCK)
        assert event.medium == "POOL"

    def test_an_instance_loads_blocks_that_another_computed(self, two: tuple[VllmInstance, VllmInstance]) -> None:
        first, second = two
        first.compute(Request("a", list(range(22))), [7, 3, 5, 1, 2, 9])
        request = Request("b", list(range(22)))
        assert second.match(request) == (20, True)
        results, invalid = second.load(request, [4, 8, 11, 10, 6, 0])
        assert (results.finished_recving, results.failed_recving, invalid) == ({"b"}, set(), set())
        for layer, tensor in enumerate(second.kv.values()):
            for block_hash, block in zip(request.block_hashes, [4, 8, 11, 10, 6], strict=False):
                assert bool((tensor[block] == block_hash[0] + layer).all())
        assert second.match(Request("c", list(range(100, 122)))) == (0, False)

    @pytest.mark.parametrize(
        ("method", "is_disabled", "expected"),
        [
            ("eagle", False, 16),
            ("mtp", False, 16),
            ("eagle", True, 20),
            ("ngram", False, 20),
            ("draft_model", False, 20),
        ],
    )
    def test_the_block_that_vllm_drops_from_its_own_hits_is_not_loaded(
        self, folder: Path, tmp_path: Path, method: str, is_disabled: bool, expected: int
    ) -> None:
        config = make_config(folder, tmp_path / "pool")
        config.speculative_config = make_plain(SpeculativeConfig)
        for name, value in {"method": method, "disable_eagle_block_drop": is_disabled}.items():
            object.__setattr__(config.speculative_config, name, value)
        with (
            contextlib.closing(VllmInstance(config)) as first,
            contextlib.closing(VllmInstance(config)) as second,
        ):
            first.compute(Request("a", list(range(22))), [7, 3, 5, 1, 2, 9])
            assert second.match(Request("b", list(range(22)))) == (expected, True)

    def test_missing_blocks_are_reported_to_vllm(self, two: tuple[VllmInstance, VllmInstance]) -> None:
        first, second = two
        first.compute(Request("a", list(range(22))), [7, 3, 5, 1, 2, 9])
        request = Request("b", list(range(22)))
        second.match(request)
        second.worker._mover._pool.remove_blocks(request.block_hashes[2:], force=True)
        results, invalid = second.load(request, [4, 8, 11, 10, 6, 0])
        assert (results.finished_recving, invalid) == ({"b"}, {11, 10, 6})

    def test_both_connectors_count_under_the_same_namespace(self, two: tuple[VllmInstance, VllmInstance]) -> None:
        first, second = two
        first.compute(Request("a", list(range(22))), [7, 3, 5, 1, 2, 9])
        second.load(Request("b", list(range(22))), [4, 8, 11, 10, 6, 0])
        saved, loaded, found = (
            half.get_kv_connector_stats() for half in (first.worker, second.worker, second.scheduler)
        )
        assert saved is not None
        assert loaded is not None
        assert found is not None
        assert saved.data.keys() == loaded.data.keys() == found.data.keys() == {first.rank.namespace.digest}
        counts = [each.data[first.rank.namespace.digest] for each in (saved, loaded, found)]
        assert (counts[0]["save ok"], counts[1]["load ok"], counts[2]["lookup ok"]) == (5, 5, 5)
        assert second.worker.get_kv_connector_stats() is None
        assert not saved.is_empty()
        saved.reset()
        assert saved.is_empty()

    def test_a_prefill_waits_for_its_saves_and_steps_are_measured(
        self, two: tuple[VllmInstance, VllmInstance], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, _ = two
        awaited: list[object] = []
        monkeypatch.setattr(first.worker._mover, "wait_for_saves", lambda numbers: awaited.append(list(numbers)))
        request = Request("a", list(range(22)), max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        first.scheduler.update_state_after_alloc(request, Table([0, 1, 2, 3, 4, 5]), 0)
        assert not first.scheduler.has_pending_push_work()
        clock = TickingClock()
        monkeypatch.setattr(first.worker._mover, "_clock", clock)
        may_save, save = threading.Event(), BlockPool.save

        def save_after_event(pool: BlockPool, *arguments: Any, **options: Any) -> list[Status]:
            may_save.wait()
            return save(pool, *arguments, **options)

        monkeypatch.setattr(BlockPool, "save", save_after_event)
        first.step({"a": 22}, {"a": [0, 1, 2, 3, 4, 5]})
        assert awaited == [[1]]
        assert clock.calls == ["begin", 22]
        is_pending = first.scheduler.has_pending_push_work()
        may_save.set()
        assert is_pending

    def test_after_a_reset_no_block_is_shared(self, two: tuple[VllmInstance, VllmInstance]) -> None:
        first, second = two
        first.compute(Request("a", list(range(22))), [7, 3, 5, 1, 2, 9])
        assert second.scheduler.reset_cache() is False, "vLLM's own cache has not been reset"
        second.blocks.reset_prefix_cache()
        assert second.scheduler.reset_cache() is True
        assert second.match(Request("b", list(range(22)))) == (0, False)
        assert second.worker.reset_cache() is True

    def test_instances_with_the_same_settings_have_the_same_documented_namespace(
        self, two: tuple[VllmInstance, VllmInstance], folder: Path
    ) -> None:
        first, second = two
        namespace = first.rank.namespace
        assert namespace == second.rank.namespace
        assert dataclasses.replace(namespace, model="") == Namespace(
            model="",
            kv_dtype="auto float32",
            block_size=BLOCK,
            num_layers=2,
            num_kv_heads=HEADS,
            head_size=3,
            layout=f"vllm {vllm.__version__} CPU_ATTN avx torch.float32[h2,n4,c6]",
        )
        assert len(namespace.model) == 32
        assert first.rank.family is not None
        facts = collect_instance_facts(make_config(folder, folder / "pool"))
        assert facts["checkpoint"] == fingerprint_model(folder)
        assert facts["setting dtype"] == "torch.float32"
        assert facts["software"] == f"vLLM {vllm.__version__}"

    @pytest.mark.parametrize(
        "change",
        [
            {"model_config.quantization": "fp8"},
            {"model_config.model_impl": "transformers"},
            {"cache_config.prefix_caching_hash_algo": "sha256_cbor"},
            {"cache_config.cache_dtype": "fp8"},
            {"kv_transfer_config.kv_connector_extra_config": {"weights_version": "2"}},
        ],
        ids=str,
    )
    def test_instances_with_other_settings_have_another_namespace(
        self, two: tuple[VllmInstance, VllmInstance], folder: Path, tmp_path: Path, change: dict[str, Any]
    ) -> None:
        config = make_config(folder, tmp_path / "pool")
        for path, value in change.items():
            kind, name = path.split(".")
            if isinstance(value, dict):
                value = {**config.kv_transfer_config.kv_connector_extra_config, **value}
            object.__setattr__(getattr(config, kind), name, value)
        with contextlib.closing(VllmInstance(config)) as other:
            assert other.rank.namespace.digest != two[0].rank.namespace.digest

    def test_blocks_of_weights_that_changed_while_vllm_loaded_them_are_not_shared(
        self, two: tuple[VllmInstance, VllmInstance], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(namespace_module, "mark_changed_weights", mark_changed_weights)
        with contextlib.closing(VllmInstance(make_config(folder, tmp_path / "pool"))) as other:
            assert other.rank.namespace.digest != two[0].rank.namespace.digest

    def test_the_times_of_weight_files_are_read_after_their_samples(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This order detects a change of the weights during the sampling."""
        steps: list[str] = []
        sample = namespace_module.fingerprint_checkpoint

        def note_sample(*arguments: Any) -> str:
            steps.append("samples")
            return str(sample(*arguments))

        def note_times(version: str, name: str) -> str:
            steps.append(name)
            return version

        monkeypatch.setattr(namespace_module, "fingerprint_checkpoint", note_sample)
        monkeypatch.setattr(namespace_module, "mark_changed_weights", note_times)
        config = make_config(folder, tmp_path / "pool")
        draft = checkpoint(tmp_path / "draft")
        config.speculative_config = make_plain(SpeculativeConfig)
        object.__setattr__(config.speculative_config, "method", "eagle")
        draft_config = SimpleNamespace(model=str(draft), revision=None)
        object.__setattr__(config.speculative_config, "draft_model_config", draft_config)
        with contextlib.closing(VllmInstance(config)):
            assert steps[:3] == ["samples", str(folder), str(draft)]

    def test_streamed_weights_have_only_the_version_that_the_operator_sets(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each process of vLLM writes the other files of an s3:// address to a new folder, with new times."""
        monkeypatch.setattr(namespace_module, "mark_changed_weights", mark_changed_weights)
        (folder / "model.safetensors").unlink()
        digests = []
        for version in ("1", "1", "2"):
            config = make_config(folder, tmp_path / "pool", weights_version=version)
            object.__setattr__(config.model_config, "model_weights", "s3://models/a")
            with contextlib.closing(VllmInstance(config)) as instance:
                digests.append(instance.rank.namespace.digest)
        assert digests[0] == digests[1] != digests[2]

    @pytest.mark.parametrize(("cache_dtype", "is_shared"), [("auto", True), ("fp8", False)])
    def test_quantized_kv_of_another_kind_of_gpu_has_another_namespace(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dtype: str, is_shared: bool
    ) -> None:
        """MI300 and MI355 have the same settings, but their bytes of vLLM's fp8 have different meanings."""
        digests = set()
        for minor in (4, 5):
            capability = DeviceCapability(9, minor)
            monkeypatch.setattr(namespace_module.current_platform, "get_device_capability", lambda c=capability: c)
            config = make_config(folder, tmp_path / "pool")
            object.__setattr__(config.cache_config, "cache_dtype", cache_dtype)
            with contextlib.closing(VllmInstance(config)) as instance:
                digests.add(instance.rank.namespace.digest)
        assert (len(digests) == 1) is is_shared

    @pytest.mark.parametrize(
        ("architecture", "is_shared"), [("LlamaForCausalLM", True), ("TransformersForCausalLM", False)]
    )
    def test_the_namespace_has_the_version_of_transformers_for_models_that_transformers_computes(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, is_shared: bool
    ) -> None:
        digests = set()
        for number in ("5.1.0", "5.2.0"):
            monkeypatch.setattr("importlib.metadata.version", lambda _, number=number: number)
            config = make_config(folder, tmp_path / "pool")
            object.__setattr__(config.model_config, "_architecture", architecture)
            with contextlib.closing(VllmInstance(config)) as instance:
                digests.add(instance.rank.namespace.digest)
        assert (len(digests) == 1) is is_shared

    @pytest.mark.parametrize("change", ["mla", "drafts", "heads"])
    def test_other_shardings_are_not_readable_without_known_separate_heads(
        self, folder: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make_config(folder, tmp_path / "pool")
        monkeypatch.setattr(ModelConfig, "use_mla", change == "mla")
        namespace = make_namespace(num_kv_heads=HEADS + (change == "heads"))
        if change == "drafts":
            config.speculative_config = SimpleNamespace()
        memory = KVMemory({"l0": torch.zeros(NUM_BLOCKS, HEADS, BLOCK, 6)}, NUM_BLOCKS)
        assert find_readable_family(config, namespace, memory) is None

    def test_adapters_are_watched_only_with_a_lora_configuration(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.config import LoRAConfig
        from vllm.lora.worker_manager import WorkerLoRAManager

        read = WorkerLoRAManager._load_adapter
        config = make_config(folder, tmp_path / "pool")
        with contextlib.closing(VllmInstance(config)):
            assert WorkerLoRAManager._load_adapter is read
        monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", read)
        config.lora_config = make_plain(LoRAConfig)
        with contextlib.closing(VllmInstance(config)):
            assert WorkerLoRAManager._load_adapter is not read

    def test_the_direct_route_to_a_gpu_has_a_namespace_of_its_own(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = make_config(folder, tmp_path / "pool", memory="direct")
        asked: dict[str, Any] = {}
        monkeypatch.setattr(connector_module, "choose_route", lambda named, memory, config: named)
        monkeypatch.setattr(connector_module, "DeviceClock", lambda make_mark: HostClock())
        open_pool = connector_module.open_pool
        monkeypatch.setattr(
            connector_module, "open_pool", lambda *given, **more: asked.update(more) or open_pool(*given, **more)
        )
        make_memory = support_module.KVMemory

        def make_on_gpu(*given: Any) -> Any:
            made: Any = make_memory(*given)
            made.is_on_device = True
            made.record_event = lambda: None
            return made

        monkeypatch.setattr(support_module, "KVMemory", make_on_gpu)
        with contextlib.closing(VllmInstance(config)) as instance:
            assert instance.rank.namespace.layout.endswith(" unverified")
            assert instance.rank.family is None
            assert asked["is_summed"] is False


def make_namespace(**changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "model": "m",
        "kv_dtype": "float32",
        "block_size": BLOCK,
        "num_layers": 1,
        "num_kv_heads": HEADS,
        "head_size": 3,
        "layout": "torch.float32[h2,n4,c6]",
    }
    return Namespace(**{**fields, **changes})


def test_a_connection_for_look_ups_needs_little_memory() -> None:
    config = connector_module.read_config("mooncake://127.0.0.1:1?global_segment_size=1GiB&local_buffer_size=1GiB")
    assert config is not None
    store = connector_module._lookup_only(config).store
    assert isinstance(store, MooncakeSettings)
    assert (store.global_segment_size, store.local_buffer_size) == (0, 16 << 20)


def test_a_configuration_without_a_pool_is_refused(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_module, "read_config", lambda source: None)
    with pytest.raises(ConfigError, match="leave --kv-transfer-config out"):
        KVStoreConnector(*_ordered(make_configs(spec, {})))


@pytest.mark.parametrize(("seconds", "expected"), [(0, 0.0), (2, 2.0), (0.5, 0.5)])
def test_prefill_wait_s_is_read(seconds: float, expected: float) -> None:
    assert connector_module._read_prefill_wait(transfer(prefill_wait_s=seconds)) == expected
    assert connector_module._read_prefill_wait(transfer()) == 0.0
    assert connector_module._read_prefill_wait(transfer("kv_producer")) == 0.0


@pytest.mark.parametrize("seconds", [True, "2", -0.1, float("inf"), float("nan")])
def test_a_prefill_wait_s_that_is_not_a_number_of_seconds_is_refused(seconds: object) -> None:
    with pytest.raises(ConfigError, match="must be a number of seconds, 0 or more"):
        connector_module._read_prefill_wait(transfer(prefill_wait_s=seconds))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda config, group: setattr(config, "speculative_config", object()),
            "speculative decoding is on.*add --disable-hybrid-kv-cache-manager",
        ),
        (lambda config, group: setattr(config.cache_config, "use_replayssm", True), "--use-replayssm is on"),
        (lambda config, group: setattr(group, "kv_cache_spec", make_state("none")), "add --enable-prefix-caching"),
        (lambda config, group: setattr(group, "kv_cache_spec", make_window(torch.float16)), "in several dtypes"),
        (lambda config, group: setattr(group, "kv_cache_spec", make_window(extra_retained_tokens=1)), "several tokens"),
        (
            lambda config, group: setattr(group, "kv_cache_spec", dataclasses.replace(make_state(), block_size=32)),
            "recurrent layers have more tokens",
        ),
        (lambda config, group: setattr(group, "is_eagle_group", True), "from transfers"),
        (lambda config, group: setattr(group, "enable_kv_transfer", False), "from transfers"),
        (lambda config, group: setattr(group, "host_resident", True), "from transfers"),
    ],
)
def test_unsupported_models_with_several_groups_are_refused(spec: Any, change: Any, sentence: str) -> None:
    vllm_config, kv_cache_config = make_configs(spec, {})
    kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec([], make_window()))
    change(vllm_config, kv_cache_config.kv_cache_groups[1])
    with pytest.raises(ConfigError, match=sentence):
        KVStoreConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)


@pytest.mark.parametrize(
    ("kinds", "retention", "role", "is_warned"),
    [
        (("state", "full"), 0, "kv_both", True),
        (("state",), 0, "kv_producer", True),
        (("state",), 0, "kv_consumer", False),
        (("state", "full"), 32, "kv_both", False),
        (("state", "full"), None, "kv_both", False),
        (("window", "full"), 0, "kv_both", False),
        (("full",), 0, "kv_both", False),
    ],
)
def test_a_warning_says_that_the_pool_gets_few_recurrent_states(
    spec: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kinds: Sequence[str],
    retention: int | None,
    role: str,
    is_warned: bool,
) -> None:
    specs = {"full": dataclasses.replace(spec, block_size=32), "state": make_state(), "window": make_window()}
    vllm_config, kv_cache_config = make_configs(spec, {}, retention=retention)
    vllm_config.kv_transfer_config = transfer(role, pool=f"file://{tmp_path}/pool")
    kv_cache_config.kv_cache_groups = [KVCacheGroupSpec([], specs[kind]) for kind in kinds]
    logged: list[str] = []
    monkeypatch.setattr(support_module.logger, "warning", lambda text, *given: logged.append(text % given))
    KVStoreConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config).shutdown()
    KVStoreConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config).shutdown()
    assert len(logged) == is_warned
    if is_warned:
        least = 32 if "full" in kinds else 16
        assert f"--prefix-cache-retention-interval {least} " in logged[0]


def make_window(dtype: torch.dtype = torch.float32, **changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=dtype, sliding_window=64, **changes)


def make_state(mode: str = "align") -> MambaSpec:
    return MambaSpec(block_size=16, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode=mode)


def test_a_group_of_layers_with_different_windows_is_refused(spec: Any) -> None:
    specs = {"a": make_window(), "b": dataclasses.replace(make_window(), sliding_window=32)}
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    with pytest.raises(ConfigError, match="with different windows or block sizes"):
        KVStoreConnector(*_ordered(make_configs(mixed, {})))


def test_cross_attention_is_refused() -> None:
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    with pytest.raises(ConfigError, match="stores its KV as CrossAttentionSpec"):
        KVStoreConnector(*_ordered(make_configs(cross, {})))


def test_a_layer_without_a_group_is_refused(spec: Any) -> None:
    _, cache = make_configs(spec, {})
    cache.kv_cache_groups = [KVCacheGroupSpec(["a"], spec), KVCacheGroupSpec(["b"], make_window())]
    tensors = {name: torch.zeros(8, 2, 16, 16) for name in "abc"}
    shared = {**tensors, "c": tensors["a"]}
    assert find_memory(cache, False, shared).num_layers == 2
    with pytest.raises(ConfigError, match="do not match this worker's KV memory"):
        find_memory(cache, False, tensors)


def test_a_pipeline_stage_without_a_layer_of_each_group_is_refused(spec: Any) -> None:
    _, cache = make_configs(spec, {})
    cache.kv_cache_groups = [KVCacheGroupSpec(["a"], spec), KVCacheGroupSpec([], make_window())]
    with pytest.raises(ConfigError, match="a group has no layer in this pipeline stage"):
        find_memory(cache, False, {"a": torch.zeros(8, 2, 16, 16)})


def test_the_namespaces_of_all_pipeline_stages_are_used(spec: Any, tmp_path: Path) -> None:
    connector = KVStoreConnector(*_ordered(make_configs(spec, {"pool": f"file://{tmp_path}/pool"})))
    try:
        calls: list[Any] = []
        connector._planner.learn_namespaces = lambda *given: calls.append(given[0])  # type: ignore[method-assign]
        ranks = {
            (pp, tp): connector_module._Rank(make_namespace(tp_rank=tp, layout=f"stage {pp}"), None)
            for pp in (1, 0)
            for tp in (1, 0)
        }
        connector.set_xfer_handshake_metadata_pp_aware(ranks)
        assert calls == [[ranks[at].namespace for at in ((0, 0), (0, 1), (1, 0), (1, 1))]]
    finally:
        connector.shutdown()


def test_reports_of_workers_are_added() -> None:
    one = connector_module._Report(Report(short={"a"}))
    assert one.aggregate(connector_module._Report(Report(short={"b"}))) is one
    assert one.report.short == {"a", "b"}


def test_ranks_are_sorted_by_number(spec: Any, tmp_path: Path) -> None:
    connector = KVStoreConnector(*_ordered(make_configs(spec, {"pool": f"file://{tmp_path}/pool"})))
    try:
        family = SimpleNamespace(num_heads=2)
        calls: list[Any] = []
        connector._planner.learn_namespaces = lambda *given: calls.append(given)  # type: ignore[method-assign]
        ranks = [connector_module._Rank(make_namespace(tp_rank=n), family if n == 0 else None) for n in (0, 1)]
        connector.set_xfer_handshake_metadata({1: ranks[1], 0: ranks[0]})
        assert calls == [([ranks[0].namespace, ranks[1].namespace], family)]
    finally:
        connector.shutdown()


def test_a_worker_connector_without_kv_memory_reports_nothing(spec: Any) -> None:
    vllm_config, kv_cache_config = make_configs(spec, {"pool": "file:///tmp/pool"})
    worker = KVStoreConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
    assert worker.get_kv_connector_stats() is None
    assert worker.get_handshake_metadata() is None
    assert not worker.has_pending_push_work()
    worker.shutdown()


def test_statistics_begin_with_the_counts_that_vllm_passes() -> None:
    assert KVStoreConnector.build_kv_connector_stats({"a": {"load ok": 1}}).data == {"a": {"load ok": 1}}
    assert KVStoreConnector.build_kv_connector_stats().data == {}


def test_every_kind_of_count_has_a_metric() -> None:
    registry = CollectorRegistry()
    metrics = KVStoreConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=transfer()),
        {Counter: functools.partial(Counter, registry=registry), **_others()},
        ["engine"],
        {0: ["0"]},
    )
    metrics.observe({"n": {"decide load": 2, "lookup absent": 3, "save bytes": 5, "load seconds": 0.1234}})
    text = generate_latest(registry).decode()
    for line in (
        'load_or_compute_total{decision="load",engine="0",namespace="n"} 2.0',
        'blocks_total{engine="0",namespace="n",operation="lookup",outcome="absent"} 3.0',
        'bytes_total{engine="0",namespace="n",operation="save"} 5.0',
        'seconds_total{engine="0",namespace="n",operation="load"} 0.1234',
    ):
        assert f"vllm:kvstore_{line}" in text, text
    assert KVStoreStats({"n" * 9: {"load seconds": 0.12345}}).reduce() == {"nnnnnnnn load seconds": 0.123}


def _ordered(configs: tuple[Any, Any]) -> tuple[Any, KVConnectorRole, Any]:
    return configs[0], KVConnectorRole.SCHEDULER, configs[1]


def _list_subclasses(kind: Any) -> list[Any]:
    return [kind, *(each for derived in kind.__subclasses__() for each in _list_subclasses(derived))]


def _others() -> dict[Any, Any]:
    from prometheus_client import Gauge, Histogram

    return {Gauge: Gauge, Histogram: Histogram}
