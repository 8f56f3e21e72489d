"""One attempt at a request: a prefill/decode pair, or a mixed instance alone; all its legs are monitored.

A leg is an exchange with one instance. The answering leg (decode, or mixed) is the one whose bytes the client gets. In
a pair, the dialect decides the order: either both legs are sent together, and prefill's response is consumed; or
decode's leg is sent after prefill has answered. Before the first byte of the response, a failure of either leg is a
failure of the attempt: the other leg is aborted, and the caller may try another pair. After it, prefill has done its
part, and the end of its connection no longer matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import re
import time
from collections.abc import Callable
from typing import Protocol, TypedDict

import orjson

from router.fleet import Instance
from router.http import Exchange, Headers, NoRoom, Receiver, Response, StaleConnection, TimedOut, UpstreamError
from router.serving.aborts import Aborter
from router.serving.reading.api import EngineIds

__all__ = ["REDIRECTIONS", "Attempt", "AttemptOwner", "Leg", "LegFailed", "Reached", "StreamStalled", "Trouble"]

_log = logging.getLogger("router.serving.attempt")

ERROR_BYTES = 1024 * 1024
# A refusal's body comes together with its head, or it is ignored.
REFUSAL_SECONDS = 2.0
PD_ERROR = "PD Error"
# If one leg of a pair is lost, the same request may have ended the other one: wait this long to find out.
OTHER_LEG_SECONDS = 0.05
# If prefill fails after decode began to answer: if decode has the prompt's KV, its next bytes come earlier than this.
SILENCE_SECONDS = 30.0
# For a short response, prefill's last bytes may come after decode's. After this time, prefill is aborted.
PREFILL_GRACE_SECONDS = 5.0
# For these statuses, a client would follow the Location. 300, 304 and 305 are answers.
REDIRECTIONS = frozenset({301, 302, 303, 307, 308})

_PD_ERROR = PD_ERROR.encode()
# Errors of FastDeploy and SGLang.
_HAND_OVER_ERROR = re.compile(rb"PD Error|(?:Prefill|Decode) (?:bootstrap|transfer|handshake) failed")
# Answers of vLLM after its engine has died: EngineDeadError, and those of older versions.
_ENGINE_DEATH = re.compile(
    rb"EngineCore encountered an issue|EngineDeadError|Background loop (?:has errored|is stopped)"
)
# A stream with a longer preamble is relayed directly. The preamble may contain the ids of the whole prompt.
PREAMBLE_BYTES = 1024 * 1024
# How much of the response of a prefill leg that is sent together with decode's is stored, of its beginning and of its
# end: enough for an error and for the token usage, which may come after the ids of a long prompt.
KEPT_BYTES = 64 * 1024
# Limit for an answer of one token.
ANSWER_BYTES = 16 * 1024 * 1024
# Beginnings of vLLM's streams before the first token: chat, responses, messages.
_PREAMBLE = re.compile(
    rb'"role": ?"assistant", ?"content": ?""|"type": ?"(?:response\.(?:created|in_progress)|message_start|ping)"'
)
# vLLM's error in a complete answer if prefill's KV did not arrive. Its other errors contain more text.
_LATE_ERROR = re.compile(rb'"message": ?"Internal server error"')
_ERROR = re.compile(rb'^ ?\{"(?:error": ?\{|type": ?"error")')
_EVENT_DATA = re.compile(rb"^data:(.*)$", re.MULTILINE)


class Reached(enum.Enum):
    """Progress of the request at its failure."""

    UNSENT = "unsent"
    """No instance has received it."""
    SENT = "sent"
    """It was sent, and no byte came back."""
    HEAD = "head"
    """The response has begun, and the client has seen nothing of it."""
    RELAYED = "relayed"
    """The client has seen a part of the response."""


class Trouble(enum.Enum):
    """Cause of a failure."""

    UNREACHABLE = "unreachable"
    """No connection was made, or a pair was not ready."""
    DEATH = "death"
    """The connection ended or did not carry HTTP, the instance stopped answering, or its engine reports its death."""
    ERROR = "error"
    """The instance refused it, temporarily or permanently, for a reason of its own: 429 or 5xx."""
    HAND_OVER = "hand-over"
    """The KV transfer between prefill and decode failed; it is unknown which of them is the cause."""
    REJECTION = "rejection"
    """The instance refused it because of the request: another status that is not a success."""
    STALL = "stall"
    """A stream is silent, although its instance is alive."""


class LegFailed(Exception):
    """A leg failed before the first byte of the response: with the instance's own ``response``, or without one."""

    def __init__(
        self,
        instance: Instance,
        message: str,
        response: Response | None = None,
        *,
        reached: Reached = Reached.HEAD,
        trouble: Trouble,
        is_stale: bool = False,
    ) -> None:
        """
        Args:
            is_stale: whether an idle connection ended when the request was sent on it: most likely it was already
                closed.
        """
        super().__init__(message)
        self.instance = instance
        self.response = response
        self.reached = reached
        self.trouble = trouble
        self.is_stale = is_stale


