"""Logs at the level debug which blocks of a request the pool has, and where the KV of its prompt came from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from engine.scheduling.request import Sequence
from kvstore_backend import Status

__all__ = ["log_look_up", "log_prompt_sources"]

log = logging.getLogger(__name__)


def log_look_up(
    request_id: str, first: int, hashes: SequenceOf[bytes], statuses: SequenceOf[Status], present: int, seconds: float
) -> None:
    """Log a look-up of the blocks ``hashes`` in the pool, and the pool's answers ``statuses``.

    ``first`` is the index of the first of these blocks in the prompt. The pool has the first ``present`` of them. The
    look-up took ``seconds``.
    """
    if not log.isEnabledFor(logging.DEBUG):
        return
    log.debug(
        "request %s: look-up of blocks %d to %d of the prompt (first hash: %s): the pool has %d leading blocks "
        "and %d of the other blocks; %.1f ms",
        *(request_id, first, first + len(hashes) - 1, hashes[0].hex()[:12]),
        *(present, statuses.count(Status.OK) - present, 1e3 * seconds),
    )


def log_prompt_sources(sequence: Sequence, handover: str) -> None:
    """Log where the KV of each part of the prompt came from, and why.

    ``handover`` explains the hand-over of the prompt from a prefill instance; "" if there was none.
    """
    if not log.isEnabledFor(logging.DEBUG):
        return
    reasons = [part for part in (f"pool: {sequence.pool_use.text}", handover, _explain_rest(sequence)) if part]
    if sequence.num_preemptions:
        reasons.append(f"it was preempted {sequence.num_preemptions} times and started again")
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
        how = "computed here" if is_computed else "not computed completely, as the request ended before its first token"
        yield f"{rest} {how} ({end} to {end + rest - 1})"


def _explain_rest(sequence: Sequence) -> str:
    """Explain why the prompt's last tokens were computed, if the reason is that they do not fill a block; else ""."""
    tail = (sequence.num_prompt_tokens - 1) % sequence.block_size + 1
    rest = sequence.num_prompt_tokens - sum(count for _, count in sequence.prompt_sources)
    if rest != tail:
        return ""
    return f"the last {tail} do not fill a block before the last token, which is always computed"
