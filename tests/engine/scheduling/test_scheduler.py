"""The scheduler without tensors: a table of written prefixes simulates KV memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.request import BlockTable, Request, SamplingParams, Sequence, State
from engine.scheduling.scheduler import Chunk, Reservation, Scheduler
from kvstore_backend.groups import Group

BLOCK = 4
Prefix = tuple[str, tuple[int, ...]]
"""The KV of a token depends on the salt and on all tokens up to it."""


def sequence_of(prompt: list[int], max_tokens: int, name: str = "r", salt: str = "") -> Sequence:
    return Sequence(Request(name, tuple(prompt), SamplingParams(max_tokens), cache_salt=salt), BLOCK)


def scheduler_of(
    num_blocks: int,
    *,
    max_num_seqs: int = 4,
    budget: int = 8,
    max_model_len: int = 2 * BLOCK,
    prefix_caching: bool = True,
    pool: bool = False,
    groups: SequenceOf[Group] = (),
) -> Scheduler:
    blocks = BlockManager(num_blocks)
    return Scheduler(
        blocks,
        BLOCK,
        max_num_seqs,
        budget,
        max_model_len=max_model_len,
        prefix_caching=prefix_caching,
        pool=pool,
        groups=groups,
    )


class Memory:
    """Simulated KV memory: the prefix of each slot of each block. The state of a block is in its first slot."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._blocks = scheduler.blocks
        self._groups = scheduler.groups
        self._slots: dict[tuple[int, int], tuple[int, Prefix]] = {}

    def write(self, sequence: Sequence, start: int, stop: int, tables: list[BlockTable] | None = None) -> None:
        """Write KV of the sequence's tokens to its blocks, or to blocks that it will get."""
        for number, table in enumerate(tables or sequence.tables):
            for end in range(start + 1, stop + 1):
                place, offset = divmod(end - 1, BLOCK)
                if place < table.num_released:
                    continue
                if self._groups.groups[number].kind == "state":
                    if end % BLOCK and end != stop:
                        continue
                    offset = 0
                block = table.blocks[place]
                assert self._blocks._hash_of[block] is None, f"block {block} is written after it was published"
                self._slots[block, offset] = number, self._prefix(sequence, end)

    def corrupt(self, blocks: list[int]) -> None:
        """Write garbage, as a late call may do."""
        for block in blocks:
            assert self._blocks._hash_of[block] is None, f"block {block} is corrupted after it was published"
            self._slots.update({(block, slot): (-1, ("garbage", ())) for slot in range(BLOCK)})

    def has_needed_kv(self, sequence: Sequence) -> bool:
        """Return whether the sequence's blocks contain all KV that the next token reads."""
        computed = sequence.num_computed
        for number, table in enumerate(sequence.tables):
            group = self._groups.groups[number]
            ends = range(max(1, computed - group.span + 2) if group.span else 1, computed + 1)
            if group.kind == "state":
                ends = range(computed, computed + 1) if computed else range(0)
            for end in ends:
                place, offset = divmod(end - 1, BLOCK)
                slot = table.blocks[place], 0 if group.kind == "state" else offset
                if place < table.num_released or self._slots.get(slot) != (number, self._prefix(sequence, end)):
                    return False
        return True

    @staticmethod
    def _prefix(sequence: Sequence, end: int) -> Prefix:
        return sequence.request.cache_salt, tuple(sequence.token_ids[:end])


LAYERS: dict[str, list[Group]] = {
    "full": [Group("full", BLOCK)],
    "window": [Group("window", BLOCK, 6)],
    "full, window": [Group("full", BLOCK), Group("window", BLOCK, 5)],
    "full, window, state": [Group("full", BLOCK), Group("window", BLOCK, 3), Group("state", BLOCK)],
}


REQUEST = st.tuples(
    st.integers(0, 12),  # tokens of the shared prefix
    st.lists(st.integers(0, 1), min_size=1, max_size=7),  # tokens of this request only
    st.integers(1, 16),  # max_tokens
    st.sampled_from(["", "", "other"]),  # salt
)


