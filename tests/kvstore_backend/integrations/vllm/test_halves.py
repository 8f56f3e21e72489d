"""The vLLM connector's two halves over a real store, driven as vLLM's scheduler and worker drive them.

vLLM itself is too large for CI: ``benchmarks/vllm_connector.py`` runs the connector in it, and
``test_connector.py`` compares it with the calls of the installed vLLM, where one is installed.
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
    """One of vLLM's blocks, a number here, with the hash of its contents while they are cached."""

    block_hash: bytes | None = None
    is_null = False


class Blocks:
    """vLLM's block pool, as far as reference counts, hashes and the order of reuse go."""

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(NUM_BLOCKS)]
        self.freed: list[int] = []
        """Blocks in the order they came back."""
        self.held = [0] * NUM_BLOCKS
        self.in_use = False
        """Whether requests hold blocks, too."""

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
        """Know the contents of a request's blocks by their hashes."""
        for block_hash, block in zip(request.block_hashes, table, strict=False):
            self.blocks[block].block_hash = block_hash


@dataclass
class Request:
    """vLLM's request, as far as the connector looks at it."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    salt: str = ""
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
    """One vLLM instance: KV memory, a scheduler half, and one worker half for each rank."""

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
        """Have it plan this instance's steps, from the first on."""
        self.scheduler = scheduler
        scheduler.learn_namespaces([worker.namespace for worker in self.workers])
        scheduler.bind_blocks(self.blocks)

    def match_request(self, request: Request, num_computed: int = 0) -> int:
        """The scheduler's answer once the look-up has ended."""
        answers: list[int | None] = []

        def has_answer() -> bool:
            answers.append(self.scheduler.matched_tokens(request, num_computed))
            return answers[-1] is not None

        wait_until(has_answer, "a look-up")
        assert answers[-1] is not None
        return answers[-1]

    def step(self, scheduled: dict[str, int], tables: dict[str, list[int]]) -> Loaded:
        """One step of the engine; ends when all transfers it began have been reported."""
        self.begin(scheduled, tables)
        return self.end_transfers()

    def reset(self, *, with_connector: bool = True) -> bool:
        """vLLM's ``reset_prefix_cache``: its own cache, then the connector's."""
        is_reset: bool = self.blocks.reset_prefix_cache()
        return (self.scheduler.forget_blocks() and is_reset) if with_connector else is_reset

    def begin(self, scheduled: dict[str, int], tables: dict[str, list[int]]) -> Plan:
        """The step's plan, given to the workers as vLLM does: pickled."""
        plan: Plan = pickle.loads(pickle.dumps(self.scheduler.plan_step(scheduled, tables.__getitem__)))
        for worker in self.workers:
            worker.start_loads(plan.loads)
            worker.start_saves(plan.saves)
            worker.wait_for_saves(plan.awaited)
        return plan

    def end_transfers(self) -> Loaded:
        """Steps without work, until nothing is pinned."""
        total = Loaded()
        wait_until(lambda: self.idle_step(total), "all transfers")
        return total

    def idle_step(self, total: Loaded) -> bool:
        """One step without work; whether nothing is pinned after it."""
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
        """Compute all of a request at once: its KV is a function of its hashes; then finish it."""
        self.scheduler.on_allocation(request, lambda: table, 0)
        for block_hash, block in zip(request.block_hashes, table, strict=False):
            for layer, tensor in enumerate(self.kv):
                tensor[block] = content(block_hash, layer)
        self.step({request.request_id: request.num_tokens - request.num_computed_tokens}, {request.request_id: table})
        request.num_computed_tokens = request.num_tokens
        self.scheduler.on_request_end(request, table)
        self.end_transfers()

    def load(self, request: Request, table: list[int], num_computed: int = 0) -> Loaded:
        """Load the matched blocks into the request's."""
        matched = self.match_request(request, num_computed)
        self.scheduler.on_allocation(request, lambda: table, matched)
        return self.step({}, {})

    def has(self, request: Request, index: int, block: int) -> bool:
        """Whether ``block`` holds the KV of the request's block ``index``."""
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


