"""CachedBlocks: the blocks that one instance has cached, which its KV events report, and the prompts of these blocks.

A KV event names a block by a hash of its tokens. The router has no tokenizer, and knows a prompt only by hashes of its
text (``chunk_hashes``). So it finds out which blocks belong to a prompt after the response. It searches for a chain of
blocks that the instance stored during the request, with as many tokens as the engine counted in the prompt. If exactly
one chain fits, the prompt is associated with it. After that, an event that removes a block of the chain also removes
the prompt's chunks from the policy's index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import NamedTuple

import xxhash

from router.policies.block_names import SEED, hash_contents, name_next

__all__ = ["BlockHash", "CachedBlocks", "PlacedPrompt"]

BlockHash = int | bytes

# Times after a response. Before the first, its events may not have arrived, and a chain of another request could fit by
# mistake. After the second, no more events are expected, and the prompt is given up.
_SETTLE_SECONDS = 0.1
_MAX_SETTLE_SECONDS = 5.0
# Seconds for which a block is listed as recent, because the request that stored it may still run. It leaves the list
# after at most twice this time.
_RECENT_SECONDS = 600.0


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


class _Block(NamedTuple):
    parent: BlockHash | None
    end: int
    """Number of tokens from the beginning of the prompt to the end of this block; 0 if the beginning is unknown."""
    size: int
    stored_at: float
    name: int | None
    """Name of this block (see ``block_names``); None if its tokens are unknown."""
    seed: int
    """Seed for the names of this block and of the blocks after it."""


@dataclass(slots=True)
class _Tip:
    """The end of what an instance has cached of a prompt and its response."""

    chunk: int
    """Hash of the prompt's last whole chunk."""
    end: int
    """Number of cached tokens, as the engine counts them."""
    prompt_end: int
    """Number of tokens up to the end of the last block that has only prompt tokens."""
    block: BlockHash
    """The last cached block."""
    tokens_per_chunk: float
    num_rest_bytes: int
    rest_digest: int


