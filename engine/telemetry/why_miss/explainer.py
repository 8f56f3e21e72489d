"""Compares one request, or a prompt, with the pool and the requests that this instance had before it.

The pool knows hashes only; the instance knows the tokens of the requests that it served. So it can find the token at
which a prompt differs from the most similar one before, and that a missing block was saved at that time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

from engine.scheduling.pool_use import Reason
from engine.telemetry.why_miss.recent_requests import PastRequest, RecentRequests, digest_salt, format_moment
from kvstore_backend import BlockPool, Status
from kvstore_backend.manifest import Manifest
from kvstore_backend.why_miss import (
    Prompt,
    Verdict,
    compare_setups,
    count_common,
    describe_parting,
    explain_prompt,
    hide_words,
    judge_length,
    locate_message,
    tell_parting,
)

__all__ = ["Inquiry", "MissExplainer", "list_texts"]

_PLAIN = {
    Reason.NO_POOL: "no_pool",
    Reason.HANDED_OVER: "handed_over",
    Reason.ENDED: "ended",
    Reason.OWN_CACHE: "own_cache",
    Reason.SLOW: "slow",
}
"""Reasons that need no further explanation."""


@dataclass(frozen=True)
class Inquiry:
    """A question about a prompt to another instance, which may have had a similar prompt.

    Attributes:
        token_ids: the prompt's tokens.
        salt: ``digest_salt`` of its ``cache_salt``.
        leading: the number of its leading blocks that were found.
        asked_at: when it was looked up, on ``time.monotonic``.
        messages: role and text of each message that it was rendered from.
        request_id: id of the request, which is excluded from the comparison.
        manifest: the manifest of the instance that had it; None: this one.
    """

    token_ids: SequenceOf[int]
    salt: str
    leading: int
    asked_at: float
    messages: SequenceOf[tuple[str, str]] = ()
    request_id: str = ""
    manifest: Manifest | None = None


class MissExplainer:
    """Explains the misses of one instance.

    Args:
        recent: the instance's last requests.
        tokenizer: a transformers tokenizer.
        manifest: the manifest of its namespace, even if it has no pool.
        pool: None: it has none.
    """

    def __init__(self, recent: RecentRequests, tokenizer: Any, manifest: Manifest, pool: BlockPool | None) -> None:
        self._recent = recent
        self._tokenizer = tokenizer
        self._block_size = manifest.block_size
        self.manifest = manifest
        self.pool = pool

    def explain_request(self, request_id: str) -> tuple[Verdict, Inquiry] | None:
        """Explain why an ended request was a miss; add the inquiry to other instances. None: the request is unknown."""
        past = self._recent.find_request(request_id)
        if past is None:
            return None
        leading = past.cached_tokens // self._block_size
        inquiry = Inquiry(past.tokens, past.salt, leading, past.asked_at, list_texts(past.messages), past.request_id)
        return self._judge_request(past, inquiry), inquiry

    def explain_prompt(self, prompt: Prompt, stored: Prompt | None) -> Verdict:
        """Explain why a prompt would be a miss now; this queries the pool and takes as long as the query.

        Args:
            prompt: the prompt.
            stored: a prompt that should be in the pool.
        """
        pool = self.pool
        if pool is None:
            return Verdict("no_pool", "this instance has no pool; --kvcache-storage-backend is not given")
        if not pool.is_ready:
            return Verdict("pool_away", f"the pool is away: {pool.health().detail}")

        def exists(_: str, hashes: SequenceOf[bytes]) -> SequenceOf[Status]:
            return pool.exists(hashes)

        prompt = replace(prompt, decode=self.decode)
        verdict = explain_prompt(exists, self.manifest, prompt, stored=stored)
        if stored is not None or verdict.reason not in ("new", "parts"):
            return verdict
        salt, leading = digest_salt(prompt.salt), verdict.details["leading"]
        kin = self.find_kin(Inquiry(prompt.token_ids, salt, leading, time.monotonic(), prompt.messages))
        return verdict if kin.reason == "new" else kin

    def find_kin(self, inquiry: Inquiry) -> Verdict:
        """Explain another instance's miss from the requests that this instance had before it."""
        before = [
            past for past in self._recent if past.asked_at < inquiry.asked_at and past.request_id != inquiry.request_id
        ]
        alike = _find_likest(inquiry.token_ids, (past for past in before if past.salt == inquiry.salt))
        if inquiry.manifest is not None and inquiry.manifest.digest != self.manifest.digest:
            return self._explain_setup(inquiry, inquiry.manifest, alike)
        salted = _find_likest(inquiry.token_ids, (past for past in before if past.salt != inquiry.salt))
        blocks = self._count_blocks(inquiry, alike)
        if self._count_blocks(inquiry, salted) > max(inquiry.leading, blocks):
            return self._explain_salt(salted)
        if alike.past is not None and blocks > inquiry.leading:
            return self._explain_loss(inquiry, alike.past)
        # If more was found than both have in common, another instance had a more similar prompt.
        if alike.past is not None and alike.num_common > inquiry.leading * self._block_size:
            return self._explain_parting(inquiry, alike.past)
        return self._explain_newness(inquiry)

    def decode(self, tokens: SequenceOf[int]) -> str:
        """Decode tokens to text, special tokens included."""
        text: str = self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        return text

    def _judge_request(self, past: PastRequest, inquiry: Inquiry) -> Verdict:
        use = past.pool_use
        if use.reason is Reason.SHORT:
            short = judge_length(len(past.tokens), self._block_size)
            return short or Verdict("below_block", use.text)
        if use.reason in _PLAIN:
            return Verdict(_PLAIN[use.reason], f"nothing came from the pool: {use.text}")
        if use.reason is Reason.FAILED:
            return Verdict("damaged" if past.was_read else "pool_away", f"nothing came from the pool: {use.text}")
        usable = (len(past.tokens) - 1) // self._block_size
        if inquiry.leading >= usable:
            return Verdict("hit", f"no miss: all {usable} blocks that are of use came from a cache; {use.text}")
        if use.num_behind:
            missing = f"block {inquiry.leading} of {usable}"
            return Verdict(
                "evicted",
                f"the pool lacked {missing} at {past.came_at}, and had {use.num_behind} behind it: it was evicted, or "
                "removed, after all of them had been stored",
                {"block": inquiry.leading, "noticed_at": past.came_at},
            )
        return self.find_kin(inquiry)

    def _count_blocks(self, inquiry: Inquiry, likest: _Likest) -> int:
        """Return how many usable blocks the two prompts have in common."""
        return min(likest.num_common, len(inquiry.token_ids) - 1) // self._block_size

    def _explain_setup(self, inquiry: Inquiry, manifest: Manifest, alike: _Likest) -> Verdict:
        """Explain a different set-up: it matters only if one more block would have been shared without it."""
        shared = min(alike.num_common, len(inquiry.token_ids) - 1) // max(1, manifest.block_size)
        if alike.past is None or shared <= inquiry.leading:
            return self._explain_newness(inquiry)
        had = f"request {alike.past.request_id} ({alike.past.came_at}) had the same first {alike.num_common} tokens"
        verdict = compare_setups(self.manifest, manifest, ("the instance that answered that", "the one asked"))
        return replace(verdict, sentence=f"{had} at an instance with another set-up: {verdict.sentence}")

    def _explain_salt(self, salted: _Likest) -> Verdict:
        assert salted.past is not None
        return Verdict(
            "other_salt",
            f"request {salted.past.request_id} ({salted.past.came_at}) had the same first {salted.num_common} tokens "
            "with another cache_salt: blocks are shared only among equal ones",
            {"request_id": salted.past.request_id, "tokens": salted.num_common},
        )

    def _explain_loss(self, inquiry: Inquiry, alike: PastRequest) -> Verdict:
        """Explain a block that ``alike`` had, and that the pool had no longer, or not yet."""
        saves, block = alike.saves, inquiry.leading
        noticed = format_moment(inquiry.asked_at)
        whose = f"block {block}, which request {alike.request_id} had, too"
        details = {"request_id": alike.request_id, "block": block, "noticed_at": noticed}
        if saves.num_done <= block:
            why = "the pool took only" if saves.num_begun else "its saving had not begun; the pool has"
            return Verdict("unsaved", f"{whose}, was not stored: {why} {saves.num_done} of its blocks", details)
        saved = format_moment(saves.ended_at)
        if saves.ended_at > inquiry.asked_at:
            text = f"{whose}, was on its way to the pool: its saving ended at {saved}, after {noticed}"
            return Verdict("unsaved", text, {**details, "saved_at": saved})
        why = "evicted, or the pool was cleared or restarted"
        if inquiry.manifest is not None:
            why += ", or the two instances are in different pools"
        text = f"{whose}, was stored at {saved} and gone at {noticed}: {why}"
        return Verdict("evicted", text, {**details, "saved_at": saved})

    def _explain_parting(self, inquiry: Inquiry, alike: PastRequest) -> Verdict:
        parting = describe_parting(alike.tokens, inquiry.token_ids, self.decode)
        if parting.token == len(alike.tokens):
            text = f"no miss: it goes on where the prompt of request {alike.request_id} ended, at token {parting.token}"
            return Verdict("hit", f"{text}; all {inquiry.leading} full blocks before came from a cache")
        if not parting.is_edit and parting.token < self._block_size:
            return self._explain_newness(inquiry)
        prompt = Prompt(inquiry.token_ids, messages=inquiry.messages, decode=self.decode)
        # Not every client that can reach this instance may see another client's prompt.
        shown = replace(parting, stored=hide_words(parting.stored), asked=hide_words(parting.asked))
        whose = f"that of request {alike.request_id} ({alike.came_at})"
        return tell_parting(shown, locate_message(prompt, parting.token), self._block_size, whose=whose)

    def _explain_newness(self, inquiry: Inquiry) -> Verdict:
        first = inquiry.leading * self._block_size
        had = f"the first {inquiry.leading} blocks were there; " if inquiry.leading else ""
        return Verdict(
            "parts" if inquiry.leading else "new",
            f"{had}no request that this instance remembers has block {inquiry.leading} (tokens {first} to "
            f"{first + self._block_size - 1}): it is new, or was stored by another instance and evicted",
            {"block": inquiry.leading, "leading": inquiry.leading},
        )


@dataclass(frozen=True)
class _Likest:
    """The request with the longest common beginning, among several."""

    past: PastRequest | None
    num_common: int


def _find_likest(tokens: SequenceOf[int], requests: Iterable[PastRequest]) -> _Likest:
    best, most = None, 0
    for past in requests:
        if (common := count_common(past.tokens, tokens)) > most:
            best, most = past, common
    return _Likest(best, most)


def list_texts(messages: SequenceOf[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return role and text of each message, as clients send them."""
    return [(str(message.get("role")), _text_of(message.get("content"))) for message in messages]


def _text_of(content: object) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