class StreamStalled(TimedOut):
    """A stream that had begun was silent for too long."""


class Leg:
    """A request at one instance. The instance's load includes it until ``finish``."""

    __slots__ = ("_tokens", "_work", "exchange", "instance", "is_finished", "queued_before", "span_id")

    def __init__(self, instance: Instance, exchange: Exchange, tokens: int, work: float, span_id: int = 0) -> None:
        """
        Args:
            tokens: number of prompt tokens.
            work: cost of its prefill, counted until ``end_prefill``.
            span_id: id of its span, if the request is traced.
        """
        self.instance = instance
        self.exchange = exchange
        self.is_finished = False
        self.span_id = span_id
        self.queued_before = instance.load.queued
        """Work that was queued at the instance before this leg."""
        self._tokens = tokens
        self._work = work
        instance.load.add_request(tokens, work)

    @property
    def runs_at_engine(self) -> bool:
        """Return whether the instance may still be working on it."""
        return self.exchange.record.sent_at > 0 and not self.exchange.complete

    def end_prefill(self) -> None:
        """Note that the first token has been generated."""
        self.instance.load.remove_prefill(self._tokens, self._work)
        self._tokens, self._work = 0, 0.0

    def finish(self) -> None:
        """Close the exchange and stop counting the request; a second call has no effect."""
        if not self.is_finished:
            self.is_finished = True
            self.instance.load.remove_request(self._tokens, self._work)
            if not self.exchange.complete:
                self.exchange.close()


class AttemptOwner(Receiver, Protocol):
    """The request that makes an attempt. When the response has begun, its exchange reports to the owner."""

    def on_begun(self, attempt: Attempt, first: bytes, is_end: bool) -> None:
        """Take the first bytes of the response; with ``is_end``, the whole. Raise nothing."""

    def on_not_begun(self, error: Exception) -> None:
        """Handle the failure of an attempt before the response has begun. Raise nothing.

        Args:
            error: ``LegFailed``; or ``NoRoom`` if a leg could not be sent, to any instance; or a fault of the router.
        """


