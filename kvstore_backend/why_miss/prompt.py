"""Comparison of a prompt with the pool: which of its leading blocks are present, and why the next one is not.

The pool knows only hashes, so it can only report that a block is missing. More is known if a block *after* the missing
one is present (then the missing one was evicted), if another salt, adapter or set-up has the blocks, or if the operator
has the prompt that should be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvstore_backend.backend import Status
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.manifest import Manifest
from kvstore_backend.why_miss.parting import Parting, describe_parting, find_message, find_suspect
from kvstore_backend.why_miss.setups import compare_setups
from kvstore_backend.why_miss.verdict import Verdict

__all__ = ["Decode", "Exists", "Prompt", "explain_prompt", "judge_length", "locate_message", "tell_parting"]

Decode = Callable[[Sequence[int]], str]
Exists = Callable[[str, Sequence[bytes]], Sequence[Status]]


@dataclass(frozen=True)
class Prompt:
    """Prompt as an engine hashes it.

    Attributes:
        token_ids: all tokens.
        salt: its ``cache_salt``.
        adapter: the name of its adapter.
        messages: role and text of each message from which it was rendered; none for a plain text.
        decode: tokens -> text, special ones too; None: there is no tokenizer.
    """

    token_ids: Sequence[int]
    salt: str = ""
    adapter: str = ""
    messages: Sequence[tuple[str, str]] = ()
    decode: Decode | None = None

    def hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of the blocks that a pool can supply; the last token is always computed."""
        root = root_hash(self.salt, self.adapter.encode())
        return extend_block_hashes([], self.token_ids[:-1], block_size, root)


def explain_prompt(
    exists: Exists, manifest: Manifest, prompt: Prompt, *, stored: Prompt | None = None, others: Sequence[Manifest] = ()
) -> Verdict:
    """Explain why a prompt is a miss, or how much of it is a hit.

    Args:
        exists: looks up blocks in the pool, by the digest of their namespace and their hashes.
        manifest: manifest of the namespace of the prompt's instance.
        stored: a prompt that should be in the pool.
        others: other set-ups with a manifest in the pool.
    """
    engine = manifest.facts.get("block_hashes", "kvstore")
    if engine != "kvstore":
        return Verdict(
            "unknown", f"{engine} names its blocks by hashes that only {engine} makes: ask for set-ups instead"
        )
    size = manifest.block_size
    if size <= 0:
        return Verdict("unknown", "the manifest of this namespace says no size of blocks")
    if (short := judge_length(len(prompt.token_ids), size)) is not None:
        return short
    chain = _Chain(exists, manifest, prompt)
    if Status.FAILED in chain.statuses:
        return Verdict("pool_away", "the pool did not say which blocks it has: it is away, or too slow")
    if chain.leading == len(chain.statuses):
        return Verdict("hit", f"no miss: the pool has all {chain.leading} blocks that are of use", chain.details)
    if chain.behind:
        return Verdict(
            "evicted",
            f"the pool lacks block {chain.leading} ({chain.tell_tokens()}), and has {chain.behind} behind it: it was "
            "evicted, or removed, after all of them had been stored",
            chain.details,
        )
    elsewhere = None if chain.leading else _look_elsewhere(exists, manifest, prompt, others)
    return elsewhere or _explain_parting(exists, manifest, chain, stored)


def judge_length(num_tokens: int, block_size: int) -> Verdict | None:
    """Return a verdict if a prompt is too short to be shared; otherwise None."""
    if num_tokens > block_size:
        return None
    return Verdict(
        "below_block",
        f"the prompt has {num_tokens} tokens, and a block {block_size}: only full blocks are shared, and the last "
        f"token is always computed, so that prompts of {block_size + 1} tokens and more can be a hit",
        {"tokens": num_tokens, "block_size": block_size},
    )


class _Chain:
    """Blocks of a prompt in one namespace, and which of them the pool has."""

    def __init__(self, exists: Exists, manifest: Manifest, prompt: Prompt) -> None:
        self.prompt = prompt
        self.block_size = manifest.block_size
        hashes = prompt.hashes(self.block_size)
        self.statuses = list(exists(manifest.digest, hashes)) if hashes else []
        absent = [status is not Status.OK for status in self.statuses]
        self.leading = absent.index(True) if True in absent else len(absent)
        self.behind = absent[self.leading :].count(False)

    @property
    def first_missing(self) -> int:
        """First token of the first block that is missing."""
        return self.leading * self.block_size

    @property
    def details(self) -> dict[str, object]:
        return {"blocks": len(self.statuses), "leading": self.leading, "block_size": self.block_size}

    def tell_tokens(self) -> str:
        """Describe the tokens of the first missing block."""
        return f"tokens {self.first_missing} to {self.first_missing + self.block_size - 1}"


