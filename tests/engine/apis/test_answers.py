"""Greedy responses are equal to those of transformers, with any chunks, batches, blocks and loads.

One architecture. ``test_equality.py`` has the others, with all features on.

The weights are random float32 numbers. Sums of the same numbers in another order may differ in the last bits, so the
tests compare a response only up to the first token without a clear lead over the second likeliest one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.pool.pool_connector import PoolConnector
from engine.scheduling.request import State
from kvstore_backend.load_or_compute import LoadOrCompute
from kvstore_backend.staging import StagedMemory
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.checkpoints import CHECKPOINTS, VOCAB_SIZE, write_checkpoint
from tests.engine.running import Engine
from tests.support.stored import count_keys
from tests.support.waiting import wait_until

BLOCK = 16
NEAR_TIE = 1e-3
MAX_TOKENS = 20
# Around the boundaries of blocks, and of chunks of 24 tokens.
LENGTHS = (1, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCAB_SIZE), k=length)


PROMPTS = [prompt_of(length) for length in LENGTHS]
PROMPTS += [PROMPTS[-1][:48] + prompt_of(9, seed) for seed in (1, 2, 3)]  # a shared prefix of three blocks


@dataclass(frozen=True)
class Expected:
    """A reference response, and the number of its tokens with a clear lead."""

    tokens: list[int]
    num_clear: int

    def matches(self, tokens: Sequence[int]) -> bool:
        return list(tokens[: self.num_clear]) == self.tokens[: self.num_clear]


class Reference:
    """Generates with transformers from a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder)
        self._answers: dict[tuple[int, ...], Expected] = {}

    def __call__(self, prompt: Sequence[int]) -> Expected:
        key = tuple(prompt)
        if key not in self._answers:
            self._answers[key] = self._generate(prompt)
        return self._answers[key]

    def _generate(self, prompt: Sequence[int]) -> Expected:
        generated: Any = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        leads = [float(-torch.diff(torch.topk(scores[0], 2).values)) for scores in generated.scores]
        num_clear = next((i for i, lead in enumerate(leads) if lead < NEAR_TIE), len(leads))
        return Expected(generated.sequences[0, len(prompt) :].tolist(), num_clear)


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    reference: Reference


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint, and its reference, which generates each response once."""
    folder = write_checkpoint(CHECKPOINTS["qwen2-grouped-untied"](), tmp_path_factory.mktemp("models") / "qwen2")
    return Checkpoint(folder, Reference(folder))


def test_the_reference_makes_clear_and_varied_choices(qwen2: Checkpoint) -> None:
    expected = [qwen2.reference(prompt) for prompt in PROMPTS]
    assert sum(answer.num_clear for answer in expected) > 0.9 * MAX_TOKENS * len(expected)
    assert len({tuple(answer.tokens) for answer in expected}) > len(expected) / 2


def test_each_response_has_its_own_repetition_penalty_as_in_transformers(qwen2: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(qwen2.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.3}))
    penalized = Reference(tmp_path)
    with Engine(tmp_path) as engine:
        penalty = engine.runner.defaults.repetition_penalty
        answers = [engine.begin(prompt, MAX_TOKENS, repetition_penalty=penalty) for prompt in PROMPTS]
        others = [engine.begin(prompt, MAX_TOKENS) for prompt in PROMPTS]
        for prompt, submitted, other in zip(PROMPTS, answers, others, strict=True):
            assert penalized(prompt).matches(submitted.wait())
            assert qwen2.reference(prompt).matches(other.wait())
    assert sum(penalized(prompt).tokens != qwen2.reference(prompt).tokens for prompt in PROMPTS) > len(PROMPTS) / 2


def test_a_prefix_in_the_own_cache_is_not_computed_again(qwen2: Checkpoint) -> None:
    with Engine(qwen2.folder) as engine:
        first, second = (engine.answer(PROMPTS[i], MAX_TOKENS) for i in (-3, -2))
        assert (first.sequence.own_cached_tokens, second.sequence.own_cached_tokens) == (0, 48)
        assert qwen2.reference(PROMPTS[-2]).matches(second.wait())


@pytest.fixture(params=["direct", "staged"])
def transfers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Save and load blocks directly, or through staging buffers for a few blocks, as on a GPU.

    The engine loads all blocks of the pool, even if computing would be faster on a busy machine.
    """
    monkeypatch.setattr(LoadOrCompute, "decide", lambda *_: "load")
    monkeypatch.setattr("engine.pool.staging.StagedMemory", functools.partial(StagedMemory, buffer_bytes=20_000))
    staged = functools.partial(PoolConnector, staged=request.param == "staged")
    monkeypatch.setattr("engine.core.PoolConnector", staged)
    return str(request.param)


@contextlib.contextmanager
def two_engines(folder: Path, **more: Any) -> Iterator[tuple[Engine, Engine]]:
    """Start two instances with one pool."""
    store = MemoryStore(64 << 20)
    with Engine(folder, store=store, **more) as one, Engine(folder, store=store, **more) as other:
        yield one, other