class Attempt:
    """One attempt at a request.

    ``send`` sends the legs. When the response has begun, its owner gets the first bytes, and then the next ones from
    the answering leg's exchange. Until then, the attempt itself is the receiver of the leg that it waits for. The
    creator of an attempt calls ``finish`` after a complete response, and ``give_up`` or ``break_off`` otherwise. After
    the beginning, ``is_event_stream`` is whether the response is server-sent events.
    """

    __slots__ = (
        "_aborter",
        "_awaited",
        "_begun",
        "_chunks",
        "_hold_bytes",
        "_may_err_late",
        "_num_preamble",
        "_on_trouble",
        "_owner",
        "_prefill_end",
        "_refusal_timer",
        "_set_decode_request",
        "_size",
        "_timer",
        "_wanted",
        "answering",
        "deaths",
        "engine_ids",
        "is_event_stream",
        "prefill",
        "prefill_answer",
        "prefilled_at",
        "sent_at",
    )

    def __init__(
        self,
        answering: Leg,
        prefill: Leg | None,
        engine_ids: EngineIds | None,
        *,
        set_decode_request: Callable[[bytes], None] | None = None,
        may_err_late: bool = False,
        hold_bytes: int,
        aborter: Aborter,
        on_trouble: Callable[[Instance, Exception], None],
    ) -> None:
        """
        Args:
            engine_ids: names of the request's sequences at engines; None if it cannot be aborted by them.
            set_decode_request: sets the answering leg's request from prefill's answer; None if that leg has a request
                already, and both are sent together.
            may_err_late: whether decode reports missing prefill KV as its own error, which in a stream comes only after
                the beginning.
            hold_bytes: number of bytes of a response without event stream that are held back until it is complete, so
                that the death of a leg can still be hidden from the client.
        """
        self.answering = answering
        self.prefill = prefill
        self.engine_ids = engine_ids
        self.sent_at = 0.0
        self.deaths = 0
        """Number of its connections that were lost after the request was sent on them."""
        self.prefilled_at = 0.0
        """Time of the first token, from ``time.perf_counter``; 0 before it."""
        self.prefill_answer = b""
        """Prefill's response, once it is received; if it is long, only its beginning and its end."""
        self.is_event_stream = False
        self._set_decode_request = set_decode_request
        self._may_err_late = may_err_late
        self._awaited = answering if prefill is None or set_decode_request is None else prefill
        self._hold_bytes = hold_bytes
        self._aborter = aborter
        self._on_trouble = on_trouble
        self._owner: AttemptOwner | None = None  # until the response has begun, or the attempt has failed
        self._begun = False
        self._chunks: list[bytes] = []  # what was received from the awaited leg
        self._size = 0
        self._wanted = 0  # bytes that are needed of an incomplete response; 0 before its head
        self._num_preamble = 0  # bytes of whole lines of a stream's preamble
        self._timer: asyncio.TimerHandle | None = None
        self._refusal_timer: asyncio.TimerHandle | None = None
        self._prefill_end: asyncio.Future[None] | None = None

    def send(self, owner: AttemptOwner) -> None:
        """Send the legs now; if prefill comes first, the answering leg follows its answer."""
        self._owner = owner
        self.sent_at = time.perf_counter()
        if self.prefill is not None and self._set_decode_request is None:
            self.prefill.exchange.send(_PrefillReceiver(self))
        self._awaited.exchange.send(self)

    def on_data(self, data: bytes, is_end: bool) -> None:
        """Receive bytes from the awaited leg: prefill's if it comes first, else the answering one until it has
        begun.
        """
        try:
            self._collect(data, is_end)
        except Exception as exc:  # ``LegFailed``; or a fault of the router, which the owner logs
            self._report_failure(exc)

    def on_failed(self, error: Exception) -> None:
        """Handle the failure of the awaited leg."""
        if isinstance(error, UpstreamError) and not isinstance(error, NoRoom):
            error = self._make_failure(self._awaited, error)
        self._report_failure(error)

    def on_instance_failure(self, instance: Instance, silence: float) -> None:
        """Fail if ``instance``, which answers no probes, works on this attempt and has been silent for ``silence``
        seconds.
        """
        leg = self.answering if self.answering.instance is instance else self.prefill
        if leg is None or leg.is_finished or leg.instance is not instance:
            return
        message = f"{instance.key} stopped answering: {instance.trouble}"
        if not self._begun:
            self._awaited.exchange.fail(LegFailed(instance, message, **_judge(leg)))
        elif leg is self.answering and time.perf_counter() - leg.exchange.last_heard > silence:
            leg.exchange.fail(TimedOut(message))

    def is_stalled(self, since: float) -> bool:
        """Return whether its event stream has begun, and nothing has arrived since this time of
        ``time.perf_counter``.
        """
        leg = self.answering
        return self._begun and self.is_event_stream and not leg.is_finished and leg.exchange.is_silent(since)

    def on_stall(self, seconds: float) -> None:
        """Fail the answering leg: the stream was silent for this time."""
        message = f"{self.answering.instance.key} has sent nothing of the stream for {seconds:g} s"
        self.answering.exchange.fail(StreamStalled(message))

    def finish(self) -> None:
        """Finish after the client got the whole response. Prefill gets some time to end its own."""
        self.answering.finish()
        if self._timer is not None:
            self._timer.cancel()
        prefill = self.prefill
        if prefill is not None and not prefill.is_finished:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PREFILL_GRACE_SECONDS, self.give_up)

    def break_off(self, error: UpstreamError) -> None:
        """End the other leg: the answering leg failed in the middle of the response."""
        instance = self.answering.instance
        self._on_trouble(instance, error)
        instance.record_failure(time.monotonic(), str(error))
        self.give_up(culprit=instance)

    def give_up(self, culprit: Instance | None = None) -> None:
        """Close all legs immediately, and abort those that still run at their engines, except at the ``culprit``."""
        self._owner = None
        for timer in (self._timer, self._refusal_timer):
            if timer is not None:
                timer.cancel()
        legs = [leg for leg in (self.answering, self.prefill) if leg is not None and not leg.is_finished]
        running = [leg.instance for leg in legs if leg.runs_at_engine]
        for leg in legs:
            leg.finish()
        for instance in running:
            if instance is not culprit and self.engine_ids is not None:
                self._aborter.abort_soon(instance, self.engine_ids.list_ids())

    async def await_prefill_end(self) -> None:
        """After the loss of the answering leg, wait briefly whether prefill's leg is lost, too, so that ``deaths``
        includes it.
        """
        prefill = self.prefill
        if prefill is not None and not prefill.is_finished and prefill.runs_at_engine:
            self._prefill_end = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._prefill_end}, timeout=OTHER_LEG_SECONDS)

    def on_prefill_end(self, answer: bytes, error: Exception | None) -> None:
        """Handle the end or the failure of prefill's response, if both legs were sent together; a failure is passed on
        to the answering leg.
        """
        leg = self.prefill
        assert leg is not None
        self.prefill_answer = answer
        failure = self._find_prefill_failure(leg, error)
        leg.finish()
        if self._timer is not None:
            self._timer.cancel()
        if self._prefill_end is not None and not self._prefill_end.done():
            self._prefill_end.set_result(None)
        if failure is None:
            self.prefilled_at = time.perf_counter()
            if leg.instance.breaker.failures:
                leg.instance.record_success(time.monotonic())
        elif isinstance(failure, LegFailed) and failure.trouble is Trouble.DEATH and not self._begun:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(OTHER_LEG_SECONDS, self._on_prefill_failed, failure)
        else:
            self._on_prefill_failed(failure)

    def _collect(self, data: bytes, is_end: bool) -> None:
        """Store bytes of the awaited leg, and take the next step when there are enough."""
        leg = self._awaited
        exchange = leg.exchange
        self._chunks.append(data)
        self._size += len(data)
        is_refusal = not 200 <= exchange.status < 300
        if not self._wanted:
            self._wanted = self._count_wanted(leg, is_refusal, is_end)
        if not is_end and self._size < self._wanted:
            return
        body = data if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks, self._size = [], 0
        if is_refusal:
            failure = _make_refusal(leg, body)
            # This is the only error of vLLM's decode if it cannot get prefill's KV.
            if leg is self.answering and self._may_err_late and _tells_late_error(failure.response):
                failure.trouble = Trouble.HAND_OVER
            self._report_failure(failure)
        elif leg is self.prefill:
            self._send_decode(leg, body)
        elif not self._may_err_late or not self.is_event_stream or self._has_token(body, is_end):
            self._begin(body, is_end)
        else:
            self._chunks.append(body)

    def _count_wanted(self, leg: Leg, is_refusal: bool, is_end: bool) -> int:
        """Return how many bytes of an incomplete response are needed for the next step, as its head shows."""
        if is_refusal:
            if not is_end:
                loop, status = asyncio.get_running_loop(), leg.exchange.status
                late = f"{leg.instance.key} answered with {status}, and no more within {REFUSAL_SECONDS:g} s"
                self._refusal_timer = loop.call_later(REFUSAL_SECONDS, leg.exchange.fail, TimedOut(late))
            return ERROR_BYTES
        if leg is self.prefill:
            return ANSWER_BYTES
        self.is_event_stream = _is_event_stream(leg.exchange.headers)
        return 1 if self.is_event_stream else max(1, self._hold_bytes)

    def _send_decode(self, leg: Leg, answer: bytes) -> None:
        """Send the answering leg after prefill has answered."""
        self.prefill_answer = answer
        leg.finish()
        self.prefilled_at = time.perf_counter()
        if leg.instance.breaker.failures:
            leg.instance.record_success(time.monotonic())
        self._awaited, self._wanted = self.answering, 0
        assert self._set_decode_request is not None
        self._set_decode_request(answer)
        self.answering.exchange.send(self)

    def _has_token(self, data: bytes, is_end: bool) -> bool:
        """Return whether a stream has begun for its client: whether more follows its preamble.

        Raises:
            LegFailed: the stream contains an error instead.
        """
        # ``data[:self._num_preamble]`` is whole lines of the preamble: only the bytes after them are examined.
        event = _find_token(data, self._num_preamble)
        if event is None and not is_end and len(data) <= PREAMBLE_BYTES:
            self._num_preamble = max(data.rfind(b"\n", self._num_preamble) + 1, self._num_preamble)
            return False
        if event is not None and _ERROR.search(event):
            message = f"{self.answering.instance.key} has an error instead of an answer: {event.decode()[:500]}"
            raise LegFailed(self.answering.instance, message, trouble=Trouble.HAND_OVER)
        return True

    def _begin(self, first: bytes, is_end: bool) -> None:
        """Pass the beginning of the response to the owner, which is the receiver of the rest."""
        answering = self.answering
        self._begun = True
        if answering.instance.breaker.failures:
            answering.instance.record_success(time.monotonic())
        if self.prefill is None:
            self.prefilled_at = time.perf_counter() if self.is_event_stream else 0.0
            answering.end_prefill()
        owner, self._owner = self._owner, None
        assert owner is not None
        if not is_end:
            answering.exchange.receiver = owner
        owner.on_begun(self, first, is_end)

    def _report_failure(self, error: Exception) -> None:
        """Report to the owner that the attempt has failed, once."""
        owner, self._owner = self._owner, None
        if self._refusal_timer is not None:
            self._refusal_timer.cancel()
        self._awaited.exchange.receiver = None
        if owner is not None:
            owner.on_not_begun(error.with_traceback(None))  # its traceback would form a reference cycle

    def _on_prefill_failed(self, failure: LegFailed | NoRoom) -> None:
        if not self._begun:
            self.answering.exchange.fail(failure)
            return
        _log.info("prefill failed after decode had begun to answer: %s", failure)
        heard, loop = self.answering.exchange.last_heard, asyncio.get_running_loop()
        self._timer = loop.call_later(SILENCE_SECONDS, self._fail_if_silent, heard, str(failure))

    def _fail_if_silent(self, since: float, why: str) -> None:
        """End decode's leg if nothing has arrived from it: its first bytes did not prove that it had the prompt's
        KV.
        """
        exchange = self.answering.exchange
        if not self.answering.is_finished and exchange.last_heard == since:
            decode = self.answering.instance.key
            exchange.fail(TimedOut(f"{decode} has sent nothing for {SILENCE_SECONDS:g} s, since prefill failed: {why}"))

    def _find_prefill_failure(self, leg: Leg, error: Exception | None) -> LegFailed | NoRoom | None:
        if isinstance(error, NoRoom):
            return error
        if isinstance(error, UpstreamError):
            return self._make_failure(leg, error)
        body = self.prefill_answer
        if not 200 <= leg.exchange.status < 300:
            return _make_refusal(leg, body)
        # FastDeploy's prefill reports this only to its own client, in a response with status 200.
        if body.find(_PD_ERROR) >= 0 and _tells_pd_error(body):
            message = f"{leg.instance.key} could not hand over to decode"
            return LegFailed(leg.instance, message, trouble=Trouble.HAND_OVER)
        return None

    def _make_failure(self, leg: Leg, error: UpstreamError) -> LegFailed:
        self._on_trouble(leg.instance, error)
        failure = LegFailed(leg.instance, str(error), **_judge(leg), is_stale=isinstance(error, StaleConnection))
        failure.__cause__ = error
        self.deaths += failure.trouble is Trouble.DEATH
        return failure