class CachedBlocks:
    """The cached blocks of one instance, as a tree in which each block follows its parent."""

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
        self._blocks: dict[BlockHash, _Block] = {}
        self._by_name: dict[int, BlockHash] = {}
        self._children: dict[BlockHash, list[BlockHash]] = {}
        self._chunks_at: dict[BlockHash, list[int]] = {}
        self._block_of: dict[int, BlockHash] = {}
        """For each chunk, the block in which it ends."""
        self._tips: dict[int, _Tip] = {}
        """The tip of each associated prompt, by the prompt's last whole chunk."""
        self._tips_at: dict[BlockHash, list[_Tip]] = {}
        self._leaves: set[BlockHash] = set()
        """The last blocks of associated prompts."""
        # Recently stored blocks, by the number of tokens up to their ends. Two generations, as in ``PrefixIndex``.
        self._recent: dict[int, list[tuple[float, BlockHash]]] = {}
        self._less_recent: dict[int, list[tuple[float, BlockHash]]] = {}
        self._turned_at = clock()
        self._pending: list[PlacedPrompt] = []
        self._named: list[tuple[PlacedPrompt, BlockHash]] = []
        """Prompts with a last block that another process has found, until the event for this block arrives."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    @property
    def chunks(self) -> Iterable[int]:
        """The prompt chunks that the instance is known to have cached."""
        return self._block_of.keys()

    @property
    def is_settled(self) -> bool:
        """Whether no prompt is waiting for events."""
        return not self._pending and not self._named

    @property
    def block_size(self) -> int:
        """Number of tokens in each block; 0 if there are no blocks."""
        return next(iter(self._blocks.values())).size if self._blocks else 0

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
        return sum(1 for _ in takewhile(lambda each: each in self._blocks or each in self._by_name, hashes))

    def store_blocks(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        block_size: int,
        tokens: bytes = b"",
        seed: int = SEED,
    ) -> None:
        """Add a chain of blocks that the instance has stored.

        Args:
            hashes: the blocks, in order.
            parent: the block before the first one; None if the first block begins a prompt.
            block_size: number of tokens in each block.
            tokens: the tokens of the first blocks. Blocks without tokens get no names.
            seed: seed for the names if the first block begins a prompt; otherwise the seed of ``parent`` is used.
        """
        now = self._clock()
        if now - self._turned_at > _RECENT_SECONDS:
            self._recent, self._less_recent, self._turned_at = {}, self._recent, now
        end, name = 0, None
        if parent is not None:
            before = self._blocks.get(parent)
            if before is None or not before.end:
                end = -1
            else:
                end, name, seed = before.end, before.name, before.seed
            if name is None:
                tokens = b""
        contents = hash_contents(tokens, block_size, seed)
        for block in hashes:
            content = next(contents, None)
            name = None if content is None else name_next(name, content)
            known = self._blocks.get(block)
            if known is not None and known.end:  # stored twice: keeps its end, so that parents always end earlier
                name = name if known.name is None else known.name
                self._blocks[block] = known._replace(stored_at=now, name=name)
                end = known.end
            else:
                end = end + block_size if end >= 0 else -1
                if known is None and parent is not None:
                    self._children.setdefault(parent, []).append(block)
                parent = parent if known is None else known.parent
                self._blocks[block] = _Block(parent, max(0, end), block_size, now, name, seed)
            if name is not None:
                self._by_name[name] = block
            if end > 0:
                self._recent.setdefault(end, []).append((now, block))
            parent = block

    def remove_blocks(self, hashes: Iterable[BlockHash]) -> None:
        """Remove blocks that the instance has evicted. Blocks after an evicted block are cached, but cannot be used."""
        lost: list[int] = []
        seen: set[BlockHash] = set()
        for block in hashes:
            known = self._blocks.pop(block, None)
            if known is None:
                continue
            if known.name is not None and self._by_name.get(known.name) == block:
                del self._by_name[known.name]
            if known.parent is not None:
                siblings = self._children[known.parent]
                siblings.remove(block)
                if not siblings:
                    del self._children[known.parent]
            if block not in self._children and block not in self._chunks_at and block not in self._tips_at:
                self._leaves.discard(block)  # most blocks: nothing is associated with them or follows them
            elif block not in seen:
                self._cut_subtree(block, known, lost, seen)
        if lost:
            self._drop_chunks(lost)

    def clear(self) -> None:
        """Remove all blocks, and all prompts that wait for events."""
        lost = list(self._block_of)
        for each in (
            self._blocks,
            self._by_name,
            self._children,
            self._chunks_at,
            self._block_of,
            self._tips,
            self._tips_at,
            self._leaves,
        ):
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
            leaf: the last block of the prompt, if another process has found it.
        """
        if leaf is not None:
            self._named.append((prompt, leaf))
        elif prompt.chunks:
            self._pending.append(prompt)

    def settle(self) -> list[tuple[PlacedPrompt, BlockHash]]:
        """Associate the waiting prompts with their blocks. Return each prompt that was associated, and its last block.

        A prompt without a fitting chain waits longer, because its events may arrive late. Prompts with a last block
        that another process has found are associated, too, but not returned.
        """
        now, found, waiting = self._clock(), [], []
        for prompt in self._pending:
            waited = now - prompt.ended_at
            leaf = self._find_leaf(prompt) if waited >= _SETTLE_SECONDS else None
            if leaf is not None:
                self.associate(prompt, leaf)
                found.append((prompt, leaf))
            elif waited < _MAX_SETTLE_SECONDS:
                waiting.append(prompt)
        self._pending = waiting
        named, self._named = self._named, []
        for prompt, leaf in named:
            if leaf in self._blocks:
                self.associate(prompt, leaf)
            elif now - prompt.ended_at < _MAX_SETTLE_SECONDS:
                self._named.append((prompt, leaf))
        return found

    def associate(self, prompt: PlacedPrompt, leaf: BlockHash) -> None:
        """Associate a prompt with the chain that ends with the block ``leaf``. Does nothing if ``leaf`` was removed."""
        if leaf not in self._blocks:
            return
        self._leaves.add(leaf)
        self._add_tip(prompt, leaf)
        block, known = leaf, self._blocks[leaf]
        for place in range(len(prompt.chunks) - 1, -1, -1):
            chunk_end = (place + 1) * prompt.tokens_per_chunk
            while known.end - known.size >= chunk_end:
                before = self._find_parent(block)
                if before is None:
                    return  # the block before this one was removed, so the earlier chunks have no blocks
                block, known = before, self._blocks[before]
            chunk = prompt.chunks[place]
            at = self._block_of.get(chunk)
            if at == block:
                break  # the chunks before this one are associated, too
            if at is not None:
                self._chunks_at[at].remove(chunk)
            self._block_of[chunk] = block
            self._chunks_at.setdefault(block, []).append(chunk)

    def has_chunk(self, chunk: int) -> bool:
        """Return whether the instance has the block in which this chunk ends, as far as its events say."""
        return chunk in self._block_of

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

    def _find_leaf(self, prompt: PlacedPrompt) -> BlockHash | None:
        """Return the last whole block of a prompt; None if no chain of blocks fits, or several fit."""
        size = next(iter(self._blocks.values())).size if self._blocks else 1
        end = prompt.prompt_tokens // size * size
        start = next((self._block_of[c] for c in reversed(prompt.chunks) if c in self._block_of), None)
        cached = prompt.cached_tokens
        fitting: set[BlockHash] = set()
        if cached is None or cached < end:  # otherwise the instance stored no block for this prompt
            for at, block in chain(reversed(self._recent.get(end, ())), reversed(self._less_recent.get(end, ()))):
                if at < prompt.sent_at or len(fitting) > 1:
                    break
                is_free = block in self._blocks and block not in self._leaves
                if is_free and (start is None or self._is_behind(block, start)):
                    fitting.add(block)
        if cached is None and start is None:
            return None
        if len(fitting) == 1:
            return next(iter(fitting))
        if fitting or start is None or cached is None or cached < end - size:
            return None
        return self._descend(start, end)  # the whole prompt was cached, so its chain continues the known one

    def _is_behind(self, block: BlockHash, start: BlockHash) -> bool:
        """Return whether ``block`` is ``start`` or a block after it in the same chain."""
        end = self._blocks[start].end
        at: BlockHash | None = block
        while at is not None and self._blocks[at].end > end:
            at = self._find_parent(at)
        return at == start

    def _find_parent(self, block: BlockHash) -> BlockHash | None:
        """Return the cached block before ``block``; None if ``block`` begins a prompt, or its parent was removed."""
        known = self._blocks[block]
        before = None if known.parent is None else self._blocks.get(known.parent)
        # If the parent was removed and stored again in another chain, it ends elsewhere, and this chain is broken.
        return known.parent if before is not None and before.end == known.end - known.size else None

    def _list_children(self, block: BlockHash) -> list[BlockHash]:
        """Return the cached blocks that follow ``block`` directly."""
        return [child for child in self._children.get(block, ()) if self._find_parent(child) == block]

    def _descend(self, block: BlockHash, end: int) -> BlockHash | None:
        """Return the block after ``block`` that ends at ``end`` tokens; None if the chain ends or branches before."""
        while self._blocks[block].end < end:
            children = self._list_children(block)
            if len(children) != 1:
                return None
            block = children[0]
        return block if self._blocks[block].end == end else None

    def _add_tip(self, prompt: PlacedPrompt, leaf: BlockHash) -> None:
        """Store how many tokens of the prompt and its response are cached."""
        chunk = prompt.chunks[-1]
        self._remove_tip(chunk)
        last, end = leaf, self._blocks[leaf].end
        while (block := self._find_next(last, prompt)) is not None:
            last, end = block, self._blocks[block].end
        tip = _Tip(
            chunk,
            end,
            self._blocks[leaf].end,
            last,
            prompt.tokens_per_chunk,
            len(prompt.rest),
            xxhash.xxh3_64_intdigest(prompt.rest),
        )
        self._tips[chunk] = tip
        self._tips_at.setdefault(last, []).append(tip)

    def _find_next(self, block: BlockHash, prompt: PlacedPrompt) -> BlockHash | None:
        """Return the block after ``block`` with tokens of the response to ``prompt``; None if none or several fit."""
        behind = self._list_children(block)
        if len(behind) > 1:
            behind = [child for child in behind if self._blocks[child].stored_at >= prompt.sent_at]
        if len(behind) != 1 or self._blocks[behind[0]].end > prompt.total_tokens:
            return None
        return behind[0]

    def _remove_tip(self, chunk: int) -> None:
        tip = self._tips.pop(chunk, None)
        if tip is not None:
            tips = self._tips_at[tip.block]
            tips.remove(tip)
            if not tips:
                del self._tips_at[tip.block]

    def _cut_subtree(self, root: BlockHash, removed: _Block, lost: list[int], seen: set[BlockHash]) -> None:
        """Remove the prompts' associations with ``root``, which was removed, and with all blocks after it.

        Args:
            removed: the data of ``root``.
            lost: gets the chunks of these prompts.
            seen: the blocks that were processed; this method adds to it.
        """
        stack, parent = [root], removed.parent
        seen.add(root)
        while stack:
            block = stack.pop()
            behind = [child for child in self._children.get(block, ()) if child not in seen]
            seen.update(behind)  # events with errors may form a cycle
            stack += behind
            self._leaves.discard(block)
            for chunk in self._chunks_at.pop(block, ()):
                del self._block_of[chunk]
                self._remove_tip(chunk)
                lost.append(chunk)
            for tip in self._tips_at.pop(block, ()):  # the blocks before ``root`` are still cached
                if parent is None:
                    del self._tips[tip.chunk]
                else:
                    tip.end, tip.block = removed.end - removed.size, parent
                    self._tips_at.setdefault(parent, []).append(tip)