class Batching(RuleBasedStateMachine):
    """Requests arrive, load, run, are preempted, saved, handed over and aborted, in any order, with too few blocks."""

    @initialize(
        num_blocks=st.integers(5, 9),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 16),
        caching=st.sampled_from(["pool", "own", "none"]),
        layers=st.sampled_from(list(LAYERS)),
        requests=st.lists(REQUEST, min_size=2, max_size=5),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        caching: str,
        layers: str,
        requests: list[tuple[int, list[int], int, str]],
    ) -> None:
        self.scheduler = scheduler_of(
            num_blocks * len(LAYERS[layers]),
            max_num_seqs=max_num_seqs,
            budget=budget,
            prefix_caching=caching != "none",
            pool=caching == "pool",
            groups=LAYERS[layers],
        )
        self.memory = Memory(self.scheduler)
        self.live: list[Sequence] = []
        self.saves: list[list[int]] = []
        self.loads: list[Sequence] = []
        self.late_blocks: list[list[int]] = []
        self.reserved: dict[Reservation, Sequence] = {}
        self.arrived = 0
        self.first_admissions: list[int] = []
        for request in requests:
            self.submit(request)

    @rule(request=REQUEST)
    def add_request(self, request: tuple[int, list[int], int, str]) -> None:
        self.submit(request)

    def submit(self, request: tuple[int, list[int], int, str]) -> None:
        sequence = self.make_sequence(request)
        self.live.append(sequence)
        self.scheduler.add_sequence(sequence)

    def make_sequence(self, request: tuple[int, list[int], int, str]) -> Sequence:
        shared, own, max_tokens, salt = request
        free_tokens = self.scheduler.capacity_tokens - shared - len(own)
        self.arrived += 1
        return sequence_of([7] * shared + own, min(max_tokens, free_tokens), str(self.arrived), salt)

    @rule(request=REQUEST)
    def another_instance_reserves_blocks(self, request: tuple[int, list[int], int, str]) -> None:
        sequence = self.make_sequence(request)
        reservation = self.scheduler.reserve_blocks(sequence.hashes(), sequence.num_prompt_tokens)
        if reservation is not None:
            assert len(reservation.blocks) == self.scheduler.groups.count_held_blocks(sequence.num_prompt_tokens)
            self.reserved[reservation] = sequence

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), is_complete=st.booleans())
    def another_instance_ends_a_transfer(self, data: st.DataObject, is_complete: bool) -> None:
        reservation = data.draw(st.sampled_from(list(self.reserved)))
        sequence = self.reserved.pop(reservation)
        self.memory.corrupt(reservation.missing)
        if not is_complete:
            self.scheduler.cancel_reservation(reservation)
            return
        start = reservation.num_full_cached * BLOCK
        tables = self.scheduler._share_out(reservation.blocks, sequence.num_prompt_tokens)
        self.memory.write(sequence, start, sequence.num_prompt_tokens, tables)
        self.live.append(sequence)
        self.scheduler.adopt_reservation(sequence, reservation)
        self.append(sequence)

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.run_one_step()
            self.every_sequence_has_its_own_kv()
            self.no_more_sequences_than_allowed_run_or_hold_blocks()
            self.references_are_equal_to_owners()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def a_load_ends(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.loads))
        remaining = (len(sequence.token_ids) - 1) // BLOCK - sequence.num_computed // BLOCK
        self.end_load(sequence, data.draw(st.integers(0, remaining)), is_late=data.draw(st.booleans()))

    @precondition(lambda self: self.late_blocks)
    @rule()
    def a_late_call_ends(self) -> None:
        blocks = self.late_blocks.pop()
        self.memory.corrupt(blocks)
        self.scheduler.blocks.release_blocks(blocks)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def a_save_begins(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.scheduler.running))
        last = sequence.num_computed // BLOCK
        blocks = [block for table in sequence.tables for block in table.blocks[table.num_released : last]]
        self.scheduler.blocks.hold_blocks(blocks)
        self.saves.append(blocks)

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def a_save_ends(self, data: st.DataObject) -> None:
        self.scheduler.blocks.release_blocks(self.saves.pop(data.draw(st.integers(0, len(self.saves) - 1))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.scheduler.finish_sequence(sequence)
        assert sequence.state is (State.LOADING if sequence in self.loads else State.FINISHED)

    @invariant()
    def every_sequence_has_its_own_kv(self) -> None:
        assert all(self.memory.has_needed_kv(sequence) for sequence in self.list_sequences_with_blocks())

    @invariant()
    def no_more_sequences_than_allowed_run_or_hold_blocks(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler.running) <= scheduler.max_num_seqs
        ahead = [s for s in scheduler.loading + scheduler.ready if not s.num_output_tokens]
        assert len(ahead) <= (2 if scheduler.pool else 1) * scheduler.max_num_seqs
        assert not any(table.blocks for sequence in scheduler.waiting for table in sequence.tables)

    @invariant()
    def references_are_equal_to_owners(self) -> None:
        owned = [
            table.blocks[table.num_released :]
            for sequence in self.list_sequences_with_blocks()
            for table in sequence.tables
        ]
        owned += [reservation.blocks for reservation in self.reserved]
        references = Counter(block for blocks in owned + self.saves + self.late_blocks for block in blocks)
        blocks = self.scheduler.blocks
        assert all(blocks.num_references(block) == references[block] for block in range(blocks.num_blocks))

    @invariant()
    def reservations_leave_space_for_the_longest_sequence(self) -> None:
        reserved = {block for reservation in self.reserved for block in reservation.blocks}
        assert len(reserved) + self.scheduler.longest_blocks <= self.scheduler.blocks.num_blocks

    @invariant()
    def queues_are_sorted_by_arrival(self) -> None:
        for queue in (self.scheduler.waiting, self.scheduler.ready, self.scheduler.running):
            ages = [sequence.arrival for sequence in queue]
            assert ages == sorted(ages)

    @invariant()
    def sequences_are_first_admitted_in_order_of_arrival(self) -> None:
        assert self.first_admissions == sorted(self.first_admissions)

    def teardown(self) -> None:
        """After loads, saves and reservations have ended, every request ends, and all blocks become free."""
        for reservation in self.reserved:
            self.scheduler.cancel_reservation(reservation)
        while self.live or self.loads:
            for sequence in list(self.loads):
                self.end_load(sequence, 0)
            while self.saves + self.late_blocks:
                self.scheduler.blocks.release_blocks((self.saves or self.late_blocks).pop())
            assert self.run_one_step() or self.loads or not self.live, f"stuck: {self.scheduler}"
        while self.saves + self.late_blocks:
            self.scheduler.blocks.release_blocks((self.saves or self.late_blocks).pop())
        assert self.scheduler.blocks.num_available == self.scheduler.blocks.num_blocks
        assert [*self.scheduler.waiting, *self.list_sequences_with_blocks(), *self.scheduler.reservations] == []

    def list_sequences_with_blocks(self) -> list[Sequence]:
        return self.scheduler.running + self.scheduler.ready + self.scheduler.loading

    def end_load(self, sequence: Sequence, num_blocks: int, *, is_late: bool = False) -> None:
        first = sequence.num_computed // BLOCK
        end = sequence.num_computed + num_blocks * BLOCK
        read = [  # only the blocks that are needed at the resume point
            BlockTable(table.blocks, max(table.num_released, group.find_first_needed(end)))
            for group, table in zip(self.scheduler.groups.groups, sequence.tables, strict=True)
        ]
        self.memory.write(sequence, sequence.num_computed, end, read)
        self.loads.remove(sequence)
        if is_late:
            missing = [
                block
                for table in sequence.tables
                for block in table.blocks[max(first + num_blocks, table.num_released) :]
            ]
            self.scheduler.blocks.hold_blocks(missing)
            self.late_blocks.append(missing)
        self.scheduler.on_load_end(sequence, num_blocks, usable=not is_late)

    def append(self, sequence: Sequence) -> None:
        # Few different tokens, so sequences with equal prefixes often remain equal.
        sequence.token_ids.append(len(sequence.token_ids) % 2)
        if sequence.num_output_tokens == sequence.request.params.max_tokens:
            self.live.remove(sequence)
            self.scheduler.finish_sequence(sequence)

    def run_one_step(self) -> list[Chunk]:
        new = [sequence for sequence in self.scheduler.waiting if not sequence.num_preemptions]
        to_load = self.scheduler.admit_waiting()
        self.first_admissions += [int(s.request.request_id) for s in new if s.state is not State.WAITING]
        self.loads += to_load
        decoding = [sequence for sequence in self.scheduler.running if not sequence.is_prefilling]
        chunks = self.scheduler.schedule_step()
        self.check(chunks, decoding)
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.sequence.num_computed
            samples = chunk.samples
            self.memory.write(sequence, start, start + chunk.num_tokens)
            self.scheduler.advance_sequence(chunk)
            if samples:
                self.append(sequence)
        return chunks

    def check(self, chunks: list[Chunk], decoding: list[Sequence]) -> None:
        scheduler = self.scheduler
        assert sum(chunk.num_tokens for chunk in chunks) <= scheduler.max_num_batched_tokens
        scheduled = [chunk.sequence for chunk in chunks]
        assert len(set(map(id, scheduled))) == len(scheduled)
        for chunk in chunks:
            sequence = chunk.sequence
            assert chunk.num_tokens > 0
            assert sequence.state is State.RUNNING
            assert sequence.num_computed + chunk.num_tokens <= len(sequence.token_ids)
            assert sequence.num_computed + chunk.num_tokens <= len(sequence.block_table) * BLOCK
        still = [sequence for sequence in decoding if sequence.state is State.RUNNING]
        assert len([s for s in scheduled if s in still]) == min(len(still), scheduler.max_num_batched_tokens)
        if scheduler.running:
            assert chunks, "sequences run, but the step is empty"


TestBatching = Batching.TestCase
TestBatching.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_running_decodes_get_a_token_in_every_step_of_a_long_prefill() -> None:
    scheduler = scheduler_of(40, budget=8)
    decoding = sequence_of([1], 50)
    scheduler.add_sequence(decoding)
    run(scheduler)
    scheduler.add_sequence(sequence_of([2] * 60, 1))
    while len(scheduler.running) < 2 or scheduler.running[1].is_prefilling:
        before = decoding.num_output_tokens
        run(scheduler)
        assert decoding.num_output_tokens == before + 1


def test_the_rest_of_the_budget_goes_to_the_oldest_prompt() -> None:
    scheduler = scheduler_of(40, budget=10)
    first, second = sequence_of([1] * 12, 1), sequence_of([2] * 12, 1)
    scheduler.add_sequence(first)
    scheduler.add_sequence(second)
    assert run(scheduler) == [(first, 10)]
    assert run(scheduler) == [(first, 2), (second, 8)]


def test_the_youngest_sequence_is_preempted_and_continues_from_its_published_blocks() -> None:
    scheduler = scheduler_of(5, budget=16)
    old, young = sequence_of([1] * 8, 8), sequence_of([2] * 6, 3)
    scheduler.add_sequence(old)
    scheduler.add_sequence(young)
    while scheduler.num_preemptions == 0:
        run(scheduler)
    assert young.state is State.WAITING
    assert not young.block_table
    scheduler.finish_sequence(old)
    scheduler.admit_waiting()
    assert young.num_computed == 2 * BLOCK


def test_a_preempted_sequence_is_before_sequences_that_never_ran() -> None:
    scheduler = scheduler_of(5, budget=16, max_num_seqs=2)
    old, young, last = sequence_of([1] * 8, 8), sequence_of([2] * 6, 3), sequence_of([3], 1)
    for sequence in (old, young, last):
        scheduler.add_sequence(sequence)
    while scheduler.num_preemptions == 0:
        run(scheduler)
    assert list(scheduler.waiting) == [young, last]


def test_others_can_use_the_budget_of_a_sequence_that_preempts_itself() -> None:
    scheduler = scheduler_of(6, budget=8)
    old, young = sequence_of([1] * 20, 1), sequence_of([2] * BLOCK, 5)
    reservation = scheduler.reserve_blocks(young.hashes(), BLOCK)
    assert reservation is not None
    scheduler.add_sequence(old)
    scheduler.admit_waiting()
    scheduler.adopt_reservation(young, reservation)
    young.token_ids.append(9)
    assert run(scheduler) == [(old, 8)]
    assert young.state is State.WAITING


def test_loads_begin_while_the_maximum_of_sequences_runs() -> None:
    scheduler = scheduler_of(40, max_num_seqs=1, pool=True)
    running, ahead, later = sequence_of([1], 5), sequence_of([2] * 9, 5), sequence_of([3] * 9, 5)
    for sequence in (running, ahead, later):
        scheduler.add_sequence(sequence)
    assert scheduler.admit_waiting() == [ahead]
    scheduler.on_load_end(ahead, 2)
    assert (scheduler.admit_waiting(), scheduler.running, scheduler.ready) == ([], [running], [ahead])
    scheduler.finish_sequence(running)
    assert scheduler.admit_waiting() == [later]
    assert (scheduler.running, ahead.num_computed) == ([ahead], 2 * BLOCK)


def test_early_loads_leave_a_block_for_each_running_sequence() -> None:
    scheduler = scheduler_of(8, max_num_seqs=2, pool=True)
    for token in (1, 2):
        scheduler.add_sequence(sequence_of([token], 20))
    scheduler.add_sequence(sequence_of([3] * 17, 5))
    assert scheduler.admit_waiting() == []


def test_running_sequences_get_the_blocks_of_ready_ones() -> None:
    scheduler = scheduler_of(6, max_num_seqs=1, pool=True)
    running, ahead = sequence_of([1], 24), sequence_of([2] * 13, 5)
    for sequence in (running, ahead):
        scheduler.add_sequence(sequence)
    assert scheduler.admit_waiting() == [ahead]
    scheduler.on_load_end(ahead, 3)
    while ahead.state is State.READY:
        run(scheduler)
    assert running.state is State.RUNNING
    assert running.num_preemptions == 0
    assert (ahead.state, ahead.block_table) == (State.WAITING, [])


@pytest.mark.parametrize("num_loaded", [0, 1])
def test_a_sequence_that_begins_to_run_uses_blocks_that_others_published_meanwhile(num_loaded: int) -> None:
    scheduler = scheduler_of(40, max_num_seqs=1, budget=100, pool=True)
    first, same = sequence_of([1] * 13, 5), sequence_of([1] * 13, 5)
    for sequence in (first, same):
        scheduler.add_sequence(sequence)
    scheduler.admit_waiting()
    scheduler.on_load_end(first, 0)
    scheduler.on_load_end(same, num_loaded)
    run(scheduler)
    scheduler.finish_sequence(first)
    scheduler.admit_waiting()
    assert (same.num_computed, same.own_cached_tokens) == (3 * BLOCK, (3 - num_loaded) * BLOCK)


def test_blocks_that_a_sequence_replaces_at_its_start_are_free_immediately() -> None:
    scheduler = scheduler_of(9, max_num_seqs=2, budget=100, pool=True)
    first, same, other = sequence_of([1] * 9, 5), sequence_of([1] * 9, 5), sequence_of([2] * 9, 5)
    for sequence in (first, same, other):
        scheduler.add_sequence(sequence)
    assert scheduler.admit_waiting() == [first, same]
    scheduler.on_load_end(first, 0)
    run(scheduler)
    scheduler.on_load_end(same, 0)
    assert scheduler.admit_waiting() == [other]


def test_no_part_of_a_handed_over_prompt_is_computed_again() -> None:
    scheduler = scheduler_of(20)
    sequence = sequence_of([1] * (2 * BLOCK + 1), 4)
    reservation = scheduler.reserve_blocks(sequence.hashes(), 2 * BLOCK + 1)
    assert reservation is not None
    scheduler.adopt_reservation(sequence, reservation)
    scheduler.admit_waiting()
    assert scheduler.running == [sequence]
    assert sequence.num_computed == 2 * BLOCK + 1


def test_running_sequences_are_sorted_by_arrival_and_not_by_admission() -> None:
    scheduler = scheduler_of(12, budget=100, max_num_seqs=3)
    old, preempted, young = (sequence_of([token] * 9, 30) for token in range(3))
    scheduler.add_sequence(old)
    scheduler.add_sequence(young)
    scheduler.admit_waiting()
    scheduler.add_sequence(preempted)
    scheduler.admit_waiting()
    assert scheduler.running == [old, preempted, young]


def test_blocks_of_a_late_load_count_as_blocks_from_the_pool() -> None:
    scheduler = scheduler_of(8, pool=True)
    sequence = sequence_of([1] * 9, 1)
    scheduler.add_sequence(sequence)
    scheduler.admit_waiting()
    scheduler.on_load_end(sequence, 1, usable=False)
    scheduler.admit_waiting()
    assert (sequence.num_computed, sequence.own_cached_tokens) == (BLOCK, 0)


def test_an_aborted_sequence_holds_its_blocks_until_its_load_ends() -> None:
    scheduler = scheduler_of(6, pool=True)
    sequence = sequence_of([1] * 9, 1)
    scheduler.add_sequence(sequence)
    assert scheduler.admit_waiting() == [sequence]
    scheduler.finish_sequence(sequence)
    assert scheduler.blocks.num_available == 3
    scheduler.on_load_end(sequence, 2)
    assert scheduler.blocks.num_available == 6
    assert sequence.state is State.FINISHED


def test_the_longest_sequence_can_run_while_reservations_never_end() -> None:
    scheduler = scheduler_of(10, max_model_len=4 * BLOCK)
    assert scheduler.reserve_blocks([], 7 * BLOCK) is None
    assert scheduler.reserve_blocks([], 5 * BLOCK)
    assert scheduler.reserve_blocks([], 2 * BLOCK) is None
    assert scheduler.reserve_blocks([], BLOCK)
    longest = sequence_of([1] * (4 * BLOCK - 1), 1)
    scheduler.add_sequence(longest)
    scheduler.admit_waiting()
    assert scheduler.running == [longest]


def test_a_reservation_contains_cached_blocks_that_are_not_written() -> None:
    scheduler = scheduler_of(20, budget=100)
    earlier = sequence_of([1] * (2 * BLOCK), 1)
    scheduler.add_sequence(earlier)
    run(scheduler)
    scheduler.finish_sequence(earlier)
    sequence = sequence_of([1] * (3 * BLOCK + 1), 4)
    reservation = scheduler.reserve_blocks(sequence.hashes()[:3], 3 * BLOCK + 1)
    assert reservation is not None
    assert (reservation.num_cached, len(reservation.blocks)) == (2, 4)
    assert reservation.missing == reservation.blocks[2:]
    scheduler.adopt_reservation(sequence, reservation)
    assert sequence.own_cached_tokens == 2 * BLOCK


def test_offloaded_blocks_are_released_once() -> None:
    scheduler = scheduler_of(20, budget=100, prefix_caching=False)
    sequence = sequence_of([1] * (3 * BLOCK), 4)
    scheduler.add_sequence(sequence)
    run(scheduler)
    available = scheduler.blocks.num_available
    for num_blocks in (1, 2, 2, 1):
        scheduler.offload_blocks(sequence, num_blocks)
    assert scheduler.blocks.num_available == available + 2
    scheduler.finish_sequence(sequence)
    assert scheduler.blocks.num_available == 20


@pytest.mark.parametrize(("prompt_tokens", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_block_that_ends_with_the_last_token_is_not_used(prompt_tokens: int, blocks: int) -> None:
    scheduler = scheduler_of(20, budget=100)
    for _ in range(2):
        sequence = sequence_of([1] * prompt_tokens, 1)
        scheduler.add_sequence(sequence)
        run(scheduler)
        scheduler.finish_sequence(sequence)
    assert sequence.own_cached_tokens == blocks * BLOCK


def test_sequences_with_different_salts_share_no_blocks() -> None:
    scheduler = scheduler_of(20, budget=100)
    for salt in ("", "mine"):
        sequence = sequence_of([1] * 9, 1, salt=salt)
        scheduler.add_sequence(sequence)
        run(scheduler)
        scheduler.finish_sequence(sequence)
    assert sequence.own_cached_tokens == 0


def test_no_block_is_published_without_prefix_caching() -> None:
    scheduler = scheduler_of(20, budget=100, prefix_caching=False)
    sequence = sequence_of([1] * 9, 1)
    scheduler.add_sequence(sequence)
    run(scheduler)
    assert scheduler.blocks.num_cached_blocks == 0


def run(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """Run a step; return each sequence with its number of computed tokens."""
    scheduler.admit_waiting()
    chunks = scheduler.schedule_step()
    for chunk in chunks:
        samples = chunk.samples
        scheduler.advance_sequence(chunk)
        if samples:
            chunk.sequence.token_ids.append(9)
    return [(chunk.sequence, chunk.num_tokens) for chunk in chunks]