class _PrefillReceiver:
    """Receiver of prefill's response if both legs were sent together: stores its beginning and its end."""

    __slots__ = ("_attempt", "_chunks", "_size")

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._chunks: list[bytes] = []
        self._size = 0

    def on_data(self, data: bytes, is_end: bool) -> None:
        """See ``Receiver``."""
        self._chunks.append(data)
        self._size += len(data)
        if self._size > 4 * KEPT_BYTES:  # not at every piece
            body = b"".join(self._chunks)
            self._chunks, self._size = [body[:KEPT_BYTES], body[-KEPT_BYTES:]], 2 * KEPT_BYTES
        if is_end:
            self._attempt.on_prefill_end(b"".join(self._chunks), None)

    def on_failed(self, error: Exception) -> None:
        """See ``Receiver``."""
        self._attempt.on_prefill_end(b"".join(self._chunks), error)


class _Judgement(TypedDict):
    reached: Reached
    trouble: Trouble


def _judge(leg: Leg) -> _Judgement:
    """Classify a leg that ended without a complete response: how far its request got, and whether the instance is the
    cause.
    """
    if not leg.exchange.record.sent_at:
        return {"reached": Reached.UNSENT, "trouble": Trouble.UNREACHABLE}
    return {"reached": Reached.HEAD if leg.exchange.status else Reached.SENT, "trouble": Trouble.DEATH}


