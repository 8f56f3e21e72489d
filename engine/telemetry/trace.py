"""Logs the steps of a request at the level debug.

Each line begins with the id of the request. Blocks are named by their positions in the prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from engine.scheduling.request import Sequence
from kvstore_backend import Status

__all__ = [
    "log_handover_begin",
    "log_handover_end",
    "log_handover_write",
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
    """Log a look-up in the pool.

    Args:
        request_id: the id of the request.
        first: position of the first of the blocks.
        hashes: hashes of the blocks.
        statuses: answers of the pool.
        present: number of leading blocks that the pool has.
        seconds: duration of the look-up.
    """
    if not log.isEnabledFor(logging.DEBUG):
        return
    log.debug(
        "request %s: look-up of %d blocks (its %d to %d, from %s): the pool has %d leading ones and %d others; %.1f ms",
        *(request_id, len(hashes), first, first + len(hashes) - 1, hashes[0].hex()[:12]),
        *(present, statuses.count(Status.OK) - present, 1e3 * seconds),
    )


def log_load(request_id: str, wanted: int, arrived: int, block_bytes: int, seconds: float) -> None:
    """Log a load from the pool: of ``wanted`` blocks ``arrived`` were read with the right checksum."""
    log.debug(
        "request %s: load of %d blocks: %d arrived and were verified, %d bytes in %.1f ms",
        *(request_id, wanted, arrived, arrived * block_bytes, 1e3 * seconds),
    )


def log_save(
    request_id: str, first: int, hashes: SequenceOf[bytes], saved: int, block_bytes: int, seconds: float
) -> None:
    """Log a save to the pool.

    Args:
        request_id: the id of the request.
        first: position of the first of the blocks.
        hashes: hashes of the blocks.
        saved: number of these blocks that the pool has now.
        block_bytes: size of a block.
        seconds: duration of the save.
    """
    if not log.isEnabledFor(logging.DEBUG):
        return
    log.debug(
        "request %s: save of %d blocks (its %d to %d, from %s): the pool has %d of them now, %d bytes; %.1f ms",
        *(request_id, len(hashes), first, first + len(hashes) - 1, hashes[0].hex()[:12]),
        *(saved, saved * block_bytes, 1e3 * seconds),
    )


def log_handover_begin(request_id: str, num_tokens: int, reserved: int, cached: int) -> None:
    """Log, on the decode instance, that a direct transfer begins."""
    log.debug(
        "request %s: the prefill instance begins a direct transfer of %d tokens; %d blocks are reserved, "
        "the %d before them are cached here",
        *(request_id, num_tokens, reserved, cached),
    )


def log_handover_write(request_id: str, blocks: range, written: int, block_bytes: int, seconds: float) -> None:
    """Log, on the prefill instance, that blocks were written to the decode instance.

    Args:
        request_id: the id of the request.
        blocks: positions of the computed blocks.
        written: number of these blocks that were written; decode had the others already.
        block_bytes: size of a block.
        seconds: duration of the write.
    """
    log.debug(
        "request %s: direct transfer of blocks %d to %d: %d written, %d bytes in %.1f ms; decode had %d already",
        *(request_id, blocks.start, blocks.stop - 1, written, written * block_bytes),
        *(1e3 * seconds, len(blocks) - written),
    )


def log_handover_end(request_id: str, written: int, block_bytes: int, seconds: float, *, is_accepted: bool) -> None:
    """Log, on the prefill instance, the end of a direct transfer.

    Args:
        request_id: the id of the request.
        written: number of blocks that were written.
        block_bytes: size of a block.
        seconds: duration of the transfer.
        is_accepted: whether the decode instance continues from these blocks.
    """
    log.debug(
        "request %s: direct transfer %s: %d blocks written, %d bytes, %.1f ms since it began",
        *(request_id, "accepted" if is_accepted else "not accepted", written, written * block_bytes, 1e3 * seconds),
    )


def log_verified_blocks(request_id: str, count: int, block_bytes: int, seconds: float) -> None:
    """Log, on the decode instance, that the written blocks have the digests that the prefill instance sent."""
    log.debug(
        "request %s: direct transfer verified: %d blocks, %d bytes in %.1f ms",
        *(request_id, count, count * block_bytes, 1e3 * seconds),
    )


def log_prompt_sources(sequence: Sequence, handover: str) -> None:
    """Log where the KV of each part of the prompt came from, and why.

    Args:
        sequence: the sequence.
        handover: explains the hand-over of the prompt; "" if there was none.
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
    """Explain why the last tokens were computed, if they are the tokens that cannot be cached; else return ""."""
    tail = (sequence.num_prompt_tokens - 1) % sequence.block_size + 1
    rest = sequence.num_prompt_tokens - sum(count for _, count in sequence.prompt_sources)
    if rest != tail:
        return ""
    return f"the last {tail} do not fill a block before the last token, which is always computed"
