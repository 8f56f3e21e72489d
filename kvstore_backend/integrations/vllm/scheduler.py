"""Half of the vLLM connector in vLLM's scheduler process: plans loads and saves. Imports nothing from vLLM.

The scheduler does not wait for the pool: look-ups run on their own threads. If a look-up has no result yet, the request
waits until the next step. (A step may wait 2 ms in total, because most look-ups take less than 1 ms, and the next step
may be 50 ms later.) ``messages.py`` has the rule for the ownership of blocks.

If prefill and decode are separate instances, prefill first receives the request with a limit of one token. Then decode
receives the request, and generates the response. A *prefill request* is a request for one token that a router has
marked (``do_remote_decode`` in ``kv_transfer_params``), or that arrives at an instance that only saves. Its response is
returned only when its blocks are in the pool (``Plan.awaited``), so that decode finds them. No other request waits for
saves, because such a wait delays all requests of the instance.

If prefill and decode receive a request at the same time, decode waits for the blocks that prefill saves: it repeats the
look-up until the pool has all blocks of the prompt, or until no new block has arrived for ``prefill_wait_s``. Then it
computes the missing blocks.

If loading blocks takes longer than computing them (``load_or_compute.py``), the blocks are computed. Blocks that a
prefill instance has computed for this instance are always loaded.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
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

__all__ = ["Blocks", "Request", "SchedulerHalf", "Stored"]

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 0.002
_LOOKUPS = 4
# A request whose look-up takes longer than this, plus one second for each ``_LOOKUP_BLOCKS`` blocks, for each rank, is
# computed. This is twice the deadline of the look-ups (``Deadlines``), because they wait for each other in a slow pool.
_LOOKUP_SECONDS, _LOOKUP_BLOCKS = 1.0, 10_000
# After that, requests are computed without a look-up for this time, unless they wait for a prefill instance.
_SLOW_SECONDS = 5.0
# Seconds between two look-ups of blocks that prefill computes. A master answers thousands of look-ups per second.
_AGAIN_SECONDS = 0.02
# Duration of a step in which all requests wait for prefill. Without it vLLM would make a thousand steps per second.
_IDLE_SECONDS = 0.005
# Maximum share of vLLM's blocks that saves may pin. With a slow pool, further saves wait for a later step.
_SAVE_SHARE = 0.25
# Saves are still planned for this time after the scheduler's client last reached the pool.
_TRUST_SECONDS = 5.0
# Transfers require further steps of vLLM for this time after one of them began or ended. It is longer than a call to a
# working pool. vLLM's sleep mode discards the memory of blocks when no further steps are required.
_PUSH_SECONDS = 30.0


class Request(Protocol):
    """Interface of vLLM's class ``Request``, as far as the connector uses it."""

    request_id: str
    num_computed_tokens: int
    max_tokens: int
    skip_reading_prefix_cache: bool
    lora_request: Any
    mm_features: Any

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[bytes]: ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


class Blocks(Protocol):
    """Interface of vLLM's class ``BlockPool`` (blocks and their reference counts), as far as the connector uses it."""

    @property
    def blocks(self) -> Sequence[Any]: ...

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...

    def reset_prefix_cache(self) -> bool: ...


@dataclass
class _Tracked:
    """Request to which vLLM has given blocks.

    Attributes:
        request: the request.
        num_saved: number of the request's leading blocks that are in the pool or are being saved.
        num_noted: number of the request's leading blocks that ``CachedBlocks`` has recorded.
        is_loading: whether a load of the request's blocks has not ended.
        is_scheduled: whether a step had tokens of the request since vLLM last gave it blocks. Before, another connector
            (vLLM's MultiConnector) may still load the blocks that vLLM counts as computed.
        is_stale: whether blocks may not match their names, because the blocks are older than a reset of the cache, or
            some blocks are missing. Then no more blocks of the request are saved.
    """

    request: Request
    num_saved: int = 0
    num_noted: int = 0
    is_loading: bool = False
    is_scheduled: bool = False
    is_stale: bool = False


