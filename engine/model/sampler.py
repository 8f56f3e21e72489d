"""Samples the next token of each sequence from its logits.

All sequences of a step are sampled together on the device of the logits. One copy brings the results to the host.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from engine.model.device_copies import fetch_numbers, send_numbers
from engine.scheduling.request import Sequence, TokenLogprobs

__all__ = ["CANDIDATES", "Choice", "SeenTokens", "sample"]

log = logging.getLogger(__name__)

Choice: TypeAlias = tuple[int, TokenLogprobs | None] | None
"""The sampled token, with its log probabilities if they were requested. None: no token could be sampled."""

CANDIDATES = 1024
"""Number of most likely tokens from which the first try draws a token; the second try uses the whole vocabulary."""


def sample(
    logits: torch.Tensor,
    sequences: SequenceOf[Sequence],
    eos_token_ids: frozenset[int],
    seen_tokens: SeenTokens,
) -> list[Choice]:
    """Sample one token for each sequence.

    The random number depends only on the seed and the position. So a request gets the same tokens after a preemption,
    on another instance, and in another batch.

    Args:
        logits: ``[sequences, vocabulary]``; they are changed in place.
        sequences: the sequence of each row.
        eos_token_ids: tokens that end a text; they are not sampled before ``min_tokens``.
        seen_tokens: the earlier tokens of the sequences, for ``repetition_penalty``.

    Returns:
        The choice for each sequence. It is None if a logit is NaN, or if all tokens are excluded by ``min_tokens``.
    """
    logits = logits.float()
    asked = [row for row, sequence in enumerate(sequences) if sequence.request.params.logprobs is not None]
    log_probabilities = _find_log_probabilities(logits, asked) if asked else logits
    _penalize_repetition(logits, sequences, seen_tokens)
    _exclude_ends(logits, sequences, eos_token_ids)
    best, likeliest = logits.max(dim=-1)  # the maximum is NaN if a logit is NaN
    for num_candidates in _list_candidates(sequences, logits.shape[1]):
        tokens, is_certain = _draw_tokens(logits, sequences, likeliest, num_candidates)
        reported = _find_logprobs(log_probabilities, sequences, tokens, asked) if asked else []
        results = torch.cat([tokens.double(), best.isfinite().double(), is_certain.double(), *reported])
        numbers = iter(fetch_numbers(results))
        chosen, are_numbers, are_certain = ([int(next(numbers)) for _ in sequences] for _ in range(3))
        if all(are_certain):
            break
    logprobs = dict(
        zip(asked, _read_logprobs(numbers, [sequences[row] for row in asked], logits.shape[1]), strict=True)
    )
    return [
        (chosen[row], logprobs.get(row)) if are_numbers[row] else _log_failure(sequence)
        for row, sequence in enumerate(sequences)
    ]


class SeenTokens:
    """A table on the device that marks the tokens of sequences with a repetition penalty, one row for each sequence.

    When a sequence gets a row, all of its tokens are marked. Later calls mark only its new tokens.
    """

    def __init__(self) -> None:
        self._table = torch.empty(0, 0, dtype=torch.bool)
        self._listed: WeakKeyDictionary[Sequence, tuple[int, int]] = WeakKeyDictionary()
        """For each sequence its row, and the number of its tokens that are marked."""

    def find(self, sequences: SequenceOf[Sequence], logits: torch.Tensor) -> torch.Tensor:
        """Return a mask of the tokens that each sequence has: bool, ``[sequences, vocabulary]``.

        Args:
            sequences: the sequences of the step. The rows of sequences without the penalty are undefined.
            logits: the logits of the step; only their width and device are used.
        """
        width = logits.shape[1]
        penalizing = [sequence for sequence in sequences if sequence.request.params.repetition_penalty != 1]
        if len(self._table) < len(penalizing):
            num_rows = max(len(penalizing), 2 * len(self._table))
            self._table = torch.zeros(num_rows, width, dtype=torch.bool, device=logits.device)
            self._listed.clear()
        fresh = self._give_rows(penalizing)
        new: list[int] = []
        for sequence in penalizing:
            row, count = self._listed[sequence]
            new += (row * width + token for token in (sequence.token_ids[count:] if count else set(sequence.token_ids)))
            self._listed[sequence] = row, len(sequence.token_ids)
        every_row = [self._listed.get(sequence, (0, 0))[0] for sequence in sequences]
        rows, cleared, tokens = send_numbers([every_row, fresh, new], logits.device)
        self._table.index_fill_(0, cleared, False)
        self._table.view(-1).index_fill_(0, tokens, True)
        return self._table.index_select(0, rows)

    def _give_rows(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """Assign rows to the sequences that have none, and return these rows.

        If there are not enough free rows, take rows of sequences that are not in ``sequences``.
        """
        coming = [sequence for sequence in sequences if sequence not in self._listed]
        if not coming:
            return []
        free = set(range(len(self._table))) - {row for row, _ in self._listed.values()}
        for other in set(self._listed) - set(sequences) if len(free) < len(coming) else ():
            free.add(self._listed.pop(other)[0])
        rows = sorted(free)[: len(coming)]
        self._listed.update((sequence, (row, 0)) for sequence, row in zip(coming, rows, strict=True))
        return rows


def _penalize_repetition(logits: torch.Tensor, sequences: SequenceOf[Sequence], seen_tokens: SeenTokens) -> None:
    """Apply ``repetition_penalty`` to the logits in place, as transformers' ``RepetitionPenaltyLogitsProcessor`` does.

    The method is from https://arxiv.org/abs/1909.05858.
    """
    penalties = [sequence.request.params.repetition_penalty for sequence in sequences]
    if all(penalty == 1 for penalty in penalties):
        return
    [sent] = send_numbers([penalties], logits.device, torch.float64)
    penalty = sent.to(logits.dtype)[:, None]
    seen = seen_tokens.find(sequences, logits)
    # The factor is 1 for tokens that were not seen. In place, because logits are the largest tensors of a step.
    falls = seen & (logits < 0)
    logits.mul_(torch.where(falls, penalty, 1))
    logits.div_(torch.where(seen ^ falls, penalty, 1))


def _exclude_ends(logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Set the logits of end tokens to minus infinity, for sequences that have not reached ``min_tokens``."""
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


