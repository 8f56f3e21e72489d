"""Sampling: the effect of seeds, temperatures and other parameters on the chosen token."""

from __future__ import annotations

import gc
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model import device_copies, sampler
from engine.model.sampler import Choice, SeenTokens
from engine.scheduling.request import Request, SamplingParams, Sequence, TokenLogprobs

EOS = frozenset({0})
LOGITS = torch.tensor([1.0, 4.0, 3.0, 2.0, 0.0])
PROBABILITIES = torch.softmax(LOGITS, dim=-1).tolist()


def sample(
    logits: torch.Tensor, sequences: list[Sequence], eos: frozenset[int], seen: SeenTokens | None = None
) -> list[Choice]:
    """Sample as in a first step, unless ``seen`` is given."""
    return sampler.sample(logits, sequences, eos, seen or SeenTokens())


def sequence_of(num_output_tokens: int = 0, *, seed: int | None = 0, **params: Any) -> Sequence:
    sequence = Sequence(Request("r", (1, 2, 3), SamplingParams(max_tokens=100, seed=seed, **params)), 16)
    sequence.token_ids += [1] * num_output_tokens
    return sequence


def choose(logits: torch.Tensor, sequence: Sequence, eos: frozenset[int] = EOS) -> int:
    (choice,) = sample(logits[None].clone(), [sequence], eos)
    return token_of(choice)


def token_of(choice: Choice) -> int:
    assert choice is not None
    return choice[0]


def draws(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    return [choose(logits, sequence_of(seed=seed, **params)) for seed in range(count)]


def logprobs_of(sequence: Sequence) -> TokenLogprobs:
    (choice,) = sample(LOGITS[None].clone(), [sequence], EOS)
    assert choice
    assert choice[1]
    return choice[1]


def test_temperature_zero_selects_the_likeliest_token() -> None:
    assert set(draws(20, temperature=0.0)) == {1}


def test_top_p_zero_selects_the_likeliest_token() -> None:
    assert set(draws(20, top_p=0.0)) == {1}


def test_requests_without_a_seed_have_different_seeds() -> None:
    assert len({sequence_of(seed=None).seed for _ in range(20)}) == 20


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30, unique=True),
    seed=st.integers(),
    temperature=st.floats(0.01, 5),
)
@settings(deadline=None)
def test_top_k_of_one_is_greedy_at_any_temperature(logits: list[float], seed: int, temperature: float) -> None:
    greedy = choose(torch.tensor(logits), sequence_of(temperature=0.0))
    assert choose(torch.tensor(logits), sequence_of(seed=seed, temperature=temperature, top_k=1)) == greedy


def test_a_top_k_larger_than_any_float_keeps_all_tokens() -> None:
    assert draws(50, top_k=10**400) == draws(50)


def test_top_k_keeps_the_k_likeliest_tokens() -> None:
    assert set(draws(200, top_k=3, temperature=5.0)) == {1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "candidates"),
    [(0.01, {1}), (PROBABILITIES[1] - 0.01, {1}), (PROBABILITIES[1] + 0.01, {1, 2}), (0.999, {0, 1, 2, 3, 4})],
)
def test_top_p_keeps_the_fewest_tokens_with_probability_p(top_p: float, candidates: set[int]) -> None:
    assert set(draws(600, top_p=top_p)) == candidates


def test_tokens_are_drawn_with_their_probabilities() -> None:
    count = 4000
    drawn = draws(count)
    for token, probability in enumerate(PROBABILITIES):
        deviation = math.sqrt(count * probability * (1 - probability))
        assert abs(drawn.count(token) - count * probability) < 4 * deviation


def test_a_higher_temperature_flattens_the_choice() -> None:
    assert draws(500, temperature=0.3).count(1) > draws(500).count(1) > draws(500, temperature=3.0).count(1)


@given(seed=st.integers(-(2**70), 2**70), position=st.integers(0, 50), others=st.integers(0, 4))
@settings(deadline=None)
def test_the_token_of_a_seed_does_not_depend_on_the_batch(seed: int, position: int, others: int) -> None:
    flat = torch.zeros(50)
    alone = choose(flat, sequence_of(position, seed=seed))
    batch = [sequence_of(i, seed=i, temperature=float(i % 2)) for i in range(others)]
    logits = torch.randn(others + 1, 50, generator=torch.Generator().manual_seed(0))
    logits[-1] = flat
    tokens = sample(logits, [*batch, sequence_of(position, seed=seed)], EOS)
    assert token_of(tokens[-1]) == alone


def test_a_seed_draws_a_new_number_at_each_position() -> None:
    flat = torch.zeros(1000)
    assert len({choose(flat, sequence_of(position, seed=1)) for position in range(50)}) > 40


def test_end_tokens_cannot_be_chosen_before_min_tokens() -> None:
    end_likeliest = torch.tensor([9.0, 1.0, 8.0, 0.0, 0.0])
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": frozenset({2})}
    chosen = [choose(end_likeliest, sequence_of(n, **params)) for n in range(5)]
    assert chosen == [1, 1, 1, 0, 0]


