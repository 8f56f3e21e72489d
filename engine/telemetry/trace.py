"""The steps of a request in the log, for debugging; nothing is computed if the log level is higher than debug.

Each line begins with the request's id, and names blocks by their positions in its prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from engine.scheduling.request import Sequence
from kvstore_backend import Status

__all__ = [
    "log_handover_end",
    "log_handover_write",
    "log_lent_blocks",
    "log_load",
    "log_look_up",
    "log_prompt_sources",
    "log_save",
    "log_verified_blocks",
]

log = logging.getLogger(__name__)


def log_look_up(
    request_id: str, first: int, hashes: SequenceOf[bytes], statuses: SequenceOf[Status], present: int, seconds: float
) -> None:
    """Log which blocks, from the ``first``-th on, the pool was asked for, and how many leading ones it has."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    log.debug(
        "request %s: look-up of %d blocks (its %d to %d, from %s): the pool has %d leading ones and %d others; %.1f ms",
        *(request_id, len(hashes), first, first + len(hashes) - 1, hashes[0].hex()[:12]),
        *(present, statuses.count(Status.OK) - present, 1e3 * seconds),
    )


def log_load(request_id: str, wanted: int, arrived: int, block_bytes: int, seconds: float) -> None:
    """Log how many blocks were read from the pool; blocks that do not verify do not count as arrived."""
    log.debug(
        "request %s: load of %d blocks: %d arrived and were verified, %d bytes in %.1f ms",
        *(request_id, wanted, arrived, arrived * block_bytes, 1e3 * seconds),
    )


def log_save(
    request_id: str, first: int, hashes: SequenceOf[bytes], saved: int, block_bytes: int, seconds: float
) -> None:
    """Log how many of a save's blocks, from the ``first``-th on, the pool has now."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    log.debug(
        "request %s: save of %d blocks (its %d to %d, from %s): the pool has %d of them now, %d bytes; %.1f ms",
        *(request_id, len(hashes), first, first + len(hashes) - 1, hashes[0].hex()[:12]),
        *(saved, saved * block_bytes, 1e3 * seconds),
    )


def log_lent_blocks(request_id: str, num_tokens: int, lent: int, cached: int) -> None:
    """Log, on the decode instance, that a hand-over begins."""
    log.debug(
        "request %s: the prefill instance begins to hand over %d tokens; lent %d blocks, the %d before are here",
        *(request_id, num_tokens, lent, cached),
    )


def log_handover_write(request_id: str, blocks: range, written: int, block_bytes: int, seconds: float) -> None:
    """Log, on the prefill instance, how many of computed ``blocks`` were written to the decode instance."""
    log.debug(
        "request %s: hand-over of blocks %d to %d: %d written, %d bytes in %.1f ms; decode had %d already",
        *(request_id, blocks.start, blocks.stop - 1, written, written * block_bytes),
        *(1e3 * seconds, len(blocks) - written),
    )


def log_handover_end(request_id: str, written: int, block_bytes: int, seconds: float, *, is_accepted: bool) -> None:
    """Log, on the prefill instance, whether the decode instance continues from all blocks ``written``."""
    log.debug(
        "request %s: direct hand-over %s: %d blocks written, %d bytes, %.1f ms since it began",
        *(request_id, "accepted" if is_accepted else "not accepted", written, written * block_bytes, 1e3 * seconds),
    )


def log_verified_blocks(request_id: str, count: int, block_bytes: int, seconds: float) -> None:
    """Log, on the decode instance, that the blocks have the digests that were sent."""
    log.debug(
        "request %s: hand-over verified: %d blocks, %d bytes in %.1f ms",
        *(request_id, count, count * block_bytes, 1e3 * seconds),
    )


def log_prompt_sources(sequence: Sequence, handover: str) -> None:
    """Log where each token of the prompt came from, and why; ``handover`` explains its hand-over, if there was one."""
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
    """Explain why tokens were computed that neither the pool nor any cache could have."""
    tail = (sequence.num_prompt_tokens - 1) % sequence.block_size + 1
    rest = sequence.num_prompt_tokens - sum(count for _, count in sequence.prompt_sources)
    return f"the last {tail} fill no block before the last token, which is always computed" if rest == tail else ""
