"""The scheduler without tensors: KV memory is played by a table of which prefix was written where."""

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
"""A token's KV depends on the salt, and all tokens up to it."""


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
    """Which prefix's KV each slot of each block holds; a block with a state has it in its first slot."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._blocks = scheduler.blocks
        self._groups = scheduler.groups
        self._slots: dict[tuple[int, int], tuple[int, Prefix]] = {}

    def write(self, sequence: Sequence, start: int, stop: int, tables: list[BlockTable] | None = None) -> None:
        """Write KV of the sequence's tokens into its blocks, or into those that are to become its."""
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

    def spoil(self, blocks: list[int]) -> None:
        """Write rubbish, as a call does that was given up."""
        for block in blocks:
            assert self._blocks._hash_of[block] is None, f"block {block} is spoilt after it was published"
            self._slots.update({(block, slot): (-1, ("garbage", ())) for slot in range(BLOCK)})

    def holds(self, sequence: Sequence) -> bool:
        """Whether all that the next token reads is where the sequence's tables point."""
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
    st.integers(0, 12),  # tokens of a beginning that all share
    st.lists(st.integers(0, 1), min_size=1, max_size=7),  # its own ones
    st.integers(1, 16),  # max_tokens
    st.sampled_from(["", "", "other"]),  # salt
)


class Batching(RuleBasedStateMachine):
    """Requests come, load, run, are preempted, saved, handed over, aborted, in any order, in a pool too small."""

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
            self.arrive(request)

    @rule(request=REQUEST)
    def one_more(self, request: tuple[int, list[int], int, str]) -> None:
        self.arrive(request)

    def arrive(self, request: tuple[int, list[int], int, str]) -> None:
        sequence = self.new(request)
        self.live.append(sequence)
        self.scheduler.add_sequence(sequence)

    def new(self, request: tuple[int, list[int], int, str]) -> Sequence:
        shared, own, max_tokens, salt = request
        room = self.scheduler.capacity_tokens - shared - len(own)
        self.arrived += 1
        return sequence_of([7] * shared + own, min(max_tokens, room), str(self.arrived), salt)

    @rule(request=REQUEST)
    def another_instance_asks_for_blocks(self, request: tuple[int, list[int], int, str]) -> None:
        sequence = self.new(request)
        reservation = self.scheduler.reserve_blocks(sequence.hashes(), sequence.num_prompt_tokens)
        if reservation is not None:
            assert len(reservation.blocks) == self.scheduler.groups.count_held_blocks(sequence.num_prompt_tokens)
            self.reserved[reservation] = sequence

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), is_complete=st.booleans())
    def another_instance_has_written(self, data: st.DataObject, is_complete: bool) -> None:
        reservation = data.draw(st.sampled_from(list(self.reserved)))
        sequence = self.reserved.pop(reservation)
        self.memory.spoil(reservation.missing)
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
            self.every_sequence_finds_its_own_kv()
            self.no_more_sequences_than_allowed_run_or_hold_blocks()
            self.every_block_has_exactly_its_owners_references()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def a_load_ends(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.loads))
        wanted = (len(sequence.token_ids) - 1) // BLOCK - sequence.num_computed // BLOCK
        self.end_load(sequence, data.draw(st.integers(0, wanted)), given_up=data.draw(st.booleans()))

    @precondition(lambda self: self.late_blocks)
    @rule()
    def a_call_that_was_given_up_ends(self) -> None:
        blocks = self.late_blocks.pop()
        self.memory.spoil(blocks)
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
    def every_sequence_finds_its_own_kv(self) -> None:
        assert all(self.memory.holds(sequence) for sequence in self.holding())

    @invariant()
    def no_more_sequences_than_allowed_run_or_hold_blocks(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler.running) <= scheduler.max_num_seqs
        ahead = [s for s in scheduler.loading + scheduler.ready if not s.num_output_tokens]
        assert len(ahead) <= (2 if scheduler.pool else 1) * scheduler.max_num_seqs
        assert not any(table.blocks for sequence in scheduler.waiting for table in sequence.tables)

    @invariant()
    def every_block_has_exactly_its_owners_references(self) -> None:
        owned = [table.blocks[table.num_released :] for sequence in self.holding() for table in sequence.tables]
        owned += [reservation.blocks for reservation in self.reserved]
        references = Counter(block for blocks in owned + self.saves + self.late_blocks for block in blocks)
        blocks = self.scheduler.blocks
        assert all(blocks.num_references(block) == references[block] for block in range(blocks.num_blocks))

    @invariant()
    def what_others_may_keep_leaves_room_for_the_longest_sequence(self) -> None:
        lent = {block for reservation in self.reserved for block in reservation.blocks}
        assert len(lent) + self.scheduler.longest_blocks <= self.scheduler.blocks.num_blocks

    @invariant()
    def the_oldest_stand_first(self) -> None:
        for queue in (self.scheduler.waiting, self.scheduler.ready, self.scheduler.running):
            ages = [sequence.arrival for sequence in queue]
            assert ages == sorted(ages)

    @invariant()
    def those_who_came_first_are_admitted_first(self) -> None:
        assert self.first_admissions == sorted(self.first_admissions)

    def teardown(self) -> None:
        """Once everybody else has ended every request does, and all blocks come back."""
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
        assert [*self.scheduler.waiting, *self.holding(), *self.scheduler.reservations] == []

    def holding(self) -> list[Sequence]:
        return self.scheduler.running + self.scheduler.ready + self.scheduler.loading

    def end_load(self, sequence: Sequence, num_blocks: int, *, given_up: bool = False) -> None:
        first = sequence.num_computed // BLOCK
        end = sequence.num_computed + num_blocks * BLOCK
        read = [  # what is needed at the resume point, and nothing else
            BlockTable(table.blocks, max(table.num_released, group.find_first_needed(end)))
            for group, table in zip(self.scheduler.groups.groups, sequence.tables, strict=True)
        ]
        self.memory.write(sequence, sequence.num_computed, end, read)
        self.loads.remove(sequence)
        if given_up:
            missing = [
                block
                for table in sequence.tables
                for block in table.blocks[max(first + num_blocks, table.num_released) :]
            ]
            self.scheduler.blocks.hold_blocks(missing)
            self.late_blocks.append(missing)
        self.scheduler.on_load_end(sequence, num_blocks, usable=not given_up)

    def append(self, sequence: Sequence) -> None:
        # Few different tokens, so that sequences with equal beginnings stay equal for a while.
        sequence.token_ids.append(len(sequence.token_ids) % 2)
        if sequence.num_output_tokens == sequence.request.params.max_tokens:
            self.live.remove(sequence)
            self.scheduler.finish_sequence(sequence)

    def run_one_step(self) -> list[Chunk]:
        """One step as ``EngineCore`` takes it."""
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


