"""The half of the vLLM connector in vLLM's scheduler process: plans loads and saves; imports nothing from vLLM.

It never waits for the pool: look-ups run on their own threads, and a request without an answer is looked up again in
the next step. (A step may wait 2 ms in total, because most look-ups take less than 1 ms, and the next step may be 50 ms
away.) Ownership of blocks: ``messages.py``.

If prefill and decode are separate instances, prefill receives a request for one token, then decode receives the request
for the answer. A request for one token is only for its KV if a router has marked it as prefill's part
(``do_remote_decode`` in ``kv_transfer_params``) or the instance only saves. It is answered when its blocks are in the
pool (``Plan.awaited``), so decode finds them. No other request waits for saves, because such a wait delays all requests
of the instance.

If both receive a request at the same time, decode waits for the blocks that prefill saves: it repeats the look-up until
all blocks of the prompt are present, or nothing new has arrived for ``prefill_wait_s``. It computes the blocks that are
still missing.

If loading the pool's blocks takes longer than computing them (``load_or_compute.py``), they are computed. Blocks that a
prefill instance computed for this one are always loaded, because that decision was made earlier.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import filterfalse
from typing import Any, NamedTuple, Protocol

from kvstore_backend.backend import Status, StorageBackend
from kvstore_backend.integrations.vllm.adapters import KnownAdapters, name_adapter, name_blocks
from kvstore_backend.integrations.vllm.cached import CachedBlocks
from kvstore_backend.integrations.vllm.counts import Counts
from kvstore_backend.integrations.vllm.messages import Plan, Report, Transfer
from kvstore_backend.load_or_compute import Decision, LoadOrCompute
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import BlockPool
from kvstore_backend.refill import Refill
from kvstore_backend.resharding import PeerShardings, Run, ShardingFamily
from kvstore_backend.threads import DaemonThreads

__all__ = ["Blocks", "Request", "SchedulerHalf"]

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 0.002
_LOOKUPS = 4
# Seconds between two look-ups of blocks that prefill computes; the master answers thousands of look-ups a second.
_AGAIN_SECONDS = 0.02
# Duration of a step that only waits for prefill; without it vLLM would make a thousand steps a second.
_IDLE_SECONDS = 0.005
# Maximum share of all blocks in saves that wait for a slow pool; more saves wait for a later step.
_SAVE_SHARE = 0.25


# Workers receive blocks to save this long after the look-ups' client last reached the pool.
_TRUST_SECONDS = 5.0
# A transfer keeps vLLM's steps running, and a pause waiting, this long: longer than a call to a working pool.
_PUSH_SECONDS = 30.0


class Request(Protocol):
    """The part of vLLM's ``Request`` that is used."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[bytes]: ...

    @property
    def lora_request(self) -> Any: ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


class Blocks(Protocol):
    """The part of vLLM's ``BlockPool`` that is used."""

    @property
    def blocks(self) -> Sequence[Any]: ...

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...

    def reset_prefix_cache(self) -> bool: ...


@dataclass
class _Tracked:
    """Request with blocks; its first ``num_saved`` blocks are in the pool or being saved.

    Attributes:
        num_noted: leading blocks that are known to be cached and saved.
        is_stale: whether its blocks differ from what their names say (they are older than a reset, or some are
            missing); then it saves nothing more.
    """

    request: Request
    num_saved: int = 0
    num_noted: int = 0
    is_loading: bool = False
    is_stale: bool = False


@dataclass
class _Question:
    """Look-up of a request: how many of the blocks from ``first`` on, with these ``names``, the pool has.

    Attributes:
        answer: answer of the last look-up, which began at ``asked_at``.
        found: number found by earlier look-ups; the last block was found at ``found_at``.
        run: run of the last look-up, if some of its blocks come from another sharding.
        decision: whether found blocks are loaded or computed; ``None``: none were found yet.
    """

    first: int
    names: Sequence[bytes]
    answer: Future[_Found]
    asked_at: float
    found_at: float
    found: int = 0
    run: Run | None = None
    decision: Decision | None = None


