"""ClientResponse: the response to one client, and the methods that send its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import orjson

from kvcommon.json_objects import load_object
from router.http import (
    ApiError,
    ClientRequest,
    Headers,
    Refused,
    RequestEnded,
    TokenCount,
    Usage,
    encode_error_event,
    read_cached_figures,
    read_usage,
    set_figures,
)
from router.serving.attempt import Attempt
from router.serving.resume import EngineFailed, ResponseMerger, StreamMerger, find_engine_failure, strip_usage

__all__ = ["CLIENT_LEFT", "HELD_BYTES", "MERGED_BYTES", "ClientResponse"]

CLIENT_LEFT = 499
"""The status in the record of a request whose client disconnected before the response was complete."""

# A response that is not an event stream is held back up to this size until it is complete, so that another attempt can
# follow if a leg dies. If another attempt may continue the response, the limit is MERGED_BYTES.
HELD_BYTES = 1024 * 1024
MERGED_BYTES = 64 * 1024 * 1024
# An event that is longer than this is relayed in pieces. The first event may contain the ids of the whole prompt.
EVENT_BYTES = 16 * 1024 * 1024

_JSON = [(b"content-type", b"application/json")]
_EVENT_STREAM = [(b"content-type", b"text/event-stream")]
_COMMENT = b": keep-alive\n\n"
# With this header nginx relays the comments at once; otherwise it would collect larger pieces.
_UNHELD = [*_EVENT_STREAM, (b"x-accel-buffering", b"no")]
# Number of characters of an instance's refusal that an event quotes, if the refusal is not a JSON object with an error.
_QUOTED_CHARACTERS = 1000
# Text in each event that reports an engine failure.
_ERROR_MARK = b'"error"'
# Text in each usage that reports cached tokens.
_CACHE_MARK = b'"cache'
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_LONGEST_END = 4
_NO_USAGE = Usage()


class ClientResponse:
    """The response to one client.

    Other code may set ``merger``, ``tag``, ``token_count`` and the attributes about usage, and only reads the other
    public attributes. ``router_headers``, an argument of each method that may send a head, are the header lines that
    name the instances.
    """

    __slots__ = (
        "_before_last",
        "_cached_figures",
        "_comment_timer",
        "_incomplete",
        "_largest",
        "_last",
        "_request",
        "bytes_sent",
        "chunks",
        "error_code",
        "first_byte_at",
        "has_null_usages",
        "hides_usage",
        "is_event_stream",
        "is_resumed",
        "merger",
        "status",
        "tag",
        "token_count",
    )

    def __init__(self, request: ClientRequest) -> None:
        self.status = CLIENT_LEFT
        self.error_code = ""
        """Code of the error that ended the response; ``""`` if there was no error."""
        self.is_event_stream = False
        self.first_byte_at = 0.0
        """Time of the first byte that was sent of an instance's response, by ``time.perf_counter``; 0 before."""
        self.bytes_sent = 0
        self.chunks = 0
        """Number of pieces in which the response's body arrived from the instance."""
        self.is_resumed = False
        """Whether the last attempt continued a response that earlier attempts had begun."""
        self.merger: StreamMerger | ResponseMerger | None = None
        """Merges the segments of the response; None if only one instance generates it."""
        self.tag = b""
        """Suffix of the request's id at engines, which is removed from the response; ``b""`` if there is none."""
        self.token_count: TokenCount | None = None
        """Counts the tokens of a stream if the client has a token limit; else None."""
        self.hides_usage = self.has_null_usages = False
        """Whether only the router has requested the usage; whether therefore the other events have a null usage."""
        self._request = request
        self._incomplete = bytearray()  # the beginning of an event that has not arrived completely
        self._comment_timer: asyncio.TimerHandle | None = None
        # The last two pieces that arrived, which contain the usage.
        self._before_last = self._last = b""
        # The largest counts of prompt and completion tokens in all pieces so far, if the client has a token limit.
        self._largest = (0, 0)
        # Prefill's counts of cached tokens; None until they are known.
        self._cached_figures: Mapping[bytes, bytes] | None = None

    def holds_whole(self, attempt: Attempt, is_end: bool) -> bool:
        """Return whether the response, which is not an event stream, has arrived completely.

        Raises:
            RequestEnded: the client already has a part of a response, which this response cannot continue.
        """
        key = attempt.answering.instance.key
        if self._request.response_started:
            did_not = "did not continue the stream" if self.first_byte_at else "did not respond with a stream"
            raise RequestEnded(_no_continuation(f"{key} {did_not}"))
        if not is_end and isinstance(self.merger, ResponseMerger):
            raise RequestEnded(_no_continuation(f"the response of {key} is larger than {MERGED_BYTES} bytes"))
        return is_end

    def relay_whole(self, attempt: Attempt, body: bytes, router_headers: bytes) -> bool:
        """Send the complete response of an attempt to the client.

        Return False, and send nothing, if the instance preempted the request, or the segments cannot be merged. Then
        another attempt must follow.
        """
        exchange = attempt.answering.exchange
        if isinstance(self.merger, ResponseMerger):
            merged = self.merger.feed(exchange.status, body)
            if merged is None:
                attempt.finish()
                return False
            body = merged
        self._last = body
        # ``find`` is faster than ``in``, which first tries to use bytes as a number (half a microsecond).
        if body.find(_CACHE_MARK) >= 0:
            body = self._correct_usage(attempt, body)
        self.send(exchange.status, exchange.headers, body, router_headers)
        attempt.finish()
        return True

    def begin_pieces(self, attempt: Attempt, router_headers: bytes) -> None:
        """Send the head of an attempt's response, unless the client already has one. ``relay_piece`` sends the body."""
        request, exchange = self._request, attempt.answering.exchange
        self.is_event_stream, self._incomplete = attempt.is_event_stream, bytearray()
        if not self.first_byte_at:
            self.first_byte_at = time.perf_counter()
        if not request.response_started:
            self.status, headers = exchange.status, exchange.headers
            if self.is_event_stream:  # the length may change, because events are changed, or another instance continues
                headers = [header for header in headers if header[0] != b"content-length"]
            request.start_response(exchange.status, headers, router_headers)

    def relay_piece(self, attempt: Attempt, data: bytes, is_end: bool) -> bool:
        """Send the next bytes of an attempt's response to the client. Pause the exchange if the client reads slowly.

        Of an event stream, only complete events are sent, so that an error event can always follow.

        Args:
            attempt: the attempt that ``begin_pieces`` was called with.
            data: the next bytes.
            is_end: whether these are the last bytes.

        Returns:
            False if the instance preempted the request, and another segment follows.

        Raises:
            UpstreamError: an event reports that the engine failed, or the segment does not continue the stream.
        """
        request, is_events = self._request, self.is_event_stream
        if is_events and (self._incomplete or not data.endswith(_EVENT_ENDS)):
            data = self._take_whole_events(data, is_end)
        merger = self.merger if isinstance(self.merger, StreamMerger) else None
        usual = merger.feed_usual(data) if merger is not None else None
        failure = None
        if usual is None and is_events and data.find(_ERROR_MARK) >= 0:
            failure = find_engine_failure(data)
            data = data if failure is None else data[: failure[0]]
        if data:
            if is_events and self.token_count is not None:
                self.token_count.add(data)
            if merger is not None:
                data = merger.feed(data) if usual is None else usual
            data = self._finish_piece(attempt, data)
            if merger is not None and merger.preempted:
                attempt.finish()
                request.write_piece(data)
                return False
        if is_end and failure is None:
            request.finish_response(data)
            attempt.finish()
            return True
        request.write_piece(data)
        if failure is not None:
            raise EngineFailed(f"the engine of {attempt.answering.instance.key} failed: {failure[1]}")
        if not request.is_ready:
            exchange = attempt.answering.exchange
            exchange.pause()
            request.on_ready = exchange.resume
        return True

    def end_segment(self, attempt: Attempt) -> None:
        """Record how much of the prompt was cached at the first instance, if another attempt continues the response."""
        merger = self.merger
        if merger is None or not merger.has_earlier_segments or self.is_resumed:
            return
        self.is_resumed = True
        if self._cached_figures is None:
            self._cached_figures = read_cached_figures(attempt.prefill_answer)
        if self._cached_figures:
            merger.note_cached({name.decode(): int(figure) for name, figure in self._cached_figures.items()})

    def finish_from_segments(self, router_headers: bytes) -> None:
        """Send the end of a response that has all requested tokens, although its last segment was preempted."""
        assert self.merger is not None
        end = self.merger.make_end()
        if self._cached_figures:
            end = set_figures(end, self._cached_figures)
        self._before_last, self._last = self._last, end
        if self.tag:
            end = end.replace(self.tag, b"")
        if self._request.response_started:
            self._request.finish_response(end)
        else:
            self.send(200, _EVENT_STREAM if isinstance(self.merger, StreamMerger) else _JSON, end, router_headers)

    def send(self, status: int, headers: Headers, body: bytes, router_headers: bytes) -> None:
        """Send a complete response to the client.

        Args:
            status: the response's status.
            headers: headers of the response.
            body: the body.
            router_headers: header lines that the router adds.
        """
        self.status, self.first_byte_at = status, time.perf_counter()
        if self.tag:
            body = body.replace(self.tag, b"")
        self.bytes_sent = len(body)
        self._request.send_response(status, headers, body, router_headers)

    def start_comments(self, seconds: float, router_headers: bytes) -> None:
        """Send a comment every ``seconds``, until ``stop_comments`` is called.

        The client of a stream gets comments while it waits for the first token, so that no proxy on the way closes the
        connection. The first comment is sent together with the head of the response. So an error before the first
        comment has its own status, and a later error is an event of a stream with status 200. Until an instance's first
        byte is relayed, another attempt may still follow, because the client has received nothing from an instance.
        """
        loop = asyncio.get_running_loop()
        self._comment_timer = loop.call_later(seconds, self._send_comment, seconds, router_headers)

    def stop_comments(self) -> None:
        """Send no more comments, because the response begins or the request ends."""
        if self._comment_timer is not None:
            self._comment_timer.cancel()

    def _send_comment(self, seconds: float, router_headers: bytes) -> None:
        self.start_comments(seconds, router_headers)
        request = self._request
        if not request.response_started:
            self.status, self.is_event_stream = 200, True
            request.start_response(200, _UNHELD, router_headers)
        if request.is_ready:
            request.write_piece(_COMMENT)

    def end_with_refusal(self, status: int, body: bytes) -> None:
        """Send an instance's refusal as an event to a client that already has the head of an event stream."""
        self.error_code = "instance_refused"
        if self.tag:
            body = body.replace(self.tag, b"")
        value = load_object(body)
        if value is not None and value.get("error"):
            event = encode_error_event(orjson.dumps(value), self._request.path)
        else:
            message = body.decode(errors="replace")[:_QUOTED_CHARACTERS] or f"the instance answered with {status}"
            event = ApiError(status, message, self.error_code).error_event(self._request.path)
        self._request.finish_response(event)

    def send_rejection(self, refused: Refused, echo: Headers) -> None:
        """Send the response to a request that was not admitted.

        Args:
            refused: the refusal.
            echo: the header with the id that the client gave the request.
        """
        if self._request.response_started:
            self.end_with(refused.error, b"")
            return
        self.error_code = refused.error.code
        self.send(refused.error.status, _JSON + refused.headers + echo, refused.error.body(self._request.path), b"")

    def end_with(self, error: ApiError | None, router_headers: bytes) -> None:
        """End the response at any stage. If ``error`` is None, the client has disconnected and gets nothing."""
        request = self._request
        self.error_code = error.code if error else "client_left"
        if request.response_complete:
            return
        if error is None:
            self.status = CLIENT_LEFT
            request.cut_response()
        elif not request.response_started:
            self.send(error.status, _JSON, error.body(request.path), router_headers)
        elif self.is_event_stream:
            request.finish_response(error.sse(request.path) if self.first_byte_at else error.error_event(request.path))
        else:
            request.cut_response()  # the client notices that the body is shorter than its content-length

    def read_usage(self) -> Usage:
        """Return the token counts that the engine has reported at the end of its response."""
        return read_usage(self._before_last + self._last) or _NO_USAGE

    def read_cached_tokens(self) -> int | None:
        """Return the number of prompt tokens that prefill had cached for the first segment.

        Return None if the response has only one segment, or if prefill has not reported this number.
        """
        figures = self._cached_figures if self.is_resumed else None
        return int(figures[b"cached_tokens"]) if figures and b"cached_tokens" in figures else None

    def count_used_tokens(self, prompt_tokens: int) -> int:
        """Return the number of tokens that the request has used; 0 if it failed before its response began.

        Args:
            prompt_tokens: estimated number of prompt tokens, used if the engine does not report it.
        """
        has_failed = self.status >= 400 or (self.error_code and not self.first_byte_at)
        if has_failed and self.status != CLIENT_LEFT:
            return 0
        usage = self.read_usage()
        prompt, completion = _take_larger(self._largest, usage)
        # A response has its whole usage at its end. If it ended early, an earlier usage may be of one sequence of
        # several, or in a part of the request that the engine repeats.
        if self.error_code or (usage.prompt_tokens is None and not prompt):
            prompt = max(prompt, prompt_tokens)
        if (self.error_code or not usage.completion_tokens) and self.token_count is not None:
            completion = max(completion, self.token_count.tokens)
        return prompt + completion

    def _take_whole_events(self, data: bytes, is_end: bool) -> bytes:
        """Return the events that ``data`` completes, and hold the rest. At the end of the stream, return everything."""
        held = self._incomplete
        seen = len(held)
        held += data  # in place, because copying a long event for each of its pieces would block the router
        end = len(held) if is_end else _find_events_end(held, seen)
        events = bytes(held[:end])
        del held[:end]
        return events

    def _correct_usage(self, attempt: Attempt, data: bytes) -> bytes:
        """Replace the cached-token counts in a pair's response by those that prefill has reported.

        Decode reports everything that prefill has computed as cached. If there are several segments, the counts of the
        first segment's prefill instance are used.
        """
        if attempt.prefill is None:
            return data
        if self._cached_figures is None and attempt.prefill_answer:
            self._cached_figures = read_cached_figures(attempt.prefill_answer)
        return set_figures(data, self._cached_figures) if self._cached_figures else data

    def _finish_piece(self, attempt: Attempt, data: bytes) -> bytes:
        """Count a piece of the response, and return it as the client should get it."""
        if not data:
            return data
        self._before_last, self._last = self._last, data
        if self.token_count is not None:
            # A part of the request that the engine repeats may fill all pieces after the usage.
            self._largest = _take_larger(self._largest, self.read_usage())
        self.chunks += 1
        self.bytes_sent += len(data)
        if self.is_event_stream:
            if data.find(_CACHE_MARK) >= 0:
                data = self._correct_usage(attempt, data)
            if self.tag or self.hides_usage:
                data = self._hide_own_parts(data)
        return data

    def _hide_own_parts(self, events: bytes) -> bytes:
        """Return the events without parts that only the router has requested or added: a usage, and the suffix of the
        id.

        This is done only for events, because the head announces the length of other responses.
        """
        if self.hides_usage:
            events = self._hide_usage(events)
        return events.replace(self.tag, b"") if self.tag else events

    def _hide_usage(self, events: bytes) -> bytes:
        """Return the events without the usage, which the client did not request."""
        left = strip_usage(events, has_nulls=self.has_null_usages)
        self.bytes_sent -= len(events) - len(left)
        return left


def _take_larger(counts: tuple[int, int], usage: Usage) -> tuple[int, int]:
    return max(counts[0], usage.prompt_tokens or 0), max(counts[1], usage.completion_tokens or 0)


def _no_continuation(message: str) -> ApiError:
    return ApiError(502, message, "cannot_continue")


def _find_events_end(data: bytes | bytearray, seen: int = 0) -> int:
    """Return the end of the last complete server-sent event; 0 if there is none.

    Return the end of ``data`` if its only event is incomplete, but too long to be held.

    Args:
        data: events; the last event may be incomplete.
        seen: number of bytes at the beginning that are known to contain no complete event.
    """
    if data.endswith(_EVENT_ENDS):
        return len(data)
    start, end = max(0, seen - _LONGEST_END), 0
    for mark in _EVENT_ENDS:
        if (found := data.rfind(mark, start)) >= 0:
            end = max(end, found + len(mark))
    return len(data) if end == 0 and len(data) > EVENT_BYTES else end
