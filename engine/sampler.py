"""Logits -> the next token of each sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from engine.request import Sequence, TokenLogprobs

__all__ = ["sample"]


def sample(
    logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: frozenset[int]
) -> list[tuple[int, TokenLogprobs | None]]:
    """Choose one token for each sequence.

    The random draw is a function of (seed, position) alone, so a request continues the same way after a
    preemption, on another instance, or beside other requests.

    Args:
        logits: ``[sequences, vocabulary]``, changed in place.
        eos_token_ids: ids that end a text; not chosen before ``min_tokens``.
    """
    logits = logits.float()
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if sequence.num_output_tokens < params.min_tokens:
            logits[row, list(eos_token_ids | params.stop_token_ids)] = -torch.inf
    chosen: list[int] = torch.argmax(logits, dim=-1).tolist()
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if params.temperature > 0 and params.top_p > 0:
            chosen[row] = _draw(logits[row], sequence)
    return [
        (token, _logprobs(logits[row], token, sequences[row].request.params.logprobs))
        for row, token in enumerate(chosen)
    ]


def _draw(logits: torch.Tensor, sequence: Sequence) -> int:
    params = sequence.request.params
    assert params.seed is not None, "the entry point gives every sampled request a seed"
    ordered, tokens = torch.sort(logits / params.temperature, descending=True)
    if params.top_k > 0:
        ordered, tokens = ordered[: params.top_k], tokens[: params.top_k]
    probabilities = torch.softmax(ordered, dim=-1)
    before = torch.cumsum(probabilities, dim=-1) - probabilities
    probabilities[before >= params.top_p] = 0  # the likeliest token has nothing before it: it always stays
    generator = torch.Generator().manual_seed((params.seed * 1_000_003 + len(sequence.token_ids)) % 2**63)
    return int(tokens[torch.multinomial(probabilities.cpu(), 1, generator=generator)])


def _logprobs(logits: torch.Tensor, token: int, count: int | None) -> TokenLogprobs | None:
    if count is None:
        return None
    log_probabilities = torch.log_softmax(logits, dim=-1)
    values, tokens = torch.topk(log_probabilities, min(count, len(log_probabilities)))
    return TokenLogprobs(float(log_probabilities[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
