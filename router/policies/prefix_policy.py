"""PrefixPolicy: the base of policies with a ``PrefixIndex``, which a snapshot saves for the next start."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from router.policies.base import DEFAULTS, Decision, Outcome, PolicyBase, PolicyOptions, RequestFeatures
from router.policies.cached_blocks import BlockHash, CachedBlocks, PlacedPrompt
from router.policies.prefix_index import PrefixIndex
from router.policies.resume_points import ResumePoints

__all__ = ["PrefixPolicy"]


_AnyPolicy = TypeVar("_AnyPolicy", bound="PrefixPolicy")


class PrefixPolicy(PolicyBase):
    """Base of policies that have a ``PrefixIndex``."""

    def __init__(self, options: PolicyOptions = DEFAULTS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(options, clock)
        self._index = PrefixIndex(options.prefix_index_entries, 60 * options.eviction_duration_mins, clock)
        self._resume_points = ResumePoints(60 * options.eviction_duration_mins, clock)
        self.note_chain: Callable[[Sequence[int], str], None] = self._index.add_chain
        """Adds the chunks of a prompt, and the instance that this or another process chose for it, to the index."""
        self._add_chain = self.note_chain
        self.caches: dict[str, CachedBlocks] = {}
        """The blocks that each instance reports by KV events. Instances without KV events are missing."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks in the index."""
        return len(self._index)

    def subscribe_to_chains(self, callback: Callable[[Sequence[int], str], None]) -> None:
        """Call ``callback`` for each prompt for which this policy decides, with its chunk hashes and the chosen
        instance.
        """

        def add_and_report(chunks: Sequence[int], key: str) -> None:
            self._index.add_chain(chunks, key)
            callback(chunks, key)

        self._add_chain = add_and_report

    def make_sibling(self: _AnyPolicy) -> _AnyPolicy:
        """Return a policy for requests of another model. It shares the index and the cached blocks with this policy."""
        sibling = super().make_sibling()
        sibling._index, sibling.note_chain, sibling._add_chain = self._index, self.note_chain, self._add_chain
        sibling.caches, sibling._resume_points = self.caches, self._resume_points
        return sibling

    def watch_cache(self, key: str) -> CachedBlocks:
        """Return an empty ``CachedBlocks`` for an instance. The caller updates it with the instance's KV events."""

        def drop_chunks(chunks: Sequence[int]) -> None:
            self._index.drop_chunks(chunks, key)

        self.caches[key] = CachedBlocks(drop_chunks, self._clock)
        return self.caches[key]

    def settle_cache(self, key: str) -> list[tuple[PlacedPrompt, BlockHash]]:
        """Associate the waiting prompts with the cached blocks of an instance.

        Returns:
            Each prompt that was associated, and its last block.
        """
        settled = self.caches[key].settle()
        for prompt, _ in settled:
            self._index.restore_chunks(prompt.chunks, key)  # the cache may have been emptied while the request ran
        return settled

    def unwatch_cache(self, key: str) -> None:
        """Delete the ``CachedBlocks`` of an instance. From now on its cache is estimated from its requests."""
        self.caches.pop(key, None)
        self._index.set_aging(key, None)

    def set_exact(self, key: str, *, is_exact: bool) -> None:
        """Set whether all KV events of an instance up to now were applied.

        If not, the index again assumes that the instance evicts a chunk after a time without use.
        """
        cache = self.caches[key]
        if is_exact:
            self._index.restore_holder(cache.chunks, key)  # ``forget_instance`` may have removed it from the index
        cache.is_exact = is_exact
        self._index.set_aging(key, cache.has_chunk if is_exact else None)

    def _ask_cache(
        self, request: RequestFeatures, key: str, own_chunks: int, own_tokens: int
    ) -> tuple[Mapping[str, float | str], int]:
        """Return how many tokens of a prompt an instance has cached, according to its KV events.

        Args:
            key: the instance.
            own_chunks: number of leading chunks in its own cache, according to the index.
            own_tokens: number of tokens in these chunks.

        Returns:
            Reasons for the decision, and the number of tokens. Without events that number is ``own_tokens``.
        """
        cache = self.caches.get(key)
        if cache is None:
            return {}, own_tokens
        if not own_chunks:  # "learned" if there are blocks, because some may belong to this prompt
            return {"own_known": "learned" if len(cache) else "exact" if cache.is_exact else "degraded"}, 0
        chunk = request.chunks[own_chunks - 1]
        if not cache.has_chunk(chunk):
            return {"own_known": "learned"}, own_tokens
        reasons: dict[str, float | str] = {"own_known": "exact" if cache.is_exact else "degraded"}
        if found := cache.find_end(chunk, request.text_after(own_chunks)):
            end, tokens_per_chunk = found
            reasons["own_engine_tokens"] = end
            own_tokens = min(request.prompt_tokens, round(end * request.tokens_per_chunk / tokens_per_chunk))
        return reasons, own_tokens

    def observe_outcome(self, request: RequestFeatures, decision: Decision, outcome: Outcome) -> None:
        """Give the prompt of a request that has ended to the ``CachedBlocks`` of its instance."""
        cache = self.caches.get(decision.key)
        if cache is None or not outcome.prompt_tokens or not request.chunks:
            return
        now = self._clock()
        cache.note_prompt(
            PlacedPrompt(
                request.chunks,
                request.tokens_per_chunk * outcome.prompt_tokens / request.prompt_tokens,
                request.text_after(len(request.chunks)),
                outcome.prompt_tokens,
                outcome.cached_tokens,
                outcome.prompt_tokens + (outcome.completion_tokens or 0),
                now - outcome.seconds,
                now,
            )
        )

    def empty_cache(self, key: str) -> None:
        """Delete all blocks of an instance, because its KV events report an empty cache."""
        self._index.forget_holder(key)
        self.caches[key].clear()
        self._resume_points.forget(key)

    def forget_instance(self, key: str) -> None:
        """Delete what is known about an instance's cache, because the instance has restarted or ended.

        The index keeps the instance's chunks if KV events report exactly what the instance has.
        """
        cache = self.caches.get(key)
        if cache is None or not cache.is_exact:
            self._index.forget_holder(key)
        self._resume_points.forget(key)

    def dump(self) -> bytes:
        """Encode the index of cached prefixes. This runs in another thread, while the policy chooses instances.

        The router stores the result in its snapshot (``PersistentPolicy`` in ``fleet/snapshot.py``).
        """
        return self._index.dump()

    def load_dump(self, data: bytes) -> None:
        """Load the index that ``dump`` of an earlier policy has encoded.

        Raises:
            ValueError: ``data`` cannot be used. The index is unchanged.
        """
        self._index.load(data)