def _list_candidates(sequences: SequenceOf[Sequence], vocab_size: int) -> list[int]:
    """Return from how many of the most likely tokens the first try draws and, if there may be a second try, the second.

    To sort the whole vocabulary takes many times as long as to find its best ``CANDIDATES`` tokens, and almost every
    drawn token is one of these. So only a second try, if it might give another token, uses the whole vocabulary.
    """
    most = max((sequence.request.params.top_k for sequence in sequences if _is_drawn(sequence)), default=0)
    return [vocab_size] if max(most, CANDIDATES) >= vocab_size or most > CANDIDATES else [CANDIDATES, vocab_size]


def _log_failure(sequence: Sequence) -> Choice:
    """Log why no token could be sampled, and return None."""
    log.error(
        "request %s: no token can be sampled: a logit is NaN, or every token would end the text before min_tokens",
        sequence.request.request_id,
    )
    return None


def _draw_tokens(
    logits: torch.Tensor, sequences: SequenceOf[Sequence], likeliest: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next token of each sequence: the most likely one, or a randomly drawn one if the request samples.

    Args:
        logits: ``[sequences, vocabulary]``.
        sequences: the sequence of each row.
        likeliest: the most likely token of each row.
        num_candidates: number of most likely tokens to draw from.

    Returns:
        The tokens, and for each whether it is certain: whether the whole vocabulary would give the same token.
    """
    is_certain = torch.ones_like(likeliest, dtype=torch.bool)
    places = [row for row, sequence in enumerate(sequences) if _is_drawn(sequence)]
    if not places:
        return likeliest, is_certain
    params = [sequences[i].request.params for i in places]
    [rows] = send_numbers([places], logits.device)
    temperature, top_p, top_k, is_open, shares = send_numbers(
        [
            [param.temperature for param in params],
            [param.top_p for param in params],
            # The minimum comes first, because a client may give an integer that does not fit in a float64.
            [min(param.top_k, logits.shape[1]) if param.top_k > 0 else logits.shape[1] for param in params],
            [param.top_k <= 0 and num_candidates < logits.shape[1] for param in params],
            [_draw_share(sequences[i]) for i in places],
        ],
        logits.device,
        torch.float64,
    )
    scores = logits.index_select(0, rows)
    values, tokens = _find_best(scores, num_candidates)
    # Differences from the highest logit, in float64: otherwise a temperature close to 0 would give infinite weights.
    highest, divisor = values[:, :1].double(), temperature[:, None]
    weights = ((values.double() - highest) / divisor).exp_()
    ranks = torch.arange(num_candidates, device=logits.device)
    weights.masked_fill_(ranks >= top_k[:, None], 0)
    sums = weights.sum(-1, keepdim=True)
    if any(param.top_k <= 0 for param in params) and num_candidates < logits.shape[1]:
        every = ((scores.double() - highest) / divisor).exp_().sum(-1, keepdim=True)
        sums = torch.where(is_open[:, None] > 0, every, sums)
    probabilities = weights / sums
    reached = probabilities.cumsum(-1)
    # ``reached - probabilities`` is the sum before a token. It is 0 for the most likely token, which so always stays.
    stays = (reached - probabilities < top_p[:, None]) & (probabilities > 0)
    last = stays.sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    # An open row may draw a token that is not a candidate; such tokens have the rest of the probability.
    goes_on = (is_open > 0) & (top_p >= 1)
    target = torch.where(goes_on[:, None], 1, reached.gather(1, last)) * shares[:, None]
    drawn = torch.searchsorted(reached, target, right=True)
    ends_here = (is_open == 0) | torch.where(goes_on, target[:, 0] < reached[:, -1], top_p <= reached[:, -1])
    chosen = tokens.gather(1, drawn.minimum(last))[:, 0]
    return likeliest.index_copy(0, rows, chosen), is_certain.index_copy(0, rows, ends_here)


def _is_drawn(sequence: Sequence) -> bool:
    params = sequence.request.params
    return params.temperature != 0 and params.top_p != 0


def _find_best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` highest logits of each row and their tokens, both ``[rows, count]``, the highest first.

    Equal logits are ordered by their tokens, the lower token first. ``topk`` does not define the order of equal values.
    So ``topk`` gets integers that are made of a logit and its token, and are never equal.
    """
    width = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32).long()  # -0 becomes 0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).mul_(1 << 32)
    keys += torch.arange(width - 1, -1, -1, device=logits.device)
    keys = torch.topk(keys, count).values if count < width else torch.sort(keys, descending=True).values
    tokens = (width - 1) - (keys & 0xFFFFFFFF)
    return logits.gather(1, tokens), tokens