@pytest.mark.usefixtures("transfers")
class TestPool:
    def test_responses_with_blocks_of_another_instance_are_the_same(self, qwen2: Checkpoint) -> None:
        with two_engines(qwen2.folder) as (one, other):
            prompts = PROMPTS[: len(LENGTHS)]  # these have no common prefix
            for prompt in prompts:
                one.answer(prompt, 1)
            answers = [other.begin(prompt, MAX_TOKENS) for prompt in prompts]
            for prompt, submitted in zip(prompts, answers, strict=True):
                assert qwen2.reference(prompt).matches(submitted.wait()), f"prompt of {len(prompt)} tokens"
                # All full blocks except one that ends with the last token, which is always computed.
                assert submitted.sequence.pool_cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
                assert submitted.sequence.own_cached_tokens == 0

    def test_responses_are_the_same_if_a_small_instance_loads_saves_and_preempts(self, qwen2: Checkpoint) -> None:
        with two_engines(qwen2.folder, num_blocks=9, max_num_seqs=5, budget=7, save_outputs=True) as (one, other):
            for engine in (one, other):
                answers = [engine.begin(prompt, MAX_TOKENS) for prompt in PROMPTS]
                for prompt, submitted in zip(PROMPTS, answers, strict=True):
                    assert qwen2.reference(prompt).matches(submitted.wait()), f"prompt of {len(prompt)} tokens"
                    sequence = submitted.sequence
                    assert sequence.own_cached_tokens + sequence.pool_cached_tokens < len(prompt)
                engine.wait_until_idle()
            assert other.metric("kvstore_pool_cached_tokens_total") > 0

    def test_a_prompt_with_another_salt_is_a_miss(self, qwen2: Checkpoint) -> None:
        with two_engines(qwen2.folder) as (one, other):
            prompt = PROMPTS[-4]
            one.answer(prompt, salt="tenant")
            hit, miss = other.answer(prompt, salt="tenant"), other.answer(prompt, salt="other tenant")
            assert hit.sequence.pool_cached_tokens == 96
            assert (miss.sequence.pool_cached_tokens, miss.sequence.own_cached_tokens) == (0, 0)
            assert hit.wait() == miss.wait()

    @pytest.mark.parametrize(("save_outputs", "cached"), [(True, 48), (False, 32)])
    def test_the_next_turn_hits_generated_blocks_with_output_caching(
        self, qwen2: Checkpoint, save_outputs: bool, cached: int
    ) -> None:
        with two_engines(qwen2.folder, save_outputs=save_outputs) as (one, other):
            prompt = prompt_of(40)
            answer = one.answer(prompt, MAX_TOKENS).wait()
            follow_up = other.answer([*prompt, *answer, *prompt_of(5)], MAX_TOKENS)
            assert follow_up.sequence.pool_cached_tokens == cached
            assert qwen2.reference([*prompt, *answer, *prompt_of(5)]).matches(follow_up.wait())


def test_generated_blocks_are_saved_when_they_are_full_and_another_instance_can_load_them(
    qwen2: Checkpoint,
) -> None:
    store = MemoryStore(64 << 20)
    with Engine(qwen2.folder, store=store, save_outputs=True) as one, Engine(qwen2.folder, store=store) as other:
        prompt = prompt_of(40)
        submitted = one.begin(prompt, 900)
        answer = [submitted.next().token_id or 0 for _ in range(MAX_TOKENS)]
        wait_until(lambda: count_keys(store) >= 3, "a block with generated tokens to be in the pool")
        follow_up = other.answer([*prompt, *answer, *prompt_of(5)], MAX_TOKENS)
        assert submitted.sequence.state is State.RUNNING
        assert follow_up.sequence.pool_cached_tokens == 48
        one.core.abort_sequence(submitted.sequence)


def test_tokens_from_before_a_preemption_are_not_computed_again(qwen2: Checkpoint) -> None:
    # The sequence loses its blocks, and loads them from the pool.
    with Engine(qwen2.folder, store=MemoryStore(64 << 20), num_blocks=9, save_outputs=True) as engine:
        submitted = engine.begin_at_once([prompt_of(24, seed) for seed in (1, 2)], 90)
        for one in submitted:
            one.wait()
        preempted = submitted[1].sequence
        assert preempted.num_preemptions > 0
        assert preempted.num_saved >= 6
        engine.wait_until_idle()
        follow_up = engine.answer([*preempted.token_ids, 1], 1).sequence
        assert follow_up.own_cached_tokens + follow_up.pool_cached_tokens == 112


def test_cached_tokens_are_those_of_the_first_run_of_a_preempted_prompt(qwen2: Checkpoint) -> None:
    long = prompt_of(72)
    engine = Engine(qwen2.folder, store=MemoryStore(64 << 20), num_blocks=9, budget=2, max_num_seqs=2, start=False)
    # The long prompt gets only one token of the budget per step. The second request takes its blocks meanwhile, so the
    # long prompt begins again, and loads its saved blocks.
    requests = [engine.begin(long[:33], 1), engine.begin([1], 130), engine.begin(long, 1)]
    engine.core.start()
    with engine:
        for submitted in requests:
            submitted.wait()
        preempted = requests[-1].sequence
        assert preempted.num_preemptions > 0
        assert (preempted.own_cached_tokens, preempted.pool_cached_tokens) == (32, 0)


def test_two_models_with_one_pool_do_not_load_each_others_blocks(
    qwen2: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    twin_config = CHECKPOINTS["qwen2-grouped-untied"]()
    twin_config.initializer_range = 0.31  # equal shapes and names, and other weights
    folder = write_checkpoint(twin_config, tmp_path_factory.mktemp("models") / "twin")
    store = MemoryStore(64 << 20)
    with Engine(qwen2.folder, store=store) as one, Engine(folder, store=store) as twin:
        one.answer(PROMPTS[-4])
        answer = twin.answer(PROMPTS[-4], MAX_TOKENS)
        assert answer.sequence.pool_cached_tokens == 0
        assert Reference(folder)(PROMPTS[-4]).matches(answer.wait())