class _Found(NamedTuple):
    """Number of leading blocks found, and the run of them if some come from another sharding."""

    num_blocks: int
    run: Run | None


@dataclass
class _Pin:
    """Blocks of a transfer, pinned until all ranks have reported its end; then ``on_end`` is called."""

    request_id: str
    blocks: Sequence[int]
    ranks: int
    is_load: bool
    on_end: Callable[[], None] = field(default=lambda: None)
    begun_at: float = field(default_factory=lambda: time.monotonic())  # evaluated late, because tests replace the clock


class SchedulerHalf:
    """Planner of one scheduler's loads and saves. All calls come from vLLM's scheduler thread.

    Args:
        backend: the store, for look-ups; ``close`` closes it.
        block_size: tokens in a block.
        loads: whether to look up and load.
        saves: whether to save.
        prefill_wait_s: how long a prompt waits for its next block, if a prefill instance also received the request.
    """

    def __init__(
        self,
        backend: StorageBackend,
        block_size: int,
        *,
        loads: bool = True,
        saves: bool = True,
        prefill_wait_s: float = 0.0,
    ) -> None:
        self._backend = backend
        self._block_size = block_size
        self._loads = loads
        self._saves = saves
        self._prefill_wait_s = prefill_wait_s
        self._pools: list[BlockPool] = []
        self._peers: PeerShardings | None = None
        self._counts: Counts | None = None
        self._blocks: Blocks | None = None
        self._adapters = KnownAdapters()
        self._epoch = b""
        self._is_empty = False  # vLLM's own cache was reset, and no request got blocks since
        self._is_stale = False  # vLLM's own cache may have blocks from before the last reset
        self._threads = DaemonThreads(_LOOKUPS, "pool-lookup")
        self._load_or_compute = LoadOrCompute(block_size)
        self._patience = _PATIENCE_SECONDS
        self._ready_at = -math.inf
        self._is_waiting = False  # whether some request of this step waits for prefill
        self._requests: dict[str, _Tracked] = {}
        self._questions: dict[str, _Question] = {}
        self._barred: set[str] = set()  # requests with a short load: they compute the rest
        self._planned_loads: list[Transfer] = []
        self._planned_saves: list[Transfer] = []
        self._pins: dict[int, _Pin] = {}
        self._last_number = 0
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # to be called in the next step
        self._cached: CachedBlocks | None = None
        self._refill: Refill | None = None
        self.num_lookups = 0
        """Number of look-ups begun, repeated ones included."""

    def learn_namespaces(self, namespaces: Sequence[Namespace], family: ShardingFamily | None = None) -> None:
        """Take the namespaces of all ranks from the workers; before this call everything is a miss.

        Args:
            namespaces: namespaces of all ranks.
            family: rank 0's family; None: blocks of other shardings are not looked up.
        """
        self._pools = [BlockPool(self._backend, namespace) for namespace in namespaces]
        if family is not None:
            self._peers = PeerShardings(self._pools[0], family, range(family.num_heads))
        self._counts = Counts(namespaces[0].digest)
        self._watch_for_losses()

    def bind_blocks(self, blocks: Blocks) -> None:
        """Take vLLM's block pool; its reference counts pin blocks.

        vLLM resets its cache only if no block is referenced, and a save holds references as long as a slow pool takes.
        So this object calls the pool's ``reset_prefix_cache`` without those references, and restores them when it ends.
        """
        self._blocks = blocks
        if (reset := getattr(blocks, "reset_prefix_cache", None)) is not None:
            setattr(blocks, "reset_prefix_cache", partial(self._reset_cache, reset))  # noqa: B010
        self._watch_for_losses()

    def matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Return how many tokens after the first ``num_computed`` the pool has, in full blocks; ``None``: unknown.

        At least one token is left to compute, because vLLM needs its logits.
        """
        first, end = num_computed // self._block_size, (request.num_tokens - 1) // self._block_size
        if not self._loads or end <= first or request.request_id in self._barred or not self._is_ready:
            return 0
        if self._is_stale:
            return 0
        question = self._questions.get(request.request_id)
        if question is None or question.first != first:
            wanted = self._name_blocks(request, first, end)
            if not wanted:
                return 0
            now = time.monotonic()
            question = _Question(first, wanted, self._begin_lookup(wanted), now, now)
            self._questions[request.request_id] = question
        found = self._wait_for_answer(question)
        if found is None:
            return None
        if self._is_prefilled_elsewhere(request, question, found):
            self._is_waiting = True
            return None
        return found * self._block_size if found and self._decide(question, found) == "load" else 0

    def on_allocation(self, request: Request, blocks: Callable[[], Any], num_external: int) -> None:
        """Record that a request has its ``blocks``; ``num_external`` of their tokens are from the pool."""
        self._is_empty = False
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        question = self._questions.pop(request.request_id, None)
        if not num_external or question is None:
            return
        tracked.is_loading = True
        tracked.num_saved = question.first + num_external // self._block_size
        self._planned_loads.append(self._pin_load(request, question, tracked.num_saved, blocks()))
        if question.run is not None:  # the own sharding lacks some of them, which is not a loss
            tracked.num_noted = tracked.num_saved

    def plan_step(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Any]) -> Plan:
        """Return the workers' transfers in the step that computes ``scheduled`` tokens of each request.

        Args:
            scheduled: number of tokens by request.
            blocks_of: returns the ids of a request's blocks.
        """
        self._patience = _PATIENCE_SECONDS
        self._run_posts()
        prefilled: set[str] = set()
        computes_prompt = False
        for request_id, count in scheduled.items():
            if (tracked := self._requests.get(request_id)) is not None:
                request = tracked.request
                computed = request.num_computed_tokens + count
                computes_prompt |= request.num_computed_tokens < request.num_prompt_tokens
                self._plan_save(tracked, computed, lambda request_id=request_id: blocks_of(request_id))  # type: ignore[misc]
                if self._is_prefill(request) and computed >= request.num_tokens:
                    prefilled.add(request_id)
        loads, self._planned_loads = self._planned_loads, []
        saves, self._planned_saves = self._planned_saves, []
        if self._is_waiting and not (scheduled or loads or saves or self._pins):
            time.sleep(_IDLE_SECONDS)
        self._is_waiting = False
        awaited = [number for number, pin in self._pins.items() if pin.request_id in prefilled and not pin.is_load]
        return Plan(loads, saves, awaited, sum(scheduled.values()) if computes_prompt else 0)

    def offer_states(self, offers: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
        """Take the states that the next planned step computes at block boundaries; called before ``plan_step``.

        Args:
            offers: by request: group, block, and number of tokens before the boundary. A model with one group has none.
        """

    def on_request_end(self, request: Request, blocks: Any) -> None:
        """Record the end of a request, before its blocks are freed, and save its last full blocks."""
        self._questions.pop(request.request_id, None)
        self._barred.discard(request.request_id)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None or tracked.is_loading:
            return
        # The last token was sampled; its KV was not computed.
        computed = min(request.num_computed_tokens, request.num_tokens - 1, self._count_covered(blocks))
        self._plan_save(tracked, computed, lambda: blocks)
        if self._find_adapter(request) is None:
            return  # not cached, so no save was dropped
        if (missing := self._num_full(tracked, computed) - tracked.num_saved) > 0 and self._counts is not None:
            self._counts.add_operation("save", dropped=missing)

    def on_report(self, report: Report) -> None:
        """Process the workers' report: unpin blocks that no transfer touches any more, and record durations."""
        for num_blocks, seconds in report.loads:
            self._load_or_compute.record_load(num_blocks, seconds)
        for num_tokens, seconds in report.steps:
            self._load_or_compute.record_step(num_tokens, seconds)
        self._barred |= report.short & self._requests.keys()
        self._adapters.take_news(report.adapters)
        for number, ranks in report.ended.items():
            pin = self._pins[number]
            pin.ranks -= ranks
            if pin.ranks == 0:
                del self._pins[number]
                self._free_pin(pin)

    def forget_blocks(self) -> bool:
        """Forget everything saved before: this instance may compute other bytes now, because its weights changed.

        Other instances may not have changed, so its blocks are not shared until the next start. Requests that already
        have blocks save none of them. If vLLM's own cache could not be reset, it may still use older blocks: then
        nothing is loaded or saved until a reset of both succeeds.

        Returns:
            Whether vLLM's own cache has no older block.
        """
        self._epoch = os.urandom(16)
        self._questions.clear()
        for tracked in self._requests.values():
            tracked.is_stale = True
        if self._cached is not None:
            self._cached.forget_all()
        self._is_stale = not self._is_empty
        logger.warning("The cache was reset: blocks are no longer shared with other instances until the next start")
        if self._is_stale:
            logger.warning("vLLM's own cache was not: nothing is loaded or saved until a reset of both succeeds")
        return not self._is_stale

    @property
    def has_pins(self) -> bool:
        """Whether some transfer has not ended, or waits for a step to begin."""
        return bool(self._pins) or not self._posts.empty()

    @property
    def is_moving(self) -> bool:
        """Whether a transfer may still end soon; one that hangs for long keeps its blocks, but needs no steps."""
        oldest = time.monotonic() - _PUSH_SECONDS
        return self.has_pins and (not self._posts.empty() or any(pin.begun_at > oldest for pin in self._pins.values()))

    @property
    def num_open_lookups(self) -> int:
        """Number of requests with a running look-up, or that wait for prefill."""
        return len(self._questions)

    def take_counts(self) -> dict[str, dict[str, float]]:
        """Return all counts since the last call."""
        return self._counts.pop_counts() if self._counts is not None else {}

    def close(self) -> None:
        """Leave the pool; wait for that only a short time."""
        if self._refill is not None:
            self._refill.close()
        if self._cached is not None:
            self._cached.close()
        self._threads.close()
        leaving = threading.Thread(target=self._backend.close, name="pool-close", daemon=True)
        leaving.start()
        leaving.join(2.0)

    def _reset_cache(self, reset: Callable[[], bool]) -> bool:
        """Reset vLLM's own cache, although transfers pin blocks; they stay pinned."""
        assert self._blocks is not None
        held = [self._find_blocks(pin.blocks) for pin in self._pins.values()]
        for blocks in held:
            self._blocks.free_blocks(blocks)
        try:
            self._is_empty = reset()
        finally:
            for blocks in held:
                self._blocks.touch(blocks)
        return self._is_empty

    def _is_prefill(self, request: Request) -> bool:
        """Return whether a request is only for its KV, which a decode instance will look up."""
        is_marked = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
        return request.max_tokens == 1 and (is_marked or not self._loads)

    @property
    def _is_ready(self) -> bool:
        return bool(self._pools) and self._backend.is_ready

    @property
    def _may_save(self) -> bool:
        """Whether workers receive blocks to save.

        A late look-up says little about the workers' own clients, which detect failures themselves.
        """
        now = time.monotonic()
        if self._is_ready:
            self._ready_at = now
        return bool(self._pools) and now - self._ready_at < _TRUST_SECONDS

    def _wait_for_answer(self, question: _Question) -> int | None:
        """Return how many blocks the last look-up found; ``None``: it still runs."""
        start = time.monotonic()
        try:
            found, question.run = question.answer.result(self._patience)
            return found
        except NotYet:
            return None
        finally:
            self._patience = max(0.0, self._patience - (time.monotonic() - start))

    def _decide(self, question: _Question, found: int) -> Decision:
        """Decide to load ``found`` blocks, or to compute their tokens.

        vLLM may ask several times until it has free blocks; the decision does not change.
        """
        if question.decision is None:
            assert self._counts is not None
            num_running = sum(not tracked.is_loading for tracked in self._requests.values())
            is_decided = bool(self._prefill_wait_s)
            question.decision = "load" if is_decided else self._load_or_compute.decide(found, num_running)
            self._counts.add_decision(question.decision)
            if question.decision == "compute":
                logger.info("%d blocks of the pool are computed, which is quicker: %s", found, self._load_or_compute)
        return question.decision

    def _is_prefilled_elsewhere(self, request: Request, question: _Question, found: int) -> bool:
        """Return whether more blocks of the prompt are expected soon; then they are looked up again.

        A preempted request does not wait: it has its own tokens, which no prefill instance saves.
        """
        if not self._prefill_wait_s or request.num_tokens > request.num_prompt_tokens:
            return False
        missing, now = len(question.names) - found, time.monotonic()
        if found > question.found:
            question.found, question.found_at = found, now
        if missing and now - question.found_at >= self._prefill_wait_s:
            logger.warning(
                "Request %s: %d blocks of its prompt did not come from a prefill instance; they are computed. (Does it "
                "save, to this pool, in this namespace?)",
                request.request_id,
                missing,
            )
            return False
        if missing and now - question.asked_at >= _AGAIN_SECONDS:
            question.asked_at = now
            question.answer = self._begin_lookup(question.names, question.found)
        return missing > 0

    def _begin_lookup(self, wanted: Sequence[bytes], found_before: int | None = None) -> Future[_Found]:
        self.num_lookups += 1
        return self._threads.submit(lambda: self._look_up(wanted, found_before))

    def _look_up(self, wanted: Sequence[bytes], found_before: int | None = None) -> _Found:
        """Return how many leading blocks every rank finds; a repeated look-up counts only new blocks."""
        assert self._counts is not None
        start = time.monotonic()
        count, run = len(wanted), None
        try:
            for pool in self._pools:
                count = pool.lookup(wanted[:count]) if count else 0
            if run := self._extend_run(wanted, count):
                count = run.count
        except Exception:
            logger.exception("Looking up %d blocks failed; they will be computed", len(wanted))
            count, run = 0, None
        seconds = time.monotonic() - start
        if found_before is None:
            self._counts.add_operation("lookup", seconds, ok=count, absent=len(wanted) - count)
        else:
            self._counts.add_operation("lookup", seconds, ok=max(0, count - found_before))
        return _Found(count, run)

    def _extend_run(self, wanted: Sequence[bytes], count: int) -> Run | None:
        """Find more leading blocks than the ``count`` that every rank has, in another sharding."""
        if self._peers is None or count == len(wanted) or not self._is_ready or self._peers.is_alone():
            return None
        by_rank = [pool.exists(wanted[count:]) for pool in self._pools]
        rest = [next(filterfalse(bool, statuses), Status.OK) for statuses in zip(*by_rank, strict=True)]
        return self._peers.extend_run([Status.OK] * count + rest, 0, lambda _: wanted)

    def _name_blocks(self, request: Request, first: int, end: int) -> list[bytes]:
        """Return the pool's names of blocks ``first`` to ``end``; none if the request's blocks cannot be named."""
        adapter = self._find_adapter(request)
        return [] if adapter is None else name_blocks(request.block_hashes[first:end], adapter, self._epoch)

    def _find_adapter(self, request: Request) -> bytes | None:
        """Return the digest of a request's LoRA adapter; empty: it has none; None: its blocks cannot be named."""
        return b"" if (lora := request.lora_request) is None else self._adapters.find_digest(lora, len(self._pools))

    def _num_full(self, tracked: _Tracked, computed: int) -> int:
        """Return how many blocks are full and have a name once ``computed`` tokens are computed."""
        return min(computed // self._block_size, len(tracked.request.block_hashes))

    def _count_covered(self, blocks: Any) -> int:
        """Return how many leading tokens a request's blocks can hold."""
        return len(blocks) * self._block_size

    def _pin_load(self, request: Request, question: _Question, end: int, blocks: Any) -> Transfer:
        """Return the pinned load of the blocks up to ``end`` that were looked up."""
        names = question.names[: end - question.first]
        return replace(self._pin_blocks(request, names, blocks[question.first : end], is_load=True), run=question.run)

    def _may_plan_save(self, tracked: _Tracked) -> bool:
        return self._saves and self._may_save and not tracked.is_stale and not self._is_stale

    def _count_save_room(self) -> int:
        """Return how many more blocks may be in saves now."""
        assert self._blocks is not None
        held = sum(len(pin.blocks) for pin in self._pins.values() if not pin.is_load)
        return int(_SAVE_SHARE * len(self._blocks.blocks)) - held

    def _plan_save(self, tracked: _Tracked, computed: int, blocks: Callable[[], Any]) -> None:
        full = self._num_full(tracked, computed)
        if full <= tracked.num_saved or not self._may_plan_save(tracked):
            return
        assert self._blocks is not None
        end = min(full, tracked.num_saved + self._count_save_room())
        if end <= tracked.num_saved or not (named := self._name_blocks(tracked.request, tracked.num_saved, end)):
            return  # they may get names later: the digest of an adapter is still being computed
        (first, tracked.num_saved), table = (tracked.num_saved, end), blocks()
        if any(self._blocks.blocks[block].is_null for block in table[first:end]):
            tracked.is_stale = True  # vLLM dropped blocks that it still names; the null block may have any bytes
            return
        self._planned_saves.append(self._pin_blocks(tracked.request, named, table[first:end], is_load=False))
        # Includes loaded blocks, which have arrived by now. Not with an adapter, because a worker may refuse the save.
        if self._cached is not None and tracked.request.lora_request is None:
            noted, tracked.num_noted = tracked.num_noted, end
            self._cached.note_blocks(self._name_blocks(tracked.request, noted, end), table[noted:end])

    def _pin_blocks(
        self, request: Request | None, named: Sequence[bytes], blocks: Sequence[int], *, is_load: bool
    ) -> Transfer:
        """Return a transfer of ``blocks``, pinned until it ends; ``request`` is None after the request's end."""
        assert self._blocks is not None
        self._last_number += 1
        self._blocks.touch(self._find_blocks(blocks))
        request_id = "" if request is None else request.request_id
        adapter = None if request is None or request.lora_request is None else name_adapter(request.lora_request)
        self._pins[self._last_number] = _Pin(request_id, blocks, len(self._pools), is_load)
        return Transfer(self._last_number, request_id, named, blocks, adapter=adapter)

    def _find_blocks(self, blocks: Sequence[int]) -> list[Any]:
        """Return vLLM's objects of these blocks."""
        assert self._blocks is not None
        return [self._blocks.blocks[block] for block in blocks]

    def _list_all_blocks(self) -> Sequence[Any]:
        """Return vLLM's objects of all blocks, at the numbers that transfers use."""
        assert self._blocks is not None
        return self._blocks.blocks

    def _watch_for_losses(self) -> None:
        """Begin to save blocks again that the pool has lost, once pools and blocks are known."""
        if self._pools and self._blocks is not None and self._saves and self._refill is None:
            self._cached = CachedBlocks(
                self._pools, self._list_all_blocks(), self._posts.put, self._save_again, self._touch_in_order
            )
            digests = [pool.namespace.digest for pool in self._pools]
            self._refill = Refill(self._pools[0], self._cached, lambda _: None, digests=digests)

    def _run_posts(self) -> None:
        while not self._posts.empty():
            self._posts.get()()

    def _save_again(self, names: Sequence[bytes], blocks: Sequence[int], on_end: Callable[[], None]) -> None:
        if not blocks or not self._may_save:
            on_end()
            return
        transfer = self._pin_blocks(None, names, blocks, is_load=False)
        self._pins[transfer.number].on_end = on_end
        self._planned_saves.append(transfer)

    def _touch_in_order(self, blocks: Sequence[int]) -> None:
        assert self._blocks is not None
        touched = self._find_blocks(blocks)
        self._blocks.touch(touched)
        self._blocks.free_blocks(touched)

    def _free_pin(self, pin: _Pin) -> None:
        assert self._blocks is not None
        # The last blocks of a sequence are evicted first, as when vLLM frees a request.
        self._blocks.free_blocks(self._find_blocks(list(reversed(pin.blocks))))
        pin.on_end()
        tracked = self._requests.get(pin.request_id)
        if pin.is_load and tracked is not None:
            tracked.is_loading = False
            if pin.request_id in self._barred:
                tracked.num_saved = 0