@dataclass
class _Lookup:
    """Look-up of a request's blocks in the pool, which may be repeated.

    Attributes:
        first: index in the prompt of the first block that is looked up.
        names: names of the blocks from ``first`` on.
        answer: future with the result of the last look-up.
        begun_at: time when the last look-up began.
        found_at: time when the last new block was found.
        found: number of leading blocks that were found.
        run: the blocks of the last look-up, if some of them come from another sharding; otherwise None.
        decision: whether the found blocks are loaded or computed, or None if that is not decided yet.
        has_given_up: whether the request does not wait for a prefill instance any more.
    """

    first: int
    names: Sequence[bytes]
    answer: Future[_Found]
    begun_at: float
    found_at: float
    found: int = 0
    run: Run | None = None
    decision: Decision | None = None
    has_given_up: bool = False


class Stored(NamedTuple):
    """Successive blocks that all ranks have stored in the pool: vLLM's hashes of the blocks and of their parent.

    The parent is the block before these blocks; None if these blocks begin the prompt.
    """

    block_hashes: Sequence[bytes]
    parent: bytes | None


class _Found(NamedTuple):
    """Result of a look-up: the number of leading blocks that the pool has, and a ``Run`` if two shardings have them."""

    num_blocks: int
    run: Run | None


@dataclass
class _Pin:
    """Pinned blocks of a transfer. They are unpinned when all ranks have reported the end of the transfer.

    Attributes:
        request_id: id of the request; empty for blocks that are saved again because the pool lost them.
        blocks: numbers of the blocks, as in ``Transfer.blocks``.
        ranks: number of ranks that have not reported the end.
        is_load: whether the transfer is a load.
        on_end: called after the blocks were unpinned.
        stored: the blocks of a save, which ``take_stored`` returns when all ranks have stored them, or None if
            ``take_stored`` must not return them.
        num_unsaved: number of ranks that have not stored all blocks.
    """

    request_id: str
    blocks: Sequence[int]
    ranks: int
    is_load: bool
    on_end: Callable[[], None] = field(default=lambda: None)
    stored: Stored | None = None
    num_unsaved: int = 0


