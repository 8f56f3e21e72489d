"""Models with several groups of layers: responses in every state of the own cache, and the blocks in use."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model.checkpoint import load_model_config
from engine.model.layer_groups import group_layers
from engine.model.model_runner import ModelRunner
from engine.scheduling.retrieval_config import RetrievalConfig
from kvstore_backend import ConfigError
from kvstore_backend.load_or_compute import LoadOrCompute
from kvstore_backend.refill import Refill
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.checkpoints import GROUPED, VOCAB_SIZE, write_checkpoint
from tests.engine.event_loop import in_event_loop
from tests.engine.faulty_store import Fault, FaultyStore
from tests.engine.pair import empty_prefix_cache, pair_of
from tests.engine.running import Engine
from tests.engine.test_equality import MAX_TOKENS, run_on_pair_together, run_together
from tests.support.clearing import looks, wait_for_a_look
from tests.support.waiting import wait_until

__all__ = ["looks"]

each_layout = pytest.mark.parametrize("checkpoint", ["gpt-oss", "gemma3", "mistral", "lfm2"], indirect=True)
"""Architectures with different groups of layers. The pool depends on no other property."""

BLOCK = 16
TOLERANCE = 1e-3  # of a logit; smaller differences are rounding errors


def random_tokens(count: int, seed: str) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


SYSTEM = random_tokens(5 * BLOCK + 3, "a beginning that several prompts share")
PROMPTS = [SYSTEM + random_tokens(length, str(length)) for length in (1, 9, 13, 30, 70)]
PROMPTS += [random_tokens(length, str(length)) for length in (1, 15, 16, 17, 64, 100)]


@pytest.fixture(scope="module", params=GROUPED)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(GROUPED[request.param](), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def _load_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load all blocks from the pool, even on a busy machine."""
    monkeypatch.setattr(LoadOrCompute, "decide", lambda *_: "load")


