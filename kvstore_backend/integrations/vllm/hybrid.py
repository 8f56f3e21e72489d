"""Scheduler's half of the vLLM connector for models with several KV cache groups.

``kvstore_backend/groups.py`` defines groups, resume points and hits. Facts about vLLM 0.32: there is a block hash for
every ``hash_block_size`` tokens, and this number divides all block sizes. The last hash in a block depends on the whole
prefix up to the end of the block. Before a load, vLLM allocates exactly the blocks that a group needs, and fills the
places before them with its null block.

A *unit* is the least common multiple of the groups' block sizes, in tokens. Look-ups, loads and saves work in units,
because a resume point is a multiple of a unit. In transfers a block is ``group * num_blocks + id`` (``memory.py``). A
transfer lists the blocks of full-attention groups last, and these blocks are stored last. So a reader that finds them
also finds the blocks of the other groups, without which it could load nothing.

A block of a sliding window is saved when it is full, if vLLM has not dropped it before, because a later prompt may have
a common prefix of any length. vLLM makes a recurrent state only if a step ends at a block boundary, keeps only some
states (``--prefix-cache-retention-interval``), and reports each kept state once, in the step that computes the state
(``offer_states``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstore_backend.backend import Status, StorageBackend
from kvstore_backend.groups import Exists, Group, find_resume_point
from kvstore_backend.integrations.vllm.adapters import name_blocks
from kvstore_backend.integrations.vllm.messages import Transfer
from kvstore_backend.integrations.vllm.scheduler import Request, SchedulerHalf, _Found, _Lookup, _Tracked

__all__ = ["HybridSchedulerHalf"]

logger = logging.getLogger(__name__)

Tables = Sequence[Sequence[int]]
"""Ids of a request's blocks, for each group."""