class SchedulerHalf:
    """Plans the loads and saves of one vLLM scheduler. All methods are called from vLLM's scheduler thread.

    Args:
        backend: backend of the pool for look-ups; ``close`` closes it.
        block_size: tokens in a block.
        loads: whether blocks are looked up and loaded.
        saves: whether blocks are saved.
        prefill_wait_s: seconds for which a prompt waits for its next block from a prefill instance that received the
            request at the same time; with 0, prompts do not wait.
        reports_stored: whether stored blocks are recorded for ``take_stored``.
        drops_last: whether the last block of a hit is computed, not loaded, as in vLLM's own cache with EAGLE or MTP.
            With these, a token's KV in draft layers depends on the next token, which may not be in the block's hash.
        num_rewritten: how many of the last computed tokens have KV that the next step may write again, as vLLM's MTP
            with several modules does. The blocks of these tokens are saved later.
        skips_media: whether requests with images or other media do not use the pool.
    """

    def __init__(
        self,
        backend: StorageBackend,
        block_size: int,
        *,
        loads: bool = True,
        saves: bool = True,
        prefill_wait_s: float = 0.0,
        reports_stored: bool = False,
        drops_last: bool = False,
        num_rewritten: int = 0,
        skips_media: bool = False,
    ) -> None:
        self._backend = backend
        self._num_dropped = int(drops_last)
        self._num_rewritten = num_rewritten
        self._reports_stored = reports_stored
        self._skips_media = skips_media
        self._stored: list[Stored] = []
        self._block_size = block_size
        self._blocks_per_unit = 1  # number of blocks that are saved for each ``block_size`` tokens
        self._loads = loads
        self._saves = saves
        self._prefill_wait_s = prefill_wait_s
        self._pools: list[BlockPool] = []
        self._peers: PeerShardings | None = None
        self._counts: Counts | None = None
        self._blocks: Blocks | None = None
        self._adapters = KnownAdapters()
        self._epoch = b""
        self._is_empty = False  # whether vLLM's own cache was reset, and no request got blocks since
        self._is_stale = False  # whether vLLM's own cache may have blocks from before the last ``forget_blocks``
        self._threads = DaemonThreads(_LOOKUPS, "pool-lookup")
        self._load_or_compute = LoadOrCompute(block_size)
        self._patience = _PATIENCE_SECONDS
        self._ready_at = -math.inf
        self._is_waiting = False  # whether a request of this step waits for prefill
        self._requests: dict[str, _Tracked] = {}
        self._lookups: dict[str, _Lookup] = {}
        self._slow_until = -math.inf
        self._short_loads: set[str] = set()  # requests that loaded fewer blocks than planned: they compute the others
        self._planned_loads: list[Transfer] = []
        self._planned_saves: list[Transfer] = []
        self._pins: dict[int, _Pin] = {}
        self._last_number = 0
        self._moved_at = -math.inf  # time when the last transfer was planned, or its end was reported
        self._deferred: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # called in the next step
        self._cached: CachedBlocks | None = None
        self._refill: Refill | None = None
        self.num_lookups = 0
        """Total number of look-ups that were begun, including repeated ones."""

    def learn_namespaces(self, namespaces: Sequence[Namespace], family: ShardingFamily | None = None) -> None:
        """Begin to use the pool, in the namespaces that the workers report. Before this call, every look-up is a miss.

        Args:
            namespaces: the namespace of each rank.
            family: shardings in which rank 0 can read blocks, or None if only the own sharding is looked up.
        """
        self._pools = [BlockPool(self._backend, namespace) for namespace in namespaces]
        if family is not None:
            self._peers = PeerShardings(self._pools[0], family, range(family.num_heads))
        self._counts = Counts(namespaces[0].digest)
        self._watch_for_losses()

    def bind_blocks(self, blocks: Blocks) -> None:
        """Set vLLM's block pool, in which reference counts pin blocks, and wrap its method ``reset_prefix_cache``.

        vLLM resets its cache only if no block has references, but saves to a slow pool hold references for a long time.
        So the wrapper releases the references of all transfers, resets the cache, and takes the references again.
        """
        self._blocks = blocks
        if (reset := getattr(blocks, "reset_prefix_cache", None)) is not None:
            setattr(blocks, "reset_prefix_cache", partial(self._reset_cache, reset))  # noqa: B010
        self._watch_for_losses()

    def matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Return for how many tokens after the first ``num_computed`` the pool has full blocks that should be loaded.

        The result is None if the number is not known yet; vLLM then asks again in the next step. At least one token of
        the prompt remains to be computed, because vLLM needs its logits.
        """
        first = num_computed // self._block_size
        # Another instance has saved no block with tokens that are written again, so a request must not wait for one.
        end = (request.num_tokens - max(1, self._num_rewritten)) // self._block_size
        if not self._loads or self._is_stale or request.skip_reading_prefix_cache or end - first <= self._num_dropped:
            return 0
        if request.request_id in self._short_loads or not self._is_ready:
            return 0
        lookup = self._lookups.get(request.request_id)
        if lookup is None or lookup.first != first:
            now, wanted = time.monotonic(), self._name_blocks(request, first, end)
            if not wanted or now < self._slow_until:
                return 0
            lookup = _Lookup(first, wanted, self._begin_lookup(wanted), now, now)
            self._lookups[request.request_id] = lookup
        found = self._wait_for_answer(lookup)
        if found is None:
            return None
        if self._is_prefilled_elsewhere(request, lookup, found):
            self._is_waiting = True
            return None
        found -= self._num_dropped
        return found * self._block_size if found > 0 and self._decide(lookup, found) == "load" else 0

    def on_allocation(self, request: Request, blocks: Callable[[], Any], num_external: int) -> None:
        """Record that vLLM gave ``blocks`` to a request, and plan the load of ``num_external`` tokens from the pool."""
        self._is_empty = False
        tracked = self._requests.setdefault(request.request_id, _Tracked(request))
        tracked.is_scheduled = False
        lookup = self._lookups.pop(request.request_id, None)
        if not num_external or lookup is None:
            return
        tracked.is_loading = True
        tracked.num_saved = lookup.first + num_external // self._block_size
        self._planned_loads.append(self._pin_load(request, lookup, tracked.num_saved, blocks()))
        if lookup.run is not None:  # blocks that the own sharding lacks are not recorded, because they were not lost
            tracked.num_noted = tracked.num_saved

    def plan_step(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Any]) -> Plan:
        """Return the plan of the next step: the transfers that the workers begin in it.

        Args:
            scheduled: number of tokens that the step computes, by request id.
            blocks_of: returns the ids of a request's blocks.
        """
        self._patience = _PATIENCE_SECONDS
        self._run_deferred()
        prefilled: set[str] = set()
        computes_prompt = False
        for request_id, count in scheduled.items():
            if (tracked := self._requests.get(request_id)) is not None:
                request = tracked.request
                tracked.is_scheduled = True
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
        """Record the recurrent states that the next step computes at block boundaries. Called before ``plan_step``.

        Args:
            offers: request id -> for each state: index of the group, id of the block, number of tokens before the
                boundary. Only models with several groups have such states.
        """

    def on_request_end(self, request: Request, blocks: Any) -> None:
        """Plan to save the last full blocks of a request that has ended. Called before vLLM frees the blocks."""
        self._lookups.pop(request.request_id, None)
        self._short_loads.discard(request.request_id)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None or not tracked.is_scheduled:
            return
        # The KV of the last token was not computed, because the token was sampled in the last step.
        computed = min(request.num_computed_tokens, request.num_tokens - 1, self._count_covered(blocks))
        self._plan_save(tracked, computed, lambda: blocks)
        if self._find_adapter(request) is None:
            return  # the request does not use the pool, so no save was dropped
        if (missing := self._num_full(tracked, computed) - tracked.num_saved) > 0 and self._counts is not None:
            self._counts.add_operation("save", dropped=missing)

    def on_report(self, report: Report) -> None:
        """Process a report of the workers: unpin blocks of ended transfers; record durations, and adapters' digests."""
        for num_blocks, seconds in report.loads:
            self._load_or_compute.record_load(num_blocks, seconds)
        for num_tokens, seconds in report.steps:
            self._load_or_compute.record_step(num_tokens, seconds)
        self._short_loads |= report.short & self._requests.keys()
        self._adapters.add_digests(report.adapters)
        for number, ranks in report.saved.items():
            if (saved := self._pins.get(number)) is not None and saved.stored is not None:
                saved.num_unsaved -= ranks
                if saved.num_unsaved == 0:
                    self._stored.append(saved.stored)
        if report.ended:
            self._moved_at = time.monotonic()
        for number, ranks in report.ended.items():
            pin = self._pins[number]
            pin.ranks -= ranks
            if pin.ranks == 0:
                del self._pins[number]
                self._free_pin(pin)

    def forget_blocks(self) -> bool:
        """Give all later blocks new names, so that no block from before a change of the weights is used.

        Until its next start, this instance shares no blocks with other instances, because the weights of these may not
        have changed. Requests that already have blocks save none of them. If vLLM could not reset its own cache, it may
        still use older blocks of this cache: then nothing is loaded or saved until a later reset succeeds.

        Returns:
            Whether vLLM's own cache has no older blocks.
        """
        self._epoch = os.urandom(16)
        self._lookups.clear()
        for tracked in self._requests.values():
            tracked.is_stale = True
        if self._cached is not None:
            self._cached.forget_all()
        self._is_stale = not self._is_empty
        logger.warning(
            "The prefix cache was reset: this instance shares no blocks with other instances until its next start"
        )
        if self._is_stale:
            logger.warning(
                "vLLM did not reset its own cache: no blocks are loaded or saved until a later reset succeeds"
            )
        return not self._is_stale

    @property
    def has_pins(self) -> bool:
        """Whether a transfer has not ended yet, or waits for the next step of vLLM."""
        return bool(self._pins) or not self._deferred.empty()

    @property
    def is_moving(self) -> bool:
        """Whether vLLM must make steps because a transfer may end soon. Transfers that hang need no steps."""
        is_recent = time.monotonic() - self._moved_at < _PUSH_SECONDS
        return not self._deferred.empty() or (bool(self._pins) and is_recent)

    def take_counts(self) -> dict[str, dict[str, float]]:
        """Return the counts of blocks, bytes and seconds since the last call, by namespace."""
        return self._counts.pop_counts() if self._counts is not None else {}

    def take_stored(self) -> list[Stored]:
        """Return the blocks that were stored in the pool since the last call.

        Blocks of requests with an adapter, and blocks after ``forget_blocks``, are not included.
        """
        stored, self._stored = self._stored, []
        return stored

    def close(self) -> None:
        """Close the backend of the pool; return after a short time even if the pool hangs."""
        if self._refill is not None:
            self._refill.close()
        if self._cached is not None:
            self._cached.close()
        self._threads.close()
        leaving = threading.Thread(target=self._backend.close, name="pool-close", daemon=True)
        leaving.start()
        leaving.join(2.0)

    def _reset_cache(self, reset: Callable[[], bool]) -> bool:
        """Reset vLLM's own cache, and keep the blocks of transfers pinned; return whether the cache was reset."""
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
        """Return whether ``request`` is a prefill request, so that a decode instance will look up its blocks."""
        is_marked = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
        return request.max_tokens == 1 and (is_marked or not self._loads)

    @property
    def _is_ready(self) -> bool:
        return bool(self._pools) and self._backend.is_ready

    @property
    def _may_save(self) -> bool:
        """Whether saves may be planned: the scheduler's own client has reached the pool in the last ``_TRUST_SECONDS``.

        A short failure of the scheduler's client does not prevent saves, because the workers have their own clients.
        """
        now = time.monotonic()
        if self._is_ready:
            self._ready_at = now
        return bool(self._pools) and now - self._ready_at < _TRUST_SECONDS

    def _wait_for_answer(self, lookup: _Lookup) -> int | None:
        """Return the number of blocks that the last look-up found; None if it has not ended yet.

        If it takes too long, return the number that earlier look-ups found, 0 if there were none.
        """
        start = time.monotonic()
        try:
            found, lookup.run = lookup.answer.result(self._patience)
            return found
        except NotYet:
            seconds = len(self._pools) * (_LOOKUP_SECONDS + len(lookup.names) / _LOOKUP_BLOCKS)
            if start - lookup.begun_at < seconds:
                return None
            lookup.answer.cancel()  # if it still waits for a thread
            if start >= self._slow_until and not self._prefill_wait_s:
                self._slow_until = start + _SLOW_SECONDS
                logger.warning("The pool looks up blocks too slowly, so requests are computed for %g s", _SLOW_SECONDS)
            return lookup.found
        except CancelledError:
            return lookup.found
        finally:
            self._patience = max(0.0, self._patience - (time.monotonic() - start))

    def _decide(self, lookup: _Lookup, found: int) -> Decision:
        """Decide whether to load ``found`` blocks or to compute them. The decision for a look-up does not change.

        vLLM may ask several times for one request, until vLLM has free blocks for it.
        """
        if lookup.decision is None:
            assert self._counts is not None
            num_running = sum(not tracked.is_loading for tracked in self._requests.values())
            has_prefill = bool(self._prefill_wait_s)
            lookup.decision = "load" if has_prefill else self._load_or_compute.decide(found, num_running)
            self._counts.add_decision(lookup.decision)
            if lookup.decision == "compute":
                logger.info(
                    "%d blocks in the pool are computed instead of loaded, because computing is faster: %s",
                    found,
                    self._load_or_compute,
                )
        return lookup.decision

    def _is_prefilled_elsewhere(self, request: Request, lookup: _Lookup, found: int) -> bool:
        """Return whether a request must wait for blocks that a prefill instance saves; if so, repeat the look-up.

        A preempted request does not wait, because it also needs blocks of its generated tokens, which no prefill
        instance saves.
        """
        if not self._prefill_wait_s or request.num_tokens > request.num_prompt_tokens:
            return False
        missing, now = len(lookup.names) - found, time.monotonic()
        if found > lookup.found:
            lookup.found, lookup.found_at = found, now
        if missing and now - lookup.found_at >= self._prefill_wait_s and not lookup.has_given_up:
            lookup.has_given_up = True
            logger.warning(
                "Request %s: %d blocks of its prompt did not arrive from a prefill instance and are computed; check "
                "that the prefill instance saves to this pool, in this namespace",
                request.request_id,
                missing,
            )
        if lookup.has_given_up:
            return False
        # A running look-up is not replaced: its answer would be lost, and another one would take as long.
        if missing and lookup.answer.done() and now - lookup.begun_at >= _AGAIN_SECONDS:
            lookup.begun_at = now
            lookup.answer = self._begin_lookup(lookup.names, lookup.found)
        return missing > 0

    def _begin_lookup(self, wanted: Sequence[bytes], found_before: int | None = None) -> Future[_Found]:
        self.num_lookups += 1
        return self._threads.submit(lambda: self._look_up(wanted, found_before))

    def _look_up(self, wanted: Sequence[bytes], found_before: int | None = None) -> _Found:
        """Look blocks up; return the number of leading blocks that the pools of all ranks have.

        Args:
            wanted: names of the blocks.
            found_before: number of blocks that earlier look-ups found and counted, or None in the first look-up.
        """
        assert self._counts is not None
        start = time.monotonic()
        try:
            found = self._find_leading(wanted)
        except Exception:
            logger.exception("Looking up %d blocks failed; they will be computed", len(wanted))
            found = _Found(0, None)
        seconds, count = time.monotonic() - start, found.num_blocks
        if found_before is None:
            self._counts.add_operation("lookup", seconds, ok=count, absent=len(wanted) - count)
        else:
            self._counts.add_operation("lookup", seconds, ok=max(0, count - found_before))
        return found

    def _find_leading(self, wanted: Sequence[bytes]) -> _Found:
        """Look blocks up in the pools of all ranks, without counting the look-up."""
        count = len(wanted)
        for pool in self._pools:
            count = pool.lookup(wanted[:count]) if count else 0
        run = self._extend_run(wanted, count)
        return _Found(run.count if run else count, run)

    def _extend_run(self, wanted: Sequence[bytes], count: int) -> Run | None:
        """Look up the blocks after the first ``count`` among those saved by instances of another tensor-parallel size.

        Return the leading blocks that the pool has in the own form or that of one other size; None if no other size has
        a further block.
        """
        if self._peers is None or count == len(wanted) or not self._is_ready or self._peers.is_alone():
            return None
        by_rank = [pool.exists(wanted[count:]) for pool in self._pools]
        rest = [next(filterfalse(bool, statuses), Status.OK) for statuses in zip(*by_rank, strict=True)]
        return self._peers.extend_run([Status.OK] * count + rest, 0, lambda _: wanted)

    def _name_blocks(self, request: Request, first: int, end: int) -> list[bytes]:
        """Return the names that blocks ``first`` to ``end`` of a request have in the pool; empty if not known yet."""
        adapter = self._find_adapter(request)
        return [] if adapter is None else name_blocks(request.block_hashes[first:end], adapter, self._epoch)

    def _find_adapter(self, request: Request) -> bytes | None:
        """Return the digest of a request's LoRA adapter, b"" without an adapter.

        The result is None if the digest is not known, or if the request does not use the pool for another reason.
        """
        if self._skips_media and request.mm_features:
            return None
        return b"" if (lora := request.lora_request) is None else self._adapters.find_digest(lora, len(self._pools))

    def _num_full(self, tracked: _Tracked, computed: int) -> int:
        """Return how many blocks of a request are full, and have a hash, when ``computed`` tokens were computed."""
        known = min(computed, tracked.request.num_tokens)  # the tokens of a step may include drafts
        return min(max(0, known - self._num_rewritten) // self._block_size, len(tracked.request.block_hashes))

    def _count_covered(self, blocks: Any) -> int:
        """Return the number of tokens for which ``blocks`` of a request have space."""
        return len(blocks) * self._block_size

    def _pin_load(self, request: Request, lookup: _Lookup, end: int, blocks: Any) -> Transfer:
        """Pin the blocks that a look-up found before the index ``end``, and return the transfer that loads them."""
        names = lookup.names[: end - lookup.first]
        return replace(self._pin_blocks(request, names, blocks[lookup.first : end], is_load=True), run=lookup.run)

    def _may_plan_save(self, tracked: _Tracked) -> bool:
        return self._saves and self._may_save and not tracked.is_stale and not self._is_stale

    def _count_save_room(self) -> int:
        """Return the number of blocks that further saves may pin now."""
        assert self._blocks is not None
        held = sum(len(pin.blocks) for pin in self._pins.values() if not pin.is_load)
        return int(_SAVE_SHARE * len(self._blocks.blocks)) - held

    def _plan_save(self, tracked: _Tracked, computed: int, blocks: Callable[[], Any]) -> None:
        """Plan to save the full blocks of a request that are not saved yet, after ``computed`` tokens were computed."""
        full, first = self._num_full(tracked, computed), tracked.num_saved
        if full <= first or not self._may_plan_save(tracked):
            return
        end = min(full, first + self._count_save_room() // self._blocks_per_unit)
        if end <= first or not (named := self._name_blocks(tracked.request, first, end)):
            return  # blocks without names may get names later, when the digest of an adapter is known
        tracked.num_saved = end
        self._plan_save_of(tracked, named, first, end, blocks())

    def _plan_save_of(self, tracked: _Tracked, named: Sequence[bytes], first: int, end: int, table: Any) -> None:
        """Plan to save blocks ``first`` to ``end`` of a request.

        Args:
            named: names of these blocks in the pool.
            first: index of the first block.
            end: index after the last block.
            table: ids of all blocks of the request.
        """
        if self._has_null(table[first:end]):
            # vLLM has replaced blocks of the request by the null block, which may have any bytes.
            tracked.is_stale = True
            return
        save = self._pin_blocks(tracked.request, named, table[first:end], is_load=False)
        self._planned_saves.append(save)
        if self._reports_stored and tracked.request.lora_request is None and not self._epoch:
            hashes = tracked.request.block_hashes
            stored = Stored(hashes[first:end], hashes[first - 1] if first else None)
            self._pins[save.number].stored = stored
        # Loaded blocks are recorded too; their load has ended. Blocks of an adapter are not recorded, because a worker
        # may refuse their save.
        if self._cached is not None and tracked.request.lora_request is None:
            noted, tracked.num_noted = tracked.num_noted, end
            self._cached.note_blocks(self._name_blocks(tracked.request, noted, end), table[noted:end])

    def _has_null(self, blocks: Sequence[int]) -> bool:
        assert self._blocks is not None
        return any(self._blocks.blocks[block].is_null for block in blocks)

    def _pin_blocks(
        self, request: Request | None, named: Sequence[bytes], blocks: Sequence[int], *, is_load: bool
    ) -> Transfer:
        """Pin ``blocks`` and return the transfer; ``request`` is None for blocks that are saved again after a loss."""
        assert self._blocks is not None
        self._last_number += 1
        self._moved_at = time.monotonic()
        self._blocks.touch(self._find_blocks(blocks))
        request_id = "" if request is None else request.request_id
        adapter = None if request is None or request.lora_request is None else name_adapter(request.lora_request)
        self._pins[self._last_number] = _Pin(
            request_id, blocks, len(self._pools), is_load, num_unsaved=len(self._pools)
        )
        return Transfer(self._last_number, request_id, named, blocks, adapter=adapter)

    def _find_block(self, block: int) -> Any:
        """Return vLLM's object for a block, from the number that the block has in ``Transfer.blocks``."""
        assert self._blocks is not None
        return self._blocks.blocks[block]

    def _find_blocks(self, blocks: Iterable[int]) -> list[Any]:
        return [self._find_block(block) for block in blocks]

    def _watch_for_losses(self) -> None:
        """Start the refill, which saves lost blocks again, if namespaces and vLLM's blocks are known."""
        if self._pools and self._blocks is not None and self._saves and self._refill is None:
            self._cached = CachedBlocks(
                self._pools, self._find_block, self._deferred.put, self._save_again, self._touch_in_order
            )
            digests = [pool.namespace.digest for pool in self._pools]
            self._refill = Refill(self._pools[0], self._cached, lambda _: None, digests=digests)

    def _run_deferred(self) -> None:
        while not self._deferred.empty():
            self._deferred.get()()

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
        self._blocks.free_blocks(self._find_blocks(reversed(pin.blocks)))
        pin.on_end()
        tracked = self._requests.get(pin.request_id)
        if pin.is_load and tracked is not None:
            tracked.is_loading = False
            if pin.request_id in self._short_loads:
                tracked.num_saved = 0