def test_what_one_instance_computes_another_loads(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(), [7, 3, 5, 1, 2, 9])
    request = make_request(name="b")
    assert second.match_request(request) == 20
    loaded = second.load(request, [4, 8, 11, 10, 6, 0])
    assert (loaded.requests, loaded.blocks, loaded.failed) == ({"b"}, set(), set())
    assert all(second.has(request, index, block) for index, block in enumerate([4, 8, 11, 10, 6]))


def test_prompts_with_images_use_no_pool_where_chunks_decide_their_kv(store: StorageBackend) -> None:
    with (
        contextlib.closing(Instance(store, skips_media=True)) as first,
        contextlib.closing(Instance(store, skips_media=True)) as second,
    ):
        table = [7, 3, 5, 1, 2, 9]
        first.compute(make_request(mm_features=["an image"]), table)
        assert second.match_request(make_request(name="b")) == 0, "nothing was saved"
        first.compute(make_request(name="c"), table)
        assert second.match_request(make_request(name="d", mm_features=["an image"])) == 0
        assert second.match_request(make_request(name="e")) == 20


def test_what_the_instance_has_itself_is_not_asked_for(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(), [0, 1, 2, 3, 4, 5])
    request = make_request(name="b")
    assert second.match_request(request, num_computed=8) == 12
    second.load(request, [20, 21, 22, 23, 24, 25], num_computed=8)
    assert not second.has(request, 1, 21)
    assert all(second.has(request, index, 20 + index) for index in (2, 3, 4))


def test_chunks_of_a_prompt_are_saved_as_they_become_full(two: tuple[Instance, Instance]) -> None:
    first, second = two
    request, table = make_request(), [0, 1, 2, 3, 4, 5]
    first.scheduler.on_allocation(request, lambda: table, 0)
    first.step({"a": 10}, {"a": table})
    assert second.match_request(make_request(name="early")) == 8
    request.num_computed_tokens = 10
    first.step({"a": 10}, {"a": table})
    assert second.match_request(make_request(name="late")) == 20


def test_a_request_that_was_preempted_loads_its_own_blocks_into_others(two: tuple[Instance, Instance]) -> None:
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


def test_requests_of_another_salt_find_nothing(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(salt="mine"), [0, 1, 2, 3, 4, 5])
    assert second.match_request(make_request(salt="yours")) == 0


def test_instances_of_another_block_size_find_nothing(store: StorageBackend) -> None:
    with contextlib.closing(Instance(store)) as first, contextlib.closing(Instance(store, block_size=8)) as second:
        first.compute(make_request(), [0, 1, 2, 3, 4, 5])
        assert second.match_request(make_request()) == 0


def test_a_block_counts_only_where_every_rank_has_it(store: StorageBackend) -> None:
    with contextlib.closing(Instance(store, ranks=2)) as two_ranks:
        two_ranks.compute(make_request(), [0, 1, 2, 3, 4, 5])
        lost = two_ranks.workers[1].namespace.key(make_request().block_hashes[2])
        assert two_ranks.match_request(make_request(name="b")) == 20
        store.remove([lost])
        assert two_ranks.match_request(make_request(name="c")) == 8


def test_a_request_that_runs_at_a_reset_saves_nothing_under_the_names_of_after_it(
    two: tuple[Instance, Instance],
) -> None:
    first, _ = two
    request, table = make_request(), [0, 1, 2, 3, 4, 5]
    first.scheduler.on_allocation(request, lambda: table, 0)
    first.step({"a": 10}, {"a": table})
    assert first.reset(), "vLLM has preempted it, so that its own cache is empty"
    request.num_computed_tokens = 10
    assert first.begin({"a": 12}, {"a": table}).saves == []
    request.num_computed_tokens = 22
    first.scheduler.on_request_end(request, table)
    assert first.begin({}, {}).saves == []
    first.compute(make_request(name="b"), [6, 7, 8, 9, 10, 11])
    assert first.match_request(make_request(name="c")) == 20, "a request that began after it is shared"