@functools.cache
def reference_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@torch.inference_mode()
def check(folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """Assert that each token is the likeliest one of transformers' model."""
    model = reference_of(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == MAX_TOKENS
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        leads = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert leads.max() < TOLERANCE, f"prompt of {len(prompt)} tokens"


def test_responses_are_equal_to_transformers_with_and_without_cached_prefixes(checkpoint: Path) -> None:
    with Engine(checkpoint, num_blocks=500, budget=40) as engine:
        first = run_together(engine, PROMPTS)
        turns = [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(PROMPTS, first, strict=True)]
        second = run_together(engine, turns)
        cached = engine.metric("kvstore_prompt_tokens_total", origin="own_cache")
        assert cached >= sum((len(prompt) + MAX_TOKENS - 1) // BLOCK * BLOCK for prompt in PROMPTS)
    check(checkpoint, PROMPTS + turns, first + second)


def test_responses_are_equal_to_transformers_with_too_few_blocks(checkpoint: Path) -> None:
    num_groups = len(group_layers("", load_model_config(str(checkpoint)), BLOCK, 1 << 20).members)
    prompts = [random_tokens(length, f"few {length}") for length in (12, 13, 14, 15, 14, 13, 40)]
    with Engine(checkpoint, num_blocks=4 * num_groups, max_num_seqs=6, budget=40) as engine:
        answers = run_together(engine, prompts)
        assert engine.metric("kvstore_preemptions_total") > 0
    check(checkpoint, prompts, answers)


def test_blocks_that_no_later_token_reads_are_released(checkpoint: Path) -> None:
    with Engine(checkpoint, num_blocks=300, budget=40) as engine:
        submitted = engine.begin(random_tokens(150, "long"), 60)
        for _ in range(59):
            submitted.next()
        held = [len(table.blocks) - table.num_released for table in submitted.sequence.tables]
        submitted.wait()
    needed = {"full": 14, "window": 4, "state": 2}
    for group, count in zip(engine.runner.groups.groups, held, strict=True):
        assert count <= needed[group.kind]


def next_turns(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(prompts, answers, strict=True)]


@each_layout
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_another_instance_loads_the_blocks_up_to_a_resume_point(checkpoint: Path, staged: bool) -> None:
    store = MemoryStore(64 << 20)
    settings: dict[str, Any] = {"num_blocks": 700, "budget": 40, "save_outputs": True}
    if staged:
        settings["max_model_len"] = 4000
    with Engine(checkpoint, store=FaultyStore(store), **settings) as writer:
        assert writer.late_calls_hold_blocks != staged
        turns = next_turns(PROMPTS, run_together(writer, PROMPTS))
    with Engine(checkpoint, store=FaultyStore(store), **settings) as reader:
        answers = run_together(reader, turns)
        allowed = sum((len(turn) - 4) // BLOCK * BLOCK for turn in turns)
        loaded = reader.metric("kvstore_prompt_tokens_total", origin="pool")
        own = reader.metric("kvstore_prompt_tokens_total", origin="own_cache")
        assert loaded + own >= 0.9 * allowed
        assert loaded >= 0.6 * allowed  # another prompt has computed the shared prefix of the rest
        again = next_turns(turns, answers)
    check(checkpoint, turns, answers)
    with Engine(checkpoint, store=FaultyStore(store), **settings) as third:
        check(checkpoint, again, run_together(third, again))


@each_layout
def test_random_losses_of_the_pool_shorten_hits_and_change_no_response(checkpoint: Path) -> None:
    store, chance = MemoryStore(64 << 20), random.Random(3)
    settings: dict[str, Any] = {"num_blocks": 700, "budget": 40, "save_outputs": True}
    with Engine(checkpoint, store=FaultyStore(store), **settings) as writer:
        turns = next_turns(PROMPTS, run_together(writer, PROMPTS))
    loaded = []
    for lost in (0.03, 0.1, 0.4):
        store.remove([key for key in store._values if chance.random() < lost])
        with Engine(checkpoint, store=FaultyStore(store), **{**settings, "save_outputs": False}) as reader:
            check(checkpoint, turns, run_together(reader, turns))
            loaded.append(reader.metric("kvstore_prompt_tokens_total", origin="pool"))
    assert loaded[0] > 0


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NOTHING])
def test_a_pool_that_fails_changes_no_response(fault: Fault, tmp_path: Path) -> None:
    for family in ("gemma3", "lfm2"):
        folder = write_checkpoint(GROUPED[family](), tmp_path / family)
        memory = MemoryStore(64 << 20)
        settings: dict[str, Any] = {"num_blocks": 400, "budget": 40}
        with Engine(folder, store=FaultyStore(memory), **settings) as writer:
            run_together(writer, PROMPTS[:5])
        faulty = FaultyStore(memory)
        with Engine(folder, store=faulty, **settings) as reader:
            faulty.fault = fault
            check(folder, PROMPTS[:5], run_together(reader, PROMPTS[:5]))
            faulty.fault = Fault.NOTHING
            check(folder, PROMPTS[:5], run_together(reader, PROMPTS[:5]))


def test_the_names_of_blocks_in_the_pool_contain_their_group(tmp_path: Path) -> None:
    store = MemoryStore(64 << 20)
    folder = write_checkpoint(GROUPED["gemma2"](), tmp_path)
    with Engine(folder, num_blocks=200, store=store) as engine:
        sequence = engine.answer(random_tokens(3 * BLOCK, "three blocks"), 1).sequence
        groups, namespace = engine.scheduler.groups, engine.runner.namespace
        assert "full attention: 1 3; sliding window 40: 0 2" in namespace.layout
        names = [groups.name_block(number, each) for number in range(len(groups)) for each in sequence.hashes()]
        assert sorted(store._values) == sorted(map(namespace.key, names))


@each_layout
@in_event_loop
async def test_prompts_are_handed_over_with_the_blocks_of_each_group(
    checkpoint: Path, word_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.disaggregation.prefill.SILENCE_SECONDS", 60.0)
    settings: dict[str, Any] = {"num_blocks": 900, "prefill_blocks": 900, "budget": 40, "save_outputs": True}
    store = MemoryStore(64 << 20)
    async with pair_of(
        checkpoint, word_tokenizer, store=store, max_num_seqs=16, expiry_seconds=60.0, **settings
    ) as pair:
        answers = await run_on_pair_together(pair, PROMPTS)
        empty_prefix_cache(pair.prefill.engine)
        turns = next_turns(PROMPTS, answers)
        answers += await run_on_pair_together(pair, turns)
        ways = {way: pair.decode.handed_over(way) for way in ("direct", "pool", "computed")}
        assert ways == {"direct": len(PROMPTS + turns), "pool": 0, "computed": 0}
        assert pair.decode.engine.metric("kvstore_prompt_tokens_total", origin="own_cache") > 0
        assert pair.prefill.engine.metric("kvstore_prompt_tokens_total", origin="pool") > 0
        pair.prefill.transfer.fails = True
        last = next_turns(turns, answers[len(PROMPTS) :])
        answers += await run_on_pair_together(pair, last)
        assert pair.decode.handed_over("pool") > 0
    check(checkpoint, PROMPTS + turns + last, answers)


@pytest.mark.parametrize("offload_boundary", [1000, 0], ids=["sparse", "offloaded"])
@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_retrieval_reads_the_blocks_of_full_attention(family: str, offload_boundary: int, tmp_path: Path) -> None:
    folder = write_checkpoint(GROUPED[family](), tmp_path)
    every_block = RetrievalConfig(BLOCK, BLOCK, 2 * BLOCK, 1.0, 0, offload_boundary)
    with Engine(folder, num_blocks=700, budget=40, retrieval=every_block) as engine:
        submitted = engine.begin_at_once(PROMPTS[-3:], MAX_TOKENS)
        answers = [each.wait() for each in submitted]
        assert all(each.sequence.blocks_read > 0 for each in submitted)
    check(folder, PROMPTS[-3:], answers)


@pytest.mark.parametrize("length", [{}, {"conv_L_cache": 1}])
def test_convolutions_without_a_state_are_refused(length: dict[str, int]) -> None:
    config = SimpleNamespace(layer_types=["conv", "full_attention"], num_hidden_layers=2, hidden_size=8, **length)
    with pytest.raises(ConfigError, match="conv_L_cache of at least 2"):
        group_layers("model", config, BLOCK, 512)


@pytest.mark.parametrize(
    ("family", "reason"), [("gemma2", "has soft-capping or sinks"), ("mistral", "has no layers with full attention")]
)
def test_retrieval_is_refused_where_it_cannot_work(family: str, reason: str, tmp_path: Path) -> None:
    folder = str(write_checkpoint(GROUPED[family](), tmp_path))
    runner = ModelRunner(folder, load_model_config(folder), "cpu", torch.float32, BLOCK)
    runner.allocate_kv(40)
    runner.try_out()
    with pytest.raises(ConfigError, match=reason):
        runner.enable_retrieval(RetrievalConfig(BLOCK), 4, 100)


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_blocks_of_all_groups_are_saved_again_if_the_pool_has_lost_them(
    family: str, staged: bool, tmp_path: Path, looks: list[bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.pool.pool_connector.Refill", functools.partial(Refill, period=0.02))
    folder, store = write_checkpoint(GROUPED[family](), tmp_path), MemoryStore(64 << 20)
    settings: dict[str, Any] = {"num_blocks": 300, "max_model_len": 2000 if staged else None}
    with Engine(folder, store=FaultyStore(store), **settings) as writer:
        run_together(writer, PROMPTS[:2])
        wait_for_a_look(looks)
        saved = dict(store._values)
        store.clear("")
        wait_until(lambda: store._values.keys() >= saved.keys(), "all blocks to be saved again", 60)
        assert store._values == saved
