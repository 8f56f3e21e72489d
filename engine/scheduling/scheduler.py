"""The scheduler: chooses which sequences compute how many tokens in the next step (continuous batching).

It uses no tensors. The states of a sequence::

    add ─► waiting ─admit─► loading ─loaded─► ready ─(a place)─► running ─► finished
              ▲                └─(nothing to load)─┘ ▲ │             │
              └──────────────── preempted ◄──────────┼─┴─────────────┘
    reserve ─► adopt (another instance computed the prompt)

At most ``max_num_seqs`` sequences run. Each step has a budget of tokens. First, each sequence in decode gets one token.
The rest of the budget goes to chunks of prompts. So a long prompt delays a decode by at most one step. With a pool, up
to ``max_num_seqs`` further sequences get blocks in advance, so that they load blocks while others compute.

Sequences are ordered by arrival; older sequences go first, so that every sequence ends. If blocks run out, the youngest
sequence that is ready is preempted; if none is ready, the youngest that runs. A preempted sequence releases its blocks
and is computed again later; it can take its published blocks from the prefix cache, if they were not evicted.

If the model has several groups of layers, a sequence gets the same number of blocks in each group. It releases the
blocks that no later token reads: those before a sliding window, and all states except the last one.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

from engine.scheduling.block_groups import BlockGroups
from engine.scheduling.block_manager import BlockManager, NoFreeBlocks
from engine.scheduling.pool_use import NO_POOL, PoolUse, Reason, explain_no_load
from engine.scheduling.request import BlockTable, Sequence, State
from kvstore_backend.groups import Group

__all__ = ["Chunk", "Reservation", "Scheduler"]

log = logging.getLogger(__name__)

# The entry of a released block in a block table. It must not be used as a block.
_NO_BLOCK = -1


@dataclass(frozen=True)
class Chunk:
    """A part of a sequence that one step computes: the next ``num_tokens`` tokens that have no KV."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk includes the last token of the sequence, so that the step samples the next token."""
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True, eq=False)
class Reservation:
    """Blocks that are reserved for a prompt that another instance computes.

    The owner of a reservation passes it to a sequence (``adopt_reservation``). If the owner does not, it cancels the
    reservation (``cancel_reservation``) when the other instance does not write to the blocks any more.

    Attributes:
        blocks: the reserved blocks of all groups, in the order of ``BlockGroups.list_held_blocks``.
        num_cached: number of leading ``blocks`` that come from the prefix cache and have KV already. The other instance
            writes the remaining blocks.
        num_full_cached: number of leading full blocks of the prompt that were found in the prefix cache.
    """

    blocks: list[int]
    num_cached: int
    num_full_cached: int

    @property
    def missing(self) -> list[int]:
        """The reserved blocks without KV, which the other instance must write."""
        return self.blocks[self.num_cached :]


