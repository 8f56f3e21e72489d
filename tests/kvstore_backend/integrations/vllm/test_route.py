"""The route between vLLM's memory and the pool, and transfers through host buffers with a stand-in for a GPU."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore_backend import BlockPool, ConfigError, Namespace, StorageBackend
from kvstore_backend.config import FileSettings, MooncakeSettings, PoolConfig
from kvstore_backend.integrations.vllm import route
from kvstore_backend.integrations.vllm.memory import KVMemory
from kvstore_backend.integrations.vllm.messages import Transfer
from kvstore_backend.integrations.vllm.route import Route, choose_route, open_route, read_route
from kvstore_backend.integrations.vllm.worker import WorkerHalf
from kvstore_backend.staging import KVTensors, StagedMemory, StandInDevice
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.transfers import TransferMemory
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from tests.faults.injector import Fault, FaultInjector
from tests.kvstore_backend.integrations.vllm.test_halves import NUM_BLOCKS, Instance, make_request
from tests.support.waiting import wait_until

TABLE = [7, 3, 5, 1, 2, 9]
OTHERS = [10, 11, 12, 13, 14, 15]
# The orders of vLLM's axes in memory: layer, block, head, token, content (``KVCacheLayout``).
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@pytest.fixture
def store() -> StorageBackend:
    return CheckedBackend(MemoryStore(1 << 20))


def make_layers(order: str, dtype: torch.dtype, heads: int = 2) -> list[torch.Tensor]:
    """Return three layers ``[block, head, token, content]`` of seven blocks, in one allocation, as in vLLM."""
    sizes = {"L": 3, "B": 7, "H": heads, "N": 4, "C": 6}
    memory = torch.zeros(math.prod(sizes.values()), dtype=torch.uint8 if dtype.itemsize == 1 else torch.float32)
    whole = memory.to(dtype).view([sizes[axis] for axis in order]).permute([order.index(axis) for axis in "LBHNC"])
    return list(whole)


def fill(layers: list[torch.Tensor]) -> None:
    """Write different values to neighboring elements, exact in every dtype."""
    for layer, tensor in enumerate(layers):
        count = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
        tensor.copy_(((count * 7 + layer) % 16).to(tensor.dtype))


def make_worker(store: StorageBackend, layers: list[torch.Tensor], route_name: Route) -> WorkerHalf:
    memory = KVMemory({f"l{i}": tensor for i, tensor in enumerate(layers)}, 7)
    pool = BlockPool(store, Namespace("m", str(layers[0].dtype), 4, 3, 2, 3, memory.layout))
    return WorkerHalf(pool, memory, route=open_route(route_name, memory, pool))


@pytest.mark.parametrize(
    ("order", "dtype", "heads"),
    [
        *((order, torch.float32, 2) for order in ORDERS),
        *((order, torch.float8_e4m3fn, 2) for order in ("LBNHC", "BHLNC")),
        ("LBHNC", torch.bfloat16, 1),  # MLA
        ("BLNHC", torch.uint8, 1),
    ],
)
@pytest.mark.parametrize("routes", [("staged", "direct"), ("direct", "staged")])
def test_a_block_has_the_same_bytes_through_both_routes(
    store: StorageBackend, order: str, dtype: torch.dtype, heads: int, routes: tuple[Route, Route]
) -> None:
    mine, theirs = make_layers(order, dtype, heads), make_layers(order, dtype, heads)
    fill(mine)
    names = [bytes([number]) * 32 for number in range(3)]
    with (
        contextlib.closing(make_worker(store, mine, routes[0])) as writer,
        contextlib.closing(make_worker(store, theirs, routes[1])) as reader,
    ):
        writer.start_saves([Transfer(1, "a", names, [6, 0, 3])])
        assert writer.wait_for_saves([1])
        reader.start_loads([Transfer(2, "b", names, [1, 5, 2])])
        wait_until(lambda: reader.take_outcomes()[0].requests == {"b"}, "the load")
    for one, other in zip(mine, theirs, strict=True):
        mine_bytes, their_bytes = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        assert torch.equal(their_bytes[[1, 5, 2]], mine_bytes[[6, 0, 3]])
        assert not their_bytes[[0, 3, 4, 6]].any(), "no other block was changed"


@pytest.mark.parametrize("order", ORDERS)
def test_all_layers_are_merged_unless_heads_come_before_layers_in_a_block(order: str) -> None:
    layers = make_layers(order, torch.float32)
    memory = KVMemory({f"l{i}": tensor for i, tensor in enumerate(layers)}, 7)
    assert len(memory.merge_layers()) == (3 if order == "BHLNC" else 1)


class Gate:
    """A gate that stops the copies of the stand-in between their steps, while it is closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.held = threading.Semaphore(0)
        """Released by each step that waits at the closed gate."""

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        if not self._open.is_set():
            self.held.release()
            assert self._open.wait(60)

    def open_route(self, _: Route, memory: KVMemory, pool: BlockPool) -> TransferMemory:
        """Open the staged route with a stand-in. Its copies wait at this gate."""
        device = StandInDevice(before_step=self.wait)
        return StagedMemory(KVTensors(memory.merge_layers(), memory.num_blocks), pool, device=device)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def test_a_step_does_not_wait_for_a_copy_and_the_copied_blocks_stay_pinned(store: StorageBackend, gate: Gate) -> None:
    with contextlib.closing(Instance(store, open_memory=gate.open_route)) as instance:
        request = make_request()
        instance.scheduler.on_allocation(request, lambda: TABLE, 0)
        gate.close()
        instance.begin({"a": 22}, {"a": TABLE})  # returns although no copy can end
        gate.held.acquire()
        request.num_computed_tokens = 22
        instance.scheduler.on_request_end(request, TABLE)
        assert [instance.blocks.held[block] for block in TABLE] == [1, 1, 1, 1, 1, 0]
        gate.open()
        instance.end_transfers()
        assert instance.blocks.held == [0] * NUM_BLOCKS


