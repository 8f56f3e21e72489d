"""Logits -> the next token of each sequence.

All sequences of a step are sampled together, on the device that has the logits; the result comes in one copy.
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
"""A token, and its log probabilities if requested; None if there is no token to choose."""

CANDIDATES = 1024
"""Number of tokens of each sequence that a draw first considers."""


def sample(
    logits: torch.Tensor,
    sequences: SequenceOf[Sequence],
    eos_token_ids: frozenset[int],
    seen_tokens: SeenTokens,
) -> list[Choice]:
    """Choose one token for each sequence.

    The random draw is a function of (seed, position) alone, so a request continues the same way after a preemption, on
    another instance, or together with other requests.

    Args:
        logits: ``[sequences, vocabulary]``, changed in place.
        eos_token_ids: ids that end a text; never chosen before ``min_tokens``.
        seen_tokens: the tokens of the same sequences in the steps before, for ``repetition_penalty``.

    Returns:
        For each sequence its choice; None if a logit is not a number, or every token would end the text too early.
    """
    logits = logits.float()
    asked = [row for row, sequence in enumerate(sequences) if sequence.request.params.logprobs is not None]
    log_probabilities = _find_log_probabilities(logits, asked) if asked else logits
    _penalize_repetition(logits, sequences, seen_tokens)
    _hold_ends_back(logits, sequences, eos_token_ids)
    best, likeliest = logits.max(dim=-1)  # if one logit is NaN, that is the maximum
    for num_candidates in _list_candidates(sequences, logits.shape[1]):
        tokens, is_certain = _draw_tokens(logits, sequences, likeliest, num_candidates)
        told = _find_logprobs(log_probabilities, sequences, tokens, asked) if asked else []
        ready = torch.cat([tokens.double(), best.isfinite().double(), is_certain.double(), *told])
        numbers = iter(fetch_numbers(ready))
        chosen, are_numbers, are_certain = ([int(next(numbers)) for _ in sequences] for _ in range(3))
        if all(are_certain):
            break
    logprobs = dict(
        zip(asked, _read_logprobs(numbers, [sequences[row] for row in asked], logits.shape[1]), strict=True)
    )
    return [
        (chosen[row], logprobs.get(row)) if are_numbers[row] else _tell_hopeless(sequence)
        for row, sequence in enumerate(sequences)
    ]


class SeenTokens:
    """The tokens that sequences with a repetition penalty have had: a row for each, on the logits' device.

    A new sequence's row first gets all of its tokens, and later each new one.
    """

    def __init__(self) -> None:
        self._table = torch.empty(0, 0, dtype=torch.bool)
        self._listed: WeakKeyDictionary[Sequence, tuple[int, int]] = WeakKeyDictionary()
        """The row of a sequence, and how many tokens are marked there."""

    def find(self, sequences: SequenceOf[Sequence], logits: torch.Tensor) -> torch.Tensor:
        """Return a bool mask ``[sequences, vocabulary]``, undefined for sequences without the penalty.

        ``logits`` give the width and the device.
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
        """Assign rows to sequences that have none; if necessary, reuse rows of sequences that are not among these."""
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
    """Apply the penalty as transformers' ``RepetitionPenaltyLogitsProcessor``, after https://arxiv.org/abs/1909.05858."""
    penalties = [sequence.request.params.repetition_penalty for sequence in sequences]
    if all(penalty == 1 for penalty in penalties):
        return
    [sent] = send_numbers([penalties], logits.device, torch.float64)
    penalty = sent.to(logits.dtype)[:, None]
    seen = seen_tokens.find(sequences, logits)
    # The factor is 1 where nothing changes. It is applied in place: logits are the largest tensors of a step.
    falls = seen & (logits < 0)
    logits.mul_(torch.where(falls, penalty, 1))
    logits.div_(torch.where(seen ^ falls, penalty, 1))