def test_where_vllms_own_cache_keeps_blocks_of_before_a_reset_nothing_is_loaded_or_saved_until_the_next(
    two: tuple[Instance, Instance],
) -> None:
    first, _ = two
    first.blocks.in_use = True
    assert not first.reset(), "vLLM is told that the reset has failed"
    first.compute(make_request(name="b"), [0, 1, 2, 3, 4, 5])
    assert first.match_request(make_request(name="c")) == 0
    first.blocks.in_use = False
    assert first.reset()
    assert first.match_request(make_request(name="d")) == 0
    first.compute(make_request(name="e"), [0, 1, 2, 3, 4, 5])
    assert first.match_request(make_request(name="f")) == 20


def test_a_reset_of_vllms_own_cache_long_ago_does_not_vouch_for_it(two: tuple[Instance, Instance]) -> None:
    first, _ = two
    assert first.reset(with_connector=False)
    first.compute(make_request(), [0, 1, 2, 3, 4, 5])
    assert not first.scheduler.forget_blocks()


def test_saves_under_way_do_not_keep_vllm_from_resetting_its_cache(hanging: Hanging) -> None:
    second = hanging.instance
    hanging.store.faults = [Fault.HANGS]
    request, table = Request("b", list(range(100, 122))), [10, 11, 12, 13, 14, 15]
    second.scheduler.on_allocation(request, lambda: table, 0)
    second.begin({"b": 22}, {"b": table})
    assert second.blocks.reset_prefix_cache()
    assert [second.blocks.held[block] for block in table] == [1, 1, 1, 1, 1, 0], "a save still reads them"
    hanging.store.go_on()
    second.end_transfers()
    assert second.blocks.held == [0] * NUM_BLOCKS