def _draw_share(sequence: Sequence) -> float:
    """Return the random number in [0, 1) for the next token of a sequence. It is the same for all kinds of devices."""
    return random.Random((sequence.seed * 1_000_003 + len(sequence.token_ids)) % 2**63).random()


def _count_logprobs(sequences: SequenceOf[Sequence], vocab_size: int) -> int:
    """Return the largest number of alternatives that one of the sequences requested."""
    return min(max(sequence.request.params.logprobs or 0 for sequence in sequences), vocab_size)


def _find_log_probabilities(logits: torch.Tensor, asked: list[int]) -> torch.Tensor:
    """Return the log probabilities of all tokens, for the rows in ``asked``: ``[asked, vocabulary]``."""
    [rows] = send_numbers([asked], logits.device)
    return torch.log_softmax(logits[rows], dim=-1)


def _find_logprobs(
    log_probabilities: torch.Tensor, sequences: SequenceOf[Sequence], tokens: torch.Tensor, asked: list[int]
) -> list[torch.Tensor]:
    """Return the log probabilities that clients requested, as three flat tensors of float64.

    For the rows in ``asked``, the tensors have: the log probabilities of the chosen ``tokens``; the ids of the most
    likely tokens; and the log probabilities of the most likely tokens.
    """
    [rows] = send_numbers([asked], tokens.device)
    count = _count_logprobs([sequences[row] for row in asked], log_probabilities.shape[1])
    values, ids = torch.topk(log_probabilities, count)
    chosen = log_probabilities.gather(1, tokens[rows][:, None])
    return [chosen.flatten().double(), ids.flatten().double(), values.flatten().double()]


def _read_logprobs(numbers: Iterator[float], sequences: SequenceOf[Sequence], vocab_size: int) -> list[TokenLogprobs]:
    """Read the numbers of ``_find_logprobs`` on the host, and return the log probabilities of each sequence."""
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