def _look_elsewhere(exists: Exists, manifest: Manifest, prompt: Prompt, others: Sequence[Manifest]) -> Verdict | None:
    """Check whether the first block is present without its salt or adapter, or for another set-up."""
    for reason, lacks, variant in _strip_prompt(prompt):
        if _Chain(exists, manifest, variant).leading:
            return Verdict(
                reason, f"the pool has this prompt's blocks {lacks}: blocks are shared only among equal ones"
            )
    for other in others:
        comparable = other.digest != manifest.digest and other.facts.get("block_hashes", "kvstore") == "kvstore"
        if comparable and other.block_size > 0 and _Chain(exists, other, prompt).leading:
            verdict = compare_setups(manifest, other, ("the one asked for", "the one that has them"))
            sentence = f"the pool has this prompt's blocks for another set-up, {other.digest}: {verdict.sentence}"
            return replace(verdict, sentence=sentence)
    return None


def _strip_prompt(prompt: Prompt) -> Iterator[tuple[str, str, Prompt]]:
    """Yield the prompt without its salt, and without its adapter, with the reason and a description of each."""
    if prompt.salt:
        yield "other_salt", "without the cache_salt", replace(prompt, salt="")
    if prompt.adapter:
        yield "other_adapter", "without the adapter", replace(prompt, adapter="")


def _explain_parting(exists: Exists, manifest: Manifest, chain: _Chain, stored: Prompt | None) -> Verdict:
    if stored is None:
        return _explain_unseen(chain)
    prompt = chain.prompt
    if (prompt.salt, prompt.adapter) != (stored.salt, stored.adapter):
        reason = "other_salt" if prompt.salt != stored.salt else "other_adapter"
        return Verdict(
            reason, f"the two prompts have {'cache_salts' if reason == 'other_salt' else 'adapters'} that differ"
        )
    parting = describe_parting(stored.token_ids, prompt.token_ids, prompt.decode)
    block = parting.token // manifest.block_size
    if block > chain.leading:
        text = f"both prompts have block {chain.leading} ({chain.tell_tokens()}), and the pool lacks it"
        return Verdict("new", f"{text}: it was evicted, or never stored", chain.details)
    if _Chain(exists, manifest, stored).leading <= block:
        extra = "; the prompt to compare with is not in the pool from there on either"
    else:
        extra = ""
    return tell_parting(parting, locate_message(prompt, parting.token), manifest.block_size, extra=extra)


def _explain_unseen(chain: _Chain) -> Verdict:
    """Describe the first missing block, with any text in it that is probably new each time."""
    had = (
        f"the pool has the first {chain.leading} of {len(chain.statuses)} blocks, and "
        if chain.leading
        else "the pool "
    )
    text = f"{had}lacks block {chain.leading} ({chain.tell_tokens()}): it is new, or was evicted"
    details = chain.details
    decode, tokens, first = chain.prompt.decode, chain.prompt.token_ids, chain.first_missing
    if decode is not None:
        # A word may begin in the block before.
        before = decode(tokens[max(0, first - chain.block_size) : first])
        inside = decode(tokens[first : first + chain.block_size])
        whole = before + inside + decode(tokens[first + chain.block_size : first + 2 * chain.block_size])
        suspect = find_suspect(whole, len(before), len(before) + len(inside))
        if suspect is not None:
            kind, word = suspect
            details = {**details, "suspect": kind, "text": word}
            text += f"; it has {kind} in it ({word!r}), which makes a prompt new each time"
        else:
            details = {**details, "text": inside}
            text += f"; it begins {inside[:60]!r}"
    return Verdict("parts" if chain.leading else "new", text, details)


def locate_message(prompt: Prompt, token: int) -> tuple[int, str] | None:
    """Return the number and role of the message that a token belongs to; None if that is not known."""
    if not prompt.messages or prompt.decode is None:
        return None
    text, before = prompt.decode(prompt.token_ids), prompt.decode(prompt.token_ids[: token + 1])
    return find_message(prompt.messages, text, max(0, len(before) - 1))


def tell_parting(
    parting: Parting,
    message: tuple[int, str] | None,
    block_size: int,
    *,
    whose: str = "the stored one",
    extra: str = "",
) -> Verdict:
    """Return the verdict that a prompt differs from ``whose``, and where.

    Args:
        message: result of ``locate_message`` for the first difference.
        extra: the end of the sentence.
    """
    place = f"message {message[0]}, the {message[1]}'s: " if message else ""
    words = f": {parting.stored!r} became {parting.asked!r}" if parting.stored or parting.asked else ""
    lost = f"blocks from {parting.token // block_size} on cannot be shared"
    return Verdict(
        "parts",
        f"the prompt parts from {whose} at token {parting.token} ({place}{parting.kind}{words}); {lost}{extra}",
        {
            "token": parting.token,
            "block": parting.token // block_size,
            "kind": parting.kind,
            "stored": parting.stored,
            "asked": parting.asked,
            "message": message[0] if message else None,
            "role": message[1] if message else None,
        },
    )