class Scheduler:
    """Chooses the chunks of each step, and allocates and releases the blocks of sequences.

    Args:
        blocks: the block manager.
        block_size: number of tokens in a block.
        max_num_seqs: maximum number of sequences that run concurrently.
        max_num_batched_tokens: token budget of a step.
        max_model_len: maximum number of tokens of a sequence. Reservations leave enough blocks for one such sequence.
        prefix_caching: whether full blocks are published (put into the prefix cache), and sequences take published
            blocks at admission.
        pool: whether admitted sequences load missing full blocks from a pool before they run. Then up to
            ``max_num_seqs`` sequences can have blocks in addition to those that run.
        groups: the groups of layers. Default: one group with full attention.
    """

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        max_model_len: int,
        prefix_caching: bool,
        pool: bool,
        groups: SequenceOf[Group] = (),
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.groups = BlockGroups(groups or [Group("full", block_size)])
        self.longest_blocks = -(-max_model_len // block_size) * len(self.groups)
        self.prefix_caching = prefix_caching
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.loading: list[Sequence] = []
        self.ready: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reservations: set[Reservation] = set()
        self.num_preemptions = 0

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of tokens of a sequence that fits in KV memory."""
        return self.blocks.num_blocks // len(self.groups) * self.block_size

    @property
    def has_sequences(self) -> bool:
        """Whether there is a sequence in any state except finished."""
        return bool(self.waiting or self._num_holding)

    def add_sequence(self, sequence: Sequence) -> None:
        """Queue a new sequence. Its prompt and ``max_tokens`` together must fit in ``capacity_tokens``."""
        bisect.insort(self.waiting, sequence, key=_arrival_of)

    def admit_waiting(self) -> list[Sequence]:
        """Admit waiting sequences, oldest first, while there are blocks, up to a limit of sequences with blocks.

        Returns:
            The admitted sequences for which the caller must start a load.
        """
        to_load = []
        if not self.groups.is_full:
            for sequence in self.running:
                self._release_passed_blocks(sequence)
        self._fill_places()
        while self.waiting and self._num_holding < self._max_holding and self._give_blocks(self.waiting[0]):
            sequence = self.waiting.popleft()
            if self.pool and self._count_loadable(sequence) > 0:
                sequence.state = State.LOADING
                self.loading.append(sequence)
                to_load.append(sequence)
            else:
                if not sequence.num_preemptions:
                    sequence.pool_use = self._explain_no_load(sequence)
                self._get_ready(sequence)
        self._fill_places()
        return to_load

    def reserve_blocks(self, hashes: SequenceOf[bytes], num_tokens: int) -> Reservation | None:
        """Reserve blocks for a prompt that another instance computes.

        If another instance hangs, its reservation stays. So all reservations together leave enough blocks for the
        longest sequence.

        Args:
            hashes: the hashes of the prompt's full blocks.
            num_tokens: number of tokens of the prompt.

        Returns:
            The reservation, or None if there are not enough blocks, or a sequence waits for blocks.
        """
        reserved = len({block for reservation in self.reservations for block in reservation.blocks})
        num_blocks = self.groups.count_held_blocks(num_tokens)
        if reserved + num_blocks + self.longest_blocks > self.blocks.num_blocks:
            return None
        hashes = hashes[: num_tokens // self.block_size]  # the other instance may send more
        num_full_cached = self.groups.match_prefix(self.blocks, hashes) if self.prefix_caching else 0
        held = self.groups.list_held_blocks(num_tokens)
        cached = [self.groups.name_block(number, hashes[place]) for number, place in held if place < num_full_cached]
        needed = num_blocks - len(cached)
        if self.waiting or not self._has_room(needed, cached):
            return None
        blocks = self.blocks.take_cached_blocks(cached) + self.blocks.allocate_blocks(needed)
        reservation = Reservation(blocks, len(cached), num_full_cached)
        self.reservations.add(reservation)
        return reservation

    def adopt_reservation(self, sequence: Sequence, reservation: Reservation, *, recomputes_last: bool = False) -> None:
        """Give the blocks of a reservation to a new sequence, which continues from the KV of its prompt.

        Args:
            sequence: the sequence; it was not queued before.
            reservation: the reservation for its prompt. All of its blocks have KV now.
            recomputes_last: whether the prompt's last token is computed again, to sample the first token of the answer.
                Then the block of this token must not be shared.

        Raises:
            ValueError: the reservation is for a prompt of another length. It was cancelled.
        """
        if len(reservation.blocks) != self.groups.count_held_blocks(sequence.num_prompt_tokens):
            self.cancel_reservation(reservation)
            sequence.state = State.FINISHED
            raise ValueError(
                f"the reservation has {len(reservation.blocks)} blocks, which is not the number that a prompt of "
                f"{sequence.num_prompt_tokens} tokens needs"
            )
        self.reservations.remove(reservation)
        sequence.tables = self._share_out(reservation.blocks, sequence.num_prompt_tokens)
        sequence.num_computed = sequence.num_prompt_tokens - recomputes_last
        sequence.num_published = reservation.num_full_cached
        sequence.own_cached_tokens = min(reservation.num_full_cached * self.block_size, sequence.num_prompt_tokens)
        rest = sequence.num_prompt_tokens - sequence.own_cached_tokens
        sequence.prompt_sources = [("own cache", sequence.own_cached_tokens), ("the prefill instance", rest)]
        sequence.pool_use = PoolUse(
            Reason.HANDED_OVER, "not looked up; the prefill instance transferred the prompt directly"
        )
        self._get_ready(sequence)
        self.publish_blocks(sequence)

    def cancel_reservation(self, reservation: Reservation) -> None:
        """Release the blocks of a reservation that no sequence adopts."""
        self.reservations.remove(reservation)
        self.blocks.release_blocks(reservation.blocks)

    def on_load_end(self, sequence: Sequence, num_blocks: int, *, usable: bool = True) -> None:
        """Continue with a sequence after its load has ended.

        Args:
            sequence: the sequence, in the state ``LOADING``.
            num_blocks: number of blocks that the load filled; they follow the blocks that had KV before the load.
            usable: whether the sequence may write to its other blocks. If not, because a call that missed its deadline
                may still write to them, the sequence releases all of its blocks and waits for new ones.
        """
        self.loading.remove(sequence)
        if sequence.aborted:
            self._free_blocks(sequence)
            sequence.state = State.FINISHED
            return
        sequence.num_computed += num_blocks * self.block_size
        self._release_passed_blocks(sequence)  # blocks that were not loaded because no later token reads them
        self.publish_blocks(sequence)
        if usable:
            self._get_ready(sequence)
        else:
            self._wait_anew(sequence)

    def schedule_step(self) -> list[Chunk]:
        """Return the chunks of the next step, with blocks for all of their tokens; empty if nothing can run."""
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        for sequence in list(self.running):
            if budget == 0:
                break
            # A sequence that an earlier iteration of this loop preempted is no longer running.
            if sequence.state is State.RUNNING and not sequence.is_prefilling and self._grow_sequence(sequence):
                chunks.append(Chunk(sequence, 1))
                budget -= 1
        for sequence in self.running:
            if budget == 0:
                break
            if sequence.is_prefilling:
                chunk = Chunk(sequence, min(budget, len(sequence.token_ids) - sequence.num_computed))
                chunks.append(chunk)
                budget -= chunk.num_tokens
        return [chunk for chunk in chunks if chunk.sequence.state is State.RUNNING]

    def advance_sequence(self, chunk: Chunk) -> None:
        """Record that ``chunk`` was computed, and publish the blocks that became full."""
        chunk.sequence.num_computed += chunk.num_tokens
        self.publish_blocks(chunk.sequence)

    def publish_blocks(self, sequence: Sequence) -> None:
        """Publish the blocks of ``sequence`` that are full, have exact KV and were not published before."""
        num_full = sequence.num_exact // self.block_size
        if not self.prefix_caching or num_full <= sequence.num_published:
            return
        hashes = sequence.hashes()
        for number, table in enumerate(sequence.tables):
            places = range(max(sequence.num_published, table.num_released), num_full)
            names = zip(places, self.groups.name_blocks(number, hashes, places), strict=False)
            stored = [i for i, name in names if self.blocks.publish_block(table.blocks[i], name)]
            if self.blocks.events:
                group = (number, self.groups.groups[number]) if len(self.groups) > 1 else None
                name_blocks = partial(self.groups.name_blocks, number, hashes)
                self.blocks.events.record_stored_blocks(sequence, stored, name_blocks, group)
        sequence.num_published = num_full

    def offload_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        """Release the first ``num_blocks`` blocks of ``sequence`` in the first group; host memory has their copies."""
        self._release_leading(sequence.tables[0], num_blocks)

    def finish_sequence(self, sequence: Sequence) -> None:
        """End ``sequence`` and release its blocks. If a load writes to them, they are released when the load ends."""
        if sequence.state is State.LOADING:
            sequence.aborted = True
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.READY:
            self.ready.remove(sequence)
            self._free_blocks(sequence)
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._free_blocks(sequence)
        sequence.state = State.FINISHED

    @property
    def _max_holding(self) -> int:
        # To allocate blocks in advance is useful only if there is a pool to load from.
        return 2 * self.max_num_seqs if self.pool else self.max_num_seqs

    @property
    def _num_holding(self) -> int:
        return len(self.running) + len(self.ready) + len(self.loading)

    def _has_room(self, needed: int, cached: SequenceOf[bytes]) -> bool:
        """Return whether ``needed`` new blocks are available after the blocks with the hashes ``cached`` are taken."""
        # Leave one block for the growth of running sequences, if there are other sequences. A sequence that is admitted
        # in advance leaves one block for each running sequence, because it cannot be preempted while it loads.
        spare = min(1, self._num_holding) if self._num_holding < self.max_num_seqs else self.max_num_seqs
        return needed + spare * len(self.groups) + self.blocks.num_idle(cached) <= self.blocks.num_available

    def _get_ready(self, sequence: Sequence) -> None:
        sequence.state = State.READY
        bisect.insort(self.ready, sequence, key=_arrival_of)

    def _fill_places(self) -> None:
        while self.ready and len(self.running) < self.max_num_seqs:
            sequence = self.ready.pop(0)
            self._take_up_more(sequence)
            sequence.state = State.RUNNING
            if sequence.started_at is None:
                sequence.started_at = time.monotonic()
            bisect.insort(self.running, sequence, key=_arrival_of)

    def _take_up_more(self, sequence: Sequence) -> None:
        """Replace blocks of ``sequence`` that have no KV yet by cached blocks with the same tokens.

        Other sequences have published these cached blocks after ``sequence`` got its own blocks.
        """
        first, hashes = sequence.num_computed // self.block_size, self._list_cacheable(sequence)
        last = self.groups.match_prefix(self.blocks, hashes, first)
        if last <= first:
            return
        for number, table in enumerate(sequence.tables):
            places = self.groups.list_needed_blocks(number, first, last)
            cached = self.blocks.take_cached_blocks(self.groups.name_blocks(number, hashes, places))
            self.blocks.release_blocks(table.blocks[places.start : places.stop])
            table.blocks[places.start : places.stop] = cached
        sequence.num_computed = last * self.block_size
        sequence.num_published = last
        self._release_passed_blocks(sequence)
        if not sequence.num_preemptions:
            sequence.own_cached_tokens += (last - first) * self.block_size
            sequence.prompt_sources.append(("own cache", (last - first) * self.block_size))

    def _give_blocks(self, sequence: Sequence) -> bool:
        """Give ``sequence`` the blocks for all of its tokens: cached blocks, and new blocks for the rest.

        Returns:
            Whether there were enough blocks. If not, nothing has changed.
        """
        hashes = self._list_cacheable(sequence)
        num_cached = self.groups.match_prefix(self.blocks, hashes)
        num_new = -(-len(sequence.token_ids) // self.block_size) - num_cached
        places = [self.groups.list_needed_blocks(number, 0, num_cached) for number in range(len(self.groups))]
        names = [self.groups.name_blocks(number, hashes, each) for number, each in enumerate(places)]
        if not self._has_room(num_new * len(names), [name for each in names for name in each]):
            return False
        sequence.tables = [
            BlockTable([_NO_BLOCK] * each.start + self.blocks.take_cached_blocks(cached), each.start)
            for each, cached in zip(places, names, strict=True)
        ]
        for table in sequence.tables:
            table.blocks += self.blocks.allocate_blocks(num_new)
        sequence.num_computed = num_cached * self.block_size
        sequence.num_published = num_cached
        if not sequence.num_preemptions:
            sequence.own_cached_tokens = sequence.num_computed
            sequence.prompt_sources = [("own cache", sequence.num_computed)]
        return True

    def _share_out(self, blocks: SequenceOf[int], num_tokens: int) -> list[BlockTable]:
        """Return the block tables of a sequence that gets ``blocks``, which were reserved for ``num_tokens`` tokens."""
        firsts = [group.find_first_needed(num_tokens) for group in self.groups.groups]
        tables = [BlockTable([_NO_BLOCK] * first, first) for first in firsts]
        for (number, _), block in zip(self.groups.list_held_blocks(num_tokens), blocks, strict=True):
            tables[number].blocks.append(block)
        return tables

    def _release_passed_blocks(self, sequence: Sequence) -> None:
        """Release the blocks that no later token of ``sequence`` reads."""
        for group, table in zip(self.groups.groups, sequence.tables, strict=True):
            if group.kind != "full":
                self._release_leading(table, group.find_first_needed(sequence.num_computed))

    def _release_leading(self, table: BlockTable, num_blocks: int) -> None:
        if num_blocks > table.num_released:
            self.blocks.release_blocks(table.blocks[table.num_released : num_blocks])
            table.num_released = num_blocks

    def _list_cacheable(self, sequence: Sequence) -> SequenceOf[bytes]:
        """Return the hashes of the blocks of ``sequence`` that it may take from the prefix cache."""
        # The last token is always computed, because the next token is sampled from its logits.
        usable = (len(sequence.token_ids) - 1) // self.block_size if self.prefix_caching else 0
        return sequence.hashes()[:usable]

    def _count_loadable(self, sequence: Sequence) -> int:
        """Return the number of full blocks of ``sequence`` that have no KV and can be loaded instead of computed."""
        return (len(sequence.token_ids) - 1) // self.block_size - sequence.num_computed // self.block_size

    def _explain_no_load(self, sequence: Sequence) -> PoolUse:
        return explain_no_load(len(sequence.token_ids), self.block_size) if self.pool else NO_POOL

    def _grow_sequence(self, sequence: Sequence) -> bool:
        """Make sure that ``sequence`` has a block for the KV of its next token; preempt sequences if necessary.

        Returns:
            False if ``sequence`` itself was preempted.
        """
        if sequence.num_computed < len(sequence.block_table) * self.block_size:
            return True
        while True:
            try:
                for table, block in zip(sequence.tables, self.blocks.allocate_blocks(len(self.groups)), strict=True):
                    table.blocks.append(block)
                return True
            except NoFreeBlocks:
                victim = self.ready[-1] if self.ready else self.running[-1]
                self._preempt_sequence(victim)
                if victim is sequence:
                    return False

    def _preempt_sequence(self, sequence: Sequence) -> None:
        (self.running if sequence.state is State.RUNNING else self.ready).remove(sequence)
        log.debug(
            "request %s: preempted after %d computed tokens, because no blocks are free for running requests",
            *(sequence.request.request_id, sequence.num_computed),
        )
        self._wait_anew(sequence)
        self.num_preemptions += 1

    def _wait_anew(self, sequence: Sequence) -> None:
        """Release all blocks of ``sequence``, and queue it again as if nothing were computed."""
        self._free_blocks(sequence)
        sequence.num_computed = sequence.num_published = 0
        sequence.num_preemptions += 1
        sequence.state = State.WAITING
        bisect.insort(self.waiting, sequence, key=_arrival_of)

    def _free_blocks(self, sequence: Sequence) -> None:
        tables = sequence.tables
        if len(tables) == 1:
            held = tables[0].blocks[tables[0].num_released :]
        else:  # ordered by place, because ``release_blocks`` lets the last blocks be reused first
            places = range(min(table.num_released for table in tables), len(sequence.block_table))
            held = [table.blocks[i] for i in places for table in tables if i >= table.num_released]
        self.blocks.release_blocks(held)
        sequence.tables = [BlockTable() for _ in tables]

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self.waiting)} waiting, {len(self.loading)} loading, {len(self.ready)} ready, "
            f"{len(self.running)} running, {len(self.reservations)} reserved, {self.blocks!r}>"
        )


def _arrival_of(sequence: Sequence) -> float:
    return sequence.arrival
