"""Audit: one record per request, written as a JSON line to the access log, counted, and stored for explanations.

A request only appends its record to a list. The event loop passes the records on in batches: to the subscribers that
count them, and as lines to the log. If the log's reader has stopped reading, lines are dropped and counted, so that
requests never wait for it.
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
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson

from router.settings import RouterSettings, SettingsError
from router.telemetry.records import RequestRecord

__all__ = ["Audit"]

_log = logging.getLogger("router.telemetry.audit")

MAX_RECORDS = 10_000
FLUSH_SECONDS = 0.2
# About 64 KB of lines. Longer batches would delay other requests.
BATCH_RECORDS = 150
# Maximum number of lines that a slow reader has not taken.
MAX_BACKLOG_LINES = 10_000
_FILE_PIECE_BYTES = 65536
# Longer values are cut, so that a line fits into PIPE_BUF even if every character is escaped.
PATH_CHARACTERS, ID_CHARACTERS = 300, 128


class Audit:
    """Receives the records of ended requests: writes the access log, and stores the last records."""

    def __init__(self, settings: RouterSettings) -> None:
        """
        Raises:
            SettingsError: the access log's file cannot be written.
        """
        self._records: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
        self.lost_lines = 0
        """Number of access log lines that could not be written."""
        self._output = _open_log(settings.access_log)
        self._pending: list[RequestRecord] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batch_callbacks: list[Callable[[Sequence[RequestRecord]], None]] = []

    @property
    def records(self) -> Sequence[RequestRecord]:
        """The last requests, oldest first."""
        return self._records

    def add_record(self, record: RequestRecord) -> None:
        """Store the record of an ended request; it is counted, and its line written, soon."""
        self._records.append(record)
        pending = self._pending
        pending.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._on_timer)
        elif len(pending) == BATCH_RECORDS:
            asyncio.get_running_loop().call_soon(self.flush_records)

    def subscribe_to_batches(self, callback: Callable[[Sequence[RequestRecord]], None]) -> None:
        """Call ``callback`` with the records that were added since its last call, in order."""
        self._batch_callbacks.append(callback)

    def flush_records(self) -> None:
        """Pass the added records on now: to the subscribers, and to the log as lines."""
        batch, self._pending = self._pending, []
        for callback in self._batch_callbacks:
            callback(batch)
        if self._output is not None:
            self.lost_lines += self._output.write_lines([_format_line(record) for record in batch])

    def close(self) -> None:
        """Pass on the remaining records, and close the file."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.flush_records()
        if self._output is not None:
            self.lost_lines += self._output.close()
            self._output = None

    def explain_request(self, request_id: str) -> dict[str, Any] | None:
        """Return the decisions that placed the last request with this id, and its result; None if it is not stored.

        The id may be the request's own, or the one at engines (with the prefix ``chatcmpl-`` or ``cmpl-``).
        """
        names = {request_id, request_id.removeprefix("chatcmpl-"), request_id.removeprefix("cmpl-")}
        record = next((r for r in reversed(self._records) if r.request_id and r.request_id in names), None)
        return None if record is None else _build_explanation(record)

    def list_requests(self, count: int) -> list[dict[str, Any]]:
        """Return the ``count`` requests that ended last, newest first, in the format of the access log."""
        return [json.loads(_format_line(record)) for record in islice(reversed(self._records), count)]

    def _on_timer(self) -> None:
        self._timer = None
        self.flush_records()
        if self._output is not None and self._output.holds_back:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._on_timer)


class _Output:
    """A file or stream for lines; writing never blocks."""

    def __init__(self, descriptor: int, *, owned: bool) -> None:
        self._failed = False
        self._descriptor = descriptor
        self._owned = owned
        self._backlog: deque[bytes] = deque()
        # A writable pipe accepts at least PIPE_BUF bytes; more might block.
        self._piece_bytes = _FILE_PIECE_BYTES if stat.S_ISREG(os.fstat(descriptor).st_mode) else select.PIPE_BUF
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def holds_back(self) -> bool:
        """Return whether there are lines that the reader has not taken yet."""
        return bool(self._backlog)

    def write_lines(self, lines: list[bytes]) -> int:
        """Write lines. Those that the reader does not take now are buffered for the next time, up to a limit.

        Return how many were lost.
        """
        room = MAX_BACKLOG_LINES - len(self._backlog)
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
        """Close it if this object opened the file; return how many lines its reader has not taken."""
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


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """Encode ``fields`` as a line of JSON."""
    try:
        return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # an engine may report a number above 64 bits, and an id may be invalid Unicode
        return json.dumps(fields).encode() + b"\n"


def _open_log(destination: str) -> _Output | None:
    if destination == "off":
        return None
    if destination in ("stdout", "stderr"):
        stream = sys.__stdout__ if destination == "stdout" else sys.__stderr__
        return None if stream is None else _Output(stream.fileno(), owned=False)
    try:
        # Opening a pipe without a reader would block; with O_NONBLOCK it fails.
        descriptor = os.open(destination, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)
        os.set_blocking(descriptor, True)
    except OSError as exc:
        raise SettingsError(
            f"log.access-log {destination}: {exc.strerror}; name a file, stderr, stdout or off"
        ) from exc
    return _Output(descriptor, owned=True)


def _format_line(record: RequestRecord) -> bytes:
    fields = {
        # Faster than ``round``, which converts to text, and than ``int`` of a whole number.
        "time": (record.started_unix * 1e3 + 0.5) // 1.0 / 1e3,
        "method": record.method,
        "path": record.path[:PATH_CHARACTERS],
        "status": record.status,
        "error": record.error,
        "request_id": record.request_id[:ID_CHARACTERS],
        "client": record.client,
        "trace_id": record.trace_id,
        "mixed": record.mixed,
        "prefill": record.prefill,
        "decode": record.decode,
        "attempts": len(record.attempts),
        "queued_ms": (record.queued_ms * 1e2 + 0.5) // 1.0 / 1e2,
        "first_byte_ms": (record.first_byte_ms * 1e2 + 0.5) // 1.0 / 1e2,
        "total_ms": (record.total_ms * 1e2 + 0.5) // 1.0 / 1e2,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "decode_cached_tokens": record.decode_cached_tokens,
        "predicted_cached_tokens": record.predicted_cached_tokens,
        "bytes_sent": record.bytes_sent,
    }
    if record.client_ids:
        fields |= {name: value[:ID_CHARACTERS] for name, value in record.client_ids.items()}
    return encode_line(fields)


def _build_explanation(record: RequestRecord) -> dict[str, Any]:
    return {
        **json.loads(_format_line(record)),
        "own_cached_tokens": record.own_cached_tokens,
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
                "began_ms": _measure(record, attempt.began_at),
                "ended_ms": _measure(record, attempt.ended_at),
                "legs": [
                    {
                        "instance": instance,
                        "role": role.value,
                        "sent_ms": _measure(record, exchange.sent_at),
                        "first_byte_ms": _measure(record, exchange.first_byte_at),
                        "ended_ms": _measure(record, exchange.ended_at),
                    }
                    for instance, role, exchange, _ in attempt.legs
                ],
            }
            for attempt in record.attempts
        ],
    }


def _measure(record: RequestRecord, moment: float) -> float | None:
    """Return milliseconds from the request's arrival to a time of ``time.perf_counter``; None if there is none."""
    return round((moment - record.started) * 1e3, 2) if moment else None
