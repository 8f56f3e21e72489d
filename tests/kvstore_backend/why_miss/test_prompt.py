"""A prompt and a pool beside each other: what the pool's hashes alone tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore_backend import Namespace, Status
from kvstore_backend.manifest import Manifest
from kvstore_backend.why_miss import Prompt, Verdict, explain_prompt

NAMESPACE = Namespace("m", "float32", 16, 2, 2, 8, "layer,kv,head,token,dim")
MANIFEST = Manifest(NAMESPACE.fields, {"name": "m", "architecture": "1", "block_hashes": "kvstore"})
SYSTEM = "You are a helpful assistant. It is 2026-11-22 15:04:05 now. "
TEXT = SYSTEM + "Tell me of the sea, and of ships that sail on it; use few words."


def prompt(text: str, **changes: str) -> Prompt:
    """A token for each character."""
    return Prompt([ord(each) for each in text], decode=lambda ids: "".join(map(chr, ids)), **changes)  # type: ignore[arg-type]


class Pool:
    """The blocks of some prompts, by namespace and hash."""

    def __init__(self, *prompts: Prompt, manifest: Manifest = MANIFEST, without: Sequence[int] = ()) -> None:
        self.blocks = {
            (manifest.digest, each)
            for stored in prompts
            for i, each in enumerate(stored.hashes(manifest.block_size))
            if i not in without
        }

    def exists(self, digest: str, hashes: Sequence[bytes]) -> list[Status]:
        return [Status.OK if (digest, each) in self.blocks else Status.ABSENT for each in hashes]


def explain(pool: Pool, asked: Prompt, stored: Prompt | None = None, others: Sequence[Manifest] = ()) -> Verdict:
    return explain_prompt(pool.exists, MANIFEST, asked, stored=stored, others=others)


def test_a_prompt_that_is_there_is_no_miss() -> None:
    assert explain(Pool(prompt(TEXT)), prompt(TEXT)).reason == "hit"


def test_a_prompt_below_a_block_cannot_be_shared() -> None:
    assert explain(Pool(), prompt("x" * 16)).reason == "below_block"
    assert explain(Pool(), prompt("x" * 17)).reason == "new"


def test_a_block_behind_the_missing_one_proves_an_eviction() -> None:
    verdict = explain(Pool(prompt(TEXT), without=[2]), prompt(TEXT))
    assert verdict.reason == "evicted"
    assert "lacks block 2 (tokens 32 to 47)" in verdict.sentence


def test_the_same_prompt_with_a_salt_or_an_adapter_less_is_found() -> None:
    pool = Pool(prompt(TEXT))
    assert explain(pool, prompt(TEXT, salt="ann")).reason == "other_salt"
    assert explain(pool, prompt(TEXT, adapter="poet")).reason == "other_adapter"
    assert explain(pool, prompt(TEXT, salt="ann"), prompt(TEXT, salt="bob")).reason == "other_salt"


def test_the_same_prompt_for_another_set_up_is_found() -> None:
    other = replace(MANIFEST, fields=replace(NAMESPACE, block_size=32).fields)
    verdict = explain(Pool(prompt(TEXT), manifest=other), prompt(TEXT), others=[MANIFEST, other])
    assert verdict.reason == "other_block_size"
    assert f"for another set-up, {other.digest}" in verdict.sentence


def test_the_place_where_it_parts_from_a_stored_one_is_told() -> None:
    stored = TEXT.replace("15:04:05", "14:00:00")
    verdict = explain(Pool(prompt(stored)), prompt(TEXT), prompt(stored))
    assert (verdict.reason, verdict.details["kind"]) == ("parts", "a timestamp")
    assert verdict.details["token"] == TEXT.index("5:04:05")
    assert "not in the pool" not in verdict.sentence


def test_a_prompt_to_compare_with_that_is_not_there_is_told() -> None:
    stored = TEXT.replace("15:04:05", "14:00:00")
    verdict = explain(Pool(prompt(stored), without=range(2, 7)), prompt(TEXT), prompt(stored))
    assert "is not in the pool from there on either" in verdict.sentence
    assert "both prompts have block 0" in explain(Pool(), prompt(TEXT), prompt(stored)).sentence


def test_of_a_prompt_alone_the_likely_reason_is_told() -> None:
    verdict = explain(Pool(prompt(TEXT.replace("15:04:05", "14:00:00"))), prompt(TEXT))
    assert (verdict.reason, verdict.details["leading"], verdict.details["suspect"]) == ("parts", 2, "a timestamp")
    assert explain(Pool(), prompt("A poem on the sea and on ships")).reason == "new"


def test_a_pool_that_does_not_say_is_away() -> None:
    verdict = explain_prompt(lambda _, hashes: [Status.FAILED] * len(hashes), MANIFEST, prompt(TEXT))
    assert verdict.reason == "pool_away"


def test_blocks_that_others_name_cannot_be_told() -> None:
    other = replace(MANIFEST, facts={"block_hashes": "vLLM"})
    verdict = explain_prompt(Pool().exists, other, prompt(TEXT))
    assert (verdict.reason, "vLLM names its blocks" in verdict.sentence) == ("unknown", True)
