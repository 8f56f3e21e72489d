"""Audit: receives one record for each request. It writes the access log, and stores the last records for explanations.

A request only adds its record to a list. The event loop passes the records on in batches: to the subscribers, which
count them, and to the access log, as lines of JSON. If the reader of the log stops reading, lines are dropped and
counted, so that requests never wait for the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import stat
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson

from router.settings import RouterSettings, SettingsError
from router.telemetry.records import RequestRecord

__all__ = ["Audit", "merge_sessions"]

_log = logging.getLogger("router.telemetry.audit")

MAX_RECORDS = 10_000
FLUSH_SECONDS = 0.2
# Number of records in a batch, about 64 KB of lines. Longer batches would delay other requests.
BATCH_RECORDS = 150
# Maximum number of lines that wait for a slow reader.
MAX_BACKLOG_LINES = 10_000
_FILE_PIECE_BYTES = 65536
# Longer values are cut, so that a line is at most PIPE_BUF bytes long even if every character is escaped.
PATH_CHARACTERS, ID_CHARACTERS = 300, 128
_SESSION_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


class Audit:
    """Receives the records of ended requests, writes the access log, and stores the last records."""

    def __init__(self, settings: RouterSettings) -> None:
        """
        Raises:
            SettingsError: the file of the access log cannot be opened.
        """
        self._records: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
        self.lost_lines = 0
        """Number of lines of the access log that could not be written."""
        self._output = _open_log(settings.access_log)
        self._pending: list[RequestRecord] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batch_callbacks: list[Callable[[Sequence[RequestRecord]], None]] = []

    @property
    def records(self) -> Sequence[RequestRecord]:
        """The records of the last requests, oldest first."""
        return self._records

    def add_record(self, record: RequestRecord) -> None:
        """Store the record of an ended request. Subscribers and the access log get it with the next batch."""
        self._records.append(record)
        pending = self._pending
        pending.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._on_timer)
        elif len(pending) == BATCH_RECORDS:
            asyncio.get_running_loop().call_soon(self.flush_records)

    def subscribe_to_batches(self, callback: Callable[[Sequence[RequestRecord]], None]) -> None:
        """Call ``callback`` with each batch of records. Each record is in one batch, in the order of ``add_record``."""
        self._batch_callbacks.append(callback)

    def flush_records(self) -> None:
        """Pass the waiting records to the subscribers, and write them as lines to the access log."""
        batch, self._pending = self._pending, []
        for callback in self._batch_callbacks:
            callback(batch)
        if self._output is not None:
            self.lost_lines += self._output.write_lines([_format_line(record) for record in batch])

    def close(self) -> None:
        """Pass the remaining records to the subscribers and the access log, and close the log."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.flush_records()
        if self._output is not None:
            self.lost_lines += self._output.close()
            self._output = None

    def explain_request(self, request_id: str) -> dict[str, Any] | None:
        """Return how the instances of the last request with this id were chosen, and its result; None: no such request.

        The id may have the prefix ``chatcmpl-`` or ``cmpl-``, which engines add.
        """
        names = {request_id, request_id.removeprefix("chatcmpl-"), request_id.removeprefix("cmpl-")}
        record = next((r for r in reversed(self._records) if r.request_id and r.request_id in names), None)
        return None if record is None else _build_explanation(record)

    def sum_session(self, named: Sequence[str]) -> dict[str, Any]:
        """Return the number of a session's stored requests, the sums of their tokens, and their instances.

        Args:
            named: name of the client, and id of the session.
        """
        client, session = named
        theirs = [record for record in self._records if record.client == client and "session_id" in record.client_ids]
        records = [record for record in theirs if record.client_ids["session_id"] == session]
        children = [record for record in theirs if record.client_ids.get("parent_session_id") == session]
        return {
            "requests": len(records),
            "prompt_tokens": sum(record.prompt_tokens or 0 for record in records),
            "cached_tokens": sum(record.cached_tokens or 0 for record in records),
            "completion_tokens": sum(record.completion_tokens or 0 for record in records),
            "instances": Counter(filter(None, (record.mixed or record.prefill for record in records))),
            "children": sorted({record.client_ids["session_id"] for record in children}),
        }

    def list_requests(self, count: int) -> list[dict[str, Any]]:
        """Return the ``count`` requests that ended last, newest first, in the format of the access log."""
        return [json.loads(_format_line(record)) for record in islice(reversed(self._records), count)]

    def _on_timer(self) -> None:
        self._timer = None
        self.flush_records()
        if self._output is not None and self._output.holds_back:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._on_timer)


class _Output:
    """A file or stream for the lines of the access log. Writing a line never blocks."""

    def __init__(self, descriptor: int, *, owned: bool) -> None:
        self._failed = False
        self._descriptor = descriptor
        self._owned = owned
        self._backlog: deque[bytes] = deque()
        # A pipe that is ready for writing accepts at least PIPE_BUF bytes. Writing more could block.
        self._piece_bytes = _FILE_PIECE_BYTES if stat.S_ISREG(os.fstat(descriptor).st_mode) else select.PIPE_BUF
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def holds_back(self) -> bool:
        """Return whether lines are waiting for the reader."""
        return bool(self._backlog)

    def write_lines(self, lines: list[bytes]) -> int:
        """Write lines as far as this does not block. The next call writes the remaining lines.

        At most ``MAX_BACKLOG_LINES`` lines wait for the next call. Return the number of further lines, which are lost.
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
        """Close the file if this object opened it. Return the number of waiting lines, which are lost."""
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
            f"log.access-log is {destination!r}, which cannot be opened: {exc.strerror}; it must be a file, stderr, "
            "stdout or off"
        ) from exc
    return _Output(descriptor, owned=True)


def _format_line(record: RequestRecord) -> bytes:
    fields = {
        # The time is rounded to milliseconds. ``round`` is slower, because it converts to text.
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


def merge_sessions(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of a session over all processes.

    Args:
        parts: the result of ``Audit.sum_session`` in each process.
    """
    instances: Counter[str] = Counter()
    for part in parts:
        instances.update(part["instances"])
    return {
        **{name: sum(part[name] for part in parts) for name in _SESSION_SUMS},
        "instances": dict(instances),
        "children": sorted({child for part in parts for child in part["children"]}),
    }


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
    """Return the milliseconds from the request's arrival to a time of ``time.perf_counter``; None if that time is 0."""
    return round((moment - record.started) * 1e3, 2) if moment else None
