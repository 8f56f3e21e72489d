"""CachedBlocks: the blocks that one instance has cached, which its KV events report, and the prompts of these blocks.

A KV event names a block by a hash of its tokens. The router has no tokenizer, and knows a prompt only by hashes of its
text (``chunk_hashes``). So it finds out which blocks belong to a prompt after the response. It searches for a chain of
blocks that the instance stored during the request, with as many tokens as the engine counted in the prompt. If exactly
one chain fits, the prompt is associated with it. After that, an event that removes a block of the chain also removes
the prompt's chunks from the policy's index.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count, groupby, repeat, takewhile
from typing import NamedTuple

import xxhash

from router.policies.block_names import SEED, TOKEN_BYTES, hash_contents, name_next

__all__ = ["BlockHash", "CachedBlocks", "PlacedPrompt"]

BlockHash = int | bytes
Tokens = bytes | bytearray | Callable[[], bytes]
"""Tokens of successive blocks, or a function that returns them."""

# Times after a response. Before the first, its events may not have arrived, and a chain of another request could fit by
# mistake. A search without a result is repeated after twice the time, until the second time. Then no more events are
# expected, and the prompt is given up.
_SETTLE_SECONDS = 0.1
_MAX_SETTLE_SECONDS = 5.0
# Seconds for which a block is listed as recent, because the request that stored it may still be running. It leaves the
# list after at most twice this time.
_RECENT_SECONDS = 600.0
# Maximum number of blocks in a run of several events. The time for a block in the middle of a run grows with it.
_MAX_RUN_BLOCKS = 512


class PlacedPrompt(NamedTuple):
    """A prompt that an instance has processed, after its response."""

    chunks: Sequence[int]
    """Hashes of the prompt's whole chunks."""
    tokens_per_chunk: float
    """Average number of tokens in a chunk, as the engine counted them."""
    rest: bytes
    """Text of the prompt after its last whole chunk."""
    prompt_tokens: int
    """Number of prompt tokens, as the engine counted them."""
    cached_tokens: int | None
    """Number of prompt tokens that the engine did not compute; None if the engine did not report it."""
    total_tokens: int
    """Number of tokens of the prompt and the response."""
    sent_at: float
    """Time at which the request was sent, by the policy's clock."""
    ended_at: float
    """Time at which the response ended, by the policy's clock."""


@dataclass(slots=True, eq=False)
class _Run:
    """Successive cached blocks of one prefix. One or several events have stored them.

    A run has no object for each block, because an instance may have a million blocks, and events about thousands of
    them arrive each second.
    """

    parent: BlockHash | None
    """Hash of the block before the first one; None if the first one begins a prompt."""
    before: _Run | None
    """The run that has ``parent``; None if that block is not cached."""
    start: int
    """Number of tokens of the prompt before the first block; -1 if it is unknown."""
    size: int
    """Number of tokens in each block."""
    seed: int
    """Seed for the names of these blocks."""
    stored_at: float
    """Time of the last event."""
    hashes: list[BlockHash] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    """Names of the first blocks, as far as they were computed; see ``block_names``."""
    unnamed: list[tuple[int, int, Tokens]] = field(default_factory=list)
    """Tokens of the blocks that have no names yet: the place of the first block in ``hashes``, the place after the last
    block, and the tokens. There may be tokens of fewer blocks, and a function may return those of more blocks."""
    behind: dict[_Run, None] = field(default_factory=dict)
    """The runs whose ``before`` is this run."""
    chunks: dict[int, float] = field(default_factory=dict)
    """The prompt chunks that end in these blocks. The value is the number of tokens up to the end of the chunk."""
    tips: dict[int, _Tip] = field(default_factory=dict)
    """The tips that are in these blocks, by ``_Tip.chunk``."""

    @property
    def end(self) -> int:
        """Number of tokens from the beginning of the prompt to the end of the last block."""
        return self.start + len(self.hashes) * self.size

    def find_end(self, block: BlockHash) -> int:
        """Return the number of tokens from the beginning of the prompt to the end of one of these blocks."""
        if block == self.hashes[-1]:
            return self.end
        return self.start + (self.hashes.index(block) + 1) * self.size

    def add_blocks(self, hashes: Iterable[BlockHash], tokens: Tokens, now: float) -> None:
        """Add blocks at the end. The tokens may be those of the first ones only."""
        place = len(self.hashes)
        self.hashes += hashes
        self.stored_at = now
        if not tokens:
            return
        end = len(self.hashes)
        if not callable(tokens):
            tokens = bytearray(tokens[: (end - place) * self.size * TOKEN_BYTES])
            if self.unnamed:
                first, _, known = self.unnamed[-1]
                if isinstance(known, bytearray) and len(known) == (place - first) * self.size * TOKEN_BYTES:
                    known += tokens
                    self.unnamed[-1] = first, end, known
                    return
        self.unnamed.append((place, end, tokens))

    def keep_blocks(self, count: int) -> None:
        """Remove all blocks but the first ``count`` ones."""
        del self.hashes[count:], self.names[count:]
        while self.unnamed and self.unnamed[-1][0] >= count:
            self.unnamed.pop()
        if self.unnamed:
            first, end, tokens = self.unnamed[-1]
            self.unnamed[-1] = first, min(end, count), tokens
            if isinstance(tokens, bytearray):
                del tokens[(count - first) * self.size * TOKEN_BYTES :]