def test_running_decodes_get_their_token_in_every_step_of_a_long_prefill() -> None:
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


def test_the_youngest_is_preempted_and_goes_on_from_its_published_blocks() -> None:
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


def test_a_preempted_sequence_goes_before_those_that_never_ran() -> None:
    scheduler = scheduler_of(5, budget=16, max_num_seqs=2)
    old, young, last = sequence_of([1] * 8, 8), sequence_of([2] * 6, 3), sequence_of([3], 1)
    for sequence in (old, young, last):
        scheduler.add_sequence(sequence)
    while scheduler.num_preemptions == 0:
        run(scheduler)
    assert list(scheduler.waiting) == [young, last]


def test_a_sequence_that_preempts_itself_leaves_its_token_of_the_budget_to_others() -> None:
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


def test_loads_begin_while_all_places_are_taken() -> None:
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


def test_loads_ahead_leave_each_running_sequence_a_block_to_grow_by() -> None:
    scheduler = scheduler_of(8, max_num_seqs=2, pool=True)
    for token in (1, 2):
        scheduler.add_sequence(sequence_of([token], 20))
    scheduler.add_sequence(sequence_of([3] * 17, 5))
    assert scheduler.admit_waiting() == []


def test_those_who_wait_for_a_place_give_their_blocks_to_those_who_run() -> None:
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
def test_a_place_brings_what_others_published_since_the_blocks_were_allocated(num_loaded: int) -> None:
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


def test_blocks_exchanged_for_a_place_are_there_for_those_who_wait_at_once() -> None:
    scheduler = scheduler_of(9, max_num_seqs=2, budget=100, pool=True)
    first, same, other = sequence_of([1] * 9, 5), sequence_of([1] * 9, 5), sequence_of([2] * 9, 5)
    for sequence in (first, same, other):
        scheduler.add_sequence(sequence)
    assert scheduler.admit_waiting() == [first, same]
    scheduler.on_load_end(first, 0)
    run(scheduler)
    scheduler.on_load_end(same, 0)
    assert scheduler.admit_waiting() == [other]


