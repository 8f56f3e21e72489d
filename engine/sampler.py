"""Logits -> the next token of each sequence.

All sequences of a step at once, on the device that has the logits; its answer comes in one copy.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import TypeAlias

import torch

from engine.device_copies import fetch_numbers, send_numbers
from engine.request import Sequence, TokenLogprobs

__all__ = ["Choice", "sample"]

log = logging.getLogger(__name__)

Choice: TypeAlias = tuple[int, TokenLogprobs | None] | None
"""A token, and its log probabilities if they are wanted; None where there is no token to choose."""


def sample(
    logits: torch.Tensor,
    sequences: SequenceOf[Sequence],
    eos_token_ids: frozenset[int],
) -> list[Choice]:
    """Choose one token for each sequence.

    The random draw is a function of (seed, position) alone, so a request continues the same way after a
    preemption, on another instance, or beside other requests.

    Args:
        logits: ``[sequences, vocabulary]``, changed in place.
        eos_token_ids: ids that end a text; not chosen before ``min_tokens``.

    Returns:
        For each sequence its choice; None where a logit is no number, or every token would end the text too early.
    """
    logits = logits.float()
    asked = [row for row, sequence in enumerate(sequences) if sequence.request.params.logprobs is not None]
    log_probabilities = _find_log_probabilities(logits, asked) if asked else logits
    _penalize_repetition(logits, sequences)
    _hold_ends_back(logits, sequences, eos_token_ids)
    best, tokens = logits.max(dim=-1)  # where one logit is NaN, that is the best
    tokens = _draw_tokens(logits, sequences, tokens)
    told = _find_logprobs(log_probabilities, sequences, tokens, asked) if asked else []
    numbers = iter(fetch_numbers(torch.cat([tokens.double(), best.isfinite().double(), *told])))
    chosen, are_numbers = ([int(next(numbers)) for _ in sequences] for _ in range(2))
    logprobs = dict(
        zip(asked, _read_logprobs(numbers, [sequences[row] for row in asked], logits.shape[1]), strict=True)
    )
    return [
        (chosen[row], logprobs.get(row)) if are_numbers[row] else _tell_hopeless(sequence)
        for row, sequence in enumerate(sequences)
    ]


def _penalize_repetition(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> None:
    """As transformers' ``RepetitionPenaltyLogitsProcessor`` does it, after https://arxiv.org/abs/1909.05858."""
    penalties = [sequence.request.params.repetition_penalty for sequence in sequences]
    places = [row for row, penalty in enumerate(penalties) if penalty != 1]
    if not places:
        return
    width = logits.shape[1]
    [seen] = send_numbers(
        [[row * width + token for row in places for token in set(sequences[row].token_ids)]], logits.device
    )
    [of_rows] = send_numbers([penalties], logits.device, torch.float64)
    every = logits.view(-1)
    scores, penalty = every[seen], of_rows.to(logits.dtype)[seen // width]
    every[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)


def _hold_ends_back(logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Leave sequences that are short of ``min_tokens`` no token that ends a text."""
    width = logits.shape[1]
    ends = [
        row * width + token
        for row, sequence in enumerate(sequences)
        if sequence.num_output_tokens < sequence.request.params.min_tokens
        for token in eos_token_ids | sequence.request.params.stop_token_ids
    ]
    if ends:
        [places] = send_numbers([ends], logits.device)
        logits.view(-1).index_fill_(0, places, -torch.inf)


def _tell_hopeless(sequence: Sequence) -> Choice:
    """No choice, with its reason in the log."""
    log.error(
        "%s: no token can be chosen: a logit is no number, or every token would end the text before min_tokens",
        sequence.request.request_id,
    )
    return None


def _draw_tokens(logits: torch.Tensor, sequences: SequenceOf[Sequence], likeliest: torch.Tensor) -> torch.Tensor:
    """The tokens of all sequences: the likeliest, or a drawn one where that is asked for."""
    places = [i for i, s in enumerate(sequences) if s.request.params.temperature != 0 and s.request.params.top_p != 0]
    if not places:
        return likeliest
    params = [sequences[i].request.params for i in places]
    [rows] = send_numbers([places], logits.device)
    temperature, top_p, top_k, shares = send_numbers(
        [
            [param.temperature for param in params],
            [param.top_p for param in params],
            [param.top_k if param.top_k > 0 else logits.shape[1] for param in params],
            [_draw_share(sequences[i]) for i in places],
        ],
        logits.device,
        torch.float64,
    )
    # As differences and in float64, so that a temperature close to 0 makes no infinity of the likeliest.
    scores = logits[rows].double()
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]
    ordered, tokens = torch.sort(scores, dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    probabilities = torch.softmax(ordered.masked_fill_(ranks >= top_k[:, None], -torch.inf), dim=-1)
    before = torch.cumsum(probabilities, dim=-1) - probabilities
    # The likeliest token has nothing before it: it always stays.
    reached = probabilities.masked_fill_(before >= top_p[:, None], 0).cumsum(-1)
    drawn = torch.searchsorted(reached, reached[:, -1:] * shares[:, None], right=True)
    last = (probabilities > 0).sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    return likeliest.index_copy(0, rows, tokens.gather(1, drawn.minimum(last))[:, 0])


def _draw_share(sequence: Sequence) -> float:
    """The random number between 0 and 1 that draws the next token; drawn on the host, so that all devices agree."""
    seed = sequence.request.params.seed
    assert seed is not None, "the entry point gives every sampled request a seed"
    return random.Random((seed * 1_000_003 + len(sequence.token_ids)) % 2**63).random()


def _count_logprobs(sequences: SequenceOf[Sequence], vocab_size: int) -> int:
    """As many alternatives as any of these sequences wants."""
    return min(max(sequence.request.params.logprobs or 0 for sequence in sequences), vocab_size)


def _find_log_probabilities(logits: torch.Tensor, asked: list[int]) -> torch.Tensor:
    """The model's own log probabilities of the rows ``asked`` for, as they are before penalties and ``min_tokens``."""
    [rows] = send_numbers([asked], logits.device)
    return torch.log_softmax(logits[rows], dim=-1)


def _find_logprobs(
    log_probabilities: torch.Tensor, sequences: SequenceOf[Sequence], tokens: torch.Tensor, asked: list[int]
) -> list[torch.Tensor]:
    """Of the rows ``asked`` for: log probabilities of the chosen tokens, and the likeliest tokens with theirs."""
    [rows] = send_numbers([asked], tokens.device)
    count = _count_logprobs([sequences[row] for row in asked], log_probabilities.shape[1])
    values, ids = torch.topk(log_probabilities, count)
    chosen = log_probabilities.gather(1, tokens[rows][:, None])
    return [chosen.flatten().double(), ids.flatten().double(), values.flatten().double()]


def _read_logprobs(numbers: Iterator[float], sequences: SequenceOf[Sequence], vocab_size: int) -> list[TokenLogprobs]:
    """The log probabilities that ``_find_logprobs`` found, on the host."""
    if not sequences:
        return []
    count = _count_logprobs(sequences, vocab_size)
    chosen = [next(numbers) for _ in sequences]
    ids, values = ([[next(numbers) for _ in range(count)] for _ in sequences] for _ in range(2))
    return [
        TokenLogprobs(
            chosen[i], tuple(zip(map(int, ids[i]), values[i], strict=True))[: sequence.request.params.logprobs]
        )
        for i, sequence in enumerate(sequences)
    ]