def test_the_threads_of_transfers_are_bound_to_the_gpu(store: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []
    monkeypatch.setattr(KVMemory, "bind_thread", lambda _: bound.append(threading.current_thread().name))
    with contextlib.closing(Instance(store, route="staged")) as instance:
        request = make_request()
        instance.scheduler.on_allocation(request, lambda: TABLE, 0)
        instance.begin({"a": 22}, {"a": TABLE})
        request.num_computed_tokens = 22
        instance.scheduler.on_request_end(request, TABLE)
        instance.end_transfers()
    assert "pool-save-0" in bound


def test_a_load_is_reported_after_its_blocks_are_in_the_devices_memory(store: StorageBackend, gate: Gate) -> None:
    with (
        contextlib.closing(Instance(store, route="staged")) as first,
        contextlib.closing(Instance(store, open_memory=gate.open_route)) as second,
    ):
        first.compute(make_request(), TABLE)
        request = make_request(name="b")
        matched = second.match_request(request)
        second.scheduler.on_allocation(request, lambda: OTHERS, matched)
        gate.close()
        second.begin({}, {})
        gate.held.acquire()
        assert second.workers[0].take_outcomes()[0].requests == set(), "the read has ended, but not the copy"
        assert not second.has(request, 0, OTHERS[0])
        gate.open()
        loaded = second.end_transfers()
        assert (loaded.requests, loaded.blocks) == ({"b"}, set())
        assert all(second.has(request, i, OTHERS[i]) for i in range(5))


def test_a_read_beyond_its_deadline_writes_to_no_block(store: StorageBackend) -> None:
    injector = FaultInjector(store)
    guarded = GuardedBackend(lambda: injector, Deadlines(0.2, 0.05, 1e9))
    wait_until(lambda: guarded.is_ready, "the store")
    with (
        contextlib.closing(Instance(store, route="staged")) as first,
        contextlib.closing(Instance(guarded, route="staged")) as second,
    ):
        first.compute(make_request(), TABLE)
        request = make_request(name="b")
        matched = second.match_request(request)
        second.scheduler.on_allocation(request, lambda: OTHERS, matched)
        injector.faults = [Fault.HANGS]
        second.begin({}, {})
        loaded = second.end_transfers()
        assert (loaded.requests, loaded.failed) == ({"b"}, set())
        assert loaded.blocks == set(OTHERS[:5]), "computed in place: no late call writes to them"
        for tensor in second.kv:
            tensor[OTHERS] = 0.5
        injector.go_on()
        wait_until(lambda: guarded.wait_for_late_calls(0), "the late read")
        assert all(bool((tensor[OTHERS] == 0.5).all()) for tensor in second.kv)


def test_read_route_accepts_only_the_two_names() -> None:
    assert [read_route({"memory": name}) for name in ("staged", "direct")] == ["staged", "direct"]
    assert read_route({}) is None
    for bad in ("gpu", "", 1, True, ["staged"]):
        with pytest.raises(
            ConfigError, match=r'memory in kv_connector_extra_config is .* must be "staged" .* "direct"'
        ):
            read_route({"memory": bad})


@pytest.mark.parametrize(("is_on_device", "chosen"), [(True, "staged"), (False, "direct")])
def test_by_default_only_blocks_on_a_gpu_are_staged(is_on_device: bool, chosen: Route) -> None:
    assert choose_route(None, fake_memory(is_on_device), PoolConfig(FileSettings())) == chosen


def test_both_routes_can_be_chosen_for_host_memory() -> None:
    for named, memory in itertools.product(("staged", "direct"), (fake_memory(False),)):
        assert choose_route(named, memory, PoolConfig(FileSettings())) == named  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("store_settings", "trouble"),
    [
        (FileSettings(), "the pool is a file pool"),
        (MooncakeSettings("127.0.0.1:1", protocol="tcp"), "the pool's protocol is tcp"),
        (MooncakeSettings("127.0.0.1:1", protocol="rdma"), r"build for CUDA \(mooncake-transfer-engine or "),
    ],
)
def test_a_pool_that_cannot_reach_a_gpu_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, store_settings: Any, trouble: str
) -> None:
    monkeypatch.setattr(route, "_is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=f'{trouble}.*GPUDirect.*remove "memory" from'):
        choose_route("direct", fake_memory(True), PoolConfig(store_settings))


@pytest.mark.parametrize("wheel", ["mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"])
def test_a_pool_that_can_reach_a_gpu_accepts_the_direct_route(monkeypatch: pytest.MonkeyPatch, wheel: str) -> None:
    monkeypatch.setattr(route, "_is_installed", lambda name: name == wheel)
    settings = MooncakeSettings("127.0.0.1:1", protocol="rdma")
    assert choose_route("direct", fake_memory(True), PoolConfig(settings)) == "direct"


def fake_memory(is_on_device: bool) -> Any:
    """Return the part of a ``KVMemory`` on which the route depends."""
    return SimpleNamespace(is_on_device=is_on_device)
