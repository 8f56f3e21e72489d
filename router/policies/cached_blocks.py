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
from collections.abc import Callable, KeysView, Sequence
from heapq import heappop, heappush
from itertools import chain, count
from typing import NamedTuple

import xxhash

from router.policies.block_names import SEED
from router.policies.block_tree import BlockHash, BlockTree, Run, StoredBlocks, Tip, Tokens

__all__ = ["BlockHash", "CachedBlocks", "PlacedPrompt"]

# Times after a response. Before the first, its events may not have arrived, and a chain of another request could fit by
# mistake. A search without a result is repeated after twice the time, until the second time. Then no more events are
# expected, and the prompt is given up.
_SETTLE_SECONDS = 0.1
_MAX_SETTLE_SECONDS = 5.0
# Seconds for which a block is listed as recent, because the request that stored it may still be running. It leaves the
# list after at most twice this time.
_RECENT_SECONDS = 600.0


class PlacedPrompt(NamedTuple):
    """A prompt that an instance has processed, and the times and token counts of the request, which has ended."""

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


class CachedBlocks(BlockTree):
    """The cached blocks of one instance, and the prompts whose blocks they are."""

    def __init__(
        self, drop_chunks: Callable[[Sequence[int]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            drop_chunks: called with the prompt chunks that the instance has evicted from its cache.
        """
        super().__init__(clock)
        self.is_exact = False
        """Whether all events of the instance up to now were applied."""
        self._drop_chunks = drop_chunks
        self._lost: list[int] = []
        """The chunks that the instance loses by the removal of blocks that is being processed."""
        self._run_of_chunk: dict[int, Run] = {}
        """For each chunk of an associated prompt, the run in which it ends."""
        self._tips: dict[int, Tip] = {}
        """The ``Tip`` of each associated prompt, by the prompt's last whole chunk."""
        self._leaves: set[BlockHash] = set()
        """The last blocks of associated prompts."""
        # The blocks of each recent event, by the number of tokens up to their end, in two dictionaries: after
        # ``_RECENT_SECONDS``, the first one replaces the second one.
        self._recent: dict[int, list[StoredBlocks]] = {}
        self._less_recent: dict[int, list[StoredBlocks]] = {}
        self._turned_at = clock()
        self._pending: list[tuple[float, int, PlacedPrompt]] = []
        """A heap of the prompts without known blocks: the time of the next search, a unique number, the prompt."""
        self._num_noted = 0
        self._named: list[tuple[PlacedPrompt, BlockHash]] = []
        """Prompts with a last block that another process has found, until the event for this block arrives."""

    @property
    def chunks(self) -> KeysView[int]:
        """The prompt chunks that the instance is known to have cached."""
        return self._run_of_chunk.keys()

    @property
    def is_settled(self) -> bool:
        """Whether no prompt is waiting for events."""
        return not self._pending and not self._named

    def store_blocks(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        block_size: int,
        tokens: Tokens = b"",
        seed: int = SEED,
    ) -> list[StoredBlocks]:
        """Add a chain of blocks that the instance has stored. ``BlockTree.store_blocks`` describes the arguments."""
        now = self._clock()
        if now - self._turned_at > _RECENT_SECONDS:
            self._recent, self._less_recent, self._turned_at = {}, self._recent, now
        stored = super().store_blocks(hashes, parent, block_size, tokens, seed)
        for each in stored:
            self._recent.setdefault(each.end, []).append(each)
        return stored

    def remove_blocks(self, hashes: Sequence[BlockHash]) -> None:
        """Remove blocks that the instance has evicted. The chunks of prompts' text that end in them are lost, too."""
        super().remove_blocks(hashes)
        if self._lost:
            lost, self._lost = self._lost, []
            self._drop_chunks(lost)

    def clear(self) -> None:
        """Remove all blocks, and all prompts that wait for events."""
        super().clear()
        lost = list(self._run_of_chunk)
        for each in (self._run_of_chunk, self._tips, self._leaves):
            each.clear()
        self._recent, self._less_recent = {}, {}
        self._pending.clear()
        self._named.clear()
        if lost:
            self._drop_chunks(lost)

    def note_prompt(self, prompt: PlacedPrompt, leaf: BlockHash | None = None) -> None:
        """Store a prompt, which a later call of ``settle`` associates with its blocks.

        Args:
            prompt: the prompt, after its response.
            leaf: the last block of the prompt, if another process has found it; None if ``settle`` must find it.
        """
        if leaf is not None:
            self._named.append((prompt, leaf))
        elif prompt.chunks:
            self._num_noted += 1
            heappush(self._pending, (prompt.ended_at + _SETTLE_SECONDS, self._num_noted, prompt))

    def settle(self) -> list[tuple[PlacedPrompt, BlockHash]]:
        """Find the cached blocks of prompts whose requests have ended, and associate each prompt with its blocks.

        If no chain of stored blocks fits a prompt, or several fit, the search is repeated for a few seconds, because KV
        events may arrive late. If another router process has found the last block of a prompt, there is no search: the
        prompt only waits for the event of this block.

        Returns:
            The prompts whose blocks this process found, each with its last block; other processes must be told these.
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
        above: Run | None = run
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

        The number is known only if an earlier prompt was associated with its blocks, ``chunk`` is the last whole chunk
        of the earlier prompt, and ``text`` begins with the rest of the earlier prompt.

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

    def _on_lost(self, run: Run, blocks: Sequence[BlockHash], end: int, last: Run | None) -> None:
        """Forget that prompts have these blocks, and record the chunks that the instance has lost.

        Called when blocks of ``run`` were evicted, or can no longer be used because an earlier block was evicted.
        ``BlockTree._on_lost`` describes the arguments.
        """
        self._leaves.difference_update(blocks)
        for chunk in [chunk for chunk, chunk_end in run.chunks.items() if chunk_end > end]:
            del run.chunks[chunk], self._run_of_chunk[chunk]
            self._remove_tip(chunk)
            self._lost.append(chunk)
        for tip in [tip for tip in run.tips.values() if tip.end > end]:
            if last is None:
                self._remove_tip(tip.chunk)
            else:
                del run.tips[tip.chunk]
                tip.end, tip.run = end, last
                last.tips[tip.chunk] = tip

    def _place_chunks(self, chunks: Sequence[int], run: Run, first_end: float, per_chunk: float) -> None:
        """Associate chunks with the run in which they end.

        Up to the end of the first chunk, the prompt has ``first_end`` tokens. Each chunk has ``per_chunk`` tokens.
        """
        if not self._run_of_chunk.keys().isdisjoint(chunks):
            for chunk in chunks:
                if other := self._run_of_chunk.get(chunk):
                    del other.chunks[chunk]
        self._run_of_chunk.update(dict.fromkeys(chunks, run))
        run.chunks.update(zip(chunks, count(first_end, per_chunk), strict=False))

    def _find_leaf(self, prompt: PlacedPrompt) -> BlockHash | None:
        """Return the last whole block of a prompt; None if no chain of blocks fits, or several fit.

        When an engine has computed the prompt, it sends an event that usually ends with this block. But SGLang may send
        the blocks of the prompt and of the response in one event.
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
        """Return the blocks that may be the last whole block of a prompt.

        The result also has blocks that the instance has evicted meanwhile. Without them, a block of another prompt
        could look like the only match.

        Args:
            end: number of tokens up to the end of the block.
            event_end: number of tokens up to the end of the last block of the events that are searched.
            known: the last chunk of the prompt that is already associated with a block; None if there is none.
            since: the instance stored the block at this time or later, by the policy's clock.
        """
        found: list[BlockHash] = []
        recent, less_recent = self._recent.get(event_end, ()), self._less_recent.get(event_end, ())
        for at, block, num_blocks, _ in chain(reversed(recent), reversed(less_recent)):
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

    def _find_block_end(self, chunk: int) -> tuple[Run, int]:
        """Return the run in which an associated chunk ends, and the number of tokens to the end of its last block."""
        run = self._run_of_chunk[chunk]
        num_blocks = max(1, math.ceil((run.chunks[chunk] - run.start) / run.size))
        return run, min(run.end, run.start + num_blocks * run.size)

    def _is_behind(self, run: Run, end: int, chunk: int) -> bool:
        """Return whether the chain of blocks that ends in ``run`` at ``end`` tokens has the block with ``chunk``."""
        start, chunk_end = self._find_block_end(chunk)
        at: Run | None = run
        while at is not None and at.start >= chunk_end:
            at = at.before
        return at is start and end >= chunk_end

    def _descend(self, chunk: int, end: int) -> BlockHash | None:
        """Return the block that ends at ``end`` tokens, in the chain after the block in which ``chunk`` ends.

        Return None if the chain ends or branches before.
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

    def _add_tip(self, prompt: PlacedPrompt, run: Run, prompt_end: int) -> None:
        """Store a ``Tip``: how many tokens of the prompt and its response are cached.

        Args:
            prompt: the prompt.
            run: the run that has the last block with only prompt tokens.
            prompt_end: number of tokens up to the end of this block.
        """
        chunk = prompt.chunks[-1]
        self._remove_tip(chunk)
        end = prompt_end
        while (found := self._find_next(run, end, prompt)) is not None:
            run = found
            last_whole = run.start + (prompt.total_tokens - run.start) // run.size * run.size
            end = min(run.end, last_whole, *(each.start for each in run.behind if each.start > end))
        digest = xxhash.xxh3_64_intdigest(prompt.rest)
        tip = Tip(chunk, run, end, prompt_end, prompt.tokens_per_chunk, len(prompt.rest), digest)
        self._tips[chunk] = run.tips[chunk] = tip

    def _find_next(self, run: Run, end: int, prompt: PlacedPrompt) -> Run | None:
        """Return the run that has the next block of the response to ``prompt``; None if no block or several blocks fit.

        Args:
            run: the run that has the last block that was found.
            end: number of tokens up to the end of this block.
            prompt: the prompt.
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
