"""Greedy responses with all features on: each token is the likeliest token of transformers' model.

The features are: prefix cache, pool, output caching, chunked prefill, batches, and preemption because of too few
blocks; in one instance, and in a pair with direct transfer. The checkpoints have random float32 weights. Sums of the
same numbers in another order differ in their last bits, so a response may have another token than the reference if the
difference of their logits is within ``TOLERANCE``. The tokens after it are not compared. (``test_answers.py`` compares
with ``generate`` itself, which takes ten times as long.)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvstore_backend.load_or_compute import LoadOrCompute
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.checkpoints import CHECKPOINTS, VOCAB_SIZE, write_checkpoint
from tests.engine.event_loop import in_event_loop
from tests.engine.pair import Pair, empty_prefix_cache, pair_of, tokens_of
from tests.engine.running import Engine

BLOCK, CHUNK = 16, 40
MAX_TOKENS = 12
TOLERANCE = 1e-3  # of a logit; they have a standard deviation of about 1

BOUNDARIES = (BLOCK, 2 * BLOCK, 3 * BLOCK, 5 * BLOCK, 8 * BLOCK, CHUNK, 2 * CHUNK, 3 * CHUNK)
LENGTHS = sorted({1, 2, 3, *(boundary + off for boundary in BOUNDARIES for off in (-2, -1, 0, 1, 2))})
# Responses that end at a boundary.
LENGTHS += [boundary - MAX_TOKENS + off for boundary in (2 * BLOCK, 4 * BLOCK, 7 * BLOCK) for off in (-1, 0, 1)]


def random_tokens(count: int, seed: str) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


SYSTEM = random_tokens(3 * BLOCK + 5, "a beginning that several prompts share")
PROMPTS = [random_tokens(length, f"prompt {i}") for i, length in enumerate(LENGTHS)]
SHARED = [SYSTEM + random_tokens(length, f"shared {length}") for length in (1, 10, 11, 12, 27, 40)]
PROMPTS += SHARED
assert len(PROMPTS) >= 50
QUESTION = random_tokens(9, "a second question")
MANY_BLOCKS = 1200
"""Blocks for all prompts and responses: none is evicted, and no save is skipped because too many blocks wait."""
TIMEOUT_SECONDS = 250.0
SETTINGS: dict[str, Any] = {"block_size": BLOCK, "budget": CHUNK, "save_outputs": True}


@pytest.fixture(autouse=True)
def wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load all blocks from the pool, and let prefill and decode wait long for each other, even on a busy machine."""
    monkeypatch.setattr(LoadOrCompute, "decide", lambda *_: "load")
    monkeypatch.setattr("engine.disaggregation.prefill.SILENCE_SECONDS", TIMEOUT_SECONDS)


class Reference:
    """Checks responses with transformers' model."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder)

    @torch.inference_mode()
    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Return whether ``answer`` is equal to the reference. Fail if a differing token is not nearly as likely."""
        assert len(answer) == MAX_TOKENS
        logits = self._model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        for at, (got, likeliest) in enumerate(zip(answer, logits.argmax(-1).tolist(), strict=True)):
            if got != likeliest:
                lead = float(logits[at, likeliest] - logits[at, got])
                assert lead < TOLERANCE, f"prompt of {len(prompt)} tokens: token {at} is {got}, not {likeliest}"
                return False
        return True


