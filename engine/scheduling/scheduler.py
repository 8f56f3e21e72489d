"""Continuous batching over paged blocks: which sequence computes how many tokens in the next step. No tensors.

The states of a sequence::

    add ─► waiting ─admit─► loading ─loaded─► ready ─(a place)─► running ─► finished
              ▲                └─(nothing to load)─┘ ▲ │             │
              └──────────────── preempted ◄──────────┼─┴─────────────┘
    reserve ─► adopt (another instance computed the prompt)

A step first gives every decoding sequence its one token, then fills the rest of the token budget with chunks of
prompts: long prompts never hold up running decodes for more than one budget. With a pool, up to ``max_num_seqs`` more
sequences get blocks in advance, so that their loads run while others compute.

Sequences are always ordered by arrival, oldest first, so that each becomes the oldest at some time and ends. When
blocks run out, the youngest is preempted, preferably one that does not run yet: its blocks are released (published ones
can still be found), and it is computed again later.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.scheduling.block_manager import BlockManager, NoFreeBlocks
from engine.scheduling.pool_use import NO_POOL, PoolUse, Reason, explain_no_load
from engine.scheduling.request import Sequence, State

__all__ = ["Chunk", "Reservation", "Scheduler"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """``num_tokens`` tokens of ``sequence``, from its ``num_computed`` on, to be computed in one step."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token, so that a new token is sampled after it."""
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True, eq=False)
class Reservation:
    """Blocks for a whole prompt that another instance computes.

    The first ``num_cached`` hold their KV already and are shared; the other instance writes the others. The owner
    passes them to a sequence by ``adopt_reservation``, or releases them by ``cancel_reservation`` when the other
    instance writes no more.
    """

    blocks: list[int]
    num_cached: int

    @property
    def missing(self) -> list[int]:
        """The blocks to be written."""
        return self.blocks[self.num_cached :]


