"""With everything on, each token of a greedy answer is the one that transformers' model has for the likeliest.

Everything: prefix cache, pool, output caching, chunked prefill, batches, and too few blocks, so that sequences are
preempted; by one instance, and by two of which one hands over to the other directly. The checkpoints are random float32
weights. Sums of the same numbers in another order differ in their last bits, so where an answer has another token than
the reference, the reference itself must find that as likely, within ``TOLERANCE``; what follows is another text than
``generate`` would give, and is not compared. (``test_answers.py`` compares with ``generate`` itself, which takes ten
times as long.)
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
from tests.engine.pair import Pair, forget_prefixes, pair_of, tokens_of
from tests.engine.running import Engine

BLOCK, CHUNK = 16, 40
MAX_TOKENS = 12
TOLERANCE = 1e-3  # of a logit; they have a standard deviation of about 1

BORDERS = (BLOCK, 2 * BLOCK, 3 * BLOCK, 5 * BLOCK, 8 * BLOCK, CHUNK, 2 * CHUNK, 3 * CHUNK)
LENGTHS = sorted({1, 2, 3, *(border + off for border in BORDERS for off in (-2, -1, 0, 1, 2))})
# Answers that reach a border.
LENGTHS += [border - MAX_TOKENS + off for border in (2 * BLOCK, 4 * BLOCK, 7 * BLOCK) for off in (-1, 0, 1)]


def random_tokens(count: int, seed: str) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


SYSTEM = random_tokens(3 * BLOCK + 5, "a beginning that several prompts share")
PROMPTS = [random_tokens(length, f"prompt {i}") for i, length in enumerate(LENGTHS)]
SHARED = [SYSTEM + random_tokens(length, f"shared {length}") for length in (1, 10, 11, 12, 27, 40)]
PROMPTS += SHARED
assert len(PROMPTS) >= 50
QUESTION = random_tokens(9, "a second question")
ROOMY = 1200
"""Blocks for all prompts and answers: none is evicted, and no save is given up because too many blocks wait for it."""
PATIENCE_SECONDS = 250.0
SETTINGS: dict[str, Any] = {"block_size": BLOCK, "budget": CHUNK, "save_outputs": True}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too, everything in the pool is loaded, and prefill and decode wait for each other."""
    monkeypatch.setattr(LoadOrCompute, "decide", lambda *_: "load")
    monkeypatch.setattr("engine.disaggregation.prefill.SILENCE_SECONDS", PATIENCE_SECONDS)


class Reference:
    """What transformers' model thinks of an answer."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder)

    @torch.inference_mode()
    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether ``answer`` is the reference's to its end; a difference that is no near-tie fails."""
        assert len(answer) == MAX_TOKENS
        logits = self._model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        for at, (got, wanted) in enumerate(zip(answer, logits.argmax(-1).tolist(), strict=True)):
            if got != wanted:
                lead = float(logits[at, wanted] - logits[at, got])
                assert lead < TOLERANCE, f"prompt of {len(prompt)} tokens: token {at} is {got}, not {wanted}"
                return False
        return True


def asked_at_once(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    answers = engine.begin_at_once(prompts, MAX_TOKENS)
    tokens = [answering.wait() for answering in answers]
    engine.wait_until_idle()
    return tokens


async def asked_of_pair_at_once(pair: Pair, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    answers = (pair.answer(prompt, MAX_TOKENS, name=str(i)) for i, prompt in enumerate(prompts))
    tokens = [tokens_of(pieces) for pieces in await asyncio.gather(*answers)]
    await pair.until_free()
    return tokens


def full_blocks(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens in full blocks."""
    return sum(len(prompt) // BLOCK * BLOCK for prompt in prompts)


def kept_blocks(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens in the full blocks that prompts and their answers leave behind: the last token's KV is not computed."""
    return sum((len(prompt) + MAX_TOKENS - 1) // BLOCK * BLOCK for prompt in prompts)


def next_turns(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*prompt, *answer, *QUESTION] for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(CHECKPOINTS[request.param](), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    """One for both tests, which ask nearly the same."""
    return Reference(checkpoint)


def test_answers_with_everything_on_are_those_of_transformers(checkpoint: Path, reference: Reference) -> None:
    store = MemoryStore(64 << 20)
    same: list[bool] = []

    def check(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        answers = asked_at_once(engine, prompts)
        same.extend(reference.check(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))
        return answers

    with (
        Engine(checkpoint, num_blocks=ROOMY, max_num_seqs=16, store=store, **SETTINGS) as roomy,
        Engine(checkpoint, num_blocks=14, max_num_seqs=6, store=store, **SETTINGS) as small,
    ):
        turns = next_turns(PROMPTS, check(roomy, PROMPTS))
        # The next turns of all conversations, on another instance that has too few blocks for them ...
        for _ in range(5):  # whether enough requests run at the same time depends on how quickly each one loads
            check(small, turns)
            if small.metric("kvstore_preemptions_total"):
                break
        assert small.metric("kvstore_preemptions_total") > 0
        assert small.metric("kvstore_pool_cached_tokens_total") > 0.6 * full_blocks(turns)
        # ... and on the first one, whose own cache has the first turns, and the pool some of what the other saved.
        check(roomy, turns)
        assert roomy.metric("kvstore_prompt_tokens_total", origin="own_cache") >= kept_blocks(PROMPTS)
    # Near-ties are rare: else this test would compare little.
    assert sum(same) > 0.95 * len(same)


@pytest.mark.parametrize("checkpoint", ["qwen2-grouped-untied", "llama-multiquery-untied"], indirect=True)
@in_event_loop
async def test_answers_of_a_pair_that_hands_over_directly_are_those_of_transformers(
    checkpoint: Path, reference: Reference, word_tokenizer: Any
) -> None:
    sizes: dict[str, Any] = {"num_blocks": ROOMY, "prefill_blocks": ROOMY, "max_num_seqs": 16}
    sizes["expiry_seconds"] = PATIENCE_SECONDS
    async with pair_of(checkpoint, word_tokenizer, store=MemoryStore(64 << 20), **sizes, **SETTINGS) as pair:
        prefill, decode = pair.prefill.engine, pair.decode.engine
        answers = await asked_of_pair_at_once(pair, PROMPTS)
        forget_prefixes(prefill)
        turns = next_turns(PROMPTS, answers)
        before = prefill.metric("kvstore_prompt_tokens_total", origin="own_cache")
        answers += await asked_of_pair_at_once(pair, turns)
        ways = {way: pair.decode.handed_over(way) for way in ("direct", "pool", "computed")}
        assert ways == {"direct": len(PROMPTS) + len(turns), "pool": 0, "computed": 0}
        # Prefill found the first turns in the pool, or in its own cache what another prompt began with; decode had
        # all in its own cache.
        own = prefill.metric("kvstore_prompt_tokens_total", origin="own_cache") - before
        assert prefill.metric("kvstore_prompt_tokens_total", origin="pool") + own >= kept_blocks(PROMPTS)
        assert own <= len(SHARED) * full_blocks([SYSTEM])
        assert decode.metric("kvstore_prompt_tokens_total", origin="own_cache") >= kept_blocks(PROMPTS)
        assert decode.metric("kvstore_prompt_tokens_total", origin="handed_over") > 0
    same = [reference.check(prompt, answer) for prompt, answer in zip([*PROMPTS, *turns], answers, strict=True)]
    assert sum(same) > 0.95 * len(same)
