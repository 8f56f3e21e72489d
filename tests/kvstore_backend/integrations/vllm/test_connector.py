"""The vLLM connector as the installed vLLM sees it; skipped where none is, as in CI, for which vLLM is too large."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")

from prometheus_client import CollectorRegistry, Counter, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvstore_backend import ConfigError
from kvstore_backend.integrations.vllm.connector import (
    KVStoreConnector,
    KVStoreMetrics,
    KVStoreStats,
)
from kvstore_backend.integrations.vllm.fields import FIELDS, _find_default, collect_fields
from kvstore_backend.integrations.vllm.scheduler import SchedulerHalf
from kvstore_backend.stores.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore")


def transfer(role: str = "kv_both", **extra: object) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_connector_module_path="kvstore_backend.integrations.vllm",
        kv_role=role,
        kv_connector_extra_config=extra,
    )


def config(spec: Any, extra: dict[str, Any], **changes: object) -> tuple[Any, Any]:
    """The arguments that vLLM gives a connector, as far as this one looks at them."""
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    cache = {"prefix_caching_hash_algo": "sha256", "calculate_kv_scales": False, "block_size": 16}
    cache["enable_prefix_caching"] = True
    model = {"is_diffusion": False, "is_prefix_caching_supported": True}
    vllm_config = SimpleNamespace(
        kv_transfer_config=transfer(**extra),
        parallel_config=SimpleNamespace(**{key: changes.get(key, value) for key, value in parallel.items()}),
        cache_config=SimpleNamespace(**{key: changes.get(key, value) for key, value in cache.items()}),
        model_config=SimpleNamespace(**{key: changes.get(key, value) for key, value in model.items()}),
        attention_config=SimpleNamespace(use_non_causal=changes.get("use_non_causal", False)),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=changes.get("enable_chunked_prefill", True)),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    return vllm_config, SimpleNamespace(kv_cache_groups=groups, num_blocks=8)


@pytest.fixture
def spec() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)


def test_vllm_finds_the_connector_by_its_module() -> None:
    assert KVConnectorFactory.get_connector_class(transfer()) is KVStoreConnector


def test_nothing_abstract_is_left() -> None:
    assert not KVStoreConnector.__abstractmethods__


def test_failed_loads_are_recomputed_without_being_asked_for(spec: Any, tmp_path: Any) -> None:
    vllm_config, kv_cache_config = config(spec, {"pool": f"file://{tmp_path}/pool"})
    connector = KVStoreConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    try:
        assert vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        assert not connector.requires_kv_delivery
    finally:
        connector.shutdown()


@pytest.mark.parametrize("kind", FIELDS)
def test_every_counted_field_of_vllms_own_classes_sets_instances_apart(kind: str) -> None:
    """That defaults are found in these classes, too, and that nothing at its default counts."""
    import vllm.config as configs

    found = getattr(configs, kind, None) or importlib.import_module("vllm.config.diffusion").DiffusionConfig
    plain = make_plain(found)
    assert collect_fields(plain) == {}
    for name in FIELDS[kind].counted.split():
        changed = make_plain(found)
        object.__setattr__(changed, name, "another")
        assert len(collect_fields(changed)) == 1, name


def make_plain(kind: Any) -> Any:
    """One with all of its fields at their defaults, which vLLM does not ask whether they fit."""
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
        ({"pool": "memory:"}, {}, "a memory pool is one process's own"),
        ({}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size is more than 1"),
        ({}, {"decode_context_parallel_size": 2}, "context parallelism is on"),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "it must be sha256 or sha256_cbor"),
        ({}, {"calculate_kv_scales": True}, "scales of its own"),
        ({}, {"is_diffusion": True}, "depends on later tokens"),
        ({}, {"use_non_causal": True}, "depends on later tokens"),
        ({}, {"is_prefix_caching_supported": False}, "vLLM supports no prefix caching for it"),
        ({}, {"enable_prefix_caching": False, "enable_chunked_prefill": False}, "does not continue prompts"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    spec: Any, extra: dict[str, object], changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        KVStoreConnector(*_ordered(config(spec, extra, **changes)))


def test_an_instance_that_only_saves_cannot_wait_for_blocks(spec: Any) -> None:
    vllm_config, kv_cache_config = config(spec, {})
    vllm_config.kv_transfer_config = transfer("kv_producer", pool="file:///tmp/pool", prefill_wait_s=1)
    with pytest.raises(ConfigError, match="kv_role is kv_producer, which loads nothing"):
        KVStoreConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)


def test_models_without_full_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match="keeps its KV as SimpleNamespace"):
        KVStoreConnector(*_ordered(config(SimpleNamespace(), {})))


@pytest.mark.parametrize("change", [{"enable_prefix_caching": False}, {"enable_chunked_prefill": False}])
def test_a_user_may_switch_prefix_caching_or_chunked_prefill_off(spec: Any, tmp_path: Any, change: Any) -> None:
    connector = KVStoreConnector(*_ordered(config(spec, {"pool": f"file://{tmp_path}/pool"}, **change)))
    connector.shutdown()


def test_prefix_caching_that_vllm_switched_off_for_batch_invariance_is_refused(
    spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT is set"):
        KVStoreConnector(*_ordered(config(spec, {}, enable_prefix_caching=False)))


def test_only_specs_that_are_known_to_be_causal_are_taken(tmp_path: Any) -> None:
    """Of all of vLLM's: one that is derived from a known one may be anything."""
    from vllm.v1 import kv_cache_interface as interface

    taken = []
    for kind in _list_subclasses(interface.KVCacheSpec):
        made: Any = object.__new__(kind)  # with defaults alone, which the type decides before
        with contextlib.suppress(ConfigError):
            KVStoreConnector(*_ordered(config(made, {"pool": f"file://{tmp_path}/pool"}))).shutdown()
            taken.append(kind.__name__)
    assert sorted(taken) == ["FullAttentionSpec", "MLAAttentionSpec"]


