"""FlightRecorder: records the last minutes of a process's decisions and outcomes in files, for reading after a crash.

Each process has two files, which are called a ring: the file to which it appends, and the previous file
(``.old.jsonl``). When the present file covers the configured minutes, or is full, it replaces the previous file. So a
ring covers at least the configured minutes, unless a file is full earlier. Each line of a file is JSON. The first line
has the settings and the instances.

The files contain ids, times, sizes, addresses and codes. They contain no prompts, no responses, no keys, and no error
texts of instances. If the process crashes, at most about half a second is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from kvcommon.versions import find_version
from router.settings import RouterSettings, SettingsError
from router.telemetry.audit import ID_CHARACTERS, PATH_CHARACTERS, encode_line

if TYPE_CHECKING:
    from router.fleet import Instance, Registry
    from router.telemetry.records import RequestRecord, RunningRequest

__all__ = ["FlightRecorder", "RecordingError", "find_recordings", "find_ring", "read_recording"]

_log = logging.getLogger("router.telemetry.flight_recorder")

FORMAT = "kvrouter flight 1"
FLUSH_SECONDS = 0.2
# Interval for entries that show that the process is alive, while it has nothing else to record.
ALIVE_SECONDS = 10.0
# Maximum size of a file, enough for about 100,000 requests. A ring has two files.
MAX_FILE_BYTES = 64 * 1024 * 1024
# Maximum size of the entries that wait for a slow disk.
MAX_BACKLOG_BYTES = 8 * 1024 * 1024
# Number of rings of ended processes that a new process does not remove: those that ended last.
KEPT_RINGS = 8
_OLD, _SUFFIX = ".old.jsonl", ".jsonl"
_REASON_CHARACTERS = 200
# Values of ``AttemptRecord.ended`` that are recorded. Other values are sentences, which may quote an instance.
_GOOD_ENDS = ("answered", "preempted")


class RecordingError(ValueError):
    """A file cannot be read as a recording. The message is one sentence."""


class FlightRecorder:
    """Writes the two files of one process. If the disk fails, the recording ends, and the router continues."""

    def __init__(
        self,
        settings: RouterSettings,
        registry: Registry,
        name: str,
        list_progress: Callable[[float], Iterable[RunningRequest]],
    ) -> None:
        """
        Args:
            settings: the folder, and the minutes to record.
            registry: the instances.
            name: name of this process; each process of the router has a different name.
            list_progress: called with a time of ``time.perf_counter``. Returns the running requests that arrived, or
                were sent to an instance, after this time.

        Raises:
            SettingsError: a file cannot be created in the folder.
        """
        self._settings, self._registry, self._name = settings, registry, name
        self._list_progress = list_progress
        self._pending: list[bytes] = []
        self._num_pending_bytes = self._num_lost = 0
        self._num_file_bytes = 0
        self._started_at = self._listed_at = self._written_at = 0.0
        self._known: dict[str, dict[str, Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_noting = False
        # If ``keep_recording`` is cancelled, its thread may still be writing when ``close`` begins.
        self._one_at_a_time = threading.Lock()
        folder = Path(settings.flight_recorder_path)
        started = time.time()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(started)) + f".{started % 1 * 1e3:03.0f}"
        self._path = folder / f"flight-{settings.port}-{stamp}-{name}{_SUFFIX}"
        try:
            folder.mkdir(exist_ok=True)
            self._descriptor = _open_new(self._path)
        except OSError as exc:
            raise SettingsError(
                f"log.flight-recorder-path is {str(folder)!r}, but it cannot be written: {exc.strerror}; name another "
                "folder"
            ) from exc
        _remove_rings(folder, f"flight-{settings.port}-")

    @property
    def is_recording(self) -> bool:
        """Whether the recorder still writes; false after an error or ``close``."""
        return self._descriptor >= 0

    async def keep_recording(self) -> None:
        """Write entries until this task is cancelled, or the file cannot be written."""
        self._loop = asyncio.get_running_loop()
        self._registry.events.changes.subscribe(self._on_fleet_change)
        self._begin_file()
        while self.is_recording:
            if self._pending:
                await asyncio.to_thread(self._write, *self._take_pending())
            await asyncio.sleep(FLUSH_SECONDS)
            with self._end_at_failure():
                self._add_progress()
                if not self._pending and time.monotonic() - self._written_at >= ALIVE_SECONDS:
                    self._note("alive")

    def on_batch(self, records: Sequence[RequestRecord]) -> None:
        """Record a batch of ended requests."""
        if self.is_recording:
            with self._end_at_failure():
                for record in records:
                    self._add(_describe_request(record))

    def close(self) -> None:
        """Record the end of this process, and close the file."""
        if self.is_recording:
            with self._end_at_failure():
                self._note("stop")
                self._write(*self._take_pending())
        self._close_file()

    def _on_fleet_change(self) -> None:
        """Schedule ``_add_fleet_changes``, which runs when the change is complete."""
        if self._loop is not None and self.is_recording and not self._is_noting:
            self._is_noting = True
            self._loop.call_soon(self._add_fleet_changes)

    def _add_fleet_changes(self) -> None:
        self._is_noting = False
        with self._end_at_failure():
            before, self._known = self._known, self._describe_fleet()
            for key, state in self._known.items():
                if before.get(key) != state:
                    self._note("instance", instance=key, **state)
            for key in before:
                if key not in self._known:
                    self._note("gone", instance=key)

    def _add_progress(self) -> None:
        since, self._listed_at = self._listed_at, time.perf_counter()
        for running in self._list_progress(since):
            self._add(_describe_running(running))

    def _note(self, kind: str, **members: Any) -> None:
        """Add an entry with the present time."""
        self._add({"kind": kind, "time": time.time(), **members})

    def _add(self, entry: Mapping[str, Any]) -> None:
        line = encode_line(entry)
        if self._num_pending_bytes + len(line) > MAX_BACKLOG_BYTES:
            self._num_lost += 1
            return
        self._pending.append(line)
        self._num_pending_bytes += len(line)

    def _take_pending(self) -> tuple[bytes, bool]:
        """Return the entries to write as bytes, and whether they begin a new file."""
        self._written_at = time.monotonic()
        age, num_bytes = self._written_at - self._started_at, self._num_file_bytes + self._num_pending_bytes
        begins = age >= 60 * self._settings.flight_recorder or num_bytes > MAX_FILE_BYTES
        if begins:
            self._begin_file()
        data = b"".join(self._pending)
        self._pending, self._num_pending_bytes = [], 0
        self._num_file_bytes += len(data)
        num_lost, self._num_lost = self._num_lost, 0
        if num_lost:
            self._note("lost", entries=num_lost)
        return data, begins

    def _begin_file(self) -> None:
        """Insert the first line of a new file before the pending entries."""
        self._started_at, self._num_file_bytes = time.monotonic(), 0
        self._known = self._describe_fleet()
        head = {
            "kind": "begin",
            "time": time.time(),
            "format": FORMAT,
            "version": find_version(),
            "process": self._name,
            "port": self._settings.port,
            "settings": self._settings.plain_values,
            "instances": self._known,
        }
        self._pending.insert(0, encode_line(head))

    def _describe_fleet(self) -> dict[str, dict[str, Any]]:
        return {instance.key: _describe_instance(instance) for instance in self._registry}

    def _write(self, data: bytes, begins: bool) -> None:
        """Append ``data`` to the file. This runs in a thread, so that a slow disk delays no request.

        Args:
            data: entries as bytes.
            begins: whether ``data`` begins a new file.
        """
        with self._one_at_a_time, self._end_at_failure():
            if begins:
                with contextlib.suppress(FileNotFoundError):  # an operator has removed the file
                    os.replace(self._path, self._path.with_name(find_ring(self._path) + _OLD))
                self._close_file()
                self._descriptor = _open_new(self._path)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    @contextlib.contextmanager
    def _end_at_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            _log.error("the flight recorder has stopped: %s cannot be written: %s", self._path, exc.strerror)
            self._close_file()
        except Exception:
            _log.exception("the flight recorder has stopped because of an unexpected error")
            self._close_file()

    def _close_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def find_recordings(paths: Iterable[Path]) -> list[Path]:
    """Return the files of the recordings at ``paths``.

    Args:
        paths: folders and files. For a folder, all its recordings are returned. For a file, the file is returned, and
            the previous file of the same process, if it exists.

    Raises:
        RecordingError: a folder has no recording.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            files = sorted(path.glob(f"flight-*{_SUFFIX}"), key=lambda file: (find_ring(file), _OLD not in file.name))
            if not files:
                raise RecordingError(f"{path} has no recording; the files of a flight recorder are named flight-...")
        else:
            older = path.with_name(find_ring(path) + _OLD)
            files = [older, path] if older.exists() else [path]
        found.update(dict.fromkeys(files))
    return list(found)