class HybridSchedulerHalf(SchedulerHalf):
    """Plans the loads and saves of one vLLM scheduler for a model with several KV cache groups.

    Args:
        backend: the pool's backend, for look-ups; ``close`` closes it.
        groups: the groups, in vLLM's order.
        hash_block_size: number of tokens for each hash in ``Request.block_hashes``.
        options: the other arguments of ``SchedulerHalf``.
    """

    def __init__(self, backend: StorageBackend, groups: Sequence[Group], hash_block_size: int, **options: Any) -> None:
        super().__init__(backend, math.lcm(*(group.block_size for group in groups)), **options)
        self._namer = _Namer(groups, hash_block_size)
        self._groups = groups
        per_unit = sum(self._block_size // group.block_size for group in groups if group.kind != "state")
        self._blocks_per_unit = max(1, per_unit)
        # Full-attention groups are last in transfers.
        self._order = sorted(range(len(groups)), key=lambda number: groups[number].kind == "full")
        self._states: list[tuple[str, int, int, int]] = []

    def offer_states(self, offers: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
        for request_id, states in offers.items():
            self._states += [(request_id, *state) for state in states]

    def plan_step(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Any]) -> Any:
        states, self._states = self._states, []
        for request_id, number, block, num_tokens in states:
            tracked = self._requests.get(request_id)
            # A state in the middle of a unit is not saved, because it is not at a resume point.
            if tracked is not None and num_tokens % self._block_size == 0:
                self._plan_state(tracked, number, block, num_tokens)
        return super().plan_step(scheduled, blocks_of)

    def matched_tokens(self, request: Request, num_computed: int) -> int | None:
        if num_computed % self._block_size:
            return 0  # not a resume point, so no load can begin here
        return super().matched_tokens(request, num_computed)

    def _name_blocks(self, request: Request, first: int, end: int) -> Sequence[bytes]:  # type: ignore[override]
        adapter = self._find_adapter(request)
        if adapter is None:
            return []
        return _Wanted(self._namer, list(request.block_hashes), first, end, adapter, self._epoch)

    def _num_full(self, tracked: _Tracked, computed: int) -> int:
        return min(computed // self._block_size, self._namer.count_units(len(tracked.request.block_hashes)))

    def _count_covered(self, blocks: Tables) -> int:
        return min(
            len(table) * group.block_size
            for table, group in zip(blocks, self._groups, strict=True)
            if group.kind != "state" or len(self._groups) == 1
        )

    def _find_leading(self, wanted: Sequence[bytes]) -> _Found:
        assert self._counts is not None
        assert isinstance(wanted, _Wanted)
        first, end = wanted.first * self._block_size, (wanted.first + len(wanted)) * self._block_size
        unknown: set[Status] = set()
        resume = find_resume_point(self._groups, first, end, self._look_up_in(wanted, unknown))
        if resume.num_tokens < resume.num_reached and not unknown:
            for group, missing in zip(self._groups, resume.missing, strict=True):
                self._counts.add_operation(group.name.replace(" ", "_"), missing=missing)
            logger.info(
                "Fewer tokens can be loaded than the pool has full-attention blocks for, because the pool lacks "
                "blocks of other groups of layers: %s",
                resume.describe(self._groups),
            )
        return _Found((resume.num_tokens - first) // self._block_size, None)

    def _look_up_in(self, wanted: _Wanted, unknown: set[Status]) -> Exists:
        """Return a function that looks up blocks in the pools of all ranks.

        If a pool does not answer, the function adds ``Status.FAILED`` to the set ``unknown``.
        """

        def exists(blocks: Sequence[tuple[int, int]]) -> list[bool]:
            names = [wanted.name(number, place) for number, place in blocks]
            present = [True] * len(names)
            for pool in self._pools:
                # Only blocks that all earlier ranks have are looked up.
                places = [i for i, has in enumerate(present) if has]
                for i, status in zip(places, pool.exists([names[i] for i in places]) if places else (), strict=True):
                    present[i] = bool(status)
                    if status is Status.FAILED:
                        unknown.add(status)
            return present

        return exists

    def _pin_load(self, request: Request, lookup: _Lookup, end: int, blocks: Tables) -> Transfer:
        wanted, num_tokens = lookup.names, end * self._block_size
        assert isinstance(wanted, _Wanted)
        names: list[bytes] = []
        targets: list[int] = []
        for number in self._order:
            group = self._groups[number]
            begin = lookup.first * self._block_size // group.block_size
            needed = [place for place in group.list_needed(num_tokens) if place >= begin]
            if needed and (needed[-1] >= len(blocks[number]) or self._has_null(blocks[number][needed[0] :])):
                # A load without blocks counts as failed, so the request computes its tokens.
                logger.error(
                    "Blocks of request %s are computed instead of loaded: vLLM allocated too few blocks of group %s",
                    request.request_id,
                    group.name,
                )
                names, targets = [], []
                break
            names += [wanted.name(number, place) for place in needed]
            targets += [self._number_block(number, blocks[number][place]) for place in needed]
        return replace(self._pin_blocks(request, names, targets, is_load=True), num_units=end - lookup.first)

    def _plan_save_of(self, tracked: _Tracked, named: Sequence[bytes], first: int, end: int, table: Tables) -> None:
        assert isinstance(named, _Wanted)
        names: list[bytes] = []
        sources: list[int] = []
        for number in self._order:
            group, own = self._groups[number], table[number]
            places = range(first * self._block_size // group.block_size, end * self._block_size // group.block_size)
            if group.kind == "state":
                continue
            if group.kind == "full" and self._has_null(own[places.start : places.stop]):
                # vLLM has replaced blocks of the request by the null block, which may have any bytes.
                tracked.is_stale = True
                return
            # vLLM has dropped the blocks before the window, because later steps of the request do not read them.
            kept = [place for place in places if place < len(own) and not self._has_null([own[place]])]
            names += [named.name(number, place) for place in kept]
            sources += [self._number_block(number, own[place]) for place in kept]
        self._begin_save(tracked, names, sources)

    def _plan_state(self, tracked: _Tracked, number: int, block: int, num_tokens: int) -> None:
        """Plan to save a recurrent state.

        Args:
            number: index of the state's group.
            block: the block that has the state after this step.
            num_tokens: number of the request's leading tokens that the state covers.
        """
        end = num_tokens // self._block_size
        if end <= tracked.num_saved or not self._may_plan_save(tracked) or self._count_save_room() < 1:
            return
        if self._groups[number].kind != "state" or self._has_null([block]):
            return
        if end > self._namer.count_units(len(tracked.request.block_hashes)):
            return
        if wanted := self._name_blocks(tracked.request, end - 1, end):
            assert isinstance(wanted, _Wanted)
            name = wanted.name(number, num_tokens // self._groups[number].block_size - 1)
            self._begin_save(tracked, [name], [self._number_block(number, block)])

    def _begin_save(self, tracked: _Tracked, names: Sequence[bytes], sources: Sequence[int]) -> None:
        if not names:
            return
        self._planned_saves.append(self._pin_blocks(tracked.request, names, sources, is_load=False))
        # Blocks of an adapter are not recorded, because a worker may refuse their save.
        if self._cached is not None and tracked.request.lora_request is None:
            self._cached.note_blocks(names, sources)

    def _number_block(self, number: int, block: int) -> int:
        assert self._blocks is not None
        return number * len(self._blocks.blocks) + block

    def _find_block(self, block: int) -> Any:
        assert self._blocks is not None
        return self._blocks.blocks[block % len(self._blocks.blocks)]


class _Namer:
    """Computes the names that the blocks of each KV cache group have in the pool."""

    def __init__(self, groups: Sequence[Group], hash_block_size: int) -> None:
        self._groups = groups
        self._hash_size = hash_block_size
        self._unit = math.lcm(*(group.block_size for group in groups))
        self._tags = [
            f"{number} {group.kind} {group.span} {group.block_size}".encode() for number, group in enumerate(groups)
        ]

    def count_units(self, num_hashes: int) -> int:
        """Return how many complete units (least common multiples of the block sizes) ``num_hashes`` hashes cover."""
        return num_hashes * self._hash_size // self._unit

    def name(self, hashes: Sequence[bytes], number: int, place: int, adapter: bytes, epoch: bytes) -> bytes:
        """Return the name of a block, which is made from the last hash in the block.

        Args:
            hashes: vLLM's block hashes of the request.
            number: index of the block's group.
            place: index of the block in the group.
            adapter: digest of the LoRA adapter's files, or empty.
            epoch: random bytes after the weights were changed in place, or empty.
        """
        last = (place + 1) * self._groups[number].block_size // self._hash_size - 1
        (name,) = name_blocks([hashes[last]], adapter, epoch, self._tags[number])
        return name


@dataclass(frozen=True)
class _Wanted(Sequence[bytes]):
    """Blocks of all groups that a look-up searches, for the units ``first`` to ``end`` of a request (see the module).

    As a sequence, this object has only a length, the number of units. An index raises ``TypeError``, because the name
    of a block also depends on its group (``name``).
    """

    namer: _Namer
    hashes: Sequence[bytes]
    first: int
    end: int
    adapter: bytes
    epoch: bytes

    def __len__(self) -> int:
        return max(0, self.end - self.first)

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("the name of a block depends on its group; call name() with the group and the index")

    def name(self, number: int, place: int) -> bytes:
        """Return the name of the block at index ``place`` of group ``number``."""
        return self.namer.name(self.hashes, number, place, self.adapter, self.epoch)
