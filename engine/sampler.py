"""Logits -> the next token of each sequence."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from typing import TypeAlias

import torch

from engine.request import Sequence, TokenLogprobs

__all__ = ["Choice", "sample"]

log = logging.getLogger(__name__)

Choice: TypeAlias = tuple[int, TokenLogprobs | None] | None
"""A token, and its log probabilities if they are wanted; None where there is no token to choose."""


def sample(
    logits: torch.Tensor,
    sequences: SequenceOf[Sequence],
    eos_token_ids: frozenset[int],
    repetition_penalty: float = 1.0,
) -> list[Choice]:
    """Choose one token for each sequence.

    The random draw is a function of (seed, position) alone, so a request continues the same way after a
    preemption, on another instance, or beside other requests.

    Args:
        logits: ``[sequences, vocabulary]``, changed in place.
        eos_token_ids: ids that end a text; not chosen before ``min_tokens``.
        repetition_penalty: above 1 makes tokens of the prompt and the answer less likely to come again.

    Returns:
        For each sequence its choice; None where a logit is no number, or every token would end the text too early.
    """
    logits = logits.float()
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if repetition_penalty != 1:
            _penalize_repetition(logits[row], sequence.token_ids, repetition_penalty)
        if sequence.num_output_tokens < params.min_tokens:
            logits[row, list(eos_token_ids | params.stop_token_ids)] = -torch.inf
    best, likeliest = logits.max(dim=-1)  # where one logit is NaN, that is the best
    return [
        _choose_token(logits[row], sequence, token, is_number)
        for row, (sequence, token, is_number) in enumerate(
            zip(sequences, likeliest.tolist(), best.isfinite().tolist(), strict=True)
        )
    ]


def _penalize_repetition(logits: torch.Tensor, token_ids: SequenceOf[int], penalty: float) -> None:
    """As transformers' ``RepetitionPenaltyLogitsProcessor`` does it, after https://arxiv.org/abs/1909.05858."""
    seen = torch.tensor(token_ids, device=logits.device)
    scores = logits[seen]
    logits[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)


def _choose_token(logits: torch.Tensor, sequence: Sequence, likeliest: int, is_number: bool) -> Choice:
    params = sequence.request.params
    if not is_number:
        log.error(
            "%s: no token can be chosen: a logit is no number, or every token would end the text before min_tokens",
            sequence.request.request_id,
        )
        return None
    is_greedy = params.temperature == 0 or params.top_p == 0
    token = likeliest if is_greedy else _draw_token(logits, sequence)
    return token, _top_logprobs(logits, token, params.logprobs)


def _draw_token(logits: torch.Tensor, sequence: Sequence) -> int:
    params = sequence.request.params
    assert params.seed is not None, "the entry point gives every sampled request a seed"
    # As differences and in float64, so that a temperature close to 0 makes no infinity of the likeliest.
    logits = logits.double()
    ordered, tokens = torch.sort((logits - logits.max()) / params.temperature, descending=True)
    if params.top_k > 0:
        ordered, tokens = ordered[: params.top_k], tokens[: params.top_k]
    probabilities = torch.softmax(ordered, dim=-1)
    before = torch.cumsum(probabilities, dim=-1) - probabilities
    probabilities[before >= params.top_p] = 0  # the likeliest token has nothing before it: it always stays
    probabilities = probabilities.float()
    generator = torch.Generator().manual_seed((params.seed * 1_000_003 + len(sequence.token_ids)) % 2**63)
    return int(tokens[torch.multinomial(probabilities.cpu(), 1, generator=generator)])


def _top_logprobs(logits: torch.Tensor, token: int, count: int | None) -> TokenLogprobs | None:
    if count is None:
        return None
    log_probabilities = torch.log_softmax(logits, dim=-1)
    values, tokens = torch.topk(log_probabilities, min(count, len(log_probabilities)))
    return TokenLogprobs(float(log_probabilities[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
