"""Sparse attention: where it must be exact, where it is active, and the factors that must not change responses."""

from __future__ import annotations

import queue
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core import Listener, Prefilled
from engine.model.attention.pages import PageReader
from engine.model.attention.retrieval import Retrieval
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.request import Sequence as EngineSequence
from engine.scheduling.retrieval_config import Regime, RetrievalConfig
from engine.scheduling.scheduler import Reservation
from kvstore_backend import BlockPool, ConfigError, Span, Status
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.running import Engine, SubmittedRequest
from tests.support.stored import count_keys
from tests.support.waiting import wait_until

BLOCK = 16
LAYERS = 2
PROMPTS = [random.Random(i).choices(range(300), k=length) for i, length in enumerate((200, 37, 300, 128))]
MAX_TOKENS = 24


def config(**changes: Any) -> RetrievalConfig:
    """Make a config. By default, every prompt is sparse and none is offloaded."""
    sizes = {"init_tokens": BLOCK, "local_tokens": 40, "dense_boundary": 0, "offload_boundary": 10_000}
    return RetrievalConfig(BLOCK, **{**sizes, **changes})


OFFLOADED = {"offload_boundary": 0}


def ask(
    folder: Path, retrieval: RetrievalConfig | None, prompts: Sequence[list[int]], **engine: Any
) -> list[SubmittedRequest]:
    """Submit all prompts together; return when all have ended."""
    with Engine(folder, num_blocks=100, retrieval=retrieval, **engine) as running:
        answers = [running.begin(prompt, MAX_TOKENS, logprobs=0) for prompt in prompts]
        for submitted in answers:
            submitted.wait()
        running.wait_until_idle()
    return answers


def tokens_of(answers: Sequence[SubmittedRequest]) -> list[list[int]]:
    return [submitted.wait() for submitted in answers]


@pytest.fixture(scope="module")
def dense(tiny_checkpoint: Path) -> list[list[int]]:
    return tokens_of(ask(tiny_checkpoint, None, PROMPTS))