def find_ring(path: Path) -> str:
    """Return the name of a ring: the part that the names of its two files have in common."""
    return path.name.removesuffix(_SUFFIX).removesuffix(".old")


def read_recording(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the entries of a file in order, and the number of damaged lines, which are skipped.

    Each entry has a ``kind`` and a ``time`` in seconds since 1970. The other members are not checked.

    Raises:
        RecordingError: the file cannot be read, has no entry, or has another format.
    """
    entries, num_damaged = list[dict[str, Any]](), 0
    try:
        with path.open("rb") as file:
            for line in file:
                entry = _parse_line(line)
                if entry is None:
                    num_damaged += 1
                else:
                    entries.append(entry)
    except OSError as exc:
        raise RecordingError(f"{path} cannot be read: {exc.strerror}") from exc
    if not entries:
        raise RecordingError(f"{path} has no entry of a flight recorder")
    if entries[0]["kind"] == "begin" and entries[0].get("format") != FORMAT:
        raise RecordingError(f"the format of {path} is {entries[0].get('format')!r}; this version reads {FORMAT!r}")
    return entries, num_damaged


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        # orjson is faster, but refuses invalid Unicode and numbers above 64 bits.
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return None
    moment = entry.get("time")
    return entry if isinstance(moment, (int, float)) and 0 <= moment < 1e11 else None


def _open_new(path: Path) -> int:
    """Create a file that only this user can read, and lock it until this process ends. Return its descriptor."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_rings(folder: Path, prefix: str) -> None:
    """Remove the files of ended processes, except of the ``KEPT_RINGS`` processes that ended last."""
    rings: dict[str, float] = {}
    for path in folder.glob(f"{prefix}*{_SUFFIX}"):
        ring = find_ring(path)
        with contextlib.suppress(OSError):  # another process has removed the file
            rings[ring] = max(rings.get(ring, 0.0), path.stat().st_mtime)
    ended = sorted((ring for ring in rings if _has_ended(folder / f"{ring}{_SUFFIX}")), key=lambda ring: rings[ring])
    for ring in ended[: max(0, len(ended) - KEPT_RINGS)]:
        for suffix in (_SUFFIX, _OLD):
            with contextlib.suppress(OSError):
                (folder / f"{ring}{suffix}").unlink()


def _has_ended(path: Path) -> bool:
    """Return whether the process that wrote this file has ended: it does not lock the file any more."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait if the file is a pipe
    except OSError as exc:
        return exc.errno == errno.ENOENT
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _describe_instance(instance: Instance) -> dict[str, Any]:
    registration = instance.registration
    return {
        "role": registration.role.value,
        "engine": registration.engine.value,
        "connector": registration.kv_connector.value if registration.engine.value == "vllm" else "",
        "healthy": instance.healthy,
        "why": instance.trouble[:_REASON_CHARACTERS],
        "draining": instance.draining,
        "paused": instance.paused or registration.is_paused,
        "breaker": instance.breaker.state,
        "weight": instance.share,
    }


def _describe_request(record: RequestRecord) -> dict[str, Any]:
    started, model = record.started, record.model
    entry = {
        "kind": "request",
        "time": record.started_unix,
        "id": record.request_id[:ID_CHARACTERS],
        "method": record.method,
        "path": record.path[:PATH_CHARACTERS],
        "client": record.client,
        "model": model[:ID_CHARACTERS] if isinstance(model, str) else "",
        "status": record.status,
        "error": record.error,
        "streamed": record.streamed,
        # Cut to whole microseconds. ``round`` would take longer than all other work in this function.
        "queued_us": int(record.queued_ms * 1e3),
        "first_byte_us": int(record.first_byte_ms * 1e3),
        "total_us": int(record.total_ms * 1e3),
        "bytes_sent": record.bytes_sent,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "predicted_cached_tokens": record.predicted_cached_tokens,
        "attempts": [
            {
                "ended": attempt.ended if attempt.ended in _GOOD_ENDS else attempt.trouble or "failed",
                "began_us": int((attempt.began_at - started) * 1e6),
                "ended_us": int((attempt.ended_at - started) * 1e6),
                # Each choice has: instance, cost of the prefill in tokens, tokens expected in a cache, reasons.
                "choices": [
                    (decision.key, decision.work, decision.cached_tokens, decision.reasons)
                    for decision in attempt.decisions
                ],
                # Each leg has: instance, role, status; times at which the request was sent, the first byte arrived and
                # the leg ended, in microseconds after the arrival of the request; 0 if this did not happen.
                "legs": [
                    (
                        *(instance, role.value, exchange.status),
                        *(_measure(started, exchange.sent_at), _measure(started, exchange.first_byte_at)),
                        _measure(started, exchange.ended_at),
                    )
                    for instance, role, exchange, _ in attempt.legs
                ],
            }
            for attempt in record.attempts
        ],
    }
    if record.trace_id:
        entry["trace_id"] = record.trace_id
    if record.client_ids:
        entry["client_ids"] = {name: value[:ID_CHARACTERS] for name, value in record.client_ids.items()}
    return entry


def _describe_running(running: RunningRequest) -> dict[str, Any]:
    model = running.model
    return {
        "kind": "running",
        "time": running.started_unix,
        "id": running.request_id[:ID_CHARACTERS],
        "method": running.method,
        "path": running.path[:PATH_CHARACTERS],
        "client": running.client,
        "model": model[:ID_CHARACTERS] if isinstance(model, str) else "",
        "attempt": running.attempt,
        "sent_us": _measure(running.started, running.sent_at),
        "instances": running.instances,
    }


def _measure(started: float, moment: float) -> int:
    """Return the microseconds from ``started`` to a time of ``time.perf_counter``; 0 if that time is 0."""
    return int((moment - started) * 1e6) if moment else 0