def test_a_prompt_that_another_instance_computed_is_not_computed_in_part_again() -> None:
    scheduler = scheduler_of(20)
    sequence = sequence_of([1] * (2 * BLOCK + 1), 4)
    reservation = scheduler.reserve_blocks(sequence.hashes(), 2 * BLOCK + 1)
    assert reservation is not None
    scheduler.adopt_reservation(sequence, reservation)
    scheduler.admit_waiting()
    assert scheduler.running == [sequence]
    assert sequence.num_computed == 2 * BLOCK + 1


def test_a_preempted_sequence_is_not_the_youngest_because_it_came_back_last() -> None:
    scheduler = scheduler_of(12, budget=100, max_num_seqs=3)
    old, preempted, young = (sequence_of([token] * 9, 30) for token in range(3))
    scheduler.add_sequence(old)
    scheduler.add_sequence(young)
    scheduler.admit_waiting()
    scheduler.add_sequence(preempted)
    scheduler.admit_waiting()
    assert scheduler.running == [old, preempted, young]


def test_what_a_load_that_was_given_up_brought_counts_as_the_pools() -> None:
    scheduler = scheduler_of(8, pool=True)
    sequence = sequence_of([1] * 9, 1)
    scheduler.add_sequence(sequence)
    scheduler.admit_waiting()
    scheduler.on_load_end(sequence, 1, usable=False)
    scheduler.admit_waiting()
    assert (sequence.num_computed, sequence.own_cached_tokens) == (BLOCK, 0)


def test_a_sequence_that_loads_holds_its_blocks_until_the_load_ended_even_if_aborted() -> None:
    scheduler = scheduler_of(6, pool=True)
    sequence = sequence_of([1] * 9, 1)
    scheduler.add_sequence(sequence)
    assert scheduler.admit_waiting() == [sequence]
    scheduler.finish_sequence(sequence)
    assert scheduler.blocks.num_available == 3
    scheduler.on_load_end(sequence, 2)
    assert scheduler.blocks.num_available == 6
    assert sequence.state is State.FINISHED


def test_the_longest_sequence_runs_beside_reservations_that_are_never_given_back() -> None:
    scheduler = scheduler_of(10, max_model_len=4 * BLOCK)
    assert scheduler.reserve_blocks([], 7 * BLOCK) is None
    assert scheduler.reserve_blocks([], 5 * BLOCK)
    assert scheduler.reserve_blocks([], 2 * BLOCK) is None
    assert scheduler.reserve_blocks([], BLOCK)
    longest = sequence_of([1] * (4 * BLOCK - 1), 1)
    scheduler.add_sequence(longest)
    scheduler.admit_waiting()
    assert scheduler.running == [longest]


def test_of_a_reservation_only_what_is_not_cached_is_written_and_the_rest_counts_as_cached() -> None:
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


def test_offloaded_blocks_are_given_back_once() -> None:
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
def test_the_last_token_is_always_computed_so_a_block_ending_with_it_is_not_taken_up(
    prompt_tokens: int, blocks: int
) -> None:
    scheduler = scheduler_of(20, budget=100)
    for _ in range(2):
        sequence = sequence_of([1] * prompt_tokens, 1)
        scheduler.add_sequence(sequence)
        run(scheduler)
        scheduler.finish_sequence(sequence)
    assert sequence.own_cached_tokens == blocks * BLOCK


def test_sequences_of_another_salt_share_nothing() -> None:
    scheduler = scheduler_of(20, budget=100)
    for salt in ("", "mine"):
        sequence = sequence_of([1] * 9, 1, salt=salt)
        scheduler.add_sequence(sequence)
        run(scheduler)
        scheduler.finish_sequence(sequence)
    assert sequence.own_cached_tokens == 0


def test_without_prefix_caching_nothing_is_published() -> None:
    scheduler = scheduler_of(20, budget=100, prefix_caching=False)
    sequence = sequence_of([1] * 9, 1)
    scheduler.add_sequence(sequence)
    run(scheduler)
    assert scheduler.blocks.num_cached_blocks == 0


def run(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """One step; who computed how many tokens."""
    scheduler.admit_waiting()
    chunks = scheduler.schedule_step()
    for chunk in chunks:
        samples = chunk.samples
        scheduler.advance_sequence(chunk)
        if samples:
            chunk.sequence.token_ids.append(9)
    return [(chunk.sequence, chunk.num_tokens) for chunk in chunks]