def _hold_ends_back(logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Exclude tokens that end a text for sequences that have not reached ``min_tokens``."""
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
    """Return increasing numbers of candidates to draw from; each next one is used until each token is certain.

    Sorting the whole vocabulary takes many times as long as finding its best thousand tokens, and nearly every draw is
    one of these: a second try is rare, and costs a second wait for the device.
    """
    most = max((sequence.request.params.top_k for sequence in sequences if _is_drawn(sequence)), default=0)
    return [vocab_size] if max(most, CANDIDATES) >= vocab_size or most > CANDIDATES else [CANDIDATES, vocab_size]


def _tell_hopeless(sequence: Sequence) -> Choice:
    """Log why there is no token to choose, and return None."""
    log.error(
        "%s: no token can be chosen: a logit is no number, or every token would end the text before min_tokens",
        sequence.request.request_id,
    )
    return None


def _draw_tokens(
    logits: torch.Tensor, sequences: SequenceOf[Sequence], likeliest: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of all sequences: the likeliest, or a drawn one if the request samples.

    Args:
        logits: ``[sequences, vocabulary]``.
        sequences: the sequences of the rows.
        likeliest: the likeliest token of each row.
        num_candidates: draw from at most this many tokens, the likeliest ones.

    Returns:
        The tokens, and whether each is certain: it is uncertain if the right token may not be a candidate.
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
            # Clients may give integers that no float64 holds.
            [min(param.top_k, logits.shape[1]) if param.top_k > 0 else logits.shape[1] for param in params],
            [param.top_k <= 0 and num_candidates < logits.shape[1] for param in params],
            [_draw_share(sequences[i]) for i in places],
        ],
        logits.device,
        torch.float64,
    )
    scores = logits.index_select(0, rows)
    values, tokens = _find_best(scores, num_candidates)
    # As differences and in float64, so that a temperature close to 0 does not make the likeliest infinite.
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
    # No probability precedes the likeliest token: it always stays.
    stays = (reached - probabilities < top_p[:, None]) & (probabilities > 0)
    last = stays.sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    # An open row has more tokens than candidates; they share the rest of 1 that the candidates leave.
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
    """Return the greatest logits ``[rows, count]`` in falling order and their tokens; the lower token wins a tie.

    ``topk`` does not define which of equal values it takes. So it gets no equal values: each integer has a logit and
    its token.
    """
    width = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32).long()  # -0 becomes 0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).mul_(1 << 32)
    keys += torch.arange(width - 1, -1, -1, device=logits.device)
    keys = torch.topk(keys, count).values if count < width else torch.sort(keys, descending=True).values
    tokens = (width - 1) - (keys & 0xFFFFFFFF)
    return logits.gather(1, tokens), tokens


def _draw_share(sequence: Sequence) -> float:
    """Return the random number between 0 and 1 that draws the next token; made on the host, so all devices agree."""
    seed = sequence.request.params.seed
    assert seed is not None, "the entry point gives every sampled request a seed"
    return random.Random((seed * 1_000_003 + len(sequence.token_ids)) % 2**63).random()


def _count_logprobs(sequences: SequenceOf[Sequence], vocab_size: int) -> int:
    """Return the largest number of alternatives that any of these sequences requested."""
    return min(max(sequence.request.params.logprobs or 0 for sequence in sequences), vocab_size)


def _find_log_probabilities(logits: torch.Tensor, asked: list[int]) -> torch.Tensor:
    """Compute the model's log probabilities of the rows in ``asked``, before penalties and ``min_tokens``."""
    [rows] = send_numbers([asked], logits.device)
    return torch.log_softmax(logits[rows], dim=-1)


def _find_logprobs(
    log_probabilities: torch.Tensor, sequences: SequenceOf[Sequence], tokens: torch.Tensor, asked: list[int]
) -> list[torch.Tensor]:
    """Return the log probabilities of the chosen tokens and of the likeliest tokens, for the rows in ``asked``."""
    [rows] = send_numbers([asked], tokens.device)
    count = _count_logprobs([sequences[row] for row in asked], log_probabilities.shape[1])
    values, ids = torch.topk(log_probabilities, count)
    chosen = log_probabilities.gather(1, tokens[rows][:, None])
    return [chosen.flatten().double(), ids.flatten().double(), values.flatten().double()]


def _read_logprobs(numbers: Iterator[float], sequences: SequenceOf[Sequence], vocab_size: int) -> list[TokenLogprobs]:
    """Read the log probabilities that ``_find_logprobs`` found, on the host."""
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