@pytest.mark.parametrize("flag", ["non_causal", "non_causal_multi_token_decode"])
def test_models_that_attend_to_later_tokens_are_refused(flag: str) -> None:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, **{flag: True})
    with pytest.raises(ConfigError, match="depends on later tokens"):
        KVStoreConnector(*_ordered(config(spec, {})))


def test_vllms_cache_is_reset_while_transfers_hold_blocks_of_it() -> None:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
    scheduler = SchedulerHalf(MemoryStore(1 << 20), 16)
    scheduler.bind_blocks(pool)
    blocks = pool.get_new_blocks(3)
    pins = [scheduler._pin_blocks(None, [], [block.block_id for block in blocks[:n]], is_load=False) for n in (3, 2)]
    assert not pool.reset_prefix_cache(), "requests hold blocks, too"
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


def test_what_vllm_reads_adapters_with_is_where_it_is_watched() -> None:
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

    assert list(inspect.signature(WorkerLoRAManager._load_adapter).parameters) == ["self", "lora_request"]
    assert LRUCacheWorkerLoRAManager._load_adapter is WorkerLoRAManager._load_adapter
    assert "self._load_adapter(lora_request)" in inspect.getsource(LRUCacheWorkerLoRAManager.add_adapter)


def test_statistics_add_up_and_appear_in_vllms_metrics() -> None:
    stats = KVStoreStats({"abc": {"load ok": 2, "load bytes": 10}}).aggregate(
        KVStoreStats({"abc": {"load ok": 1}, "def": {"lookup absent": 4}})
    )
    assert stats.reduce() == {"abc load bytes": 10, "abc load ok": 3, "def lookup absent": 4}
    registry = CollectorRegistry()

    def counter(**arguments: Any) -> Counter:
        return Counter(**arguments, registry=registry)

    metrics = KVStoreMetrics(
        SimpleNamespace(kv_transfer_config=transfer()), {Counter: counter, **_others()}, ["engine"], {0: ["0"]}
    )
    metrics.observe(stats.to_dict(), 0)
    text = generate_latest(registry).decode()
    assert 'vllm:kvstore_blocks_total{engine="0",namespace="abc",operation="load",outcome="ok"} 3.0' in text, text
    assert 'vllm:kvstore_bytes_total{engine="0",namespace="abc",operation="load"} 10.0' in text


def _ordered(configs: tuple[Any, Any]) -> tuple[Any, KVConnectorRole, Any]:
    return configs[0], KVConnectorRole.SCHEDULER, configs[1]


def _list_subclasses(kind: Any) -> list[Any]:
    return [kind, *(each for derived in kind.__subclasses__() for each in _list_subclasses(derived))]


def _others() -> dict[Any, Any]:
    from prometheus_client import Gauge, Histogram

    return {Gauge: Gauge, Histogram: Histogram}