def test_a_reset_that_raises_leaves_blocks_of_transfers_held(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_block_evicted_after_the_look_up_is_computed_and_what_came_before_is_kept(
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
    assert second.match_request(request) == 0, "the same load would be tried again and again"


@dataclass
class Hanging:
    """An instance whose next read hangs until ``store.go_on()``, and is given up."""

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


def test_blocks_of_a_read_that_was_given_up_stay_pinned_until_it_ends(hanging: Hanging) -> None:
    second, request = hanging.instance, make_request(name="b")
    matched = second.match_request(request)
    second.scheduler.on_allocation(request, lambda: [10, 11, 12, 13, 14, 15], matched)
    hanging.store.faults = [Fault.HANGS]
    second.begin({}, {})
    total = Loaded()
    wait_until(lambda: second.idle_step(total) or bool(total.requests), "the end of the load")
    assert (total.requests, total.blocks, total.failed) == ({"b"}, set(), {"b"}), "it starts anew in other blocks"
    assert all(second.blocks.held[block] == 1 for block in range(10, 15))
    assert second.match_request(request) == 0
    hanging.store.go_on()
    second.end_transfers()
    assert second.blocks.held == [0] * NUM_BLOCKS
    assert all(bool((tensor[10:15] == 0).all()) for tensor in second.kv), "what the late read left is cleared"


def test_blocks_of_a_write_that_was_given_up_stay_pinned_until_it_ends(hanging: Hanging) -> None:
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
    """A store that takes its time to write."""

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        time.sleep(0.2)
        return super().put(keys, values)


BEFORE_DECODE = {"do_remote_decode": True}


def prefill(instance: Instance, request: Request, table: list[int]) -> Plan:
    """The step that computes the rest of a request; ends when its tokens may be told."""
    if not request.num_computed_tokens:
        instance.scheduler.on_allocation(request, lambda: table, 0)
    count = request.num_tokens - request.num_computed_tokens
    return instance.begin({request.request_id: count}, {request.request_id: table})


def test_a_request_for_one_token_is_answered_when_its_blocks_are_in_the_pool(store: StorageBackend) -> None:
    with contextlib.closing(Instance(SlowWrites(store))) as first, contextlib.closing(Instance(store)) as second:
        request = make_request(max_tokens=1, kv_transfer_params=BEFORE_DECODE)
        first.scheduler.on_allocation(request, lambda: [0, 1, 2, 3, 4, 5], 0)
        assert first.begin({"a": 10}, {"a": [0, 1, 2, 3, 4, 5]}).awaited == []
        request.num_computed_tokens = 10
        plan = prefill(first, request, [0, 1, 2, 3, 4, 5])
        assert len(plan.awaited) == 2, "the save of its first chunk has not ended either"
        assert second.match_request(make_request(name="b")) == 20
        longer = make_request(name="c", kv_transfer_params=BEFORE_DECODE)
        assert prefill(first, longer, [6, 7, 8, 9, 10, 11]).awaited == []


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": True}])
def test_a_client_that_asks_for_one_token_makes_nobody_wait_for_the_pool(
    store: StorageBackend, params: dict[str, Any] | None
) -> None:
    with contextlib.closing(Instance(SlowWrites(store))) as instance:
        plan = prefill(instance, make_request(max_tokens=1, kv_transfer_params=params), [0, 1, 2, 3, 4, 5])
        assert (len(plan.saves), plan.awaited) == (1, [])


def test_a_look_up_that_came_too_late_keeps_no_block_from_the_pool(store: StorageBackend) -> None:
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


def test_an_answer_does_not_wait_for_a_pool_that_hangs(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_backend.integrations.vllm.worker._SAVE_WAIT_SECONDS", 0.05)
    second = hanging.instance
    hanging.store.faults = [Fault.HANGS]
    request = Request("b", list(range(100, 122)), max_tokens=1, kv_transfer_params=BEFORE_DECODE)
    prefill(second, request, [10, 11, 12, 13, 14, 15])
    assert not second.workers[0].wait_for_saves(second.scheduler._pins)
    hanging.store.go_on()
    second.end_transfers()
    assert second.workers[0].wait_for_saves([1])


def test_a_request_that_is_aborted_while_it_loads_saves_nothing(two: tuple[Instance, Instance]) -> None:
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


class TestDecodeBesidePrefill:
    """Both are given a request at once: decode waits for the blocks that prefill saves."""

    @pytest.fixture
    def pair(self, store: StorageBackend) -> Iterator[tuple[Instance, Instance]]:
        with contextlib.closing(Instance(store)) as first, contextlib.closing(decode_instance(store, 60.0)) as second:
            yield first, second

    def test_it_waits_until_all_blocks_of_the_prompt_are_there(self, pair: tuple[Instance, Instance]) -> None:
        prefill, decode = pair
        request, table, waiting = make_request(), [0, 1, 2, 3, 4, 5], make_request(name="b")
        keeps_waiting(decode, waiting)
        prefill.scheduler.on_allocation(request, lambda: table, 0)
        prefill.step({"a": 12}, {"a": table})
        keeps_waiting(decode, waiting)
        request.num_computed_tokens = 12
        prefill.step({"a": 10}, {"a": table})
        assert decode.match_request(waiting) == 20

    def test_when_nothing_comes_it_takes_what_is_there_and_says_so(
        self, store: StorageBackend, caplog: pytest.LogCaptureFixture
    ) -> None:
        with contextlib.closing(Instance(store)) as first, contextlib.closing(decode_instance(store, 0.1)) as second:
            first.compute(make_request(10), [0, 1, 2])
            assert second.match_request(make_request(name="b")) == 8
        assert "Request b: 3 blocks of its prompt did not arrive from a prefill instance" in caplog.text

    def test_a_request_with_an_answer_begun_does_not_wait(self, pair: tuple[Instance, Instance]) -> None:
        prefill, decode = pair
        prefill.compute(make_request(10), [0, 1, 2])
        assert decode.match_request(make_request(name="b", num_output_tokens=12)) == 8

    def test_it_does_not_wait_for_a_pool_that_is_away(self) -> None:
        faulty = FaultInjector(MemoryStore(1 << 20))
        guarded = GuardedBackend(lambda: CheckedBackend(faulty))
        assert guarded.wait_ready(10.0)
        with contextlib.closing(decode_instance(guarded, 60.0)) as instance:
            keeps_waiting(instance, waiting := make_request(name="b"))
            faulty.faults = [Fault.FAILED] * 100
            assert instance.match_request(waiting) == 0

    def test_an_aborted_request_is_forgotten(self, pair: tuple[Instance, Instance]) -> None:
        _, decode = pair
        keeps_waiting(decode, waiting := make_request(name="b"))
        decode.scheduler.on_request_end(waiting, [])
        assert len(decode.scheduler._lookups) == 0


def decode_instance(store: StorageBackend, prefill_wait_s: float) -> Instance:
    return Instance(store, prefill_wait_s=prefill_wait_s)


def keeps_waiting(instance: Instance, request: Request) -> None:
    """Looked up twice and more, and still not known."""
    answers: list[object] = []

    def looked_up_again() -> bool:
        instance.scheduler.plan_step({}, dict[str, list[int]]().__getitem__)
        before = instance.scheduler.num_lookups
        answers.append(instance.scheduler.matched_tokens(request, 0))
        return instance.scheduler.num_lookups > before

    for which in ("first", "second", "third"):
        wait_until(looked_up_again, f"the {which} look-up")
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


class Life:
    """An instance whose requests begin, load, compute, end and are preempted in any order, over a faulty store."""

    def __init__(self, route: Route) -> None:
        self.store = FaultInjector(CheckedBackend(MemoryStore(1 << 20)))
        self.instance = Instance(self.store, route=route)
        self._requests: dict[str, tuple[Request, list[int]]] = {}
        self._number = 0
        self._free = list(range(NUM_BLOCKS))

    def begin(self) -> None:
        """A request of one of two prompts asks for its blocks, and gets them if there are any."""
        if len(self._free) < 6:
            return
        self._number += 1
        request = Request(str(self._number), [self._number % 2, *range(1, 22)])
        matched = self.instance.match_request(request)
        table = [self._free.pop() for _ in range(6)]
        self._requests[request.request_id] = request, table
        self.instance.scheduler.on_allocation(request, lambda: table, matched)

    def compute(self) -> None:
        """One step of six tokens for every request."""
        running = {name: (request, table) for name, (request, table) in self._requests.items()}
        counts = {name: min(6, 22 - request.num_computed_tokens) for name, (request, _) in running.items()}
        self.instance.begin(counts, {name: table for name, (_, table) in running.items()})
        for name, (request, _) in running.items():
            request.num_computed_tokens += counts[name]

    def end(self) -> None:
        """The oldest request ends, or is aborted, wherever it is."""
        if self._requests:
            request, table = self._requests.pop(next(iter(self._requests)))
            self.instance.scheduler.on_request_end(request, table)
            self._free += [block for block in table if not self.instance.blocks.held[block]]

    def preempt(self) -> None:
        """The last one loses its blocks, and gets others."""
        if self._requests and len(self._free) >= 6:
            name, (request, _) = self._requests.popitem()
            table = [self._free.pop() for _ in range(6)]
            request.num_computed_tokens = 0
            self._requests[name] = request, table
            self.instance.scheduler.on_allocation(request, lambda: table, 0)

    def report(self) -> None:
        """What workers have to say arrives."""
        self.instance.idle_step(Loaded())

    def reset(self) -> None:
        """vLLM's caches are reset."""
        self.instance.reset()

    def finish(self) -> None:
        """All requests end, and the store does what it was asked."""
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
def test_whatever_happens_to_requests_and_the_pool_nothing_stays_held(
    route: Route, actions: list[str], faults: list[Fault]
) -> None:
    life = Life(route)
    with contextlib.closing(life.instance):
        life.store.faults = faults
        for action in actions:
            getattr(life, action)()
        life.finish()
        scheduler, worker = life.instance.scheduler, life.instance.workers[0]
        assert life.instance.blocks.held == [0] * NUM_BLOCKS
        assert (scheduler._pins, scheduler._requests, scheduler._short_loads) == ({}, {}, set())
        assert (len(scheduler._lookups), scheduler.has_pins, worker._saving) == (0, False, set())


def learn_figures(instance: Instance, *, load_seconds: float, compute_seconds: float) -> None:
    """Tell the scheduler how long loading a block has taken, four times, and computing one."""
    report = Report(loads=[(100, 100 * load_seconds)] * 4, steps=[(100 * BLOCK, 100 * compute_seconds)] * 4)
    instance.scheduler.on_report(report)


def test_what_takes_longer_to_load_than_to_compute_is_computed(two: tuple[Instance, Instance]) -> None:
    first, second = two
    first.compute(make_request(), [7, 3, 5, 1, 2, 9])
    learn_figures(second, load_seconds=1.0, compute_seconds=0.5)
    request = make_request(name="b")
    assert [second.match_request(request) for _ in range(30)] == [0] * 30, "decided once, however often vLLM asks"
    second.scheduler.on_allocation(request, lambda: [4, 8, 11, 10, 6, 0], 0)
    assert second.step({}, {}).requests == set()
    learn_figures(second, load_seconds=0.1, compute_seconds=0.5)
    assert second.match_request(make_request(name="c")) == 20
    (counts,) = second.scheduler.take_counts().values()
    assert (counts["decide compute"], counts["decide load"]) == (1, 1)


def test_blocks_that_a_prefill_instance_computed_for_this_one_are_loaded(store: StorageBackend) -> None:
    with contextlib.closing(Instance(store)) as first, contextlib.closing(Instance(store, prefill_wait_s=9)) as second:
        first.compute(make_request(), [7, 3, 5, 1, 2, 9])
        learn_figures(second, load_seconds=1.0, compute_seconds=0.5)
        assert second.match_request(make_request(name="b")) == 20


def test_the_scheduler_hears_how_long_loads_and_steps_with_prompts_took(two: tuple[Instance, Instance]) -> None:
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
    assert plan.num_tokens == 0, "a step without prompts says little of computing them"
    for num_tokens in (2, plan.num_tokens):
        second.workers[0].begin_step()
        second.workers[0].end_step(num_tokens)
    second.scheduler.on_report(reports)
    ((num_tokens, step_seconds),) = second.workers[0].take_outcomes()[1].steps
    assert num_tokens == 2
    assert step_seconds >= 0


class Refilled:
    """An instance with a request's blocks in its cache and in the pool, and its answers to a ``Refill``."""

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
        """Let the pool forget everything."""
        for worker in self.instance.workers:
            assert self._store.clear(worker.namespace.prefix) is Status.OK

    def save_again(self) -> tuple[int, int]:
        """The answer to a ``Refill`` that offers all blocks, while the instance makes steps."""
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


def test_blocks_that_vllm_has_used_for_something_else_are_not_saved_again(refilled: Refilled) -> None:
    refilled.instance.blocks.blocks[5].block_hash = b"another's"
    refilled.lose_all()
    assert refilled.save_again() == (4, 4)
    assert refilled.instance.match_request(make_request(name="b")) == 8


def test_blocks_of_before_new_weights_are_not_saved_again(refilled: Refilled) -> None:
    refilled.instance.reset()
    assert refilled.save_again() == (0, 0)
    assert not refilled.holder.list_saved_blocks(9)


def test_blocks_of_before_an_operators_clear_are_not_saved_again(refilled: Refilled) -> None:
    assert refilled.digests == [worker.namespace.digest for worker in refilled.instance.workers]
    refilled.holder.withhold_blocks()
    assert refilled.save_again() == (0, 0)
    assert not refilled.holder.list_saved_blocks(9)


def test_blocks_that_were_saved_again_are_reused_in_the_order_of_before(refilled: Refilled) -> None:
    refilled.save_again()
    refilled.instance.blocks.freed.clear()
    refilled.holder.end_round(refilled.names)
    refilled.instance.step({}, {})
    assert refilled.instance.blocks.freed == [2, 1, 5, 3, 7]