def test_min_tokens_works_for_a_checkpoint_without_an_end_token() -> None:
    assert choose(LOGITS, sequence_of(temperature=0.0, min_tokens=1), frozenset()) == 1


@pytest.mark.parametrize(
    "params", [{"temperature": 1e-38}, {"temperature": 5e-324}, {"top_p": 1e-46}, {"top_p": 5e-324}], ids=str
)
def test_a_tiny_temperature_or_top_p_is_greedy(params: dict[str, Any]) -> None:
    assert set(draws(20, 100 * LOGITS, **params)) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("reason", ["a logit is NaN", "every token ends the text"])
def test_only_a_sequence_without_a_possible_token_gets_none(reason: str, temperature: float) -> None:
    logits, ends = torch.stack([LOGITS, LOGITS]), frozenset[int]()
    if reason == "a logit is NaN":
        logits[0, 3] = torch.nan
    else:
        ends = frozenset(range(len(LOGITS)))
    impossible = sequence_of(temperature=temperature, min_tokens=1, stop_token_ids=ends)
    choices = sample(logits, [impossible, sequence_of(temperature=0.0)], EOS)
    assert [choice and choice[0] for choice in choices] == [None, 1]


def test_there_are_no_logprobs_unless_requested() -> None:
    (choice,) = sample(LOGITS[None].clone(), [sequence_of()], EOS)
    assert choice
    assert choice[1] is None


def test_logprobs_are_sorted_and_of_the_whole_distribution() -> None:
    logprobs = logprobs_of(sequence_of(temperature=0.0, logprobs=5))
    tokens, values = zip(*logprobs.top, strict=True)
    assert tokens == (1, 2, 3, 0, 4)
    assert sum(map(math.exp, values)) == pytest.approx(1)
    assert logprobs.chosen == pytest.approx(math.log(PROBABILITIES[1]), abs=1e-6)


def test_the_chosen_token_has_a_logprob_even_if_it_is_not_among_the_likeliest() -> None:
    seed = next(seed for seed, token in enumerate(draws(500)) if token == 4)
    logprobs = logprobs_of(sequence_of(seed=seed, logprobs=1))
    assert [token for token, _ in logprobs.top] == [1]
    assert logprobs.chosen == pytest.approx(math.log(PROBABILITIES[4]), abs=1e-5)


def test_logprobs_are_those_of_the_model_before_penalties_and_min_tokens() -> None:
    logprobs = logprobs_of(sequence_of(temperature=0.0, logprobs=5, repetition_penalty=2.0, min_tokens=3))
    expected = {token: math.log(probability) for token, probability in enumerate(PROBABILITIES)}
    assert dict(logprobs.top) == pytest.approx(expected, abs=1e-6)


def test_there_are_at_most_as_many_logprobs_as_tokens() -> None:
    assert len(logprobs_of(sequence_of(logprobs=20)).top) == len(LOGITS)


def test_each_sequence_has_its_own_penalty_for_its_own_tokens() -> None:
    """A positive score is divided by the penalty, and a negative one is multiplied, as in transformers."""
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.tensor([[2.0, 2.4, 1.7, 1.0, 0.0], [3.0, 3.2, 4.0, 4.4, 1.0]]).repeat_interleave(3, 0)
    sequences, expected = [], []
    for row, (tokens, penalty) in enumerate((tokens, each) for tokens in ([0, 1], [2, 3]) for each in (1.0, 1.5, 0.5)):
        params = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=penalty)
        sequences.append(Sequence(Request("r", tuple(tokens), params), 16))
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        expected.append(int(processor(torch.tensor([tokens]), logits[row : row + 1].clone()).argmax(-1)))
    chosen = sample(logits.clone(), sequences, EOS)
    assert [token_of(choice) for choice in chosen] == expected == [1, 2, 1, 3, 1, 3]


def test_a_penalty_multiplies_negative_scores() -> None:
    logits = torch.tensor([[-2.0, -2.5, -9.0]])
    sequence = Sequence(Request("r", (0,), SamplingParams(9, temperature=0.0, repetition_penalty=1.5)), 16)
    assert token_of(sample(logits, [sequence], EOS)[0]) == 1


def test_end_tokens_are_suppressed_only_for_sequences_with_fewer_than_min_tokens() -> None:
    end_likeliest = torch.tensor([9.0, 1.0, 8.0, 0.0, 0.0]).repeat(3, 1)
    sequences = [sequence_of(temperature=0.0, min_tokens=min_tokens) for min_tokens in (0, 1, 0)]
    assert [token_of(choice) for choice in sample(end_likeliest, sequences, EOS)] == [0, 2, 0]


