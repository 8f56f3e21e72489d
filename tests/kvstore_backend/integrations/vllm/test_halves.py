"""The two halves of the vLLM connector with a real store. The tests call them as vLLM's scheduler and worker do.

vLLM itself is too large for CI. ``benchmarks/vllm_connector.py`` runs the connector in vLLM, and ``test_connector.py``
tests it with the classes of an installed vLLM.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies

from kvstore_backend import BlockPool, Namespace, StorageBackend, extend_block_hashes, root_hash
from kvstore_backend.backend import Status, Value
from kvstore_backend.integrations.vllm import scheduler
from kvstore_backend.integrations.vllm.memory import KVMemory
from kvstore_backend.integrations.vllm.messages import Plan, Report
from kvstore_backend.integrations.vllm.route import Route, open_route
from kvstore_backend.integrations.vllm.scheduler import SchedulerHalf
from kvstore_backend.integrations.vllm.worker import Loaded, WorkerHalf
from kvstore_backend.refill import Holder
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.transfers import TransferMemory
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from tests.faults.injector import Fault, FaultInjector
from tests.support.waiting import wait_until

BLOCK = 4
NUM_BLOCKS = 32
LAYERS = 3


class Block(int):
    """A block of vLLM: its number, and the hash of its contents while they are cached."""

    block_hash: bytes | None = None
    is_null = False


class Blocks:
    """vLLM's block pool: its reference counts, its hashes and its order of reuse."""

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(NUM_BLOCKS)]
        self.freed: list[int] = []
        """The freed blocks, in order."""
        self.held = [0] * NUM_BLOCKS
        self.in_use = False
        """Whether requests hold blocks."""

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            self.held[block] += 1

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        for block in ordered_blocks:
            assert self.held[block] > 0
            self.held[block] -= 1
            self.freed.append(int(block))

    def reset_prefix_cache(self) -> bool:
        if self.in_use or any(self.held):
            return False
        for block in self.blocks:
            block.block_hash = None
        return True

    def cache(self, request: Request, table: Sequence[int]) -> None:
        """Set the hashes of a request's blocks."""
        for block_hash, block in zip(request.block_hashes, table, strict=False):
            self.blocks[block].block_hash = block_hash