class Scheduler:
    """Chooses the chunks of each step; moves no data.

    Args:
        blocks: the block manager; this scheduler allocates and releases the blocks of sequences.
        block_size: tokens in a block.
        max_num_seqs: the maximum number of sequences that run concurrently.
        max_num_batched_tokens: token budget of a step.
        max_model_len: tokens of the longest sequence; reservations leave enough blocks for one.
        prefix_caching: whether published blocks are looked up on admission.
        pool: whether missing full blocks of a newly admitted sequence are loaded before it runs. Up to ``max_num_seqs``
            more sequences then hold blocks, in addition to adopted ones.
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
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.longest_blocks = -(-max_model_len // block_size)
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
        """Length in tokens of the longest sequence that fits."""
        return self.blocks.num_blocks * self.block_size

    @property
    def has_sequences(self) -> bool:
        """Whether a sequence waits, loads or runs."""
        return bool(self.waiting or self._num_holding)

    def add_sequence(self, sequence: Sequence) -> None:
        """Queue a new sequence; its prompt and ``max_tokens`` together fit in ``capacity_tokens``."""
        bisect.insort(self.waiting, sequence, key=_arrival_of)

    def admit_waiting(self) -> list[Sequence]:
        """Allocate blocks to waiting sequences, oldest first; return those that need a load."""
        to_load = []
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
        """Reserve blocks for a prompt of ``num_tokens`` with these hashes of full blocks; None: there are not enough.

        A reservation never overtakes a sequence that waits for blocks. Another instance that hangs holds its reserved
        blocks, so the longest sequence must always fit next to all reservations.
        """
        num_cached = self.blocks.match_prefix(hashes) if self.prefix_caching else 0
        cached = hashes[:num_cached]
        num_blocks = -(-num_tokens // self.block_size)
        lent = len({block for held in self.reservations for block in held.blocks})
        if lent + num_blocks + self.longest_blocks > self.blocks.num_blocks:
            return None
        needed = num_blocks - num_cached
        if self.waiting or not self._has_room(needed, cached):
            return None
        blocks = self.blocks.take_cached_blocks(cached) + self.blocks.allocate_blocks(needed)
        reservation = Reservation(blocks, num_cached)
        self.reservations.add(reservation)
        return reservation

    def adopt_reservation(self, sequence: Sequence, reservation: Reservation, *, recomputes_last: bool = False) -> None:
        """Let a new sequence continue from its prompt's KV, all of which is in the blocks of ``reservation`` now.

        ``recomputes_last``: the prompt's last token is computed again, for its logits; its block is not shared.
        """
        self.reservations.remove(reservation)
        sequence.block_table = reservation.blocks
        sequence.num_computed = sequence.num_prompt_tokens - recomputes_last
        sequence.num_published = reservation.num_cached
        sequence.own_cached_tokens = min(reservation.num_cached * self.block_size, sequence.num_prompt_tokens)
        rest = sequence.num_prompt_tokens - sequence.own_cached_tokens
        sequence.prompt_sources = [("own cache", sequence.own_cached_tokens), ("the prefill instance", rest)]
        sequence.pool_use = PoolUse(
            Reason.HANDED_OVER, "not asked; the prefill instance handed the prompt over directly"
        )
        self._get_ready(sequence)
        self.publish_blocks(sequence)

    def cancel_reservation(self, reservation: Reservation) -> None:
        """Release the blocks of ``reservation``."""
        self.reservations.remove(reservation)
        self.blocks.release_blocks(reservation.blocks)

    def on_load_end(self, sequence: Sequence, num_blocks: int, *, usable: bool = True) -> None:
        """Mark ``sequence`` ready after its load, which filled ``num_blocks`` more leading blocks.

        If not ``usable``, its other blocks must not be written yet: the sequence releases them and waits for different
        ones.
        """
        self.loading.remove(sequence)
        if sequence.aborted:
            self._free_blocks(sequence)
            sequence.state = State.FINISHED
            return
        sequence.num_computed += num_blocks * self.block_size
        self.publish_blocks(sequence)
        if usable:
            self._get_ready(sequence)
        else:
            self._wait_anew(sequence)

    def schedule_step(self) -> list[Chunk]:
        """Return the next step's chunks; every one has its blocks. Empty when nothing can run."""
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
        """Account for the written KV of ``chunk`` and publish the blocks that became full."""
        chunk.sequence.num_computed += chunk.num_tokens
        self.publish_blocks(chunk.sequence)

    def publish_blocks(self, sequence: Sequence) -> None:
        """Publish every newly full and exactly computed block of ``sequence`` for later sequences."""
        num_full = sequence.num_exact // self.block_size
        if not self.prefix_caching or num_full <= sequence.num_published:
            return
        hashes = sequence.hashes()
        for i in range(sequence.num_published, num_full):
            self.blocks.publish_block(sequence.block_table[i], hashes[i])
        sequence.num_published = num_full

    def offload_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        """Release the leading ``num_blocks`` of a running sequence: it has copied the parts it needs of them."""
        if num_blocks > sequence.num_offloaded:
            self.blocks.release_blocks(sequence.block_table[sequence.num_offloaded : num_blocks])
            sequence.num_offloaded = num_blocks

    def finish_sequence(self, sequence: Sequence) -> None:
        """End ``sequence`` in any state; blocks of a running load are released when that load ends."""
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
        # Allocating blocks in advance is useful only if a load fills them meanwhile.
        return 2 * self.max_num_seqs if self.pool else self.max_num_seqs

    @property
    def _num_holding(self) -> int:
        return len(self.running) + len(self.ready) + len(self.loading)

    def _has_room(self, needed: int, cached: SequenceOf[bytes]) -> bool:
        """Whether ``needed`` new blocks are available in addition to the ``cached`` ones."""
        # Leave one block to grow into, unless no other sequence could release blocks. A sequence admitted in advance
        # leaves one block for each running sequence: while it loads, its blocks cannot be taken back.
        spare = min(1, self._num_holding) if self._num_holding < self.max_num_seqs else self.max_num_seqs
        return needed + spare + self.blocks.num_idle(cached) <= self.blocks.num_available

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
        """Replace blocks still to be computed by those that others published since ``sequence`` got its own."""
        first, hashes = sequence.num_computed // self.block_size, self._list_cacheable(sequence)
        last = self.blocks.match_prefix(hashes)
        if last <= first:
            return
        cached = self.blocks.take_cached_blocks(hashes[first:last])
        self.blocks.release_blocks(sequence.block_table[first:last])
        sequence.block_table[first:last] = cached
        sequence.num_computed = last * self.block_size
        sequence.num_published = last
        if not sequence.num_preemptions:
            sequence.own_cached_tokens += (last - first) * self.block_size
            sequence.prompt_sources.append(("own cache", (last - first) * self.block_size))

    def _give_blocks(self, sequence: Sequence) -> bool:
        """Take cached blocks and allocate the rest for all tokens known so far; False if there are not enough."""
        hashes = self._list_cacheable(sequence)
        num_cached = self.blocks.match_prefix(hashes)
        needed = -(-len(sequence.token_ids) // self.block_size) - num_cached
        if not self._has_room(needed, hashes[:num_cached]):
            return False
        cached = self.blocks.take_cached_blocks(hashes[:num_cached])
        sequence.block_table = cached + self.blocks.allocate_blocks(needed)
        sequence.num_computed = num_cached * self.block_size
        sequence.num_published = num_cached
        if not sequence.num_preemptions:
            sequence.own_cached_tokens = sequence.num_computed
            sequence.prompt_sources = [("own cache", sequence.num_computed)]
        return True

    def _list_cacheable(self, sequence: Sequence) -> SequenceOf[bytes]:
        """Return the hashes of those blocks that may be taken from the prefix cache."""
        # The last token is always computed: its logits give the next token.
        usable = (len(sequence.token_ids) - 1) // self.block_size if self.prefix_caching else 0
        return sequence.hashes()[:usable]

    def _count_loadable(self, sequence: Sequence) -> int:
        """Return how many full blocks of ``sequence`` lack KV and need not be computed if loaded."""
        return (len(sequence.token_ids) - 1) // self.block_size - sequence.num_computed // self.block_size

    def _explain_no_load(self, sequence: Sequence) -> PoolUse:
        return explain_no_load(len(sequence.token_ids), self.block_size) if self.pool else NO_POOL

    def _grow_sequence(self, sequence: Sequence) -> bool:
        """Get a block for one more token's KV, preempting the youngest if needed; return False if that was itself."""
        if sequence.num_computed < len(sequence.block_table) * self.block_size:
            return True
        while True:
            try:
                sequence.block_table += self.blocks.allocate_blocks(1)
                return True
            except NoFreeBlocks:
                victim = self.ready[-1] if self.ready else self.running[-1]
                self._preempt_sequence(victim)
                if victim is sequence:
                    return False

    def _preempt_sequence(self, sequence: Sequence) -> None:
        (self.running if sequence.state is State.RUNNING else self.ready).remove(sequence)
        log.debug(
            "request %s: preempted at %d computed tokens: its blocks go to older requests",
            *(sequence.request.request_id, sequence.num_computed),
        )
        self._wait_anew(sequence)
        self.num_preemptions += 1

    def _wait_anew(self, sequence: Sequence) -> None:
        """Release all blocks and wait for others."""
        self._free_blocks(sequence)
        sequence.num_computed = sequence.num_published = 0
        sequence.num_preemptions += 1
        sequence.state = State.WAITING
        bisect.insort(self.waiting, sequence, key=_arrival_of)

    def _free_blocks(self, sequence: Sequence) -> None:
        self.blocks.release_blocks(sequence.block_table[sequence.num_offloaded :])
        sequence.block_table = []
        sequence.num_offloaded = 0

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self.waiting)} waiting, {len(self.loading)} loading, {len(self.ready)} ready, "
            f"{len(self.running)} running, {len(self.reservations)} reserved, {self.blocks!r}>"
        )


def _arrival_of(sequence: Sequence) -> float:
    return sequence.arrival
