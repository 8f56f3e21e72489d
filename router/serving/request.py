"""One client's request on its way: what is known of it, what it has tried, and how its answer gets to the client."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection, Sequence

from router.fleet import Role
from router.http.api_error import ApiError, Refused
from router.http.body import BadBody, InferenceBody, encode_member, estimate_tokens, parse_inference, splice
from router.http.errors import UpstreamError
from router.http.message import Headers, PreparedHead, prepare_head
from router.http.server import ClientRequest
from router.http.usage import Usage, read_usage
from router.policies import RequestFeatures, request_features
from router.serving.attempt import Attempt, LegFailed
from router.serving.resume import AnswerStitcher, StreamStitcher
from router.serving.selection import Selection
from router.telemetry import AttemptRecord, RequestRecord

__all__ = ["Journey", "Over"]

CLIENT_LEFT = 499
# Before the second attempt after a failure that another instance may share, and doubled before each further one.
BACK_OFF_SECONDS = 0.05
# An answer that is no event stream is held up to here until it is whole, so that a leg dying half-way can be made good;
# one that may have to be continued by another leg, up to there. What is no completion is relayed as it comes.
HELD_BYTES = 1024 * 1024
STITCHED_BYTES = 64 * 1024 * 1024
# Longer ids are not taken: they are kept in memory, and sent back in a header.
MOST_ID_CHARACTERS = 256
# An event longer than this is not waited for, but relayed in pieces. The first may carry the ids of the whole prompt.
EVENT_BYTES = 16 * 1024 * 1024

# Engines name a request's sequences <prefix><request_id>_<number>.
_ID_PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}

_HOP_BY_HOP = frozenset(
    name.encode()
    for name in (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_NOT_FORWARDED_WITH_COMPLETIONS = _NOT_FORWARDED | {b"accept-encoding"}  # the router reads their answers
_JSON = [(b"content-type", b"application/json")]
_NO_FEATURES = RequestFeatures(0)


class Over(Exception):
    """The journey ends now: with an error for the client, or with nothing because the client left."""

    def __init__(self, error: ApiError | None) -> None:
        super().__init__(error.message if error else "the client left")
        self.error = error


class Journey:
    """A request from its arrival to the end of its answer. What ends it early comes through ``fail``."""

    __slots__ = (
        "_attempts",
        "_before_last",
        "_failures",
        "_is_event_stream",
        "_last",
        "_request",
        "aborted",
        "attempt",
        "avoided",
        "body",
        "client",
        "excluded",
        "features",
        "gone_stale",
        "head",
        "over",
        "preemptions",
        "queueing",
        "record",
        "selection",
        "started",
        "stitcher",
    )

    head: PreparedHead

    def __init__(self, request: ClientRequest) -> None:
        self.started = time.perf_counter()
        self.record = RequestRecord(request.method, request.path, time.time(), status=CLIENT_LEFT)
        self.client: str | None = None
        """Who asks, once admitted."""
        self.queueing: asyncio.Task[object] | None = None
        """The task that waits in the line, while it does."""
        self.body: InferenceBody | None = None
        self.features = _NO_FEATURES
        self.excluded: set[str] = set()
        self.avoided: set[str] = set()
        self.gone_stale: set[str] = set()
        self.attempt: Attempt | None = None
        self.selection: Selection | None = None
        self.stitcher: StreamStitcher | AnswerStitcher | None = None
        self.preemptions = 0
        self.over: Over | None = None
        self.aborted = False
        """A client has told its engines to stop it: an attempt that fails now is the last."""
        self._request = request
        self._is_event_stream = False
        self._attempts = self._failures = 0
        # The last two pieces that the client got, in which the usage stands.
        self._before_last = self._last = b""

    @property
    def request_headers(self) -> Headers:
        """As the client sent them, names in lower case."""
        return self._request.headers

    def fail(self, over: Over) -> None:
        """End the journey: whoever works on it gets ``over``."""
        if self.over is None:
            self.over = over
            if self.attempt is not None:
                self.attempt.fail(over)
            if self.queueing is not None:
                self.queueing.cancel()
            self._request.unblock()

    def client_left(self) -> None:
        """End the journey: nobody waits for the answer."""
        self.fail(Over(None))

    def watch_client(self) -> None:
        """End the journey when the client leaves.

        Raises:
            Over: it has left.
        """
        if self._request.disconnected:
            raise Over(None)
        self._request.on_leave = self.client_left

    def read_request(self) -> None:
        """Parse the body if the request is a completion.

        Raises:
            Over: it cannot be served, or the client left.
        """
        request, record = self._request, self.record
        self.watch_client()
        for name, value in request.headers:
            if name == b"traceparent":
                record.trace_id = value[3:35].decode("latin-1")
        prefix = _ID_PREFIXES.get(record.path)
        if prefix is None:
            self.features = RequestFeatures(estimate_tokens(request.body))
        elif record.method != "POST":
            raise Over(ApiError(405, f"{record.path} takes POST, not {record.method}", "method_not_allowed"))
        else:
            try:
                self.body = body = parse_inference(request.body)
            except BadBody as exc:
                raise Over(ApiError(400, str(exc), "invalid_body", exc.param)) from None
            if len(body.request_id or "") > MOST_ID_CHARACTERS:
                message = f"request_id is longer than the {MOST_ID_CHARACTERS} characters this router takes"
                raise Over(ApiError(400, message, "invalid_body", "request_id"))
            self.features = request_features(body.members, body.prompt_tokens, request.headers)
            record.request_id = body.request_id or _new_request_id()
        dropped = _NOT_FORWARDED if self.body is None else _NOT_FORWARDED_WITH_COMPLETIONS
        self.head = prepare_head(record.method, request.target, _end_to_end(request.headers, dropped))

    def expect_preemption(self) -> None:
        """The request goes to a pair: its decode instance may put it down half-way."""
        if self.body is not None and self.stitcher is None:
            self.stitcher = StreamStitcher(self.body) if self.body.members.get("stream") else AnswerStitcher(self.body)

    def next_attempt(self, info: bytes) -> tuple[bytes, list[str]]:
        """The body to send to instances, and the ids that their engines will give the request's sequences.

        Each attempt has a request id of its own, because an engine may still know the one before. A request that
        is no completion is sent as it is.

        Args:
            info: the encoded member ``disaggregate_info``; empty for an instance alone.
        """
        body, record = self.body, self.record
        self._attempts += 1
        if body is None:
            return self._request.body, []
        number = self._attempts - 1
        request_id = f"{record.request_id}-retry{number}" if number else record.request_id
        added = {"request_id": encode_member("request_id", request_id)}
        if info:
            added["disaggregate_info"] = info
        if isinstance(self.stitcher, StreamStitcher) and not body.members.get("return_token_ids"):
            added["return_token_ids"] = b'"return_token_ids":true'
        if self.preemptions and self.stitcher is not None:
            resumption = self.stitcher.resumption() or {}
            added |= {name: encode_member(name, value) for name, value in resumption.items()}
        return splice(body, added), self._engine_ids(request_id)

    def abort(self, asked: Collection[str] | None) -> Sequence[str]:
        """If who asks for these ids, or for all, means this request: try it no more, and answer its engines' ids."""
        if self.body is None or self.attempt is None:
            return ()
        sent = self.record.request_id
        known = {sent, *self._engine_ids(sent), *(each.rpartition("_")[0] for each in self._engine_ids(sent))}
        if asked is not None and known.isdisjoint(asked):
            return ()
        self.aborted = True
        return self.attempt.engine_ids

    def _engine_ids(self, request_id: str) -> list[str]:
        assert self.body is not None
        prefix = _ID_PREFIXES[self.record.path]
        full_id = request_id if request_id.startswith(prefix) else prefix + request_id
        return [f"{full_id}_{i}" for i in range(self.body.choices)]

    @property
    def hold_bytes(self) -> int:
        """How much of an answer that is no event stream must be there before it is relayed."""
        if self.body is None:
            return 0
        return STITCHED_BYTES if isinstance(self.stitcher, AnswerStitcher) else HELD_BYTES

    def attempt_ended(self, how: str) -> None:
        """Keep the reasons of the attempt that has just ended, and how it ended."""
        decisions = self.selection.decisions if self.selection else ()
        self.record.attempts.append(AttemptRecord(decisions, how))

    async def back_off(self, failure: LegFailed) -> None:
        """Note which instances the next attempt should not use, and give the others a moment."""
        key, selection = failure.instance.key, self.selection
        if failure.stale and key not in self.gone_stale:
            self.gone_stale.add(key)
            return
        if failure.in_hand_over and selection is not None and selection.prefill is not None:
            self.avoided |= {selection.prefill.key, selection.answering.key}
        else:
            self.excluded.add(key)
        self._failures += 1
        if self._failures > 1:
            await asyncio.sleep(BACK_OFF_SECONDS * 2 ** (self._failures - 2) * random.uniform(0.5, 1.0))

    async def relay(self, first: bytes) -> bool:
        """Send the answer's bytes to the client as they come; a slow client slows the instance down.

        Of an event stream, only whole events are sent, so that it can always be ended with an error event.

        Returns:
            False if the instance put the request down half-way, and another leg is to go on with it.
        """
        attempt = self.attempt
        assert attempt is not None
        if not attempt.is_event_stream:
            answering = attempt.answering
            if self._request.response_started:
                raise Over(_no_continuation(f"{answering.instance.key} did not go on with the stream"))
            if answering.exchange.ended:
                return self._relay_whole(attempt, first)
            if isinstance(self.stitcher, AnswerStitcher):
                message = f"the answer of {answering.instance.key} is larger than {STITCHED_BYTES} bytes"
                raise Over(_no_continuation(message))
        try:
            return await self._relay_pieces(attempt, first)
        except UpstreamError as exc:
            attempt.give_up(culprit=attempt.answering.instance)
            role = attempt.answering.instance.role.value
            self.attempt_ended(f"broke off: {exc}")
            error = ApiError(502, f"{role} instance failed in the middle of its answer: {exc}", f"{role}_failed")
            raise Over(error) from exc

    def _relay_whole(self, attempt: Attempt, answer: bytes) -> bool:
        exchange = attempt.answering.exchange
        if isinstance(self.stitcher, AnswerStitcher):
            stitched = self.stitcher.feed(exchange.status, answer)
            if stitched is None:
                attempt.finish()
                return False
            answer = stitched
        self._last = answer
        self.respond(exchange.status, _end_to_end(exchange.headers, _HOP_BY_HOP), answer)
        attempt.finish()
        return True

    async def _relay_pieces(self, attempt: Attempt, first: bytes) -> bool:
        request, exchange = self._request, attempt.answering.exchange
        stitcher = self.stitcher if isinstance(self.stitcher, StreamStitcher) else None
        self._is_event_stream = self.record.streamed = attempt.is_event_stream
        if not request.response_started:
            self._start(exchange.status, _end_to_end(exchange.headers, _HOP_BY_HOP))
        data, held = first, b""
        while True:
            ended = exchange.ended
            if self._is_event_stream and not ended:
                data, held = _whole_events(held + data if held else data)
            elif held:
                data, held = held + data, b""
            if data:
                if stitcher is not None:
                    data = stitcher.feed(data)
                self._note_piece(data)
                if stitcher is not None and stitcher.preempted:
                    attempt.finish()
                    await request.send(data)
                    return False
            if ended:
                break
            if data:
                await request.send(data)
            data = await attempt.more(None if held else self._pass_on)
        request.finish(data)
        attempt.finish()
        return True

    def _pass_on(self, data: bytes) -> bool:
        """Send on a piece in the middle of the answer as it comes; False where ``_relay_pieces`` must look at it."""
        stitcher, sent = self.stitcher, data
        if not self._request.is_ready or (self._is_event_stream and not data.endswith(_EVENT_ENDS)):
            return False
        if isinstance(stitcher, StreamStitcher):
            if stitcher.must_parse(data):
                return False
            sent = stitcher.feed(data)
        self._note_piece(sent)
        self._request.send_now(sent)
        return True

    def _note_piece(self, sent: bytes) -> None:
        if sent:
            self._before_last, self._last = self._last, sent
            self.record.chunks += 1
            self.record.bytes_sent += len(sent)

    def finish_locally(self) -> None:
        """Give the client the end of an answer whose last leg was put down when nothing was left to generate."""
        assert self.stitcher is not None
        end = self.stitcher.finish_locally()
        self._before_last, self._last = self._last, end
        if self._request.response_started:
            self._request.finish(end)
        elif isinstance(self.stitcher, StreamStitcher):
            self.respond(200, [(b"content-type", b"text/event-stream")], end)
        else:
            self.respond(200, _JSON, end)

    def refuse(self, failure: LegFailed) -> None:
        """Answer with the failure of the last attempt: the instance's own answer, unless prefill broke down."""
        answer, role = failure.answer, failure.instance.role
        own = answer is not None and (answer.status < 500 or role is not Role.PREFILL)
        if answer is not None and own and not self._request.response_started:
            self.respond(answer.status, _end_to_end(answer.headers, _HOP_BY_HOP), answer.body)
        else:
            message = f"{role.value} instance failed: {failure}; no other {role.value} instance could take the request"
            raise Over(ApiError(502, message, f"{role.value}_failed"))

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        self._note_start(status)
        self.record.bytes_sent = len(body)
        self._request.respond(status, headers + self._own_headers(), body)

    def turn_away(self, refused: Refused) -> None:
        """Answer a request that was not let in."""
        self.record.error = refused.error.code
        self.respond(refused.error.status, _JSON + refused.headers, refused.error.body())

    def end_with(self, error: ApiError | None) -> None:
        """End the journey for the client, whatever it has got so far; and the attempt, if one still runs."""
        if self.attempt is not None:
            self.attempt.give_up()
        self.record.error = error.code if error else "client_left"
        if self._attempts > len(self.record.attempts):
            self.attempt_ended(error.message if error else "the client left")
        request = self._request
        if request.response_complete:
            return
        if error is None:
            request.cut()
        elif not request.response_started:
            self.respond(error.status, _JSON, error.body())
        elif self._is_event_stream:
            request.finish(error.sse())
        else:
            request.cut()  # the answer stays short of its announced length

    def usage(self) -> Usage:
        """What the engine said of tokens, in its answer's end."""
        return read_usage(self._last) or read_usage(self._before_last) or _NO_USAGE

    def _start(self, status: int, headers: Headers) -> None:
        self._note_start(status)
        self._request.start(status, headers + self._own_headers())

    def _note_start(self, status: int) -> None:
        record = self.record
        record.status = status
        record.first_byte_ms = (time.perf_counter() - self.started) * 1e3

    def _own_headers(self) -> Headers:
        """Who served the request, and why; the whole story is at /admin/explain."""
        headers = []
        if self.record.request_id:
            # A client's own id may hold any printable character.
            headers.append((b"x-router-request-id", self.record.request_id.encode("ascii", "backslashreplace")))
        selection = self.selection
        if selection is not None:
            decision = selection.decisions[0]
            for instance in (selection.prefill, selection.answering):
                if instance is not None:
                    headers.append((_INSTANCE_HEADERS[instance.role], instance.key.encode()))
            reason = f"{decision.reasons.get('policy', '')}; cached={decision.cached_tokens}"
            headers.append((b"x-router-decision", reason.encode()))
        return headers


_NO_USAGE = Usage()
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_INSTANCE_HEADERS = {role: f"x-router-{role.value}".encode() for role in Role}


def _no_continuation(message: str) -> ApiError:
    return ApiError(502, message, "cannot_continue")


def _new_request_id() -> str:
    """A random UUID of version 4; not from ``uuid``, which asks the kernel for each."""
    text = f"{random.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def _end_to_end(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """The headers that are for the other end, not for this hop."""
    named = [value for name, value in headers if name == b"connection"]
    if named:
        dropped = dropped | {name.strip().lower() for value in named for name in value.split(b",")}
    return [header for header in headers if header[0] not in dropped]


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Split server-sent events after the last whole one."""
    if data.endswith(_EVENT_ENDS):
        return data, b""
    end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
    if end == 0 and len(data) > EVENT_BYTES:
        return data, b""
    return data[:end], data[end:]
