"""A request's way in the log, for a person debugging; nothing is worked out where the level is higher than debug."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from engine.request import Sequence

__all__ = ["log_prompt_sources"]

log = logging.getLogger(__name__)


def log_prompt_sources(sequence: Sequence, handover: str) -> None:
    """Say where each token of the prompt came from, and why; ``handover`` tells how it was handed over, if it was."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    reasons = [part for part in (f"pool: {sequence.pool_use.text}", handover, _explain_rest(sequence)) if part]
    if sequence.num_preemptions:
        reasons.append(f"it gave its blocks back {sequence.num_preemptions} times, and began anew")
    log.debug(
        "request %s: prompt of %d tokens: %s; because %s",
        *(sequence.request.request_id, sequence.num_prompt_tokens),
        *(", ".join(_describe_ranges(sequence)), "; ".join(reasons)),
    )


def _describe_ranges(sequence: Sequence) -> Iterator[str]:
    end = 0
    for source, count in sequence.prompt_sources:
        if count:
            yield f"{count} from {source} ({end} to {end + count - 1})"
            end += count
    if rest := sequence.num_prompt_tokens - end:
        is_computed = sequence.first_token_at is not None
        how = "computed here" if is_computed else "not all computed, as it ended before its first token"
        yield f"{rest} {how} ({end} to {end + rest - 1})"


def _explain_rest(sequence: Sequence) -> str:
    """Why tokens were computed that the pool could not have, nor any cache."""
    tail = (sequence.num_prompt_tokens - 1) % sequence.block_size + 1
    rest = sequence.num_prompt_tokens - sum(count for _, count in sequence.prompt_sources)
    return f"the last {tail} fill no block before the last token, which is always computed" if rest == tail else ""