def run_together(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    answers = engine.begin_at_once(prompts, MAX_TOKENS)
    tokens = [submitted.wait() for submitted in answers]
    engine.wait_until_idle()
    return tokens


async def run_on_pair_together(pair: Pair, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    answers = (pair.answer(prompt, MAX_TOKENS, name=str(i)) for i, prompt in enumerate(prompts))
    tokens = [tokens_of(pieces) for pieces in await asyncio.gather(*answers)]
    await pair.until_free()
    return tokens


def count_full_block_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens in full blocks."""
    return sum(len(prompt) // BLOCK * BLOCK for prompt in prompts)


def count_cached_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens in full blocks of prompts and responses. The last token's KV is not computed."""
    return sum((len(prompt) + MAX_TOKENS - 1) // BLOCK * BLOCK for prompt in prompts)


def next_turns(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*prompt, *answer, *QUESTION] for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(CHECKPOINTS[request.param](), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def test_responses_with_all_features_are_equal_to_those_of_transformers(checkpoint: Path, reference: Reference) -> None:
    store = MemoryStore(64 << 20)
    same: list[bool] = []

    def check(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        answers = run_together(engine, prompts)
        same.extend(reference.check(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))
        return answers

    with (
        Engine(checkpoint, num_blocks=MANY_BLOCKS, max_num_seqs=16, store=store, **SETTINGS) as large,
        Engine(checkpoint, num_blocks=14, max_num_seqs=6, store=store, **SETTINGS) as small,
    ):
        turns = next_turns(PROMPTS, check(large, PROMPTS))
        # The next turns of all conversations, on another instance that has too few blocks for them.
        for _ in range(5):  # the number of concurrent requests depends on the speed of their loads
            check(small, turns)
            if small.metric("kvstore_preemptions_total"):
                break
        assert small.metric("kvstore_preemptions_total") > 0
        assert small.metric("kvstore_pool_cached_tokens_total") > 0.6 * count_full_block_tokens(turns)
        # The same turns on the first instance. Its own cache has the first turns, and the pool has further blocks.
        check(large, turns)
        assert large.metric("kvstore_prompt_tokens_total", origin="own_cache") >= count_cached_tokens(PROMPTS)
    # Equally likely tokens must be rare, or this test would compare few tokens.
    assert sum(same) > 0.95 * len(same)


@pytest.mark.parametrize("checkpoint", ["qwen2-grouped-untied", "llama-multiquery-untied"], indirect=True)
@in_event_loop
async def test_responses_of_a_pair_with_direct_transfer_are_equal_to_those_of_transformers(
    checkpoint: Path, reference: Reference, word_tokenizer: Any
) -> None:
    sizes: dict[str, Any] = {"num_blocks": MANY_BLOCKS, "prefill_blocks": MANY_BLOCKS, "max_num_seqs": 16}
    sizes["expiry_seconds"] = TIMEOUT_SECONDS
    async with pair_of(checkpoint, word_tokenizer, store=MemoryStore(64 << 20), **sizes, **SETTINGS) as pair:
        prefill, decode = pair.prefill.engine, pair.decode.engine
        answers = await run_on_pair_together(pair, PROMPTS)
        empty_prefix_cache(prefill)
        turns = next_turns(PROMPTS, answers)
        before = prefill.metric("kvstore_prompt_tokens_total", origin="own_cache")
        answers += await run_on_pair_together(pair, turns)
        ways = {way: pair.decode.handed_over(way) for way in ("direct", "pool", "computed")}
        assert ways == {"direct": len(PROMPTS) + len(turns), "pool": 0, "computed": 0}
        # Prefill loaded the first turns from the pool, or had a shared prefix in its own cache. Decode had all in its
        # own cache.
        own = prefill.metric("kvstore_prompt_tokens_total", origin="own_cache") - before
        assert prefill.metric("kvstore_prompt_tokens_total", origin="pool") + own >= count_cached_tokens(PROMPTS)
        assert own <= len(SHARED) * count_full_block_tokens([SYSTEM])
        assert decode.metric("kvstore_prompt_tokens_total", origin="own_cache") >= count_cached_tokens(PROMPTS)
        assert decode.metric("kvstore_prompt_tokens_total", origin="handed_over") > 0
    same = [reference.check(prompt, answer) for prompt, answer in zip([*PROMPTS, *turns], answers, strict=True)]
    assert sum(same) > 0.95 * len(same)