@pytest.mark.parametrize(("share", "token"), [(0.0, 0), (0.49, 0), (0.5, 1), (0.99, 1)])
def test_a_random_number_selects_the_token_of_its_interval(
    share: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intervals contain their lower bound."""
    monkeypatch.setattr("engine.model.sampler._draw_share", lambda _: share)
    assert choose(torch.zeros(2), sequence_of()) == token


def test_equal_logits_are_ordered_by_token() -> None:
    assert {choose(torch.zeros(50_000), sequence_of(seed=seed, top_k=1)) for seed in range(3)} == {0}


def draw_by_sorting(logits: torch.Tensor, sequence: Sequence) -> int:
    """Return the token that ``sample`` must draw, by sorting the whole vocabulary."""
    params = sequence.request.params
    scores = (logits.double() - logits.double().max()) / params.temperature
    ordered, tokens = torch.sort(scores, descending=True, stable=True)
    if params.top_k > 0:
        ordered[params.top_k :] = -torch.inf
    probabilities = torch.softmax(ordered, -1)
    reached = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= params.top_p, 0).cumsum(-1)
    drawn = int(torch.searchsorted(reached, reached[-1:] * sampler._draw_share(sequence), right=True))
    return int(tokens[min(drawn, int((probabilities > 0).sum()) - 1)])


DRAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"top_k": 1},
    {"top_k": 1500},
    {"temperature": 3.0, "top_p": 0.99},
    {"temperature": 1e-3, "top_p": 0.5},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("candidates", [1, 8, 1024, 5000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_draws_from_the_best_candidates_are_equal_to_draws_from_the_sorted_vocabulary(
    monkeypatch: pytest.MonkeyPatch, candidates: int, spread: float
) -> None:
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    generator = torch.Generator().manual_seed(candidates)
    for seed in range(12):
        # Many logits are equal in bfloat16.
        logits = (spread * torch.randn(len(DRAWS), 3000, generator=generator)).bfloat16().float()
        logits[:, 7:9] = -torch.inf
        for some in (DRAWS, DRAWS[2:4]):
            sequences = [sequence_of(seed=seed, **params) for params in some]
            expected = [
                draw_by_sorting(row, sequence) if sequence.request.params.temperature else int(row.argmax())
                for row, sequence in zip(logits, sequences, strict=False)
            ]
            chosen = sample(logits[: len(some)].clone(), sequences, EOS)
            assert [token_of(choice) for choice in chosen] == expected


@pytest.mark.parametrize(("spread", "waits"), [(8.0, 1), (0.0, 2)], ids=["likely", "flat"])
def test_only_a_draw_outside_the_best_candidates_sorts_the_vocabulary_and_waits_again(
    monkeypatch: pytest.MonkeyPatch, spread: float, waits: int
) -> None:
    fetched: list[int] = []
    fetch = device_copies.fetch_numbers

    def count_fetches(numbers: torch.Tensor) -> list[float]:
        fetched.append(len(numbers))
        return fetch(numbers)

    monkeypatch.setattr(sampler, "fetch_numbers", count_fetches)
    logits = spread * torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    sample(logits, [sequence_of(top_p=0.9, logprobs=2)], EOS)
    assert len(fetched) == waits


def test_penalties_apply_to_all_tokens_so_far_while_sequences_begin_and_end() -> None:
    chance, seen, width = random.Random(0), SeenTokens(), 40
    prompts = [tuple(chance.choices(range(width), k=chance.randint(1, 20))) for _ in range(8)]
    sequences = [
        Sequence(
            Request(str(i), prompt, SamplingParams(99, temperature=0.0, repetition_penalty=(1.0, 1.3, 0.7)[i % 3])), 16
        )
        for i, prompt in enumerate(prompts)
    ]
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        if step % 10 == 9:  # one sequence ends, another begins
            sequences.pop(chance.randrange(len(sequences)))
            gc.collect()
            params = SamplingParams(99, temperature=0.0, repetition_penalty=1.5)
            sequences.append(Sequence(Request("new", (step % width,), params), 16))
        batch = chance.sample(sequences, chance.randint(1, len(sequences)))
        logits = torch.randn(len(batch), width, generator=generator)
        expected = logits.clone()
        for row, sequence in enumerate(batch):
            penalty = sequence.request.params.repetition_penalty
            for token in set(sequence.token_ids):
                score = expected[row, token]
                expected[row, token] = score * penalty if score < 0 else score / penalty
        sampler._penalize_repetition(logits, batch, seen)
        assert torch.equal(logits, expected)
        for sequence in batch:
            sequence.token_ids += chance.choices(range(width), k=chance.randint(0, 2))
    assert len(seen._table) <= 8, "more rows than sequences at once"


def test_a_penalty_keeps_no_reference_to_an_ended_sequence() -> None:
    seen, sequence = SeenTokens(), sequence_of(repetition_penalty=1.1)
    sample(LOGITS[None].clone(), [sequence], EOS, seen)
    assert len(seen._listed) == 1
    del sequence
    gc.collect()
    assert not seen._listed
