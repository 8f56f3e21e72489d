"""The scheduler's half of the vLLM connector; ``test_halves.py`` tests both halves together."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as NotYet
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_backend import StorageBackend
from kvstore_backend.integrations.vllm import scheduler as module
from kvstore_backend.integrations.vllm.messages import Report
from kvstore_backend.integrations.vllm.scheduler import SchedulerHalf
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.faults.injector import Fault, FaultInjector
from tests.kvstore_backend.integrations.vllm.test_halves import (
    BEFORE_DECODE,
    BLOCK,
    NUM_BLOCKS,
    Blocks,
    Instance,
    Request,
    make_request,
)
from tests.support.waiting import wait_until

TABLE = [0, 1, 2, 3, 4, 5]


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


class Answer:
    """The future of a look-up: it has an answer, or a wait for it times out."""

    def __init__(self, clock: Clock, found: int | None = None, seconds: float = 0.0) -> None:
        self._clock = clock
        self._seconds = seconds
        self.found = found
        self.waited: list[float] = []

    def result(self, timeout: float) -> Any:
        self.waited.append(timeout)
        self._clock.now += self._seconds
        if self.found is None:
            raise NotYet
        return module._Found(self.found, None)

    def done(self) -> bool:
        return self.found is not None

    def cancel(self) -> bool:
        return False


class ControlledHalf:
    """A scheduler half with a ``Clock``. Its look-ups return ``Answer``s."""

    def __init__(self, instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.scheduler = instance.scheduler
        self.next: list[Answer] = []
        self.begun: list[tuple[int, int | None]] = []
        monkeypatch.setattr(module, "time", self.clock)
        monkeypatch.setattr(self.scheduler, "_begin_lookup", self._begin)

    def answer(self, found: int | None = None, seconds: float = 0.0) -> Answer:
        """Set the answer of the next look-up."""
        self.next.append(Answer(self.clock, found, seconds))
        return self.next[-1]

    def idle(self) -> None:
        """Run a step that computes no token."""
        self.scheduler.plan_step({}, lambda _: [])

    def _begin(self, wanted: Sequence[bytes], found_before: int | None = None) -> Answer:
        self.begun.append((len(wanted), found_before))
        return self.next.pop(0)


def begin_computing(scheduler: SchedulerHalf, request: Request, table: list[int]) -> None:
    """Give blocks to a request, and schedule it in a step that computes none of its blocks completely."""
    scheduler.on_allocation(request, lambda: table, 0)
    scheduler.plan_step({request.request_id: 1}, lambda _: table)


@pytest.fixture
def store() -> StorageBackend:
    return CheckedBackend(MemoryStore(1 << 20))


@pytest.fixture
def instance(store: StorageBackend) -> Iterator[Instance]:
    with contextlib.closing(Instance(store)) as made:
        yield made


@pytest.fixture
def half(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> ControlledHalf:
    return ControlledHalf(instance, monkeypatch)


@pytest.fixture
def decode(store: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlledHalf]:
    with contextlib.closing(Instance(store, prefill_wait_s=10.0)) as made:
        yield ControlledHalf(made, monkeypatch)


class TestLookUps:
    """A step waits at most 2 ms for answers. Later steps ask again for the missing ones."""

    def test_a_step_waits_two_milliseconds_for_all_answers_together(self, half: ControlledHalf) -> None:
        first, second = half.answer(None, 0.0015), half.answer(None, 0.1)
        assert half.scheduler.matched_tokens(make_request(name="a"), 0) is None
        assert half.scheduler.matched_tokens(make_request(name="b"), 0) is None
        assert first.waited == [0.002]
        assert second.waited == [pytest.approx(0.0005)]
        assert half.scheduler.matched_tokens(make_request(name="b"), 0) is None
        assert second.waited[1:] == [0.0], "the wait is never negative"
        half.idle()
        half.scheduler.matched_tokens(make_request(name="a"), 0)
        assert first.waited[1:] == [0.002], "the next step waits 2 ms again"

    def test_a_request_is_computed_if_its_look_up_takes_too_long(self, store: StorageBackend) -> None:
        """Four look-ups run at a time, and the others wait for them, so a slow pool would delay the last ones."""
        slow = FaultInjector(store, [Fault.HANGS] * 4)
        with contextlib.closing(Instance(slow)) as instance, pytest.MonkeyPatch.context() as patch:
            names = [f"r{number}" for number in range(6)]
            assert [instance.scheduler.matched_tokens(make_request(name=name), 0) for name in names] == [None] * 6
            wait_until(lambda: slow.calls.count("exists") == 4, "four look-ups that hang")
            answers = [instance.scheduler._lookups[name].answer for name in names]
            patch.setattr(module, "_LOOKUP_SECONDS", 0.0)
            patch.setattr(module, "_LOOKUP_BLOCKS", 1e9)
            for _ in range(2):
                assert [instance.scheduler.matched_tokens(make_request(name=name), 0) for name in names] == [0] * 6
            assert [answer.cancelled() for answer in answers] == [False] * 4 + [True] * 2
            slow.go_on()

    def test_the_limit_of_a_look_up_is_longer_for_several_ranks(
        self, store: StorageBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pools of the ranks are looked up one after another."""
        with contextlib.closing(Instance(store, ranks=2)) as two_ranks:
            half = ControlledHalf(two_ranks, monkeypatch)
            half.answer()
            matched = []
            for seconds in (0.0, 1.9, 0.2):
                half.clock.now += seconds
                matched.append(half.scheduler.matched_tokens(make_request(), 0))
            assert matched == [None, None, 0]

    def test_a_request_is_looked_up_once_however_often_vllm_calls(self, half: ControlledHalf) -> None:
        half.answer(3)
        assert [half.scheduler.matched_tokens(make_request(), 0) for _ in range(3)] == [12] * 3
        assert half.begun == [(5, None)]

    def test_new_computed_tokens_cause_a_new_look_up(self, half: ControlledHalf) -> None:
        half.answer(3)
        half.answer(2)
        assert half.scheduler.matched_tokens(make_request(), 0) == 12
        assert half.scheduler.matched_tokens(make_request(), 9) == 8
        assert half.begun == [(5, None), (3, None)]

    @pytest.mark.parametrize(("tokens", "computed"), [(4, 0), (8, 4), (5, 4), (22, 20)])
    def test_no_loadable_block_means_no_look_up(self, half: ControlledHalf, tokens: int, computed: int) -> None:
        assert half.scheduler.matched_tokens(make_request(tokens), computed) == 0
        assert half.begun == []

    def test_a_request_that_may_not_use_cached_tokens_is_not_looked_up(self, half: ControlledHalf) -> None:
        """With ``prompt_logprobs``, vLLM computes the whole prompt."""
        assert half.scheduler.matched_tokens(make_request(skip_reading_prefix_cache=True), 0) == 0
        assert half.begun == []

    @pytest.mark.parametrize(("found", "expected"), [(5, 16), (2, 4), (1, 0), (0, 0)])
    def test_drops_last_excludes_the_last_block_of_a_hit(
        self, store: StorageBackend, monkeypatch: pytest.MonkeyPatch, found: int, expected: int
    ) -> None:
        with contextlib.closing(Instance(store, drops_last=True)) as drafting:
            half = ControlledHalf(drafting, monkeypatch)
            half.answer(found)
            assert half.scheduler.matched_tokens(make_request(), 0) == expected
            assert half.begun == [(5, None)]

    def test_the_block_that_vllm_drops_from_its_own_hit_is_not_looked_up(
        self, store: StorageBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This is true also in decode, where a request waits for blocks of a prefill instance."""
        with contextlib.closing(Instance(store, drops_last=True, prefill_wait_s=10.0)) as drafting:
            half = ControlledHalf(drafting, monkeypatch)
            assert half.scheduler.matched_tokens(make_request(), 16) == 0
            assert half.begun == []
            half.answer(2)
            assert half.scheduler.matched_tokens(make_request(), 12) == 4

    def test_a_look_up_without_a_hit_counts_no_decision(self, half: ControlledHalf) -> None:
        half.answer(0)
        assert half.scheduler.matched_tokens(make_request(), 0) == 0
        assert half.scheduler.take_counts() == {}

    def test_look_ups_are_counted_with_seconds_and_outcomes(self, instance: Instance) -> None:
        assert instance.scheduler.num_lookups == 0
        instance.compute(make_request(10), TABLE)
        assert instance.match_request(make_request(name="b")) == 8
        assert instance.scheduler.num_lookups == 1
        (counts,) = instance.scheduler.take_counts().values()
        assert (counts["lookup ok"], counts["lookup absent"]) == (2, 3)
        assert 0 < counts["lookup seconds"] < 60.0

    def test_a_look_up_that_fails_is_a_miss(self, instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
        instance.compute(make_request(), TABLE)

        def fail(names: Sequence[bytes]) -> int:
            raise RuntimeError("this pool raises an exception, which no real pool does")

        monkeypatch.setattr(instance.scheduler._pools[0], "lookup", fail)
        assert instance.match_request(make_request(name="b")) == 0

    def test_after_a_rank_without_a_hit_no_further_rank_is_looked_up(self, store: StorageBackend) -> None:
        with contextlib.closing(Instance(store, ranks=2)) as two_ranks:
            looked_up: list[int] = []

            def look_up(names: Sequence[bytes], rank: int) -> int:
                looked_up.append(rank)
                return 0

            for rank, pool in enumerate(two_ranks.scheduler._pools):
                pool.lookup = functools.partial(look_up, rank=rank)  # type: ignore[method-assign]
            assert two_ranks.match_request(make_request()) == 0
            assert looked_up == [0]

    def test_a_half_without_namespaces_finds_and_saves_no_block(self) -> None:
        with contextlib.closing(SchedulerHalf(MemoryStore(1 << 20), BLOCK)) as half:
            assert not half._is_ready
            assert not half._may_save
            assert half.take_counts() == {}
            assert half.matched_tokens(make_request(), 0) == 0


class TestDecodeWaitsForPrefill:
    """Decode waits for blocks that a prefill instance saves."""

    def test_decode_looks_up_again_every_twenty_milliseconds(self, decode: ControlledHalf) -> None:
        decode.answer(1)
        decode.answer(2)
        request = make_request()
        assert decode.scheduler.matched_tokens(request, 0) is None
        decode.clock.now += 0.0199
        assert decode.scheduler.matched_tokens(request, 0) is None
        assert decode.begun == [(5, None)]
        decode.clock.now += 0.0002
        assert decode.scheduler.matched_tokens(request, 0) is None
        assert decode.begun == [(5, None), (5, 1)]
        assert decode.scheduler.matched_tokens(request, 0) is None
        assert len(decode.begun) == 2, "the next look-up follows after 20 ms"

    def test_decode_waits_for_a_slow_look_up_instead_of_beginning_another(
        self, store: StorageBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow = FaultInjector(store, [Fault.HANGS])
        with contextlib.closing(Instance(slow, prefill_wait_s=1000.0)) as decode:
            assert decode.scheduler.matched_tokens(make_request(), 0) is None
            wait_until(lambda: slow.calls.count("exists") == 1, "a look-up that hangs")
            monkeypatch.setattr(module, "_LOOKUP_SECONDS", 0.0)
            monkeypatch.setattr(module, "_LOOKUP_BLOCKS", 1e9)
            monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.0)
            assert [decode.scheduler.matched_tokens(make_request(), 0) for _ in range(3)] == [None] * 3
            assert decode.scheduler.num_lookups == 1
            slow.go_on()

    def test_a_slow_look_up_is_not_said_to_end_the_wait(
        self, decode: ControlledHalf, caplog: pytest.LogCaptureFixture
    ) -> None:
        decode.answer(None, 2.0)
        assert [decode.scheduler.matched_tokens(make_request(), 0) for _ in range(2)] == [None] * 2
        assert caplog.messages == []

    def test_the_wait_ends_prefill_wait_s_after_the_last_new_block(self, decode: ControlledHalf) -> None:
        answers = [decode.answer(1), *(decode.answer(found) for found in (2, 2, 2, 2))]
        request = make_request()
        assert decode.scheduler.matched_tokens(request, 0) is None
        decode.clock.now += 9.0
        assert decode.scheduler.matched_tokens(request, 0) is None
        assert decode.scheduler.matched_tokens(request, 0) is None, "the second block has arrived now"
        decode.clock.now += 9.9
        assert decode.scheduler.matched_tokens(request, 0) is None
        decode.clock.now += 0.2
        assert decode.scheduler.matched_tokens(request, 0) == 8
        assert answers[0].waited

    def test_the_end_of_the_wait_is_logged_once_however_often_vllm_calls(
        self, decode: ControlledHalf, caplog: pytest.LogCaptureFixture
    ) -> None:
        decode.answer(1)
        decode.scheduler.matched_tokens(make_request(), 0)
        decode.clock.now += 10.1
        assert [decode.scheduler.matched_tokens(make_request(), 0) for _ in range(3)] == [4] * 3
        assert [record.message.count("did not arrive") for record in caplog.records] == [1]

    def test_decode_waits_for_a_single_missing_block_but_not_for_none(self, decode: ControlledHalf) -> None:
        answer = decode.answer(4)
        assert decode.scheduler.matched_tokens(make_request(), 0) is None
        answer.found = 5
        assert decode.scheduler.matched_tokens(make_request(), 0) == 20

    def test_steps_without_work_sleep_while_a_request_waits(self, decode: ControlledHalf) -> None:
        decode.idle()
        assert decode.clock.slept == []
        decode.answer(1)
        decode.scheduler.matched_tokens(make_request(), 0)
        decode.idle()
        assert decode.clock.slept == [0.005]
        decode.idle()
        assert decode.clock.slept == [0.005], "vLLM did not ask in this step"

    @pytest.mark.parametrize("work", ["computes", "loads", "saves", "is held"])
    def test_steps_with_work_do_not_sleep(self, decode: ControlledHalf, work: str) -> None:
        request = make_request(name="b")
        decode.scheduler.on_allocation(request, lambda: TABLE, 0)
        if work == "loads":
            decode.scheduler._planned_loads.append(SimpleNamespace())  # type: ignore[arg-type]
        if work == "saves":
            decode.scheduler._planned_saves.append(SimpleNamespace())  # type: ignore[arg-type]
        if work == "is held":
            decode.scheduler._pin_blocks(request, [b"n"], [3], is_load=True)
        decode.answer(1)
        decode.scheduler.matched_tokens(make_request(), 0)
        decode.scheduler.plan_step({"b": 1} if work == "computes" else {}, lambda _: TABLE)
        assert decode.clock.slept == []


class TestLoads:
    """The planned loads, and their effect on later saves."""

    def test_a_load_has_only_the_matched_blocks(self, half: ControlledHalf) -> None:
        half.answer(3)
        request = make_request()
        matched = half.scheduler.matched_tokens(request, 5)
        assert matched == 12
        half.scheduler.on_allocation(request, lambda: [10, 11, 12, 13, 14, 15], matched)
        (load,) = half.scheduler.plan_step({}, lambda _: []).loads
        assert (list(load.blocks), load.names) == ([11, 12, 13], request.block_hashes[1:4])
        assert half.scheduler.plan_step({}, lambda _: []).loads == []

    def test_the_dropped_block_of_a_hit_is_saved_when_it_is_computed(self, store: StorageBackend) -> None:
        with contextlib.closing(Instance(store, drops_last=True)) as drafting:
            request = make_request(name="b")
            drafting.compute(make_request(), TABLE)
            table = [16, 17, 18, 19, 20, 21]
            assert drafting.load(request, table).requests == {"b"}
            assert [drafting.has(request, index, table[index]) for index in range(5)] == [True] * 4 + [False]
            request.num_computed_tokens = 16
            (save,) = drafting.begin({"b": 6}, {"b": table}).saves
            assert list(save.blocks) == [20]
            drafting.end_transfers()

    def test_only_as_many_found_blocks_are_loaded_as_vllm_has_allocated(self, half: ControlledHalf) -> None:
        half.answer(3)
        request = make_request()
        half.scheduler.matched_tokens(request, 0)
        half.scheduler.on_allocation(request, lambda: TABLE, 8)
        (load,) = half.scheduler.plan_step({}, lambda _: []).loads
        assert list(load.blocks) == [0, 1]

    @pytest.mark.parametrize(("found", "external"), [(3, 0), (None, 12)])
    def test_without_a_match_or_its_look_up_no_block_is_loaded(
        self, half: ControlledHalf, found: int | None, external: int
    ) -> None:
        request = make_request()
        if found is not None:
            half.answer(found)
            half.scheduler.matched_tokens(request, 0)
        half.scheduler.on_allocation(request, lambda: TABLE, external)
        assert half.scheduler.plan_step({}, lambda _: []).loads == []
        assert not half.scheduler.has_pins

    def test_loaded_blocks_are_not_saved_but_later_blocks_are(self, half: ControlledHalf) -> None:
        half.answer(3)
        request = make_request()
        matched = half.scheduler.matched_tokens(request, 0) or 0
        half.scheduler.on_allocation(request, lambda: TABLE, matched)
        (load,) = half.scheduler.plan_step({}, lambda _: []).loads
        half.scheduler.on_report(Report(ended=Counter({load.number: 1})))
        request.num_computed_tokens = 12
        (save,) = half.scheduler.plan_step({"a": 10}, lambda _: TABLE).saves
        assert list(save.blocks) == [3, 4]

    def test_after_a_short_load_all_blocks_are_saved(self, half: ControlledHalf) -> None:
        half.answer(3)
        request = make_request()
        matched = half.scheduler.matched_tokens(request, 0) or 0
        half.scheduler.on_allocation(request, lambda: TABLE, matched)
        (load,) = half.scheduler.plan_step({}, lambda _: []).loads
        half.scheduler.on_report(Report(ended=Counter({load.number: 1}), short={"a", "nobody"}))
        assert half.scheduler._short_loads == {"a"}
        (save,) = half.scheduler.plan_step({"a": 22}, lambda _: TABLE).saves
        assert list(save.blocks) == [0, 1, 2, 3, 4]
        half.scheduler.on_request_end(request, TABLE)
        assert half.scheduler._short_loads == set()

    def test_blocks_of_loads_do_not_count_for_the_limit_of_saves(self, half: ControlledHalf) -> None:
        half.answer(5)
        request = make_request()
        matched = half.scheduler.matched_tokens(request, 0) or 0
        half.scheduler.on_allocation(request, lambda: TABLE, matched)
        other, table = Request("b", list(range(100, 140))), list(range(10, 20))
        half.scheduler.on_allocation(other, lambda: table, 0)
        (save,) = half.scheduler.plan_step({"b": 40}, lambda _: table).saves
        assert len(save.blocks) == NUM_BLOCKS // 4

    def test_a_prefill_waits_for_its_saves_but_not_for_its_load(self, half: ControlledHalf) -> None:
        half.answer(4)
        request = make_request(max_tokens=1, kv_transfer_params=BEFORE_DECODE)
        matched = half.scheduler.matched_tokens(request, 0) or 0
        half.scheduler.on_allocation(request, lambda: TABLE, matched)
        request.num_computed_tokens = matched
        plan = half.scheduler.plan_step({"a": 6}, lambda _: TABLE)
        assert plan.awaited == [save.number for save in plan.saves]
        assert len(plan.loads) == 1

    def test_loading_requests_are_not_running(self, half: ControlledHalf, monkeypatch: pytest.MonkeyPatch) -> None:
        running: list[int] = []

        def decide(found: int, number: int) -> str:
            running.append(number)
            return "load"

        monkeypatch.setattr(half.scheduler._load_or_compute, "decide", decide)
        for name in ("a", "b", "c"):
            half.answer(3)
            request = make_request(name=name)
            matched = half.scheduler.matched_tokens(request, 0) or 0
            half.scheduler.on_allocation(request, lambda: TABLE, 0 if name == "a" else matched)
        assert running == [0, 1, 1]


class TestSaves:
    """The planned saves, and their times."""

    @pytest.mark.parametrize(
        ("tokens", "computed", "table", "num_saved"),
        [(20, 20, TABLE, 4), (21, 21, TABLE, 5), (30, 30, [0, 1, 2], 3), (30, 13, list(range(8)), 3)],
        ids=["last token in a block", "last token after a block", "all allocated blocks", "all computed blocks"],
    )
    def test_at_the_end_of_a_request_its_full_computed_blocks_are_saved(
        self, instance: Instance, tokens: int, computed: int, table: list[int], num_saved: int
    ) -> None:
        request = make_request(tokens)
        begin_computing(instance.scheduler, request, table)
        request.num_computed_tokens = computed
        instance.scheduler.on_request_end(request, table)
        (save,) = instance.scheduler.plan_step({}, lambda _: []).saves
        assert list(save.blocks) == table[:num_saved]

    def test_the_end_of_a_request_before_its_first_step_saves_no_block(self, instance: Instance) -> None:
        """Another connector may still load the blocks, inside vLLM's MultiConnector."""
        request = make_request()
        instance.scheduler.on_allocation(request, lambda: TABLE, 0)
        request.num_computed_tokens = 20
        instance.scheduler.on_request_end(request, TABLE)
        assert instance.scheduler.plan_step({}, lambda _: []).saves == []

    def test_blocks_without_a_hash_are_not_saved(self, instance: Instance) -> None:
        request = make_request(22)
        request.block_hashes = request.block_hashes[:2]
        instance.scheduler.on_allocation(request, lambda: TABLE, 0)
        (save,) = instance.scheduler.plan_step({"a": 22}, lambda _: TABLE).saves
        assert len(save.blocks) == 2

    def test_blocks_that_are_not_saved_at_the_end_are_counted_as_dropped(self, instance: Instance) -> None:
        request, table = make_request(4 * 20), list(range(20))
        begin_computing(instance.scheduler, request, table)
        request.num_computed_tokens = 80
        instance.scheduler.on_request_end(request, table)
        (counts,) = instance.scheduler.take_counts().values()
        assert counts == {"save dropped": 19 - NUM_BLOCKS // 4}

    def test_after_complete_saves_no_block_is_counted_as_dropped(self, instance: Instance) -> None:
        instance.compute(make_request(), TABLE)
        assert instance.scheduler.take_counts() == {}

    def test_a_request_without_blocks_can_end(self, instance: Instance) -> None:
        instance.scheduler.on_request_end(make_request(), [])
        assert not instance.scheduler.has_pins

    def test_saves_continue_for_five_seconds_after_the_pool_was_ready(
        self, instance: Instance, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock()
        monkeypatch.setattr(module, "time", clock)
        answers = [instance.scheduler._may_save]
        monkeypatch.setattr(SchedulerHalf, "_is_ready", False)
        for seconds in (4.99, 0.01):
            clock.now += seconds
            answers.append(instance.scheduler._may_save)
        assert answers == [True, True, False]

    def test_a_null_block_ends_the_saves_of_its_request(self, instance: Instance) -> None:
        instance.blocks.blocks[0].is_null = True
        request = make_request()
        instance.scheduler.on_allocation(request, lambda: TABLE, 0)
        assert instance.scheduler.plan_step({"a": 8}, lambda _: [0, 1]).saves == []
        request.num_computed_tokens = 8
        assert instance.scheduler.plan_step({"a": 14}, lambda _: TABLE).saves == []

    def test_blocks_with_tokens_that_the_next_step_writes_again_are_saved_later(self, store: StorageBackend) -> None:
        with contextlib.closing(Instance(store, num_rewritten=2)) as drafting:
            request = make_request()
            drafting.scheduler.on_allocation(request, lambda: TABLE, 0)
            (save,) = drafting.begin({"a": 16}, {"a": TABLE}).saves
            assert list(save.blocks) == TABLE[:3]
            request.num_computed_tokens = 16
            (save,) = drafting.begin({"a": 6}, {"a": TABLE}).saves
            assert list(save.blocks) == TABLE[3:5]
            drafting.end_transfers()

    def test_draft_tokens_of_a_step_do_not_count(self, store: StorageBackend) -> None:
        with contextlib.closing(Instance(store, num_rewritten=2)) as drafting:
            request = make_request(12)
            drafting.scheduler.on_allocation(request, lambda: TABLE, 0)
            (save,) = drafting.begin({"a": 15}, {"a": TABLE}).saves  # three of the tokens are drafts
            assert list(save.blocks) == TABLE[:2]
            drafting.end_transfers()

    def test_decode_does_not_wait_for_a_block_that_prefill_saves_later(self, store: StorageBackend) -> None:
        with (
            contextlib.closing(Instance(store, num_rewritten=2)) as prefill,
            contextlib.closing(Instance(store, num_rewritten=2, prefill_wait_s=100.0)) as decode,
        ):
            prefill.compute(make_request(17), TABLE)
            assert decode.match_request(make_request(17, "b")) == 12


class TestPins:
    """Blocks are held until every rank has reported the end of their transfer."""

    def test_blocks_are_freed_after_the_reports_of_all_ranks(self, store: StorageBackend) -> None:
        with contextlib.closing(Instance(store, ranks=2)) as instance:
            request = make_request()
            instance.scheduler.on_allocation(request, lambda: TABLE, 0)
            (save,) = instance.scheduler.plan_step({"a": 22}, lambda _: TABLE).saves
            held = []
            for _ in range(2):
                instance.scheduler.on_report(Report(ended=Counter({save.number: 1})))
                held.append((instance.scheduler.has_pins, sum(instance.blocks.held)))
            assert held == [(True, 5), (False, 0)]
            assert instance.blocks.freed == [4, 3, 2, 1, 0]

    def test_steps_continue_during_a_transfer_unless_it_hangs(
        self, instance: Instance, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        instance.scheduler._pin_blocks(make_request(), [b"n"], [3], is_load=False)
        assert instance.scheduler.is_moving
        monkeypatch.setattr(module, "_PUSH_SECONDS", 0.0)
        assert (instance.scheduler.is_moving, instance.scheduler.has_pins) == (False, True)

    def test_steps_continue_while_some_of_the_transfers_in_the_queue_of_a_slow_pool_end(
        self, instance: Instance, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock()
        monkeypatch.setattr(module, "time", clock)
        first, _ = (instance.scheduler._pin_blocks(None, [b"n"], [block], is_load=False) for block in (3, 4))
        clock.now += 29.0
        instance.scheduler.on_report(Report(ended=Counter({first.number: 1})))
        moving = []
        for seconds in (29.0, 2.0):
            clock.now += seconds
            moving.append(instance.scheduler.is_moving)
        assert moving == [True, False]

    def test_steps_continue_while_a_function_waits_for_the_next_step(self, instance: Instance) -> None:
        held = [instance.scheduler.is_moving]
        instance.scheduler._deferred.put(lambda: None)
        held.append(instance.scheduler.is_moving)
        instance.scheduler.plan_step({}, lambda _: [])
        held.append(instance.scheduler.is_moving)
        assert held == [False, True, False]


class TestRefill:
    """Blocks that the pool has lost are saved again."""

    def test_refill_begins_when_namespaces_and_blocks_are_known_and_ends_with_the_half(
        self, store: StorageBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun: list[object] = []
        closed: list[bool] = []

        def refill(pool: object, *more: object, **named: object) -> Any:
            begun.append(pool)
            return SimpleNamespace(close=lambda: closed.append(True))

        monkeypatch.setattr(module, "Refill", refill)
        with contextlib.closing(Instance(store)) as instance:
            assert begun == [instance.scheduler._pools[0]]
        assert closed == [True]

    @pytest.mark.parametrize("order", ["blocks first", "namespaces first"])
    def test_refill_begins_once_in_either_order_of_namespaces_and_blocks(
        self, instance: Instance, store: StorageBackend, monkeypatch: pytest.MonkeyPatch, order: str
    ) -> None:
        begun: list[object] = []

        def refill(*given: object, **named: object) -> Any:
            begun.append(given)
            return SimpleNamespace(close=lambda: None)

        monkeypatch.setattr(module, "Refill", refill)
        with contextlib.closing(SchedulerHalf(store, BLOCK)) as half:

            def bind() -> None:
                half.bind_blocks(Blocks())

            def learn() -> None:
                half.learn_namespaces([instance.workers[0].namespace])

            first, second = (bind, learn) if order == "blocks first" else (learn, bind)
            first()
            assert begun == []
            second()
            assert len(begun) == 1
            first()
            assert len(begun) == 1

    def test_an_instance_that_does_not_save_has_no_refill(
        self, store: StorageBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun: list[object] = []
        monkeypatch.setattr(module, "Refill", lambda *given: begun.append(given))
        with contextlib.closing(Instance(store, saves=False)):
            assert begun == []

    @pytest.mark.parametrize("may_save", [True, False])
    def test_without_blocks_or_a_ready_pool_save_again_ends_at_once(
        self, instance: Instance, monkeypatch: pytest.MonkeyPatch, may_save: bool
    ) -> None:
        monkeypatch.setattr(SchedulerHalf, "_may_save", may_save)
        ended: list[bool] = []
        blocks = [] if may_save else [3]
        instance.scheduler._save_again([b"n"] * len(blocks), blocks, lambda: ended.append(True))
        assert ended == [True]
        assert not instance.scheduler.has_pins

    def test_blocks_that_are_saved_again_count_for_the_limit_of_saves(self, instance: Instance) -> None:
        instance.scheduler._save_again([bytes([n]) * 32 for n in range(8)], list(range(8)), lambda: None)
        instance.scheduler.on_allocation(make_request(), lambda: [20, 21, 22, 23, 24, 25], 0)
        (save,) = instance.scheduler.plan_step({"a": 22}, lambda _: [20, 21, 22, 23, 24, 25]).saves
        assert list(save.blocks) == list(range(8))

    def test_the_refill_omits_blocks_of_adapters(self, instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
        lora = SimpleNamespace(lora_name="ad", lora_path="/ad")
        instance.scheduler.on_report(Report(adapters={("ad", "/ad"): [b"d" * 32]}))
        noted: list[object] = []
        assert instance.scheduler._cached is not None
        monkeypatch.setattr(instance.scheduler._cached, "note_blocks", lambda *given: noted.append(given))
        request = make_request(lora_request=lora)
        instance.scheduler.on_allocation(request, lambda: TABLE, 0)
        (save,) = instance.scheduler.plan_step({"a": 22}, lambda _: TABLE).saves
        assert save.adapter == ("ad", "/ad")
        assert noted == []


def test_forget_blocks_fails_if_vllms_cache_was_never_reset(instance: Instance) -> None:
    assert not instance.scheduler.forget_blocks()


def test_a_reset_forgets_look_ups(instance: Instance) -> None:
    instance.compute(make_request(), TABLE)
    assert instance.match_request(make_request(name="b")) == 20
    assert len(instance.scheduler._lookups) == 1
    assert instance.reset()
    assert len(instance.scheduler._lookups) == 0
    assert instance.match_request(make_request(name="b")) == 0


def test_vllms_reset_still_returns_whether_it_succeeded(instance: Instance) -> None:
    assert instance.blocks.reset_prefix_cache() is True
    instance.blocks.in_use = True
    assert instance.blocks.reset_prefix_cache() is False


def test_a_block_pool_without_a_reset_is_accepted(store: StorageBackend) -> None:
    with contextlib.closing(SchedulerHalf(store, BLOCK)) as half:
        half.bind_blocks(SimpleNamespace(blocks=[]))
        assert not half.forget_blocks()


@pytest.mark.parametrize(("tokens", "is_prefill"), [(1, True), (2, False)])
def test_only_a_request_for_one_token_is_a_prefill(store: StorageBackend, tokens: int, is_prefill: bool) -> None:
    with contextlib.closing(Instance(store, loads=False)) as producer:
        request = make_request(max_tokens=tokens)
        producer.scheduler.on_allocation(request, lambda: TABLE, 0)
        assert bool(producer.scheduler.plan_step({"a": 22}, lambda _: TABLE).awaited) is is_prefill


def test_a_prefill_waits_only_for_its_own_saves(instance: Instance) -> None:
    other = Request("other", list(range(100, 122)))
    instance.scheduler.on_allocation(other, lambda: [10, 11, 12, 13, 14, 15], 0)
    request = make_request(max_tokens=1, kv_transfer_params=BEFORE_DECODE)
    instance.scheduler.on_allocation(request, lambda: TABLE, 0)
    tables = {"a": TABLE, "other": [10, 11, 12, 13, 14, 15]}
    plan = instance.scheduler.plan_step({"other": 22, "a": 22}, tables.__getitem__)
    assert plan.awaited == [save.number for save in plan.saves if save.request_id == "a"]
    assert len(plan.saves) == 2


def test_a_step_of_an_unknown_request_plans_no_transfer(instance: Instance) -> None:
    plan = instance.scheduler.plan_step({"nobody": 4}, lambda _: TABLE)
    assert (plan.loads, plan.saves, plan.awaited, plan.num_tokens) == ([], [], [], 0)


def test_a_step_with_the_last_token_of_a_prompt_counts_as_a_step_with_a_prompt(instance: Instance) -> None:
    request = make_request(22, num_computed_tokens=21)
    instance.scheduler.on_allocation(request, lambda: TABLE, 0)
    assert instance.scheduler.plan_step({"a": 1}, lambda _: TABLE).num_tokens == 1


class TestClosing:
    """The end of an instance waits only for a short time."""

    def test_close_abandons_hanging_look_ups_and_cancels_those_that_wait(self) -> None:
        store = FaultInjector(CheckedBackend(MemoryStore(1 << 20)), [Fault.HANGS] * 4)
        instance = Instance(store)
        names = [f"r{number}" for number in range(6)]
        for name in names:
            instance.scheduler.matched_tokens(make_request(name=name), 0)
        wait_until(lambda: store.calls.count("exists") == 4, "four look-ups that hang")
        answers = [instance.scheduler._lookups[name].answer for name in names]
        ended = threading.Thread(target=instance.scheduler.close, daemon=True)
        ended.start()
        ended.join(10.0)
        assert not ended.is_alive()
        assert [answer.cancelled() for answer in answers] == [False] * 4 + [True] * 2
        store.go_on()
        for worker in instance.workers:
            worker.close()

    def test_a_daemon_thread_closes_the_store(self, monkeypatch: pytest.MonkeyPatch) -> None:
        is_daemon: list[bool] = []
        half = SchedulerHalf(MemoryStore(1 << 20), BLOCK)
        monkeypatch.setattr(half._backend, "close", lambda: is_daemon.append(threading.current_thread().daemon))
        half.close()
        assert is_daemon == [True]


def test_a_repeated_look_up_counts_only_new_blocks(instance: Instance) -> None:
    instance.compute(make_request(), TABLE)
    look_up: Callable[..., Any] = instance.scheduler._look_up
    for before, expected in ((2, 3), (7, 0)):
        assert look_up(make_request().block_hashes, before) == (5, None)
        (counts,) = instance.scheduler.take_counts().values() or [{}]
        assert counts.get("lookup ok", 0) == expected
        assert "lookup absent" not in counts


class TestStoredBlocks:
    """The blocks that are reported as stored in the pool, for KV events."""

    def test_blocks_are_reported_once_after_all_ranks_have_stored_them(self, store: StorageBackend) -> None:
        with contextlib.closing(Instance(store, ranks=2, reports_stored=True)) as instance:
            request = make_request(22)
            instance.compute(request, TABLE)
            assert instance.scheduler.take_stored() == [(request.block_hashes, None)]
            assert instance.scheduler.take_stored() == []

    def test_the_report_of_later_blocks_has_the_hash_of_the_block_before_them(self, store: StorageBackend) -> None:
        with contextlib.closing(Instance(store, reports_stored=True)) as instance:
            request = make_request(22)
            instance.scheduler.on_allocation(request, lambda: TABLE, 0)
            for count in (8, 12):
                instance.step({"a": count}, {"a": TABLE})
                request.num_computed_tokens += count
            hashes = request.block_hashes
            assert instance.scheduler.take_stored() == [(hashes[:2], None), (hashes[2:5], hashes[1])]

    def test_blocks_that_a_rank_could_not_store_are_not_reported(self, store: StorageBackend) -> None:
        faulty = FaultInjector(store, [Fault.FAILED] * 100)
        with contextlib.closing(Instance(faulty, reports_stored=True)) as instance:
            instance.compute(make_request(22), TABLE)
            assert instance.scheduler.take_stored() == []

    def test_without_reports_stored_no_block_is_reported(self, instance: Instance) -> None:
        instance.compute(make_request(22), TABLE)
        assert instance.scheduler.take_stored() == []

    def test_blocks_of_changed_weights_are_not_reported(self, store: StorageBackend) -> None:
        with contextlib.closing(Instance(store, reports_stored=True)) as instance:
            instance.reset()
            instance.compute(make_request(22), TABLE)
            assert instance.scheduler.take_stored() == []