@dataclass(slots=True)
class _Tip:
    """The end of what an instance has cached of a prompt and its response."""

    chunk: int
    """Hash of the prompt's last whole chunk."""
    run: _Run
    """The run that has the last cached block."""
    end: int
    """Number of cached tokens, as the engine counts them."""
    prompt_end: int
    """Number of tokens up to the end of the last block that has only prompt tokens."""
    tokens_per_chunk: float
    num_rest_bytes: int
    rest_digest: int


class CachedBlocks:
    """The cached blocks of one instance, as a tree of runs."""

    def __init__(
        self, drop_chunks: Callable[[Iterable[int]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            drop_chunks: called with the prompt chunks that the instance has evicted from its cache.
        """
        self.is_exact = False
        """Whether all events of the instance up to now were applied."""
        self._drop_chunks = drop_chunks
        self._clock = clock
        self._run_of: dict[BlockHash, _Run] = {}
        """The run of each cached block."""
        self._size = 0
        self._copies: Counter[BlockHash] = Counter()
        """The number of further copies of each block that is cached several times."""
        self._orphans: dict[BlockHash, dict[_Run, None]] = {}
        """The runs whose parent was removed, by the parent's hash. Runs after an unknown block are missing."""
        self._by_name: dict[int, BlockHash] = {}
        """The block of each name, after the first call of ``name_blocks``. Most routers get no queries for names."""
        self._is_naming = self._is_named = False
        self._run_of_chunk: dict[int, _Run] = {}
        """For each chunk of an associated prompt, the run in which it ends."""
        self._tips: dict[int, _Tip] = {}
        """The tip of each associated prompt, by the prompt's last whole chunk."""
        self._leaves: set[BlockHash] = set()
        """The last blocks of associated prompts."""
        # The time of each recent event, its last block, and the number of its blocks, by the number of tokens up to the
        # last block's end. Two generations, as in ``PrefixIndex``.
        self._recent: dict[int, list[tuple[float, BlockHash, int]]] = {}
        self._less_recent: dict[int, list[tuple[float, BlockHash, int]]] = {}
        self._turned_at = clock()
        self._pending: list[tuple[float, int, PlacedPrompt]] = []
        """A heap of the prompts without known blocks: the time of the next search, a unique number, the prompt."""
        self._num_noted = 0
        self._named: list[tuple[PlacedPrompt, BlockHash]] = []
        """Prompts with a last block that another process has found, until the event for this block arrives."""

    def __len__(self) -> int:
        return len(self._run_of)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._run_of)

    def __contains__(self, block: object) -> bool:
        return block in self._run_of

    @property
    def chunks(self) -> Iterable[int]:
        """The prompt chunks that the instance is known to have cached."""
        return self._run_of_chunk.keys()

    @property
    def is_settled(self) -> bool:
        """Whether no prompt is waiting for events."""
        return not self._pending and not self._named

    @property
    def block_size(self) -> int:
        """Number of tokens in each whole block; 0 if there are no blocks."""
        return self._size if self._run_of else 0

    def name_blocks(self) -> Iterator[None]:
        """Compute the names of all blocks, for ``count_named`` and ``count_leading``. Yield often, for other work.

        After that, each block gets its name when it is stored. Events may be applied between the steps.
        """
        self._is_naming = True
        if not self._is_named:
            runs = [run for run in dict.fromkeys(self._run_of.values()) if run.before is None]
            while runs:
                run = runs.pop()
                self._name_run(run)
                runs += run.behind
                yield
        self._is_named = True

    def count_named(self, names: Iterable[int]) -> int:
        """Return the number of leading blocks of a prompt that are cached.

        Args:
            names: names of the prompt's blocks, in order; see ``block_names``.
        """
        return sum(1 for _ in takewhile(self._by_name.__contains__, names))

    def count_leading(self, hashes: Iterable[BlockHash]) -> int:
        """Return the number of leading blocks of a prompt that are cached.

        Args:
            hashes: for each block of the prompt, in order, its hash in the instance's events, or its name.
        """
        return sum(1 for _ in takewhile(lambda each: each in self._run_of or each in self._by_name, hashes))

    def store_blocks(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        block_size: int,
        tokens: Tokens = b"",
        seed: int = SEED,
    ) -> None:
        """Add a chain of blocks that the instance has stored.

        Args:
            hashes: the blocks, in order.
            parent: the block before the first one; None if the first block begins a prompt.
            block_size: number of tokens in each block.
            tokens: tokens of the first blocks. Blocks without tokens get no names.
            seed: seed for the names if the first block begins a prompt; otherwise the seed of ``parent`` is used.
        """
        if not hashes:
            return
        now = self._clock()
        self._size = max(block_size, self.block_size)  # vLLM may also send a part of a block, as a smaller block
        if now - self._turned_at > _RECENT_SECONDS:
            self._recent, self._less_recent, self._turned_at = {}, self._recent, now
        if self._run_of.keys().isdisjoint(hashes):
            self._store_run(hashes, parent, block_size, now, tokens, seed)
            return
        # Some blocks are stored a second time, by a request that ran at the same time, or that computed the last block
        # of a cached prompt again. They stay where they are, until the instance has evicted all copies.
        unique = dict.fromkeys(hashes)
        self._copies.update(filter(self._run_of.__contains__, unique))
        if len(unique) < len(hashes):
            tokens = b""
        at, step = 0, block_size * TOKEN_BYTES
        for run, group in groupby(unique, self._find_placed):
            blocks = list(group)
            end = at + len(blocks)
            if run is None:
                tokens = tokens() if callable(tokens) else tokens
                self._remove(blocks)
                self._store_run(blocks, parent, block_size, now, tokens[at * step : end * step], seed)
            else:
                run.stored_at = now
                self._recent.setdefault(run.find_end(blocks[-1]), []).append((now, blocks[-1], len(blocks)))
            parent, at = blocks[-1], end

    def remove_blocks(self, hashes: Sequence[BlockHash]) -> None:
        """Remove blocks that the instance has evicted. Blocks after an evicted block are cached, but cannot be used.

        If several copies of a block are cached, one of them is removed.
        """
        if not self._copies.keys().isdisjoint(hashes):
            hashes = [block for block in hashes if not self._remove_copy(block)]
        if lost := self._remove(hashes):
            self._drop_chunks(lost)

    def forget_copies(self) -> None:
        """Assume that each block is cached once. Call this if events may be missing: a missing event about the removal
        of a copy would have the effect that the block stays.
        """
        self._copies.clear()

    def clear(self) -> None:
        """Remove all blocks, and all prompts that wait for events."""
        lost = list(self._run_of_chunk)
        for each in (self._run_of, self._orphans, self._run_of_chunk, self._tips, self._leaves, self._by_name):
            each.clear()
        self._copies.clear()
        self._recent, self._less_recent = {}, {}
        self._pending.clear()
        self._named.clear()
        if lost:
            self._drop_chunks(lost)

    def note_prompt(self, prompt: PlacedPrompt, leaf: BlockHash | None = None) -> None:
        """Store a prompt, which a later call of ``settle`` associates with its blocks.

        Args:
            prompt: the prompt, after its response.
            leaf: the last block of the prompt, if another process has found it.
        """
        if leaf is not None:
            self._named.append((prompt, leaf))
        elif prompt.chunks:
            self._num_noted += 1
            heappush(self._pending, (prompt.ended_at + _SETTLE_SECONDS, self._num_noted, prompt))

    def settle(self) -> list[tuple[PlacedPrompt, BlockHash]]:
        """Associate the waiting prompts with their blocks. Return each prompt that was associated, and its last block.

        A prompt without a fitting chain waits longer, because its events may arrive late. Prompts with a last block
        that another process has found are associated, too, but not returned.
        """
        now, found = self._clock(), []
        while self._pending and self._pending[0][0] <= now:
            _, number, prompt = heappop(self._pending)
            if (leaf := self._find_leaf(prompt)) is not None:
                self.associate(prompt, leaf)
                found.append((prompt, leaf))
            elif (waited := now - prompt.ended_at) < _MAX_SETTLE_SECONDS:
                heappush(self._pending, (prompt.ended_at + 2 * waited, number, prompt))
        named, self._named = self._named, []
        for prompt, leaf in named:
            if leaf in self._run_of:
                self.associate(prompt, leaf)
            elif now - prompt.ended_at < _MAX_SETTLE_SECONDS:
                self._named.append((prompt, leaf))
        return found

    def associate(self, prompt: PlacedPrompt, leaf: BlockHash) -> None:
        """Associate a prompt with the chain that ends with the block ``leaf``. Does nothing if ``leaf`` was removed."""
        run = self._run_of.get(leaf)
        if run is None or run.start < 0:
            return
        end = run.find_end(leaf)
        self._leaves.add(leaf)
        self._add_tip(prompt, run, end)
        chunks, per_chunk = prompt.chunks, prompt.tokens_per_chunk
        place = len(chunks)
        above: _Run | None = run
        while above is not None and place:
            first = min(place, int(above.start / per_chunk))
            known = place - 1
            while known >= first and self._run_of_chunk.get(chunks[known]) is not above:
                known -= 1
            self._place_chunks(chunks[known + 1 : place], above, (known + 2) * per_chunk, per_chunk)
            if known >= first:
                break  # the chunks before this one are associated, too
            place, above = first, above.before
        for chunk in reversed(chunks):  # the last chunks may end after the last whole block, which they belong to
            if run.chunks.get(chunk, 0) <= end:
                break
            run.chunks[chunk] = end

    def has_chunk(self, chunk: int) -> bool:
        """Return whether the instance has the block in which this chunk ends, as far as its events say."""
        return chunk in self._run_of_chunk

    def find_end(self, chunk: int, text: bytes) -> tuple[int, float] | None:
        """Return the number of leading tokens of a prompt that the instance has cached; None if it is unknown.

        The number is known only if an earlier prompt was associated with its blocks, its last whole chunk is ``chunk``,
        and ``text`` begins with the rest of the earlier prompt.

        Args:
            chunk: the last chunk of the prompt that the index knows.
            text: text of the prompt after ``chunk``. If it is longer than the rest of the earlier prompt, it is assumed
                to continue with the response to the earlier prompt.

        Returns:
            The number of tokens as the engine counts them, and the average number of tokens in a chunk.
        """
        tip = self._tips.get(chunk)
        if tip is None or xxhash.xxh3_64_intdigest(text[: tip.num_rest_bytes]) != tip.rest_digest:
            return None
        end = tip.end if len(text) > tip.num_rest_bytes else min(tip.end, tip.prompt_end)
        return end, tip.tokens_per_chunk

    def _find_placed(self, block: BlockHash) -> _Run | None:
        """Return the run of a cached block whose place in the prompt is known."""
        run = self._run_of.get(block)
        return None if run is None or run.start < 0 else run

    def _store_run(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        size: int,
        now: float,
        tokens: Tokens,
        seed: int,
    ) -> None:
        """Add blocks that are not cached: to the run that ends with their parent, or as a new run."""
        before = None if parent is None else self._run_of.get(parent)
        if (
            before is not None
            and before.hashes[-1] == parent
            and before.size == size
            and not before.behind
            and len(before.hashes) + len(hashes) <= _MAX_RUN_BLOCKS
        ):
            run = before
        else:
            start = 0
            if parent is not None:
                start = -1 if before is None or before.start < 0 else before.find_end(parent)
            run = _Run(parent, before, start, size, seed if before is None else before.seed, now)
            self._link(run)
        placed = dict.fromkeys(hashes, run)
        run.add_blocks(placed, tokens if len(placed) == len(hashes) else b"", now)
        self._run_of.update(placed)
        if run.start >= 0:
            self._recent.setdefault(run.end, []).append((now, run.hashes[-1], len(placed)))
        if self._is_naming:
            self._name_run(run)
        if self._orphans:
            for block in [block for block in placed if block in self._orphans]:
                self._adopt(block, run)

    def _link(self, run: _Run) -> None:
        if run.before is not None:
            run.before.behind[run] = None
        elif run.parent is not None and run.start > 0:
            self._orphans.setdefault(run.parent, {})[run] = None

    def _unlink(self, run: _Run) -> None:
        if run.before is not None:
            del run.before.behind[run]
        elif run.parent is not None and run.start > 0:
            orphans = self._orphans[run.parent]
            del orphans[run]
            if not orphans:
                del self._orphans[run.parent]

    def _adopt(self, block: BlockHash, run: _Run) -> None:
        """Link the runs after ``block``, which was stored again, with the run that has it now."""
        end = run.find_end(block)
        for orphan in list(self._orphans[block]):
            # If the block was stored again in another chain, it ends elsewhere, and the chain of the orphan is broken.
            if run.start >= 0 and orphan.start == end:
                self._unlink(orphan)
                orphan.before = run
                self._link(orphan)

    def _remove(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Remove blocks, and return the prompt chunks that were lost. Blocks that are not cached are ignored."""
        lost: list[int] = []
        removed: dict[_Run, list[BlockHash]] = {}
        at = 0
        for run, group in groupby(map(self._run_of.pop, hashes, repeat(None))):
            end = at + len(list(group))
            if run is not None:
                removed.setdefault(run, []).extend(hashes[at:end])
            at = end
        for run, blocks in removed.items():
            self._cut(run, blocks, lost)
        return lost

    def _remove_copy(self, block: BlockHash) -> bool:
        """Remove one of several copies of a block; return False if there are not several."""
        count = self._copies.get(block, 0)
        if count > 1:
            self._copies[block] = count - 1
        elif count:
            del self._copies[block]
        return count > 0

    def _cut(self, run: _Run, removed: list[BlockHash], lost: list[int]) -> None:
        """Remove blocks from a run. The blocks after them become runs of their own, whose parents are not cached."""
        keep = len(run.hashes) - len(removed)
        tail = run.hashes[keep:]
        if keep and tail != removed[::-1] and tail != removed:  # in the usual order, the last blocks are evicted first
            gone = set(removed)
            keep = next(place for place, block in enumerate(run.hashes) if block in gone)
            tail = run.hashes[keep:]
            self._split(run, keep, gone)
        end = run.start + keep * run.size
        self._leaves.difference_update(tail)
        for name, block in zip(run.names[keep:], tail, strict=False):
            if self._by_name.get(name) == block and block not in self._run_of:
                del self._by_name[name]
        run.keep_blocks(keep)
        last = run if keep else run.before
        self._lose(run, end, last, lost)
        for each in [each for each in run.behind if each.start > end or run.start < 0]:
            self._lose_subtree(each, end, last, lost)
            del run.behind[each]
            each.before = None if each.parent is None else self._run_of.get(each.parent)
            self._link(each)
        if not keep:
            self._unlink(run)

    def _split(self, run: _Run, keep: int, gone: set[BlockHash]) -> None:
        """Make new runs of the blocks of ``run`` from ``keep`` on that are not in ``gone``."""
        at = keep
        for is_gone, group in groupby(run.hashes[keep:], gone.__contains__):
            blocks = list(group)
            if not is_gone:
                start = run.start + at * run.size if run.start >= 0 else -1
                parent = run.hashes[at - 1]
                piece = _Run(parent, None, start, run.size, run.seed, run.stored_at, blocks)
                piece.names = run.names[at : at + len(blocks)]
                self._run_of.update(dict.fromkeys(blocks, piece))
                self._link(piece)
            at += len(blocks)

    def _lose_subtree(self, root: _Run, end: int, last: _Run | None, lost: list[int]) -> None:
        """Remove the prompts' associations with ``root`` and with all runs after it, because a block before is gone."""
        stack = [root]
        while stack:
            run = stack.pop()
            stack += run.behind
            self._leaves.difference_update(run.hashes)
            self._lose(run, end, last, lost)

    def _lose(self, run: _Run, end: int, last: _Run | None, lost: list[int]) -> None:
        """Remove the prompts' associations with the blocks of ``run`` after ``end`` tokens.

        Args:
            last: the run that has the last cached block before ``end``; None if there is none.
            lost: gets the lost chunks.
        """
        for chunk in [chunk for chunk, chunk_end in run.chunks.items() if chunk_end > end]:
            del run.chunks[chunk], self._run_of_chunk[chunk]
            self._remove_tip(chunk)
            lost.append(chunk)
        for tip in [tip for tip in run.tips.values() if tip.end > end]:
            if last is None:
                self._remove_tip(tip.chunk)
            else:
                del run.tips[tip.chunk]
                tip.end, tip.run = end, last
                last.tips[tip.chunk] = tip

    def _place_chunks(self, chunks: Sequence[int], run: _Run, first_end: float, per_chunk: float) -> None:
        """Associate chunks with the run in which they end; ``first_end`` is the end of the first one, in tokens."""
        if not self._run_of_chunk.keys().isdisjoint(chunks):
            for chunk in chunks:
                if other := self._run_of_chunk.get(chunk):
                    del other.chunks[chunk]
        self._run_of_chunk.update(dict.fromkeys(chunks, run))
        run.chunks.update(zip(chunks, count(first_end, per_chunk), strict=False))

    def _find_leaf(self, prompt: PlacedPrompt) -> BlockHash | None:
        """Return the last whole block of a prompt; None if no chain of blocks fits, or several fit.

        An engine stores this block when it has computed the prompt. Usually it is the last block of an event then. But
        SGLang may send the blocks of the prompt and of the response in one event.
        """
        size = self._size or 1
        end, total = prompt.prompt_tokens // size * size, prompt.total_tokens
        known = next((chunk for chunk in reversed(prompt.chunks) if chunk in self._run_of_chunk), None)
        cached = prompt.cached_tokens
        fitting: list[BlockHash] = []
        if cached is None or cached < end:  # otherwise the instance stored no block for this prompt
            # An engine stores no KV of the last token. If it has a block for each pair of tokens, there is one less.
            for event_end in (end, *range(max(end + size, (total - 2) // size * size), total + 1, size)):
                fitting = self._list_stored(end, event_end, known, prompt.sent_at)
                if fitting:
                    break
        if cached is None and known is None:
            return None
        if len(fitting) == 1:
            return fitting[0] if fitting[0] in self._run_of else None
        if fitting or known is None or cached is None or cached < end - size:
            return None
        return self._descend(known, end)  # the whole prompt was cached, so its chain continues the known one

    def _list_stored(self, end: int, event_end: int, known: int | None, since: float) -> list[BlockHash]:
        """Return the blocks that end at ``end`` tokens, were stored since a time, and may be the last one of a prompt.

        Blocks that were removed after that may be the last one, too. Without them, a block of another prompt would fit.

        Args:
            event_end: end of the last block of the events that are searched.
            known: the last associated chunk of the prompt; None if there is none.
        """
        found: list[BlockHash] = []
        recent, less_recent = self._recent.get(event_end, ()), self._less_recent.get(event_end, ())
        for at, block, num_blocks in chain(reversed(recent), reversed(less_recent)):
            if at < since or len(found) > 1:
                break
            run = self._find_placed(block)
            if run is None:
                if end == event_end and block not in found:
                    found.append(block)
                continue
            if run.find_end(block) != event_end or event_end - num_blocks * run.size >= end:
                continue
            if end < event_end:
                while run.start >= end and run.before is not None:
                    run = run.before
                place, odd = divmod(end - run.start, run.size)
                if odd or not 0 < place <= len(run.hashes):
                    continue
                block = run.hashes[place - 1]
            if block not in self._leaves and block not in found and (known is None or self._is_behind(run, end, known)):
                found.append(block)
        return found

    def _find_block_end(self, chunk: int) -> tuple[_Run, int]:
        """Return the run in which an associated chunk ends, and the number of tokens up to the end of its block."""
        run = self._run_of_chunk[chunk]
        num_blocks = max(1, math.ceil((run.chunks[chunk] - run.start) / run.size))
        return run, min(run.end, run.start + num_blocks * run.size)

    def _is_behind(self, run: _Run, end: int, chunk: int) -> bool:
        """Return whether the first ``end`` tokens of a chain, which end in ``run``, have the block of ``chunk``."""
        start, chunk_end = self._find_block_end(chunk)
        at: _Run | None = run
        while at is not None and at.start >= chunk_end:
            at = at.before
        return at is start and end >= chunk_end

    def _descend(self, chunk: int, end: int) -> BlockHash | None:
        """Return the block that ends at ``end`` tokens, after the one in which ``chunk`` ends; None if the chain ends
        or branches before.
        """
        run, at = self._find_block_end(chunk)
        while True:
            most = min(end, run.end)
            if any(at <= each.start < most for each in run.behind):
                return None
            if end <= run.end:
                place, odd = divmod(end - run.start, run.size)
                return run.hashes[place - 1] if end >= at and not odd else None
            following = [each for each in run.behind if each.start == run.end]
            if len(following) != 1:
                return None
            run, at = following[0], run.end

    def _add_tip(self, prompt: PlacedPrompt, run: _Run, prompt_end: int) -> None:
        """Store how many tokens of the prompt and its response are cached."""
        chunk = prompt.chunks[-1]
        self._remove_tip(chunk)
        end = prompt_end
        while (found := self._find_next(run, end, prompt)) is not None:
            run = found
            last_whole = run.start + (prompt.total_tokens - run.start) // run.size * run.size
            end = min(run.end, last_whole, *(each.start for each in run.behind if each.start > end))
        digest = xxhash.xxh3_64_intdigest(prompt.rest)
        tip = _Tip(chunk, run, end, prompt_end, prompt.tokens_per_chunk, len(prompt.rest), digest)
        self._tips[chunk] = run.tips[chunk] = tip

    def _find_next(self, run: _Run, end: int, prompt: PlacedPrompt) -> _Run | None:
        """Return the run with the block after ``end`` tokens, if this block has tokens of the response to ``prompt``.

        Returns:
            None if no block or several blocks fit.
        """
        following = [each for each in run.behind if each.start == end]
        if run.end > end:
            following.append(run)
        if len(following) > 1:
            following = [each for each in following if each.stored_at >= prompt.sent_at]
        if len(following) != 1 or end + following[0].size > prompt.total_tokens:
            return None
        return following[0]

    def _remove_tip(self, chunk: int) -> None:
        tip = self._tips.pop(chunk, None)
        if tip is not None:
            del tip.run.tips[chunk]

    def _name_run(self, run: _Run) -> None:
        """Compute the names of a run's blocks, as far as their tokens and the names of the blocks before are known."""
        while run.unnamed:
            first, end, tokens = run.unnamed[0]
            name = _find_name_before(run, first)
            if name is None and (first or run.parent is not None):
                return
            data = tokens() if callable(tokens) else bytes(tokens)
            for content, block in zip(hash_contents(data, run.size, run.seed), run.hashes[first:end], strict=False):
                name = name_next(name, content)
                run.names.append(name)
                self._by_name[name] = block
            del run.unnamed[0]


def _find_name_before(run: _Run, place: int) -> int | None:
    """Return the name of the block before the one at ``place``; None if there is none, or if it has no name."""
    owner = run
    if not place:
        if run.before is None:
            return None
        owner, place = run.before, (run.start - run.before.start) // run.before.size
    return owner.names[place - 1] if 0 < place <= len(owner.names) else None