@pytest.fixture
def code_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the code for GPUs on a CPU."""
    monkeypatch.setattr("engine.model.attention.retrieval.reads_host_memory", lambda device: False)


@pytest.mark.parametrize("stride", [1, 5])
@pytest.mark.parametrize("regime", [{}, OFFLOADED], ids=["sparse", "offloaded"])
def test_sparse_attention_to_every_block_generates_the_dense_tokens(
    tiny_checkpoint: Path, dense: list[list[int]], regime: dict[str, int], stride: int
) -> None:
    answers = ask(tiny_checkpoint, config(topk_percent=1.0, stride=stride, **regime), PROMPTS)
    assert all(submitted.sequence.blocks_read > 0 for submitted in answers), "no block was searched"
    assert tokens_of(answers) == dense


def test_dense_layers_read_every_block(tiny_checkpoint: Path, dense: list[list[int]]) -> None:
    answers = ask(tiny_checkpoint, config(topk_percent=0.1, dense_layers=LAYERS, **OFFLOADED), PROMPTS)
    assert tokens_of(answers) == dense


def test_prompts_below_the_dense_boundary_are_dense(tiny_checkpoint: Path, dense: list[list[int]]) -> None:
    answers = ask(tiny_checkpoint, config(topk_percent=0.1, dense_boundary=301), PROMPTS)
    assert tokens_of(answers) == dense
    assert [submitted.sequence.blocks_passed for submitted in answers] == [0] * len(PROMPTS)


def test_the_length_of_a_prompt_selects_its_regime(tiny_checkpoint: Path, dense: list[list[int]]) -> None:
    answers = ask(tiny_checkpoint, config(topk_percent=0.1, dense_boundary=128, offload_boundary=200), PROMPTS)
    regimes = [submitted.sequence.regime for submitted in answers]
    assert regimes == [Regime.SPARSE, Regime.DENSE, Regime.OFFLOADED, Regime.SPARSE]
    assert tokens_of(answers)[1] == dense[1]


def test_a_resumed_response_has_the_regime_of_its_prompt(tiny_checkpoint: Path, dense: list[list[int]]) -> None:
    prompt, earlier, rest = PROMPTS[0], dense[0][:10], dense[0][10:]
    request = Request("r", (*prompt, *earlier), SamplingParams(len(rest), temperature=0.0), num_begun=len(earlier))
    retrieval = config(topk_percent=0.1, dense_boundary=len(prompt) + 1)
    with Engine(tiny_checkpoint, num_blocks=100, retrieval=retrieval) as running:
        submitted = SubmittedRequest(EngineSequence(request, BLOCK))
        running.core.submit(submitted.sequence, submitted.listener)
        assert submitted.wait() == rest


@pytest.mark.parametrize("regime", [{}, OFFLOADED], ids=["sparse", "offloaded"])
def test_other_sequences_of_the_batch_do_not_change_a_sparse_response(
    tiny_checkpoint: Path, regime: dict[str, int]
) -> None:
    settings = config(topk_percent=0.3, **regime)
    together = tokens_of(ask(tiny_checkpoint, settings, PROMPTS))
    alone = [tokens_of(ask(tiny_checkpoint, settings, [prompt]))[0] for prompt in PROMPTS]
    assert together == alone


def test_offloading_does_not_change_a_sparse_response(tiny_checkpoint: Path) -> None:
    here, offloaded = (ask(tiny_checkpoint, config(topk_percent=0.3, **regime), PROMPTS) for regime in ({}, OFFLOADED))
    assert tokens_of(here) == tokens_of(offloaded)


@pytest.mark.usefixtures("code_for_gpus")
def test_the_code_for_gpus_with_every_block_generates_the_dense_tokens(
    tiny_checkpoint: Path, dense: list[list[int]]
) -> None:
    """One step contains offloaded sequences and others."""
    answers = ask(tiny_checkpoint, config(topk_percent=1.0, offload_boundary=150), PROMPTS)
    assert {submitted.sequence.regime for submitted in answers} == {Regime.SPARSE, Regime.OFFLOADED}
    assert tokens_of(answers) == dense


@pytest.mark.parametrize("stride", [1, 5])
def test_the_code_for_gpus_reads_the_same_blocks(
    tiny_checkpoint: Path, request: pytest.FixtureRequest, stride: int
) -> None:
    settings = config(topk_percent=0.3, offload_boundary=150, stride=stride, dense_layers=1)
    here = ask(tiny_checkpoint, settings, PROMPTS)
    request.getfixturevalue("code_for_gpus")
    there = ask(tiny_checkpoint, settings, PROMPTS)
    assert tokens_of(there) == tokens_of(here)


def test_offloading_prompts_in_pieces_does_not_change_a_sparse_response(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(topk_percent=0.3, **OFFLOADED)
    whole = tokens_of(ask(tiny_checkpoint, settings, PROMPTS))
    monkeypatch.setattr("engine.model.attention.retrieval.MAX_MOVED_BYTES", 1)
    assert tokens_of(ask(tiny_checkpoint, settings, PROMPTS)) == whole


@pytest.mark.parametrize("is_as_on_gpu", [False, True], ids=["code of the device", "code for GPUs"])
def test_every_step_and_layer_reads_exactly_its_budget(
    tiny_checkpoint: Path,
    dense: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    is_as_on_gpu: bool,
) -> None:
    if is_as_on_gpu:
        request.getfixturevalue("code_for_gpus")
    read: list[int] = []
    attend_in_pieces, attend_at_once = PageReader.attend_in_pieces, PageReader.attend_at_once

    # Count the arguments of attention, and do not rely on the engine's own counts.
    def count_in_pieces(self: PageReader, queries: torch.Tensor, memory: torch.Tensor, *rest: Any) -> torch.Tensor:
        read.append(rest[0].shape[1] + 1)  # these blocks and the newest one
        return attend_in_pieces(self, queries, memory, *rest)

    def count_at_once(self: PageReader, queries: torch.Tensor, memory: torch.Tensor, *rest: Any) -> torch.Tensor:
        [tokens] = rest[2].flatten(1).sum(1).tolist()  # of the mask
        read.append(-(-tokens // BLOCK))
        return attend_at_once(self, queries, memory, *rest)

    monkeypatch.setattr(PageReader, "attend_in_pieces", count_in_pieces)
    monkeypatch.setattr(PageReader, "attend_at_once", count_at_once)
    [submitted] = ask(tiny_checkpoint, config(topk_percent=0.25), PROMPTS[:1])
    expected = []
    for context in range(len(PROMPTS[0]) + 1, len(PROMPTS[0]) + MAX_TOKENS):
        blocks = -(-context // BLOCK)
        outside = (context - 40) // BLOCK - 1
        cut = int((context - 40) % BLOCK > 0)
        expected += [blocks - outside + max(1, (outside + cut) // 4 - cut)] * LAYERS
    assert read == expected
    assert submitted.sequence.blocks_read == sum(expected)
    assert submitted.sequence.blocks_read < 0.7 * submitted.sequence.blocks_passed
    assert tokens_of([submitted]) != dense[:1], "the sparse path was not taken"


def test_other_sequences_can_use_the_blocks_of_an_offloaded_sequence(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, num_blocks=40, retrieval=config(**OFFLOADED)) as engine:
        submitted = engine.begin(PROMPTS[2], 200)
        wait_until(lambda: submitted.sequence.num_output_tokens > 1, "the first tokens")
        assert engine.blocks.num_blocks - engine.blocks.num_available <= 2
        engine.answer(PROMPTS[0], 8)  # it would not fit if the offloaded sequence still had its blocks
        submitted.wait()
        assert submitted.sequence.num_preemptions == 0
        engine.wait_until_idle()


def test_without_host_memory_sequences_are_not_offloaded_and_responses_are_the_same(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(topk_percent=0.3, **OFFLOADED)
    offloaded = tokens_of(ask(tiny_checkpoint, settings, PROMPTS))

    def refuse(*_: object) -> torch.Tensor:  # a test cannot use up the memory of the machine
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("engine.model.attention.retrieval.allocate_host_memory", refuse)
    here = ask(tiny_checkpoint, settings, PROMPTS)
    assert {submitted.sequence.regime for submitted in here} == {Regime.SPARSE}
    assert tokens_of(here) == offloaded


def test_a_preempted_sequence_continues_with_the_same_tokens(tiny_checkpoint: Path, dense: list[list[int]]) -> None:
    with Engine(tiny_checkpoint, num_blocks=22, retrieval=config(topk_percent=1.0)) as engine:
        all_submitted = engine.begin_at_once([PROMPTS[i] for i in (0, 3)], MAX_TOKENS)
        assert [submitted.wait() for submitted in all_submitted] == [dense[0], dense[3]]
        engine.wait_until_idle()
        assert engine.metric("kvstore_preemptions_total") > 0


def test_a_prompt_resumes_on_another_instance_from_the_pool(tiny_checkpoint: Path) -> None:
    store, settings = MemoryStore(64 << 20), config(topk_percent=0.3, **OFFLOADED)
    with (
        Engine(tiny_checkpoint, num_blocks=100, retrieval=settings, store=store, save_outputs=True) as one,
        Engine(tiny_checkpoint, num_blocks=100, retrieval=settings, store=store) as other,
    ):
        first = one.answer(PROMPTS[0], MAX_TOKENS).wait()
        saved = count_keys(store)
        assert saved == len(PROMPTS[0]) // BLOCK, "KV of sparse steps is not exact, and must not be shared"
        again = other.answer(PROMPTS[0], MAX_TOKENS)
        assert again.wait() == first
        assert again.sequence.pool_cached_tokens == saved * BLOCK
        assert count_keys(store) == saved


def read_pool(store: MemoryStore, engine: Engine, sequence: EngineSequence) -> dict[int, torch.Tensor]:
    """Return the blocks of ``sequence`` in the pool, by their numbers."""
    hashes, shape = sequence.hashes(), engine.runner.kv.shape[1:]
    blocks = torch.zeros(len(hashes), *shape)
    nbytes = engine.runner.shape.nbytes
    targets = [(Span(blocks[i].data_ptr(), nbytes),) for i in range(len(hashes))]
    statuses = BlockPool(store, engine.runner.namespace).get_blocks(hashes, targets)
    return {i: block for i, (block, status) in enumerate(zip(blocks, statuses, strict=True)) if status is Status.OK}


def read_exact(folder: Path, sequence: EngineSequence) -> dict[int, torch.Tensor]:
    """Return the KV of all full blocks of the sequence, computed by an engine without sparse attention."""
    store = MemoryStore(64 << 20)
    with Engine(folder, num_blocks=100, store=store) as engine:
        return read_pool(store, engine, engine.answer(sequence.token_ids, 1).sequence)


def check_that_all_is_exact(folder: Path, blocks: dict[int, torch.Tensor], sequence: EngineSequence) -> None:
    exact = read_exact(folder, sequence)
    for number, block in blocks.items():
        torch.testing.assert_close(block, exact[number], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("offload_boundary", "num_blocks", "prompts"),
    [(10_000, 100, PROMPTS), (100, 100, PROMPTS), (10_000, 22, [PROMPTS[0], PROMPTS[3]])],
    ids=["sparse", "offloaded", "preempted"],
)
def test_only_exact_kv_is_in_the_pool_with_output_caching(
    tiny_checkpoint: Path,
    offload_boundary: int,
    num_blocks: int,
    prompts: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "engine.pool.pool_connector")
    store = MemoryStore(64 << 20)
    settings = config(topk_percent=0.1, dense_boundary=100, offload_boundary=offload_boundary)
    options: Any = {"retrieval": settings, "store": store, "save_outputs": True, "max_model_len": 360}
    with Engine(tiny_checkpoint, num_blocks=num_blocks, **options) as engine:
        all_submitted = engine.begin_at_once(prompts, MAX_TOKENS)
        for submitted in all_submitted:
            submitted.wait()
            assert submitted.saved.wait(60)
        assert (engine.metric("kvstore_preemptions_total") > 0) == (num_blocks == 22)
        for submitted in all_submitted:
            sequence, blocks = submitted.sequence, read_pool(store, engine, submitted.sequence)
            is_dense = sequence.regime is Regime.DENSE
            exact_tokens = sequence.num_computed if is_dense else sequence.num_prompt_tokens
            assert blocks.keys() <= set(range(exact_tokens // BLOCK))
            check_that_all_is_exact(tiny_checkpoint, blocks, sequence)
    messages = [message for message in caplog.messages if "generated tokens are not saved to the pool" in message]
    sparse = [submitted for submitted in all_submitted if submitted.sequence.regime is not Regime.DENSE]
    assert len(messages) == len(sparse), "once for each sequence with sparse decode steps"


def test_a_sparse_response_is_saved_when_a_later_prompt_contains_it(tiny_checkpoint: Path) -> None:
    store, settings = MemoryStore(64 << 20), config(topk_percent=0.1)
    with Engine(tiny_checkpoint, num_blocks=100, retrieval=settings, store=store, save_outputs=True) as engine:
        first = engine.answer(PROMPTS[0], MAX_TOKENS).sequence
        assert len(read_pool(store, engine, first)) == len(PROMPTS[0]) // BLOCK
        following = engine.answer([*first.token_ids, 7, 8, 9], 2).sequence
        blocks = read_pool(store, engine, following)
        assert len(blocks) == following.num_prompt_tokens // BLOCK > len(PROMPTS[0]) // BLOCK
        check_that_all_is_exact(tiny_checkpoint, blocks, following)


def test_a_decode_instance_generates_the_same_tokens_as_a_mixed_one(tiny_checkpoint: Path) -> None:
    """It builds the index from the KV of prefill."""
    settings, prompt = config(topk_percent=0.3, **OFFLOADED), PROMPTS[0]
    [whole] = tokens_of(ask(tiny_checkpoint, settings, [prompt]))
    with (
        Engine(tiny_checkpoint, retrieval=settings) as prefill,
        Engine(tiny_checkpoint, retrieval=settings) as decode,
    ):
        computed: dict[int, torch.Tensor] = {}

        def on_computed(first: int, blocks: Sequence[int]) -> None:
            computed.update(zip(range(first, first + len(blocks)), prefill.runner.kv[list(blocks)], strict=True))
            prefill.blocks.release_blocks(blocks)

        tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        listener = Listener(lambda output: tokens.put(output.token_id), on_computed=on_computed)
        request = Request("prefill", tuple(prompt), SamplingParams(1, temperature=0.0))
        prefill.core.submit(EngineSequence(request, BLOCK), listener)
        token = tokens.get(timeout=30)
        assert token is not None

        reservations: queue.SimpleQueue[Reservation | None] = queue.SimpleQueue()
        decode.core.reserve_blocks([], len(prompt), reservations.put)
        reservation = reservations.get(timeout=30)
        assert reservation is not None
        decode.runner.kv[reservation.blocks] = torch.stack([computed[i] for i in range(len(computed))])
        decode_request = Request("decode", tuple(prompt), SamplingParams(MAX_TOKENS, temperature=0.0))
        submitted = SubmittedRequest(EngineSequence(decode_request, BLOCK))
        decode.core.submit(submitted.sequence, submitted.listener, Prefilled(reservation, token, None))
        assert submitted.wait() == whole
        assert 0 < submitted.sequence.blocks_read < submitted.sequence.blocks_passed
        decode.wait_until_idle()


@given(init=st.integers(0, 50), local=st.integers(17, 90), percent=st.floats(0.01, 1), context=st.integers(1, 600))
def test_the_window_has_at_least_the_given_size_and_every_block_is_in_one_part(
    init: int, local: int, percent: float, context: int
) -> None:
    partition = RetrievalConfig(BLOCK, init, local, percent, 0, 0).partition_blocks(context, 0)
    assert 0 <= partition.num_initial <= partition.window_start < partition.num_blocks == -(-context // BLOCK)
    assert context - partition.window_start * BLOCK >= min(local, context - partition.num_initial * BLOCK)
    assert partition.num_recalled <= max(1, percent * partition.num_outside)
    assert partition.num_read <= partition.num_blocks


@given(init=st.integers(0, 50), local=st.integers(17, 90), percent=st.floats(0.01, 1), context=st.integers(1, 600))
def test_working_sets_have_space_for_the_blocks_of_any_step(
    init: int, local: int, percent: float, context: int
) -> None:
    tested = RetrievalConfig(BLOCK, init, local, percent, 0, 0)
    read = [tested.partition_blocks(length, 0).num_read for length in range(1, context + 1)]
    assert max(read) <= tested.max_blocks_read(context, 0)


def test_the_defaults_keep_at_most_a_quarter_of_the_kv_of_128k_tokens() -> None:
    """The allocated memory is counted. It is enough for every step up to this length."""
    method, tokens = RetrievalConfig(128), 128 << 10
    kv = torch.empty(tokens // 128, 1, 2, 1, 128, 2)
    sequence = EngineSequence(Request("", (1,) * (tokens - 200), SamplingParams(200)), 128)
    sequence.regime = method.choose_regime(sequence.num_prompt_tokens)
    assert sequence.regime is Regime.OFFLOADED
    resident = Retrieval(method, kv, 1, tokens).state_of(sequence).working_set(0).kv
    assert resident.nbytes <= 0.25 * kv.nbytes
    for context in range(tokens - 200, tokens + 1):
        partition = method.partition_blocks(context, 0)
        assert context - partition.window_start * 128 >= 7192
        assert partition.num_recalled >= int(0.2 * partition.num_outside) - 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"local_tokens": BLOCK}, "--retrieval-local-tokens 16 is not more than one block; give more than 16"),
        ({"dense_boundary": 9, "offload_boundary": 8}, "--retrieval-dense-boundary 9 is above"),
        ({"representative": "median"}, "--retrieval-representative 'median' is not one of min_max, mean_std"),
        ({"dense_layers": -1}, "--retrieval-dense-layers -1 is negative"),
    ],
)
def test_impossible_values_are_refused_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("block_size", "reason"), [(64, "larger index and a longer search"), (256, "is less precise"), (128, "")]
)
def test_block_sizes_are_explained(block_size: int, reason: str) -> None:
    messages = RetrievalConfig(block_size).explain_block_size()
    assert reason in messages
    assert bool(messages) == bool(reason)
