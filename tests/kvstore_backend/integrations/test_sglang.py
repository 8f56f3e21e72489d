"""SGLang's storage contract, with its own abstract class if SGLang is installed, and with a double.

Host memory is a double of SGLang's ``MHATokenToKVPoolHost``, with its layouts and the addresses of its pages.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore_backend.backend import ConfigError
from kvstore_backend.config import PRECISION_VARIABLES
from kvstore_backend.integrations.sglang_settings import CAN_CHANGE_KV, CANNOT_CHANGE_KV
from kvstore_backend.manifest import Manifest
from kvstore_backend.namespace import mark_changed_weights
from kvstore_backend.pool import BlockPool
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.why_miss import compare_setups
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from tests.faults.injector import Fault, FaultInjector
from tests.kvstore_backend.integrations.sglang_module import (
    NAME,
    import_hybrid,
    is_installed,
    set_settings,
    sglang_module,
)
from tests.support.strict_registration import StrictStore
from tests.support.waiting import wait_until

PAGE, LAYERS, HEADS, DIM, TOKENS = 4, 3, 2, 8, 32
Attach = Callable[..., Any]


class HostMemory:
    """Host memory of multi-head attention: [k/v, layer, token, head, dim] or [k/v, token, layer, head, dim]."""

    def __init__(self, layout: str = "page_first", seed: int = 0) -> None:
        self.layout, self.page_size, self.layer_num, self.head_num, self.head_dim = layout, PAGE, LAYERS, HEADS, DIM
        self.dtype = torch.bfloat16
        tokens_and_layers = (LAYERS, TOKENS) if layout == "layer_first" else (TOKENS, LAYERS)
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer = torch.randn((2, *tokens_and_layers, HEADS, DIM), generator=generator).to(self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [self.list_pieces(index) for index in indices.tolist()[::PAGE]]
        pieces = [piece for page in pages for piece in page]
        return [piece.data_ptr() for piece in pieces], [piece.nbytes for piece in pieces]

    def list_pieces(self, index: int) -> list[torch.Tensor]:
        k, v = self.kv_buffer
        tokens = slice(index, index + PAGE)
        if self.layout == "layer_first":
            return [each[layer, tokens] for layer in range(LAYERS) for each in (k, v)]
        return [k[tokens], v[tokens]]

    def content(self, index: int) -> torch.Tensor:
        return torch.stack([piece.flatten() for piece in self.list_pieces(index)])


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.fixture(
    scope="module",
    params=[
        "double",
        pytest.param("real", marks=pytest.mark.skipif(not is_installed(), reason="SGLang is not installed here")),
    ],
)
def integration(request: pytest.FixtureRequest) -> Iterator[Any]:
    with sglang_module(real=request.param == "real") as module:
        yield module


@pytest.fixture
def sglang(integration: Any) -> Any:
    import sys

    return sys.modules[NAME]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.bin").write_bytes(b"weights")
    return folder


@pytest.fixture
def attach(integration: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attach]:
    """Return a function that makes a backend as SGLang's factory does. All backends of a test share a folder."""
    monkeypatch.setattr(integration, "mark_changed_weights", lambda version, folder: version)
    opened: list[Any] = []

    def make(host: HostMemory, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
        full: dict[str, Any] = {"interface_v1": 1, "pool": f"file://{tmp_path}/pool?size=64MiB", **(extra or {})}
        config = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        storage_config = SimpleNamespace(
            **{**config, "is_mla_model": False, "model_name": str(model), "extra_config": full, **changes}
        )
        backend = integration.KvstoreHiCache(storage_config, {})
        backend.register_mem_pool_host(host)
        backend.on_host_pools_registered()
        opened.append(backend)
        wait_until(lambda: backend.is_ready, "the pool")
        return backend

    set_settings({})
    yield make
    for backend in opened:
        backend.close()


def list_digests(*backends: Any) -> list[str]:
    """Return the digests of the backends' namespaces."""
    return [backend._pools[False].namespace.digest for backend in backends]


def test_sglangs_factory_makes_our_backend_from_its_dynamic_configuration(
    integration: Any, sglang: Any, model: Path, request: pytest.FixtureRequest
) -> None:
    if "real" not in request.node.callspec.params.values():
        pytest.skip("the factory is SGLang's own")
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    extra = {
        "backend_name": "kvstore",
        "module_path": "kvstore_backend.integrations.sglang",
        "class_name": "KvstoreHiCache",
        "interface_v1": 1,
        "pool": "memory:?size=1MiB",
    }
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    config = sglang.HiCacheStorageConfig(
        **ranks,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=str(model),
        extra_config=extra,
    )
    made = StorageBackendFactory.create_backend("dynamic", config, HostMemory())
    assert isinstance(made, integration.KvstoreHiCache)


def test_our_backend_is_a_subclass_of_sglangs_storage(integration: Any, sglang: Any) -> None:
    assert issubclass(integration.KvstoreHiCache, sglang.HiCacheStorage)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_an_instance_reads_pages_that_another_with_the_same_layout_wrote(attach: Attach, layout: str) -> None:
    ours, theirs = HostMemory(layout), HostMemory(layout, seed=1)
    assert attach(ours).batch_set_v1(["a", "b"], indices(2, 5)) == [True, True]
    other = attach(theirs)
    assert other.batch_exists(["a", "b", "c"]) == 2
    assert other.batch_get_v1(["a", "b"], indices(0, 7)) == [True, True]
    assert torch.equal(theirs.content(0), ours.content(2 * PAGE))
    assert torch.equal(theirs.content(7 * PAGE), ours.content(5 * PAGE))


@pytest.mark.parametrize("call", ["batch_get_v1", "batch_set_v1"])
def test_a_late_call_returns_when_it_no_longer_uses_the_pages(
    integration: Any, attach: Attach, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FaultInjector(MemoryStore(1 << 20))
    guarded = GuardedBackend(lambda: store, Deadlines(5.0, 0.05, 1e9))
    wait_until(lambda: guarded.is_ready, "the store")
    monkeypatch.setattr(integration, "open_pool", lambda _, namespace, *__, **___: BlockPool(guarded, namespace))
    backend = attach(HostMemory())
    store.faults = [Fault.HANGS] if call == "batch_get_v1" else [Fault.NOTHING, Fault.HANGS]  # a look-up comes first
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(getattr(backend, call), ["a"], indices(0))
        wait_until(lambda: guarded.late_calls == 1, "the deadline")
        assert not wait([future], timeout=0.3).done
        store.go_on()
        assert future.result(10) == [False]


def test_no_page_is_read_from_the_first_missing_page_on(attach: Attach) -> None:
    backend = attach(HostMemory())
    backend.batch_set_v1(["a", "c"], indices(0, 2))
    assert backend.batch_exists(["a", "b", "c"]) == 1
    assert backend.batch_get_v1(["a", "b", "c"], indices(3, 4, 5)) == [True, False, False]


@pytest.mark.parametrize(
    ("extra", "changes", "layout"),
    [
        ({}, {}, "layer_first"),
        ({}, {"tp_size": 2}, "page_first"),
        ({}, {"tp_size": 2, "tp_rank": 1}, "page_first"),
        ({}, {"pp_size": 2}, "page_first"),
        ({"interface_v1": 0}, {}, "page_first"),
        ({"weights_version": "2"}, {}, "page_first"),
    ],
    ids=["layout", "tp size", "tp rank", "pp size", "flat", "weights"],
)
def test_instances_with_different_pages_share_none(
    attach: Attach, extra: dict[str, Any], changes: dict[str, Any], layout: str
) -> None:
    attach(HostMemory()).batch_set_v1(["a"], indices(0))
    assert attach(HostMemory(layout), extra, **changes).batch_exists(["a"]) == 0


def test_ranks_of_an_mla_model_share_pages(attach: Attach) -> None:
    attach(HostMemory(), is_mla_model=True, tp_size=2).batch_set_v1(["a"], indices(0))
    assert attach(HostMemory(), is_mla_model=True, tp_size=2, tp_rank=1).batch_exists(["a"]) == 1


def test_a_rank_of_an_mla_model_does_not_read_another_ranks_heads_of_the_draft_model(attach: Attach) -> None:
    ranks = [attach(HostMemory(), is_mla_model=True, tp_size=2, tp_rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.register_mem_host_pool_v2(HostMemory(), "draft")
    wait_until(lambda: all(rank.is_ready for rank in ranks), "the pools of the draft model")
    transfer = SimpleNamespace(name="draft", host_indices=indices(0), keys=["a"])
    assert [rank.batch_set_v2([transfer]) for rank in ranks[:1]] == [{"draft": [True]}]
    assert [rank.batch_get_v2([transfer]) for rank in ranks] == [{"draft": [True]}, {"draft": [False]}]


def test_models_with_other_weights_share_no_pages(attach: Attach, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    (other / "model.bin").write_bytes(b"finetun")
    attach(HostMemory()).batch_set_v1(["a"], indices(0))
    assert attach(HostMemory(), {"model_path": str(other)}).batch_exists(["a"]) == 0


def test_pages_of_weights_that_changed_while_a_server_loaded_them_are_not_shared(
    integration: Any, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = attach(HostMemory())
    monkeypatch.setattr(integration, "mark_changed_weights", mark_changed_weights)
    assert len({*list_digests(before, attach(HostMemory()), attach(HostMemory()))}) == 3


def test_pages_of_weights_that_the_server_downloads_are_shared(
    integration: Any, attach: Attach, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The downloaded files are newer than the process, if SGLang has only a name at a hub."""
    monkeypatch.setattr(integration, "mark_changed_weights", mark_changed_weights)
    set_settings({"model_path": "owner/name"})
    one, other = (attach(HostMemory(), {"model_path": str(model)}) for _ in range(2))
    assert len({*list_digests(one, other)}) == 1


def test_the_version_of_the_weights_depends_on_the_files_of_the_draft_model(
    integration: Any, attach: Attach, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = shutil.copytree(model, tmp_path / "draft")
    monkeypatch.setattr(integration, "mark_changed_weights", lambda version, folder: f"{version} {folder}")
    set_settings({"model_path": str(model), "speculative_draft_model_path": str(draft)})
    backend = attach(HostMemory())
    assert backend._pools[False].namespace.weights_version.split() == [str(model), str(draft)]


def test_two_models_with_the_same_served_name_share_no_pages(attach: Attach, model: Path, tmp_path: Path) -> None:
    """SGLang's name of the model is --served-model-name, which can be the path of an older model."""
    (other := tmp_path / "other").mkdir()
    (other / "config.json").write_text("{}")
    (other / "model.bin").write_bytes(b"finetun")
    set_settings({"model_path": str(model)})
    attach(HostMemory()).batch_set_v1(["a"], indices(0))
    set_settings({"model_path": str(other)})
    assert attach(HostMemory(), model_name=str(model)).batch_exists(["a"]) == 0
    set_settings({"model_path": str(model)})
    assert attach(HostMemory(), model_name="a name").batch_exists(["a"]) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model_path": "{}/Q4/a.gguf"}, {"model_path": "{}/Q8/a.gguf"}),
        ({"model_path": "owner/one"}, {"model_path": "owner/other"}),
        ({"model_path": "owner/one", "revision": "1"}, {"model_path": "owner/one", "revision": "2"}),
    ],
    ids=["two files", "two names", "two revisions"],
)
def test_other_weights_with_the_same_configured_folder_share_no_pages(
    attach: Attach, model: Path, one: dict[str, str], other: dict[str, str]
) -> None:
    for name in ("Q4", "Q8"):
        (model / name).mkdir()
        (model / name / "a.gguf").write_bytes(name.encode())
    digests = set()
    for settings in (one, other):
        set_settings({key: text.format(model) for key, text in settings.items()})
        digests.update(list_digests(attach(HostMemory(), {"model_path": str(model)})))
    assert len(digests) == 2


def test_pages_can_be_flat_tensors(attach: Attach) -> None:
    backend = attach(HostMemory(), {"interface_v1": 0})
    pages = [torch.arange(100.0), torch.arange(100.0) + 1]
    assert backend.batch_set(["a", "b"], pages) is True
    got = backend.batch_get(["a", "b", "c"], [torch.zeros(100) for _ in range(3)])
    assert [None if page is None else page.tolist() for page in got] == [*(page.tolist() for page in pages), None]
    assert (backend.exists("a"), backend.exists("c"), backend.get("c", torch.zeros(100))) == (True, False, None)


def test_version_2_transfers_state_other_than_kv(attach: Attach, sglang: Any) -> None:
    kv, indexer = HostMemory(), HostMemory(seed=2)
    backend = attach(kv)
    backend.register_mem_host_pool_v2(indexer, sglang.PoolName.INDEXER)
    want = indexer.content(0).clone()
    transfer = sglang.PoolTransfer(name=sglang.PoolName.INDEXER, host_indices=indices(0, 1), keys=["a", "b"])
    assert backend.batch_set_v2([transfer]) == {"indexer": [True, True]}
    back = sglang.PoolTransfer(name=sglang.PoolName.INDEXER, host_indices=indices(4, 5, 6), keys=["a", "b", "c"])
    assert backend.batch_get_v2([back]) == {"indexer": [True, True, False]}
    assert torch.equal(indexer.content(4 * PAGE), want)
    assert backend.batch_exists(["a"]) == 0  # no KV is stored


def test_a_hit_ends_where_every_pool_has_the_pages_that_it_needs(attach: Attach, sglang: Any) -> None:
    backend = attach(HostMemory())
    for name in (sglang.PoolName.INDEXER, sglang.PoolName.MAMBA):
        backend.register_mem_host_pool_v2(HostMemory(), name)
    keys = ["a", "b", "c", "d"]
    backend.batch_set_v1(keys[:3], indices(0, 1, 2))
    stored = {sglang.PoolName.INDEXER: keys[:3], sglang.PoolName.MAMBA: ["b"]}
    for name, pages in stored.items():
        backend.batch_set_v2([sglang.PoolTransfer(name=name, host_indices=indices(*range(len(pages))), keys=pages)])
    queries = [
        sglang.PoolTransfer(name=sglang.PoolName.INDEXER),
        sglang.PoolTransfer(name=sglang.PoolName.MAMBA, keys=["d"], hit_policy=sglang.PoolHitPolicy.TRAILING_PAGES),
    ]
    found = backend.batch_exists_v2(keys, queries)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [2])
    assert found.extra_pool_hit_pages == {"kv": 3, "indexer": 3, "mamba": 2}


@pytest.mark.parametrize(("window", "ends"), [(["x", "y"], [3]), (["x"], [2, 3]), (None, [2, 3])])
def test_a_hit_can_end_only_where_all_pages_of_the_window_are_present(
    attach: Attach, sglang: Any, window: list[str] | None, ends: list[int]
) -> None:
    backend = attach(HostMemory())
    backend.register_mem_host_pool_v2(HostMemory(), sglang.PoolName.SWA if hasattr(sglang.PoolName, "SWA") else "swa")
    keys = ["a", "b", "c", "d"]
    backend.batch_set_v1(keys, indices(0, 1, 2, 3))
    stored = sglang.PoolTransfer(name="swa", host_indices=indices(0, 1), keys=["b", "c"])
    assert backend.batch_set_v2([stored]) == {"swa": [True, True]}
    query = sglang.PoolTransfer(name="swa", keys=window, hit_policy=sglang.PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(keys, [query])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, ends)


# The namespace of the pages.


def make_fp8_memory() -> HostMemory:
    """Return host memory with KV in fp8, which SGLang stores as bytes for each kind of fp8."""
    host = HostMemory()
    host.kv_buffer, host.dtype = host.kv_buffer.to(torch.uint8), torch.uint8
    return host


def test_two_kinds_of_fp8_share_no_pages(attach: Attach) -> None:
    set_settings({"kv_cache_dtype": "fp8_e4m3"})
    attach(make_fp8_memory()).batch_set_v1(["a"], indices(0))
    set_settings({"kv_cache_dtype": "fp8_e5m2"})
    other = attach(make_fp8_memory())
    assert other.batch_exists(["a"]) == 0
    set_settings({"kv_cache_dtype": "fp8_e4m3"})
    assert attach(make_fp8_memory()).batch_exists(["a"]) == 1


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "auto"}])
def test_fp8_of_an_unknown_kind_is_refused(attach: Attach, settings: dict[str, Any]) -> None:
    set_settings(settings)
    with pytest.raises(
        ConfigError, match=r'torch.uint8 in host memory, which may mean fp8_e4m3 or fp8_e5m2; .*"kv_cache_dtype"'
    ):
        attach(make_fp8_memory())


def test_the_extra_configuration_can_set_the_kind_of_fp8(attach: Attach) -> None:
    one = attach(make_fp8_memory(), {"kv_cache_dtype": "fp8_e4m3"})
    other = attach(make_fp8_memory(), {"kv_cache_dtype": "fp8_e5m2"})
    assert len({*list_digests(one, other)}) == 2


def test_each_setting_that_can_change_kv_changes_the_namespace(
    integration: Any, attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "another value").write_text("for settings that name files")
    monkeypatch.setattr(integration, "open_pool", lambda _, namespace, *__, **___: BlockPool(MemoryStore(1), namespace))
    found = dict(zip(list_digests(attach(HostMemory())), [""], strict=True))
    for name in sorted(CAN_CHANGE_KV):
        set_settings({name: "another value"})
        (digest,) = list_digests(attach(HostMemory()))
        assert digest not in found, f"{name} does not change the namespace, or has the same one as {found.get(digest)}"
        found[digest] = name


def test_adapters_count_by_the_files_in_their_folders(
    attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    set_settings({"lora_paths": [{"lora_id": "drawn", "lora_name": "a", "lora_path": "adapter", "pinned": False}]})
    backends = []
    for weights in ("one", "one", "two"):
        (tmp_path / "adapter" / "adapter_model.bin").write_text(weights)
        backends.append(attach(HostMemory()))
    one, same, other = list_digests(*backends)
    assert one == same != other


@pytest.mark.parametrize("name", PRECISION_VARIABLES)
def test_variables_of_libraries_that_can_change_numbers_change_the_namespace(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = attach(HostMemory())
    monkeypatch.setenv(name, "1")
    assert len({*list_digests(plain, attach(HostMemory()))}) == 2


@pytest.mark.parametrize(
    ("settings", "config", "is_shared"),
    [
        ({}, "{}", True),
        ({"quantization": "fp8"}, "{}", False),
        ({}, '{"quantization_config": {"quant_method": "fp8"}}', False),
    ],
)
def test_pages_of_quantized_weights_are_shared_only_by_the_same_kind_of_gpu(
    attach: Attach, model: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, config: str, is_shared: bool
) -> None:
    """H100 computes with activations in fp8 if the weights are in fp8, but A100 does not."""
    (model / "config.json").write_text(config)
    set_settings(settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = []
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        found += list_digests(attach(HostMemory()))
    assert (found[0] == found[1]) is is_shared


def test_the_kind_of_gpu_counts_for_quantized_weights_in_mistrals_format(
    attach: Attach, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "config.json").unlink()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = []
    for text in ("{}", '{"quantization": {"qformat_weight": "fp8_e4m3"}}'):
        (model / "params.json").write_text(text)
        found.append("setting device architecture" in attach(HostMemory())._facts)
    assert found == [False, True]


def test_gpus_of_amd_share_pages_only_with_the_same_kind(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes of fp8 are other numbers on MI300 than on other GPUs."""
    set_settings({"kv_cache_dtype": "fp8_e4m3"})
    backends = [attach(HostMemory())]
    monkeypatch.setattr(torch.version, "hip", "7.2")
    for name in ("gfx942", "gfx942", "gfx950"):
        properties = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda p=properties: p)
        backends.append(attach(HostMemory()))
    nvidia, one, same, other = list_digests(*backends)
    assert one == same
    assert len({nvidia, one, other}) == 3


def test_an_unknown_setting_of_a_later_version_changes_the_namespace(attach: Attach) -> None:
    plain = attach(HostMemory())
    set_settings({"a_setting_that_nobody_knows": 1})
    assert len({*list_digests(plain, attach(HostMemory()))}) == 2


def test_settings_that_cannot_change_kv_do_not_change_the_namespace(attach: Attach) -> None:
    plain = attach(HostMemory())
    set_settings(dict.fromkeys(CANNOT_CHANGE_KV, "another value"))
    assert len({*list_digests(plain, attach(HostMemory()))}) == 1


def test_variables_of_sglang_change_the_namespace_unless_they_are_neutral(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = attach(HostMemory())
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    monkeypatch.setenv("SGLANG_RUN_ID", "new at every start")
    same = attach(HostMemory())
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float16")
    assert list_digests(plain) == list_digests(same) != list_digests(attach(HostMemory()))


def test_a_file_of_scales_counts_by_its_content(attach: Attach, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    found = []
    for folder, content in (("one", "1.0"), ("two", "1.0"), ("two", "2.0")):
        scales = tmp_path / folder / "scales.json"
        scales.parent.mkdir(exist_ok=True)
        scales.write_text(content)
        set_settings({"quantization_param_path": str(scales)})
        found += list_digests(attach(HostMemory()))
    assert found[0] == found[1] != found[2]


def test_versions_of_sglang_share_no_pages(integration: Any, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    before = attach(HostMemory())
    monkeypatch.setattr(integration, "sglang_version", "0.5.24")
    assert len({*list_digests(before, attach(HostMemory()))}) == 2


def test_a_server_without_readable_settings_needs_a_version_of_its_weights(attach: Attach) -> None:
    set_settings(None)
    with pytest.raises(ConfigError, match=r'does not expose its server.s settings .*set "weights_version"'):
        attach(HostMemory())
    assert attach(HostMemory(), {"weights_version": "1"}).is_ready


def test_why_miss_names_the_setting_in_which_two_instances_differ(attach: Attach) -> None:
    manifests: list[Manifest] = []
    for settings in ({"quantization": "fp8", "dtype": "auto"}, {"quantization": "awq", "dtype": "auto"}):
        set_settings(settings)
        manifests.append(attach(HostMemory())._pools[False].manifest)
    first, second = manifests
    verdict = compare_setups(first, second)
    assert verdict.reason == "other_settings"
    assert "quantization ('fp8' of the first, 'awq' of the second)" in verdict.sentence
    assert "dtype" not in verdict.sentence


def test_state_of_another_type_shares_no_pages(attach: Attach, sglang: Any) -> None:
    one, other = attach(HostMemory()), attach(HostMemory())
    half = HostMemory()
    half.temporal_dtype = torch.float16  # type: ignore[attr-defined]
    one.register_mem_host_pool_v2(HostMemory(), sglang.PoolName.MAMBA)
    other.register_mem_host_pool_v2(half, sglang.PoolName.MAMBA)
    transfer = sglang.PoolTransfer(name=sglang.PoolName.MAMBA, host_indices=indices(0), keys=["a"])
    assert one.batch_set_v2([transfer]) == {"mamba": [True]}
    assert other.batch_get_v2([transfer]) == {"mamba": [False]}
    assert one.batch_get_v2([transfer]) == {"mamba": [True]}


def test_a_namespace_has_the_layout_of_pages_and_the_ranks(attach: Attach) -> None:
    ranks = {"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 3, "attn_cp_rank": 1, "attn_cp_size": 4}
    heads, latent = HostMemory(), HostMemory()
    del latent.head_num
    latent.kv_cache_dim = 576  # type: ignore[attr-defined]
    own = attach(heads, **ranks)._pools[False].namespace
    shared = attach(
        latent, {"interface_v1": 0, "weights_version": 7}, is_mla_model=True, dcp_rank=1, dcp_size=2, **ranks
    )
    of_mla = shared._pools[True].namespace
    assert own.layout == "sglang 0.5.23 page_first pages pp=1/3 cp=1/4 dcp=0/1"
    assert of_mla.layout == "sglang 0.5.23 page_first flat pp=1/3 cp=1/4 dcp=1/2"
    assert (own.tp_size, own.tp_rank, of_mla.tp_size, of_mla.tp_rank) == (2, 1, 1, 0)
    assert (own.num_kv_heads, own.head_size, of_mla.num_kv_heads, of_mla.head_size) == (HEADS, DIM, 1, 576)
    assert (own.block_size, own.num_layers, own.kv_dtype) == (PAGE, LAYERS, "torch.bfloat16 auto")
    assert (own.weights_version, of_mla.weights_version) == ("", "7")


def test_the_format_of_pages_is_part_of_the_namespace(attach: Attach) -> None:
    tagged = HostMemory()
    tagged.storage_format_tag = "interleaved"  # type: ignore[attr-defined]
    assert len({*list_digests(attach(HostMemory()), attach(tagged))}) == 2


def test_unified_memory_is_refused(attach: Attach, model: Path) -> None:
    unified = HostMemory()
    unified.storage_format_tag, unified.stores_page_envelope = "unified-token-major", True  # type: ignore[attr-defined]
    del unified.head_dim
    for extra in ({}, {"model_path": str(model)}):
        with pytest.raises(ConfigError, match=r"--enable-unified-memory.*start the server without this option"):
            attach(unified, extra, model_name=f"{model}-unified-token-major")


def test_host_memory_without_a_shape_is_refused(attach: Attach) -> None:
    host = HostMemory()
    del host.head_dim
    with pytest.raises(ConfigError, match="class HostMemory, which this backend does not support"):
        attach(host)


# A failure of one pool does not affect the others.


class Uneven(HostMemory):
    """Memory with a number of pieces that is not a multiple of the pages."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses, sizes = super().get_page_buffer_meta(indices)
        return addresses[:-1], sizes[:-1]


class WithoutAddresses(HostMemory):
    """Memory without known addresses."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise ValueError("Unsupported layout: layer_page_first")


@pytest.mark.parametrize("broken", [Uneven, WithoutAddresses])
def test_only_the_pool_without_addresses_of_its_pages_misses(
    attach: Attach, sglang: Any, broken: type[HostMemory]
) -> None:
    backend = attach(HostMemory())
    backend.register_mem_host_pool_v2(broken(), sglang.PoolName.MAMBA)
    transfers = [
        sglang.PoolTransfer(name=name, host_indices=indices(0, 1), keys=["a", "b"])
        for name in (sglang.PoolName.MAMBA, sglang.PoolName.KV)
    ]
    assert backend.batch_set_v2(transfers) == {"mamba": [False, False], "kv": [True, True]}
    assert backend.batch_get_v2(transfers) == {"mamba": [False, False], "kv": [True, True]}


def test_pages_without_addresses_are_a_miss_in_version_1(attach: Attach) -> None:
    backend = attach(Uneven())
    assert backend.batch_set_v1(["a", "b"], indices(0, 1)) == [*backend.batch_get_v1(["a"], indices(0)), False]


def test_a_pool_that_is_not_registered_has_no_pages(attach: Attach, sglang: Any) -> None:
    backend = attach(HostMemory())
    backend.batch_set_v1(["a"], indices(0))
    unknown = sglang.PoolTransfer(name=sglang.PoolName.INDEXER, host_indices=indices(0), keys=["a"])
    assert backend.batch_exists_v2(["a"], [unknown]).kv_hit_pages == 0
    assert backend.batch_get_v2([unknown]) == backend.batch_set_v2([unknown]) == {"indexer": [False]}


def test_each_buffer_of_a_state_that_is_not_empty_is_registered_once(
    integration: Any, attach: Attach, sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StrictStore(MemoryStore(1 << 20))
    monkeypatch.setattr(integration, "open_pool", lambda _, namespace, *__, **___: BlockPool(store, namespace))
    backend = attach(HostMemory())
    before = dict(store.registered.regions)
    conv, temporal = torch.ones(4), torch.ones(8)
    state = HostMemory()
    state.get_hybrid_pool_buffer = lambda: [None, conv, torch.empty(0), temporal]  # type: ignore[attr-defined]
    for _ in range(2):  # SGLang can register a pool twice
        backend.register_mem_host_pool_v2(state, sglang.PoolName.MAMBA)
    added = {address: size for address, size in store.registered.regions.items() if address not in before}
    assert added == {conv.data_ptr(): 16, temporal.data_ptr(): 32}
    assert store.registered.complaints == []


def test_each_buffer_of_mla_on_ascend_cards_is_registered(
    integration: Any, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StrictStore(MemoryStore(1 << 20))
    monkeypatch.setattr(integration, "open_pool", lambda _, namespace, *__, **___: BlockPool(store, namespace))
    host = HostMemory("page_first_kv_split")
    others = torch.ones(4), torch.ones(8), torch.ones(2)
    host.v_buffer, host.index_k_buffer, host.index_k_scale_buffer = others  # type: ignore[attr-defined]
    attach(host, is_mla_model=True)
    assert {each.data_ptr(): each.nbytes for each in (host.kv_buffer, *others)} == store.registered.regions


def test_flat_tensors_are_registered_memory(integration: Any, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StrictStore(MemoryStore(1 << 20))
    guarded = GuardedBackend(lambda: CheckedBackend(store))
    wait_until(lambda: guarded.is_ready, "the store")
    monkeypatch.setattr(integration, "open_pool", lambda _, namespace, *__, **___: BlockPool(guarded, namespace))
    host = HostMemory()
    backend = attach(host, {"interface_v1": 0})
    page = host.list_pieces(0)[0].flatten()  # SGLang passes views of host memory, too
    assert backend.batch_set(["a", "b"], [page, torch.ones(page.numel(), dtype=page.dtype)])
    before = dict(store.registered.regions)
    target = torch.zeros_like(page)
    got = backend.batch_get(["a", "b"], [target, host.list_pieces(4)[0].flatten()])
    assert torch.equal(got[0], page)
    assert torch.equal(got[1], torch.ones_like(page))
    assert (store.registered.complaints, store.registered.regions) == ([], before)


def test_clear_removes_only_the_pages_of_the_own_namespace(attach: Attach) -> None:
    backend, other = attach(HostMemory()), attach(HostMemory(), tp_size=2)
    for each in (backend, other):
        each.batch_set_v1(["a"], indices(0))
    backend.clear()
    assert (backend.batch_exists(["a"]), other.batch_exists(["a"])) == (0, 1)


def test_a_closed_backend_finds_and_saves_no_page(attach: Attach) -> None:
    backend = attach(HostMemory())
    backend.batch_set_v1(["a"], indices(0))
    backend.close()
    assert backend.batch_get_v1(["a"], indices(0)) == backend.batch_set_v1(["b"], indices(0)) == [False]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"model_path": "Qwen/Qwen2.5"}, 'not a folder on this machine; set "model_path"'),
        ({"pool": "ftp://x"}, "scheme"),
        ({"weight_version": "2"}, 'unknown key "weight_version".*did you mean weights_version'),
    ],
)
def test_an_unusable_configuration_is_refused(attach: Attach, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attach(HostMemory(), extra)


def test_options_of_sglang_are_accepted(attach: Attach) -> None:
    names = ("allocator", "file_storage_path", "prefetch_threshold", "prefetch_timeout_base", "protocol", "tp_lcm_size")
    assert attach(HostMemory(), {"backend_name": "kvstore", **dict.fromkeys(names, 1)}).is_ready


def test_memory_without_kv_is_refused(attach: Attach) -> None:
    host = HostMemory()
    host.kv_buffer = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="contains no KV"):
        attach(host)


def test_a_configuration_without_a_pool_is_refused(attach: Attach, tmp_path: Path) -> None:
    file = tmp_path / "off.json"
    file.write_text(json.dumps({"kvPoolConfig": {"backend": "", "configPath": ""}}))
    with pytest.raises(ConfigError, match="turns the pool off"):
        attach(HostMemory(), {"pool": str(file)})


# SGLang's own host pools of a hybrid model, its controller and its radix tree, with our store.

PROMPT_PAGES, WINDOW, STATE_EVERY = 8, 2, 2  # in pages


class Hybrid:
    """A rank of SGLang on a CPU: host pools for layers with full attention, for windows, and for recurrent layers."""

    def __init__(self, attach: Attach, classes: dict[str, Any]) -> None:
        self._classes = classes
        name = classes["PoolName"]
        with classes["host_memory_budget_scope"](1 << 30):
            pools = self._make_attention(3), self._make_attention(5), self._make_states()
        self.pools = dict(zip((name.KV, name.SWA, name.MAMBA), pools, strict=True))
        self.backend = attach(self.pools[name.KV])
        for side in (name.SWA, name.MAMBA):
            self.backend.register_mem_host_pool_v2(self.pools[side], side)
        entries = [
            classes["PoolEntry"](each, pool, None, lambda layer: layer, is_primary_index_anchor=each == name.KV)
            for each, pool in self.pools.items()
        ]
        self._controller = controller = object.__new__(classes["HybridCacheController"])
        controller.page_size, controller.storage_backend = PAGE, self.backend
        controller.storage_config = SimpleNamespace(is_storage_writer=True)
        controller.mem_pool_host = classes["HostPoolGroup"](entries)
        controller.page_get_func, controller.page_set_func = (
            controller._page_get_zero_copy,
            controller._page_set_zero_copy,
        )
        controller.prefetch_sync_queue, controller.extra_host_mem_release_queues = Queue(), {}

    def fill(self, seed: int) -> None:
        """Fill all host memory with random numbers."""
        generator = torch.Generator().manual_seed(seed)
        for pool in self.pools.values():
            for buffer in pool.get_hybrid_pool_buffer():
                buffer.copy_(torch.randn(buffer.shape, generator=generator))

    def save(self, tokens: Sequence[int], first_page: int) -> None:
        """Save the pages from ``first_page`` on, and the state after the last token."""
        hashes, count = self._hash(tokens), len(tokens) // PAGE - first_page
        places = indices(*range(first_page, first_page + count))
        transfers = [
            self._transfer("SWA", hashes[first_page:], places),
            self._transfer("MAMBA", hashes[-1:], torch.tensor([first_page])),
        ]
        operation = self._classes["StorageOperation"](
            places, tokens, hash_value=hashes[first_page:], prefix_keys=hashes[:first_page], pool_transfers=transfers
        )
        self._controller._page_backup(operation)
        assert operation.completed_tokens == count * PAGE

    def query(self, tokens: Sequence[int]) -> tuple[Any, int]:
        """Return the operation for a prompt, and the number of pages at which it can resume."""
        transfers = [self._transfer("SWA", ["?"] * WINDOW), self._transfer("MAMBA", ["?"])]
        handle = self._classes["CacheRequestHandle"]("request", 0)
        operation = self._classes["PrefetchOperation"](handle, tokens, pool_transfers=transfers)
        operation.hash_value, found = self._controller._storage_hit_query(operation)
        assert found == len(operation.hash_value) * PAGE
        return operation, len(operation.hash_value)

    def load(self, operation: Any) -> bool:
        """Load the pages that ``query`` has found; return whether SGLang uses them as a hit."""
        pages = len(operation.hash_value)
        operation.host_indices = indices(*range(20, 20 + pages))
        window, state = operation.pool_transfers
        window.host_indices, state.host_indices = indices(*range(30, 30 + min(WINDOW, pages))), torch.tensor([40])
        self._controller._page_transfer(operation)
        while not self._controller.prefetch_sync_queue.empty():
            ack = self._controller.prefetch_sync_queue.get()
            operation.completed_tokens = ack.completed_tokens or operation.completed_tokens
            operation.pool_storage_result.update_extra_pool_hit_pages(ack.pool_hits or {})
        operation.deadline_expired = True  # so SGLang does not change its data about the store
        tree = SimpleNamespace(
            page_size=PAGE,
            storage_existence_cache=None,
            prefetch_loaded_tokens_by_reqid={},
            prefetch_loaded_storage_start_by_reqid={},
            _finish_storage_prefetch=lambda *_, **__: None,
            _retire_ongoing_prefetch=lambda *_, **__: None,
        )
        check = self._classes["UnifiedRadixCache"]._check_hybrid_prefetch_result
        return bool(check(tree, operation.handle, operation, operation.hash_value, operation.host_indices))

    def pages_of(self, name: str, *places: int) -> list[bytes]:
        """Return the bytes of pages in host memory."""
        pool = self.pools[self._classes["PoolName"](name)]
        return [bytes(pool.get_data_page(place).contiguous().view(torch.uint8).numpy()) for place in places]

    def lose(self, name: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Remove pages of one kind of state from the store."""
        hashes = self._hash(tokens)
        store = self.backend._pool_of(name)
        store.remove_blocks(self.backend._hash_keys(name, [hashes[page] for page in pages]), force=True)

    def _hash(self, tokens: Sequence[int]) -> list[str]:
        hashes: list[str] = self._classes["get_storage_hash_str"](tokens, None, page_size=PAGE)
        return hashes

    def _transfer(self, name: str, keys: list[str], host_indices: torch.Tensor | None = None) -> Any:
        return self._classes["PoolTransfer"](
            name=self._classes["PoolName"][name],
            host_indices=host_indices,
            keys=keys,
            hit_policy=self._classes["PoolHitPolicy"].TRAILING_PAGES,
        )

    def _make_attention(self, num_layers: int) -> Any:
        layers = tuple(torch.zeros(8, HEADS, DIM, dtype=torch.bfloat16) for _ in range(num_layers))
        pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
        buffers = self._classes["KVBuffers"](
            k=layers, v=layers, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=self._classes["KVBufferLayout"].NHD
        )
        info = self._classes["MHABufferInfo"](
            buffers=buffers,
            page_size=PAGE,
            head_num=HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        return self._classes["MHATokenToKVPoolHost"](
            info,
            *(1.0, 0, PAGE, "page_first"),
            pin_memory=False,
            device_capacity_tokens=50 * PAGE,
            start_layer=0,
            end_layer=num_layers,
        )

    def _make_states(self) -> Any:
        info = self._classes["MambaStateBufferInfo"](
            temporal=torch.zeros(2, 4, 3, 5), conv=(torch.zeros(2, 4, 6, dtype=torch.bfloat16),)
        )
        return self._classes["MambaPoolHost"](info, 1.0, 0, device_capacity=50, pin_memory=False, layout="page_first")


@pytest.fixture
def hybrid_classes(integration: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    if "real" not in request.node.callspec.params.values():
        pytest.skip("the pools are SGLang's own")
    return import_hybrid()


def test_a_partly_lost_side_pool_of_a_hybrid_model_is_never_a_hit(
    attach: Attach, hybrid_classes: dict[str, Any]
) -> None:
    writer, reader = Hybrid(attach, hybrid_classes), Hybrid(attach, hybrid_classes)
    chance, seen = random.Random(3), set[tuple[bool, int]]()
    for number in range(40):
        tokens = chance.choices(range(1000), k=PROMPT_PAGES * PAGE)
        writer.fill(number)
        for first in range(0, PROMPT_PAGES, STATE_EVERY):
            writer.save(tokens[: (first + STATE_EVERY) * PAGE], first)
        present = {"swa": set(range(PROMPT_PAGES)), "mamba": set(range(STATE_EVERY - 1, PROMPT_PAGES, STATE_EVERY))}

        def lose(present: dict[str, set[int]] = present, tokens: Sequence[int] = tokens) -> None:
            name = chance.choice(("swa", "mamba"))
            lost = [page for page in sorted(present[name]) if chance.random() < 0.3]
            present[name].difference_update(lost)
            writer.lose(name, tokens, lost)

        def can_resume(end: int, present: dict[str, set[int]] = present) -> bool:
            return end - 1 in present["mamba"] and present["swa"].issuperset(range(max(0, end - WINDOW), end))

        if number:
            lose()
        operation, end = reader.query(tokens)
        assert end == max((page for page in range(1, PROMPT_PAGES + 1) if can_resume(page)), default=0)
        if not end:
            continue
        if number % 2:
            lose()  # after the look-up
        is_hit = reader.load(operation)
        assert is_hit == can_resume(end)
        seen.add((is_hit, end))
        if is_hit:
            places = range(end - WINDOW, end)
            for name, ours, theirs in (
                ("kv", range(20 * PAGE, (20 + end) * PAGE, PAGE), range(0, end * PAGE, PAGE)),
                ("swa", range(30 * PAGE, (30 + WINDOW) * PAGE, PAGE), range(places[0] * PAGE, end * PAGE, PAGE)),
                ("mamba", (40,), (end - STATE_EVERY,)),
            ):
                assert reader.pages_of(name, *ours) == writer.pages_of(name, *theirs), name
    assert {is_hit for is_hit, _ in seen} == {True, False}
    assert {end for is_hit, end in seen if is_hit} >= {2, 4, 6, 8}