@dataclass
class Request:
    """The part of vLLM's request that the connector uses."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    salt: str = ""
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    num_output_tokens: int = 0
    max_tokens: int = 16
    kv_transfer_params: dict[str, Any] | None = None
    block_hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = extend_block_hashes([], self.token_ids, BLOCK, root_hash(self.salt))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_output_tokens


class Instance:
    """A vLLM instance: KV memory, a scheduler half, and a worker half for each rank."""

    def __init__(
        self,
        store: StorageBackend,
        *,
        block_size: int = BLOCK,
        ranks: int = 1,
        route: Route = "direct",
        open_memory: Callable[[Route, KVMemory, BlockPool], TransferMemory] = open_route,
        **options: Any,
    ) -> None:
        self.kv = [torch.zeros(NUM_BLOCKS, 2, block_size, 6) for _ in range(LAYERS)]
        memory = KVMemory({f"layers.{i}": tensor for i, tensor in enumerate(self.kv)}, NUM_BLOCKS)
        self.blocks = Blocks()
        self.scheduler = SchedulerHalf(store, block_size, **options)
        namespaces = [
            Namespace("m", "float32", block_size, LAYERS, 2, 3, memory.layout, tp_size=ranks, tp_rank=rank)
            for rank in range(ranks)
        ]
        pools = [BlockPool(store, namespace) for namespace in namespaces]
        self.workers = [WorkerHalf(pool, memory, route=open_memory(route, memory, pool)) for pool in pools]
        self.use_scheduler(self.scheduler)

    def use_scheduler(self, scheduler: SchedulerHalf) -> None:
        """Use this scheduler half for all steps."""
        self.scheduler = scheduler
        scheduler.learn_namespaces([worker.namespace for worker in self.workers])
        scheduler.bind_blocks(self.blocks)

    def match_request(self, request: Request, num_computed: int = 0) -> int:
        """Return the scheduler's answer after the end of the look-up."""
        answers: list[int | None] = []

        def has_answer() -> bool:
            answers.append(self.scheduler.matched_tokens(request, num_computed))
            return answers[-1] is not None

        wait_until(has_answer, "a look-up")
        assert answers[-1] is not None
        return answers[-1]

    def step(self, scheduled: dict[str, int], tables: dict[str, list[int]]) -> Loaded:
        """Run one step of the engine, and wait until all its transfers are reported."""
        self.begin(scheduled, tables)
        return self.end_transfers()

    def reset(self, *, with_connector: bool = True) -> bool:
        """Call vLLM's ``reset_prefix_cache``: reset its own cache, then the connector's."""
        is_reset: bool = self.blocks.reset_prefix_cache()
        return (self.scheduler.forget_blocks() and is_reset) if with_connector else is_reset

    def begin(self, scheduled: dict[str, int], tables: dict[str, list[int]]) -> Plan:
        """Plan a step, and send the pickled plan to the workers, as vLLM does."""
        plan: Plan = pickle.loads(pickle.dumps(self.scheduler.plan_step(scheduled, tables.__getitem__)))
        for worker in self.workers:
            worker.start_loads(plan.loads)
            worker.start_saves(plan.saves)
            worker.wait_for_saves(plan.awaited)
        return plan

    def end_transfers(self) -> Loaded:
        """Run steps without work until no block is pinned."""
        total = Loaded()
        wait_until(lambda: self.idle_step(total), "all transfers")
        return total

    def idle_step(self, total: Loaded) -> bool:
        """Run a step without work; return whether no block is pinned after it."""
        reports = Report()
        for worker in self.workers:
            loaded, report = worker.take_outcomes()
            total.requests |= loaded.requests
            total.blocks |= loaded.blocks
            total.failed |= loaded.failed
            reports.add_report(report)
        self.scheduler.on_report(reports)
        return not self.scheduler.has_pins

    def compute(self, request: Request, table: list[int]) -> None:
        """Compute a whole request in one step, with KV that is a function of the hashes, and end it."""
        self.scheduler.on_allocation(request, lambda: table, 0)
        for block_hash, block in zip(request.block_hashes, table, strict=False):
            for layer, tensor in enumerate(self.kv):
                tensor[block] = content(block_hash, layer)
        self.step({request.request_id: request.num_tokens - request.num_computed_tokens}, {request.request_id: table})
        request.num_computed_tokens = request.num_tokens
        self.scheduler.on_request_end(request, table)
        self.end_transfers()

    def load(self, request: Request, table: list[int], num_computed: int = 0) -> Loaded:
        """Load the matched blocks of a request into the blocks of ``table``."""
        matched = self.match_request(request, num_computed)
        self.scheduler.on_allocation(request, lambda: table, matched)
        return self.step({}, {})

    def has(self, request: Request, index: int, block: int) -> bool:
        """Return whether ``block`` has the KV of block ``index`` of the request."""
        return all(
            bool((tensor[block] == content(request.block_hashes[index], layer)).all())
            for layer, tensor in enumerate(self.kv)
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


def content(block_hash: bytes, layer: int) -> float:
    return int.from_bytes(block_hash[:2], "little") + layer / 8


def make_request(number: int = 22, name: str = "a", **changes: Any) -> Request:
    return Request(name, list(range(number)), **changes)


@pytest.fixture
def store() -> StorageBackend:
    return CheckedBackend(MemoryStore(1 << 20))


@pytest.fixture
def two(store: StorageBackend) -> Iterator[tuple[Instance, Instance]]:
    with contextlib.closing(Instance(store)) as first, contextlib.closing(Instance(store)) as second:
        yield first, second


def test_an_instance_loads_blocks_that_another_computed(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(), [7, 3, 5, 1, 2, 9])
    request = make_request(name="b")
    assert second.match_request(request) == 20
    loaded = second.load(request, [4, 8, 11, 10, 6, 0])
    assert (loaded.requests, loaded.blocks, loaded.failed) == ({"b"}, set(), set())
    assert all(second.has(request, index, block) for index, block in enumerate([4, 8, 11, 10, 6]))


def test_prompts_with_images_do_not_use_the_pool_with_skips_media(store: StorageBackend) -> None:
    with (
        contextlib.closing(Instance(store, skips_media=True)) as first,
        contextlib.closing(Instance(store, skips_media=True)) as second,
    ):
        table = [7, 3, 5, 1, 2, 9]
        first.compute(make_request(mm_features=["an image"]), table)
        assert second.match_request(make_request(name="b")) == 0, "no block was saved"
        first.compute(make_request(name="c"), table)
        assert second.match_request(make_request(name="d", mm_features=["an image"])) == 0
        assert second.match_request(make_request(name="e")) == 20


def test_blocks_in_the_own_cache_are_not_loaded(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(), [0, 1, 2, 3, 4, 5])
    request = make_request(name="b")
    assert second.match_request(request, num_computed=8) == 12
    second.load(request, [20, 21, 22, 23, 24, 25], num_computed=8)
    assert not second.has(request, 1, 21)
    assert all(second.has(request, index, 20 + index) for index in (2, 3, 4))


def test_each_chunk_of_a_prompt_saves_its_full_blocks(two: tuple[Instance, Instance]) -> None:
    first, second = two
    request, table = make_request(), [0, 1, 2, 3, 4, 5]
    first.scheduler.on_allocation(request, lambda: table, 0)
    first.step({"a": 10}, {"a": table})
    assert second.match_request(make_request(name="early")) == 8
    request.num_computed_tokens = 10
    first.step({"a": 10}, {"a": table})
    assert second.match_request(make_request(name="late")) == 20


def test_a_preempted_request_loads_its_saved_blocks_into_new_blocks(two: tuple[Instance, Instance]) -> None:
    first, second = two
    request = make_request()
    for index, block_hash in enumerate(request.block_hashes[:3]):
        for layer, tensor in enumerate(first.kv):
            tensor[index] = content(block_hash, layer)
    first.scheduler.on_allocation(request, lambda: [0, 1, 2, 3, 4, 5], 0)
    first.step({"a": 12}, {"a": [0, 1, 2, 3, 4, 5]})
    loaded = first.load(request, [20, 21, 22, 23, 24, 25])
    assert (loaded.requests, loaded.blocks) == ({"a"}, set())
    assert all(first.has(request, index, 20 + index) for index in range(3))
    request.num_computed_tokens = 12
    first.step({"a": 10}, {"a": [20, 21, 22, 23, 24, 25]})
    assert second.match_request(make_request(name="b")) == 20


def test_requests_with_another_salt_find_no_block(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(salt="mine"), [0, 1, 2, 3, 4, 5])
    assert second.match_request(make_request(salt="yours")) == 0


def test_instances_with_another_block_size_find_no_block(store: StorageBackend) -> None:
    with contextlib.closing(Instance(store)) as first, contextlib.closing(Instance(store, block_size=8)) as second:
        first.compute(make_request(), [0, 1, 2, 3, 4, 5])
        assert second.match_request(make_request()) == 0


def test_a_block_is_a_hit_only_if_every_rank_has_it(store: StorageBackend) -> None:
    with contextlib.closing(Instance(store, ranks=2)) as two_ranks:
        two_ranks.compute(make_request(), [0, 1, 2, 3, 4, 5])
        lost = two_ranks.workers[1].namespace.key(make_request().block_hashes[2])
        assert two_ranks.match_request(make_request(name="b")) == 20
        store.remove([lost])
        assert two_ranks.match_request(make_request(name="c")) == 8


def test_a_request_that_runs_during_a_reset_saves_no_block_after_it(
    two: tuple[Instance, Instance],
) -> None:
    first, _ = two
    request, table = make_request(), [0, 1, 2, 3, 4, 5]
    first.scheduler.on_allocation(request, lambda: table, 0)
    first.step({"a": 10}, {"a": table})
    assert first.reset(), "vLLM has preempted the request, so its own cache is empty"
    request.num_computed_tokens = 10
    assert first.begin({"a": 12}, {"a": table}).saves == []
    request.num_computed_tokens = 22
    first.scheduler.on_request_end(request, table)
    assert first.begin({}, {}).saves == []
    first.compute(make_request(name="b"), [6, 7, 8, 9, 10, 11])
    assert first.match_request(make_request(name="c")) == 20, "blocks of a request after the reset are shared"


def test_after_a_failed_reset_of_vllms_cache_no_block_is_loaded_or_saved_until_a_reset_succeeds(
    two: tuple[Instance, Instance],
) -> None:
    first, _ = two
    first.blocks.in_use = True
    assert not first.reset(), "vLLM learns that the reset has failed"
    first.compute(make_request(name="b"), [0, 1, 2, 3, 4, 5])
    assert first.match_request(make_request(name="c")) == 0
    first.blocks.in_use = False
    assert first.reset()
    assert first.match_request(make_request(name="d")) == 0
    first.compute(make_request(name="e"), [0, 1, 2, 3, 4, 5])
    assert first.match_request(make_request(name="f")) == 20


def test_an_earlier_reset_of_vllms_own_cache_does_not_count(two: tuple[Instance, Instance]) -> None:
    first, _ = two
    assert first.reset(with_connector=False)
    first.compute(make_request(), [0, 1, 2, 3, 4, 5])
    assert not first.scheduler.forget_blocks()


def test_vllm_can_reset_its_cache_during_saves(hanging: Hanging) -> None:
    second = hanging.instance
    hanging.store.faults = [Fault.HANGS]
    request, table = Request("b", list(range(100, 122))), [10, 11, 12, 13, 14, 15]
    second.scheduler.on_allocation(request, lambda: table, 0)
    second.begin({"b": 22}, {"b": table})
    assert second.blocks.reset_prefix_cache()
    assert [second.blocks.held[block] for block in table] == [1, 1, 1, 1, 1, 0], "a save still reads these blocks"
    hanging.store.go_on()
    second.end_transfers()
    assert second.blocks.held == [0] * NUM_BLOCKS


def test_a_reset_that_raises_frees_no_block_of_transfers(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    second = hanging.instance
    hanging.store.faults = [Fault.HANGS]
    request, table = Request("b", list(range(100, 122))), [10, 11, 12, 13, 14, 15]

    def fail() -> bool:
        raise RuntimeError("no reset")

    second.blocks.reset_prefix_cache = fail  # type: ignore[method-assign]
    second.scheduler.bind_blocks(second.blocks)
    second.scheduler.on_allocation(request, lambda: table, 0)
    second.begin({"b": 22}, {"b": table})
    with pytest.raises(RuntimeError, match="no reset"):
        second.blocks.reset_prefix_cache()
    assert sum(second.blocks.held) == 5
    hanging.store.go_on()
    second.end_transfers()
    assert second.blocks.held == [0] * NUM_BLOCKS


def test_after_an_eviction_between_look_up_and_load_only_the_blocks_from_it_on_are_computed(
    store: StorageBackend, two: tuple[Instance, Instance]
) -> None:
    first, second = two
    first.compute(make_request(), [0, 1, 2, 3, 4, 5])
    request = make_request(name="b")
    assert second.match_request(request) == 20
    store.remove([second.workers[0].namespace.key(request.block_hashes[3])])
    loaded = second.load(request, [10, 11, 12, 13, 14, 15])
    assert (loaded.requests, loaded.blocks, loaded.failed) == ({"b"}, {13, 14}, set())
    assert all(second.has(request, index, 10 + index) for index in range(3))
    assert second.match_request(request) == 0, "the request does not repeat the load"


@dataclass
class Hanging:
    """An instance with a store that can hang in a call until ``store.go_on()``. The calls have short deadlines."""

    instance: Instance
    store: FaultInjector


@pytest.fixture
def hanging(store: StorageBackend) -> Iterator[Hanging]:
    with contextlib.closing(Instance(store)) as first:
        first.compute(make_request(), [0, 1, 2, 3, 4, 5])
        injector = FaultInjector(store)
        guarded = GuardedBackend(lambda: injector, Deadlines(0.2, 0.05, 1e9))
        wait_until(lambda: guarded.is_ready, "the store")
        with contextlib.closing(Instance(guarded)) as second:
            yield Hanging(second, injector)
            injector.go_on()


def test_the_blocks_of_a_late_read_stay_pinned_until_it_ends(hanging: Hanging) -> None:
    second, request = hanging.instance, make_request(name="b")
    matched = second.match_request(request)
    second.scheduler.on_allocation(request, lambda: [10, 11, 12, 13, 14, 15], matched)
    hanging.store.faults = [Fault.HANGS]
    second.begin({}, {})
    total = Loaded()
    wait_until(lambda: second.idle_step(total) or bool(total.requests), "the end of the load")
    assert (total.requests, total.blocks, total.failed) == ({"b"}, set(), {"b"}), "the request restarts in other blocks"
    assert all(second.blocks.held[block] == 1 for block in range(10, 15))
    assert second.match_request(request) == 0
    hanging.store.go_on()
    second.end_transfers()
    assert second.blocks.held == [0] * NUM_BLOCKS
    assert all(bool((tensor[10:15] == 0).all()) for tensor in second.kv), "the blocks of the late read are cleared"


def test_the_blocks_of_a_late_write_stay_pinned_until_it_ends(hanging: Hanging) -> None:
    second = hanging.instance
    request = Request("b", list(range(100, 122)))
    second.scheduler.on_allocation(request, lambda: [10, 11, 12, 13, 14, 15], 0)
    hanging.store.faults = [Fault.HANGS]
    second.begin({"b": 22}, {"b": [10, 11, 12, 13, 14, 15]})
    hanging.store.hanging.acquire()
    request.num_computed_tokens = 22
    second.scheduler.on_request_end(request, [10, 11, 12, 13, 14, 15])
    assert all(second.blocks.held[block] == 1 for block in range(10, 15))
    hanging.store.go_on()
    second.end_transfers()
    assert second.blocks.held == [0] * NUM_BLOCKS


class SlowWrites(FaultInjector):
    """A store with slow writes."""

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        time.sleep(0.2)
        return super().put(keys, values)


BEFORE_DECODE = {"do_remote_decode": True}


def prefill(instance: Instance, request: Request, table: list[int]) -> Plan:
    """Run the step that computes the rest of a request; return when vLLM may send its token."""
    if not request.num_computed_tokens:
        instance.scheduler.on_allocation(request, lambda: table, 0)
    count = request.num_tokens - request.num_computed_tokens
    return instance.begin({request.request_id: count}, {request.request_id: table})


def test_the_response_of_a_prefill_waits_until_its_blocks_are_in_the_pool(store: StorageBackend) -> None:
    with contextlib.closing(Instance(SlowWrites(store))) as first, contextlib.closing(Instance(store)) as second:
        request = make_request(max_tokens=1, kv_transfer_params=BEFORE_DECODE)
        first.scheduler.on_allocation(request, lambda: [0, 1, 2, 3, 4, 5], 0)
        assert first.begin({"a": 10}, {"a": [0, 1, 2, 3, 4, 5]}).awaited == []
        request.num_computed_tokens = 10
        plan = prefill(first, request, [0, 1, 2, 3, 4, 5])
        assert len(plan.awaited) == 2, "the save of the first chunk has not ended"
        assert second.match_request(make_request(name="b")) == 20
        longer = make_request(name="c", kv_transfer_params=BEFORE_DECODE)
        assert prefill(first, longer, [6, 7, 8, 9, 10, 11]).awaited == []


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": True}])
def test_a_client_request_for_one_token_does_not_wait_for_its_saves(
    store: StorageBackend, params: dict[str, Any] | None
) -> None:
    with contextlib.closing(Instance(SlowWrites(store))) as instance:
        plan = prefill(instance, make_request(max_tokens=1, kv_transfer_params=params), [0, 1, 2, 3, 4, 5])
        assert (len(plan.saves), plan.awaited) == (1, [])


def test_blocks_are_saved_after_a_late_look_up(store: StorageBackend) -> None:
    injector = FaultInjector(store)
    guarded = GuardedBackend(lambda: injector, Deadlines(0.05, 1.0, 1e9))
    wait_until(lambda: guarded.is_ready, "the store")
    with contextlib.closing(Instance(store)) as first, contextlib.closing(Instance(store)) as second:
        first.use_scheduler(SchedulerHalf(guarded, BLOCK))
        first.compute(make_request(), [0, 1, 2, 3, 4, 5])
        injector.faults = [Fault.HANGS]
        request = Request("b", list(range(100, 122)))
        assert first.match_request(request) == 0
        assert not guarded.is_ready
        prefill(first, request, [6, 7, 8, 9, 10, 11])
        first.end_transfers()
        assert second.match_request(Request("c", list(range(100, 122)))) == 20
        injector.go_on()


def test_a_response_does_not_wait_for_a_pool_that_hangs(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_backend.integrations.vllm.worker._SAVE_WAIT_SECONDS", 0.05)
    second = hanging.instance
    hanging.store.faults = [Fault.HANGS]
    request = Request("b", list(range(100, 122)), max_tokens=1, kv_transfer_params=BEFORE_DECODE)
    prefill(second, request, [10, 11, 12, 13, 14, 15])
    assert not second.workers[0].wait_for_saves(second.scheduler._pins)
    hanging.store.go_on()
    second.end_transfers()
    assert second.workers[0].wait_for_saves([1])


def test_a_request_that_is_aborted_during_its_load_saves_no_block(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(), [0, 1, 2, 3, 4, 5])
    request = make_request(name="b")
    matched = second.match_request(request)
    second.scheduler.on_allocation(request, lambda: [10, 11, 12, 13, 14, 15], matched)
    request.num_computed_tokens = matched
    second.scheduler.on_request_end(request, [10, 11, 12, 13, 14, 15])
    plan = second.begin({}, {})
    assert (len(plan.loads), len(plan.saves)) == (1, 0)
    second.end_transfers()
    assert second.blocks.held == [0] * NUM_BLOCKS


def test_saves_hold_at_most_a_quarter_of_all_blocks(two: tuple[Instance, Instance]) -> None:
    first, _ = two
    request, table = make_request(4 * 20), list(range(20))
    first.scheduler.on_allocation(request, lambda: table, 0)
    plan = first.scheduler.plan_step({"a": 80}, {"a": table}.__getitem__)
    assert [len(save.blocks) for save in plan.saves] == [NUM_BLOCKS // 4]
    request.num_computed_tokens = 80
    assert first.scheduler.plan_step({"a": 0}, {"a": table}.__getitem__).saves == []
    first.scheduler.on_report(Report(ended=Counter({plan.saves[0].number: 1})))
    again = first.scheduler.plan_step({"a": 0}, {"a": table}.__getitem__)
    assert [list(save.blocks) for save in again.saves] == [list(range(8, 16))]


def test_producers_do_not_load_and_consumers_do_not_save(store: StorageBackend) -> None:
    with (
        contextlib.closing(Instance(store)) as both,
        contextlib.closing(Instance(store, loads=False)) as producer,
        contextlib.closing(Instance(store, saves=False)) as consumer,
    ):
        consumer.compute(make_request(), [0, 1, 2, 3, 4, 5])
        assert both.match_request(make_request(name="b")) == 0
        producer.compute(make_request(name="c"), [0, 1, 2, 3, 4, 5])
        assert producer.match_request(make_request(name="d")) == 0
        assert consumer.match_request(make_request(name="e")) == 20


class TestDecodeWaitsForPrefill:
    """Prefill and decode get a request at the same time. Decode waits for the blocks that prefill saves."""

    @pytest.fixture
    def pair(self, store: StorageBackend) -> Iterator[tuple[Instance, Instance]]:
        with contextlib.closing(Instance(store)) as first, contextlib.closing(open_decode(store, 60.0)) as second:
            yield first, second

    def test_decode_waits_until_the_pool_has_all_blocks_of_the_prompt(self, pair: tuple[Instance, Instance]) -> None:
        prefill, decode = pair
        request, table, waiting = make_request(), [0, 1, 2, 3, 4, 5], make_request(name="b")
        assert_still_waits(decode, waiting)
        prefill.scheduler.on_allocation(request, lambda: table, 0)
        prefill.step({"a": 12}, {"a": table})
        assert_still_waits(decode, waiting)
        request.num_computed_tokens = 12
        prefill.step({"a": 10}, {"a": table})
        assert decode.match_request(waiting) == 20

    def test_after_the_wait_decode_loads_the_present_blocks_and_logs_the_missing_ones(
        self, store: StorageBackend, caplog: pytest.LogCaptureFixture
    ) -> None:
        with contextlib.closing(Instance(store)) as first, contextlib.closing(open_decode(store, 0.1)) as second:
            first.compute(make_request(10), [0, 1, 2])
            assert second.match_request(make_request(name="b")) == 8
        assert "Request b: 3 blocks of its prompt did not arrive from a prefill instance" in caplog.text

    def test_a_request_with_generated_tokens_does_not_wait(self, pair: tuple[Instance, Instance]) -> None:
        prefill, decode = pair
        prefill.compute(make_request(10), [0, 1, 2])
        assert decode.match_request(make_request(name="b", num_output_tokens=12)) == 8

    def test_decode_does_not_wait_for_a_failed_pool(self) -> None:
        faulty = FaultInjector(MemoryStore(1 << 20))
        guarded = GuardedBackend(lambda: CheckedBackend(faulty))
        assert guarded.wait_ready(10.0)
        with contextlib.closing(open_decode(guarded, 60.0)) as instance:
            assert_still_waits(instance, waiting := make_request(name="b"))
            faulty.faults = [Fault.FAILED] * 100
            assert instance.match_request(waiting) == 0

    def test_an_aborted_request_is_forgotten(self, pair: tuple[Instance, Instance]) -> None:
        _, decode = pair
        assert_still_waits(decode, waiting := make_request(name="b"))
        decode.scheduler.on_request_end(waiting, [])
        assert len(decode.scheduler._lookups) == 0


def open_decode(store: StorageBackend, prefill_wait_s: float) -> Instance:
    return Instance(store, prefill_wait_s=prefill_wait_s)


def assert_still_waits(instance: Instance, request: Request) -> None:
    """Check that the request has no answer after three further look-ups."""
    answers: list[object] = []

    def looks_up_again() -> bool:
        instance.scheduler.plan_step({}, dict[str, list[int]]().__getitem__)
        before = instance.scheduler.num_lookups
        answers.append(instance.scheduler.matched_tokens(request, 0))
        return instance.scheduler.num_lookups > before

    for ordinal in ("first", "second", "third"):
        wait_until(looks_up_again, f"the {ordinal} look-up")
    assert set(answers) == {None}


def test_both_halves_count_under_their_namespace(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(), [0, 1, 2, 3, 4, 5])
    second.load(make_request(name="b"), [0, 1, 2, 3, 4, 5])
    (saved,) = first.workers[0].take_counts().items()
    (looked_up,) = second.scheduler.take_counts().items()
    (loaded,) = second.workers[0].take_counts().items()
    assert saved[0] == looked_up[0] == loaded[0] == first.workers[0].namespace.digest
    assert (saved[1]["save ok"], looked_up[1]["lookup ok"], loaded[1]["load ok"]) == (5, 5, 5)
    assert loaded[1]["load bytes"] == 5 * LAYERS * 2 * BLOCK * 6 * 4
    assert second.workers[0].take_counts() == {}


class BusyInstance:
    """An instance with a faulty store. Its requests begin, load, compute, end and are preempted in any order."""

    def __init__(self, route: Route) -> None:
        self.store = FaultInjector(CheckedBackend(MemoryStore(1 << 20)))
        self.instance = Instance(self.store, route=route)
        self._requests: dict[str, tuple[Request, list[int]]] = {}
        self._number = 0
        self._free = list(range(NUM_BLOCKS))

    def begin(self) -> None:
        """Begin a request with one of two prompts, if enough blocks are free."""
        if len(self._free) < 6:
            return
        self._number += 1
        request = Request(str(self._number), [self._number % 2, *range(1, 22)])
        matched = self.instance.match_request(request)
        table = [self._free.pop() for _ in range(6)]
        self._requests[request.request_id] = request, table
        self.instance.scheduler.on_allocation(request, lambda: table, matched)

    def compute(self) -> None:
        """Run a step with up to six tokens of each request."""
        running = {name: (request, table) for name, (request, table) in self._requests.items()}
        counts = {name: min(6, 22 - request.num_computed_tokens) for name, (request, _) in running.items()}
        self.instance.begin(counts, {name: table for name, (_, table) in running.items()})
        for name, (request, _) in running.items():
            request.num_computed_tokens += counts[name]

    def end(self) -> None:
        """End the oldest request, or abort it if it is not finished."""
        if self._requests:
            request, table = self._requests.pop(next(iter(self._requests)))
            self.instance.scheduler.on_request_end(request, table)
            self._free += [block for block in table if not self.instance.blocks.held[block]]

    def preempt(self) -> None:
        """Preempt the latest request: it gets new blocks."""
        if self._requests and len(self._free) >= 6:
            name, (request, _) = self._requests.popitem()
            table = [self._free.pop() for _ in range(6)]
            request.num_computed_tokens = 0
            self._requests[name] = request, table
            self.instance.scheduler.on_allocation(request, lambda: table, 0)

    def report(self) -> None:
        """Send the workers' reports to the scheduler."""
        self.instance.idle_step(Loaded())

    def reset(self) -> None:
        """Reset vLLM's caches."""
        self.instance.reset()

    def finish(self) -> None:
        """End all requests and all transfers, without further faults."""
        while self._requests:
            self.end()
        self.store.faults = []
        self.store.go_on()
        self.instance.begin({}, {})
        self.instance.end_transfers()


FAULTS = [Fault.FAILED, Fault.FAILED_HALF_WAY, Fault.RAISES, Fault.FALSE_ABSENT, Fault.FEWER_ANSWERS, Fault.NOTHING]


@pytest.mark.parametrize("route", ["direct", "staged"])
@settings(max_examples=25, deadline=None)
@given(
    actions=strategies.lists(
        strategies.sampled_from(["begin", "compute", "end", "preempt", "report", "reset"]), max_size=25
    ),
    faults=strategies.lists(strategies.sampled_from(FAULTS), max_size=12),
)
def test_no_block_stays_held_after_any_actions_and_faults(
    route: Route, actions: list[str], faults: list[Fault]
) -> None:
    busy = BusyInstance(route)
    with contextlib.closing(busy.instance):
        busy.store.faults = faults
        for action in actions:
            getattr(busy, action)()
        busy.finish()
        scheduler, worker = busy.instance.scheduler, busy.instance.workers[0]
        assert busy.instance.blocks.held == [0] * NUM_BLOCKS
        assert (scheduler._pins, scheduler._requests, scheduler._short_loads) == ({}, {}, set())
        assert (len(scheduler._lookups), scheduler.has_pins, worker._saving) == (0, False, set())


def report_speeds(instance: Instance, *, load_seconds: float, compute_seconds: float) -> None:
    """Report to the scheduler four times how long a block takes to load, and to compute."""
    report = Report(loads=[(100, 100 * load_seconds)] * 4, steps=[(100 * BLOCK, 100 * compute_seconds)] * 4)
    instance.scheduler.on_report(report)


def test_blocks_are_computed_if_a_load_takes_longer(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(), [7, 3, 5, 1, 2, 9])
    report_speeds(second, load_seconds=1.0, compute_seconds=0.5)
    request = make_request(name="b")
    assert [second.match_request(request) for _ in range(30)] == [0] * 30, "decided once for all calls of vLLM"
    second.scheduler.on_allocation(request, lambda: [4, 8, 11, 10, 6, 0], 0)
    assert second.step({}, {}).requests == set()
    report_speeds(second, load_seconds=0.1, compute_seconds=0.5)
    assert second.match_request(make_request(name="c")) == 20
    (counts,) = second.scheduler.take_counts().values()
    assert (counts["decide compute"], counts["decide load"]) == (1, 1)


def test_decode_always_loads_blocks_of_a_prefill_instance(store: StorageBackend) -> None:
    with contextlib.closing(Instance(store)) as first, contextlib.closing(Instance(store, prefill_wait_s=9)) as second:
        first.compute(make_request(), [7, 3, 5, 1, 2, 9])
        report_speeds(second, load_seconds=1.0, compute_seconds=0.5)
        assert second.match_request(make_request(name="b")) == 20


def test_the_workers_report_the_duration_of_loads_and_of_steps_with_prompts(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(), [7, 3, 5, 1, 2, 9])
    request, table = make_request(name="b"), [4, 8, 11, 10, 6, 0]
    assert second.match_request(request) == 20
    second.scheduler.on_allocation(request, lambda: table, 20)
    second.begin({}, {})
    reports = Report()

    def has_loaded() -> bool:
        reports.add_report(second.workers[0].take_outcomes()[1])
        return bool(reports.loads)

    wait_until(has_loaded, "the load")
    ((num_blocks, seconds),) = reports.loads
    assert num_blocks == 5
    assert seconds > 0
    request.num_computed_tokens = 20
    assert second.scheduler.plan_step({"b": 2}, lambda _: table).num_tokens == 2
    request.num_computed_tokens = 22
    plan = second.scheduler.plan_step({"b": 1}, lambda _: table)
    assert plan.num_tokens == 0, "a step without prompts does not show how long prompts take"
    for num_tokens in (2, plan.num_tokens):
        second.workers[0].begin_step()
        second.workers[0].end_step(num_tokens)
    second.scheduler.on_report(reports)
    ((num_tokens, step_seconds),) = second.workers[0].take_outcomes()[1].steps
    assert num_tokens == 2
    assert step_seconds >= 0


class Refilled:
    """An instance with a request's blocks in its cache and in the pool, and the ``Holder`` that a ``Refill`` calls."""

    def __init__(self, store: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scheduler, "Refill", self._take_holder)
        self._store = store
        self._holders: list[Holder] = []
        self.instance = Instance(store)
        self.holder = self._holders[0]
        self.request, self.table = make_request(), [7, 3, 5, 1, 2, 9]
        self.instance.blocks.cache(self.request, self.table)
        self.instance.compute(self.request, self.table)
        self.names = self.request.block_hashes

    def _take_holder(self, pool: BlockPool, holder: Holder, on_blocks: Any, *, digests: Sequence[str]) -> Any:
        self._holders.append(holder)
        self.digests = digests
        return SimpleNamespace(close=lambda: None)

    def lose_all(self) -> None:
        """Remove all blocks from the pool."""
        for worker in self.instance.workers:
            assert self._store.clear(worker.namespace.prefix) is Status.OK

    def save_again(self) -> tuple[int, int]:
        """Return the answer to a ``Refill`` that offers all blocks, while the instance runs steps."""
        with ThreadPoolExecutor(1) as refill:
            answer = refill.submit(self.holder.save_again, self.names)
            wait_until(lambda: self.instance.step({}, {}) and answer.done(), "the end of the save")
            return answer.result()


@pytest.fixture
def refilled(store: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refilled]:
    made = Refilled(store, monkeypatch)
    with contextlib.closing(made.instance):
        yield made


def test_cached_blocks_that_the_pool_has_lost_are_saved_again(
    refilled: Refilled, two: tuple[Instance, Instance]
) -> None:
    assert refilled.holder.list_saved_blocks(9) == refilled.names
    refilled.lose_all()
    assert refilled.save_again() == (5, 5)
    other, request = two[0], make_request(name="b")
    assert other.match_request(request) == 20
    other.load(request, [4, 8, 11, 10, 6, 0])
    assert all(other.has(request, index, block) for index, block in enumerate([4, 8, 11, 10, 6]))


def test_blocks_with_new_contents_are_not_saved_again(refilled: Refilled) -> None:
    refilled.instance.blocks.blocks[5].block_hash = b"another's"
    refilled.lose_all()
    assert refilled.save_again() == (4, 4)
    assert refilled.instance.match_request(make_request(name="b")) == 8


def test_blocks_from_before_a_reset_are_not_saved_again(refilled: Refilled) -> None:
    refilled.instance.reset()
    assert refilled.save_again() == (0, 0)
    assert not refilled.holder.list_saved_blocks(9)


def test_blocks_from_before_an_operators_clear_are_not_saved_again(refilled: Refilled) -> None:
    assert refilled.digests == [worker.namespace.digest for worker in refilled.instance.workers]
    refilled.holder.withhold_blocks()
    assert refilled.save_again() == (0, 0)
    assert not refilled.holder.list_saved_blocks(9)


def test_blocks_that_are_saved_again_have_the_same_order_of_reuse_as_before(refilled: Refilled) -> None:
    refilled.save_again()
    refilled.instance.blocks.freed.clear()
    refilled.holder.end_round(refilled.names)
    refilled.instance.step({}, {})
    assert refilled.instance.blocks.freed == [2, 1, 5, 3, 7]
