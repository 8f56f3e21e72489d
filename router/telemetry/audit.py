"""What became of each request: a line of JSON in the access log, and the last requests kept to be explained.

A request's path only appends its record to a list. Lines are made and written in batches by the event loop, and where
the log's reader has stopped reading, lines are dropped (and counted) rather than waited for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import stat
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from router.policies import Decision
from router.settings import RouterSettings, SettingsError

__all__ = ["AttemptRecord", "Audit", "RequestRecord"]

_log = logging.getLogger("router.telemetry.audit")

KEPT_RECORDS = 10_000
FLUSH_SECONDS = 0.2
# About 64 KB of lines; more are not made at once, so that other requests do not wait for it.
BATCH_RECORDS = 150
# Lines that a slow reader has not taken yet are held up to here.
BACKLOG_LINES = 10_000
FILE_BYTES = 65536
# Cut to this, so that a line fits into PIPE_BUF even if every character is escaped.
_PATH_CHARACTERS, _ID_CHARACTERS = 300, 128


class AttemptRecord(NamedTuple):
    """One attempt: the decisions that placed it (prefill's first, in a pair), and how it ended."""

    decisions: Sequence[Decision]
    ended: str
    """``answered``, or one sentence on what went wrong."""


@dataclass(slots=True)
class RequestRecord:
    """What became of one request. Whoever makes it fills it in and changes it no more once it is written."""

    method: str
    path: str
    """Without the query, which may be confidential."""
    started_unix: float
    """Seconds since 1970 when its head had been read."""
    request_id: str = ""
    client: str = ""
    """The holder of the API key; ``""`` where there are no keys."""
    trace_id: str = ""
    """Of the W3C trace context it came with."""
    status: int = 499
    """As the client got it; 499 if the client left before."""
    error: str = ""
    """The code of the error that ended it; ``""`` if none did."""
    mixed: str = ""
    prefill: str = ""
    decode: str = ""
    """``host:port`` of the instances of the last attempt, by role."""
    streamed: bool = False
    """Whether the answer was an event stream, so that its first byte shows the first token."""
    first_byte_ms: float = 0.0
    """From its arrival to the first byte of the answer's body from the instance; 0 if there was none."""
    total_ms: float = 0.0
    bytes_sent: int = 0
    chunks: int = 0
    """Pieces in which the answer's body came from the instance."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Of usage, where the engine said so."""
    predicted_cached_tokens: int | None = None
    """What the policy expected; None where it does not look at prefixes."""
    attempts: list[AttemptRecord] = field(default_factory=list)


class Audit:
    """Writes the access log and keeps the last requests."""

    def __init__(self, settings: RouterSettings) -> None:
        """
        Raises:
            SettingsError: the access log's file cannot be written.
        """
        self._records: deque[RequestRecord] = deque(maxlen=KEPT_RECORDS)
        self.lost_lines = 0
        """Lines of the access log that could not be written."""
        self._output = _open(settings.access_log)
        self._pending: list[RequestRecord] = []
        self._flushing: asyncio.TimerHandle | None = None

    @property
    def records(self) -> Sequence[RequestRecord]:
        """The last requests, oldest first."""
        return self._records

    def write(self, record: RequestRecord) -> None:
        """Keep the record of a request that has ended, and write its line soon."""
        self._records.append(record)
        if self._output is None:
            return
        pending = self._pending
        pending.append(record)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)
        elif len(pending) == BATCH_RECORDS:
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._output is not None:
            self._write_lines(self._output)
            self.lost_lines += self._output.close()
            self._output = None

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Why the last request of this id went where it went, and what came of it; None if it is not known (any more).

        The id may be the request's own, or the one that engines have it under (``chatcmpl-`` or ``cmpl-`` before it).
        """
        names = {request_id, request_id.removeprefix("chatcmpl-"), request_id.removeprefix("cmpl-")}
        record = next((r for r in reversed(self._records) if r.request_id and r.request_id in names), None)
        return None if record is None else _explanation(record)

    def _flush(self) -> None:
        if self._output is not None:
            self._write_lines(self._output)
            if self._output.holds_back:
                self._flushing = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def _write_lines(self, output: _Output) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        pending, self._pending = self._pending, []
        self.lost_lines += output.write([_line(record) for record in pending])


class _Output:
    """A file or stream of lines that is never waited for."""

    def __init__(self, descriptor: int, *, owned: bool) -> None:
        self._failed = False
        self._descriptor = descriptor
        self._owned = owned
        self._backlog: deque[bytes] = deque()
        # A pipe that is ready for writing has room for PIPE_BUF bytes; more might block.
        self._piece_bytes = FILE_BYTES if stat.S_ISREG(os.fstat(descriptor).st_mode) else select.PIPE_BUF
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def holds_back(self) -> bool:
        """Whether there are lines that the reader has not taken yet."""
        return bool(self._backlog)

    def write(self, lines: list[bytes]) -> int:
        """Write lines; what the reader does not take now is kept for the next time, up to a limit.

        Returns how many were lost.
        """
        room = BACKLOG_LINES - len(self._backlog)
        self._backlog.extend(lines[:room])
        lost = len(lines) - min(room, len(lines))
        try:
            while self._backlog and self._poll.poll(0):
                self._write_piece()
        except OSError as exc:
            lost += len(self._backlog)
            self._backlog.clear()
            if not self._failed:
                self._failed = True
                _log.warning("the access log cannot be written: %s; its lines are lost", exc.strerror)
        return lost

    def close(self) -> int:
        """Close it if it is a file of ours; return how many lines its reader has not taken."""
        if self._owned:
            os.close(self._descriptor)
        return len(self._backlog)

    def _write_piece(self) -> None:
        backlog, size = self._backlog, 0
        piece: list[bytes] = []
        for line in backlog:
            size += len(line)
            if piece and size > self._piece_bytes:
                break
            piece.append(line)
        data = b"".join(piece)
        while data:
            data = data[os.write(self._descriptor, data) :]
        for _ in piece:
            backlog.popleft()


def _open(destination: str) -> _Output | None:
    if destination == "off":
        return None
    if destination in ("stdout", "stderr"):
        stream = sys.__stdout__ if destination == "stdout" else sys.__stderr__
        return None if stream is None else _Output(stream.fileno(), owned=False)
    try:
        # Opening a pipe that nobody reads would wait; with O_NONBLOCK it fails.
        descriptor = os.open(destination, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)
        os.set_blocking(descriptor, True)
    except OSError as exc:
        raise SettingsError(
            f"log.access-log {destination}: {exc.strerror}; name a file, stderr, stdout or off"
        ) from exc
    return _Output(descriptor, owned=True)


def _line(record: RequestRecord) -> bytes:
    fields = {
        "time": round(record.started_unix, 3),
        "method": record.method,
        "path": record.path[:_PATH_CHARACTERS],
        "status": record.status,
        "error": record.error,
        "request_id": record.request_id[:_ID_CHARACTERS],
        "client": record.client,
        "trace_id": record.trace_id,
        "mixed": record.mixed,
        "prefill": record.prefill,
        "decode": record.decode,
        "attempts": len(record.attempts),
        "first_byte_ms": round(record.first_byte_ms, 2),
        "total_ms": round(record.total_ms, 2),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "predicted_cached_tokens": record.predicted_cached_tokens,
        "bytes_sent": record.bytes_sent,
    }
    try:
        return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # an engine may count more tokens than 64 bits hold, and an id may be no valid Unicode
        return json.dumps(fields).encode() + b"\n"


def _explanation(record: RequestRecord) -> dict[str, Any]:
    return {
        **json.loads(_line(record)),
        "attempts": [
            {
                "decisions": [
                    {
                        "instance": decision.key,
                        "reasons": dict(decision.reasons),
                        "work": decision.work,
                        "predicted_cached_tokens": decision.cached_tokens,
                    }
                    for decision in attempt.decisions
                ],
                "ended": attempt.ended,
            }
            for attempt in record.attempts
        ],
    }