def _is_event_stream(headers: Headers) -> bool:
    """Return whether the response is server-sent events, and not compressed."""
    found = dict(headers)
    return found.get(b"content-type", b"").startswith(b"text/event-stream") and b"content-encoding" not in found


def _find_token(data: bytes, start: int) -> bytes | None:
    """Return the first event from ``start`` that is not part of a stream's preamble; None if there is none yet."""
    events = (found[1] for found in _EVENT_DATA.finditer(data, start))
    return next((event for event in events if not _PREAMBLE.search(event)), None)


def _tells_pd_error(body: bytes) -> bool:
    """Return whether a response, or one of its events, is a KV transfer error. Text of users and models may mention
    one, too.
    """
    for document in (body, *_EVENT_DATA.findall(body)):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(document)
            if isinstance(value, dict) and PD_ERROR in str(value.get("error")):
                return True
    return False


def _tells_late_error(response: Response | None) -> bool:
    return response is not None and response.status >= 500 and _LATE_ERROR.search(response.body) is not None


def _make_refusal(leg: Leg, body: bytes) -> LegFailed:
    response = Response(leg.exchange.status, leg.exchange.headers, body)
    message = f"{leg.instance.key} answered with {response.status}"
    trouble = Trouble.REJECTION
    if response.status in REDIRECTIONS:
        message += ", a redirection, which the router neither follows nor passes on"
    elif response.status >= 500:
        trouble = Trouble.ERROR
        if _HAND_OVER_ERROR.search(body):
            trouble = Trouble.HAND_OVER
        elif _ENGINE_DEATH.search(body):
            trouble = Trouble.DEATH
    elif response.status == 429:
        trouble = Trouble.ERROR
    return LegFailed(leg.instance, message, response, trouble=trouble)
