"""One attempt of a request, at a pair of a prefill and a decode instance, or at one mixed instance.

A leg is an exchange with one instance. The client gets the bytes of the answering leg, which is the leg at the decode
or the mixed instance. In a pair, the dialect decides the order. Either both legs are sent together, and the router
reads prefill's response only for errors and usage. Or decode's leg is sent after prefill has responded.

If a leg fails before the first byte of the response, the attempt fails: the other leg is aborted, and another attempt
may follow. After the first byte, prefill has done its work, and the end of its connection has no effect.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import re
import time
from collections.abc import Callable
from typing import Protocol, TypedDict

from kvcommon.json_objects import load_object
from router.fleet import Instance
from router.http import (
    Exchange,
    Headers,
    NoRoom,
    Receiver,
    Response,
    StaleConnection,
    TimedOut,
    UpstreamError,
)
from router.serving.aborts import Aborter
from router.serving.reading.api import EngineIds

__all__ = ["REDIRECTIONS", "Attempt", "AttemptOwner", "Leg", "LegFailed", "Reached", "StreamStalled", "Trouble"]

_log = logging.getLogger("router.serving.attempt")

ERROR_BYTES = 1024 * 1024
# The body of a refusal must arrive within this time after its head.
REFUSAL_SECONDS = 2.0
PD_ERROR = "PD Error"
# After the loss of one leg of a pair, the attempt waits for this time whether the other leg is lost, too, because the
# request may have killed both instances.
OTHER_LEG_SECONDS = 0.05
# If prefill fails after decode's response has begun, and decode then sends nothing for this time, decode does not have
# the prompt's KV.
SILENCE_SECONDS = 30.0
# Prefill's response may end this long after decode's. Then prefill is aborted.
PREFILL_GRACE_SECONDS = 5.0
# Statuses for which a client would follow the header Location. 300, 304 and 305 are ordinary responses.
REDIRECTIONS = frozenset({301, 302, 303, 307, 308})

_PD_ERROR = PD_ERROR.encode()
# Errors of FastDeploy and SGLang about the KV transfer of a pair.
_HAND_OVER_ERROR = re.compile(rb"PD Error|(?:Prefill|Decode) (?:bootstrap|transfer|handshake) failed")
# Errors of vLLM after its engine has died: EngineDeadError, and those of older versions.
_ENGINE_DEATH = re.compile(
    rb"EngineCore encountered an issue|EngineDeadError|Background loop (?:has errored|is stopped)"
)
# Errors of FastDeploy's API server about the content of a request.
_CONTENT_ERROR = re.compile(rb'"type": ?"invalid_request(?:_error)?"|"code": ?"model_not_support"')
# An error of FastDeploy that has the same type, but is about the instance: its weights were cleared during the request.
_CLEARED_ERROR = b'"Model weight cleared"'
# Maximum size of a stream's preamble, the events before the first token. A stream with a longer one is relayed
# directly. The preamble may contain the ids of the whole prompt.
PREAMBLE_BYTES = 1024 * 1024
# If both legs are sent together, this many bytes of prefill's response are stored at its beginning and at its end. This
# is enough for an error and for the token usage, which may come after the ids of a long prompt.
KEPT_BYTES = 64 * 1024
# Limit for the response of a prefill leg that is sent first.
ANSWER_BYTES = 16 * 1024 * 1024
# Events of vLLM's streams before the first token: chat, responses, messages.
_PREAMBLE = re.compile(
    rb'"role": ?"assistant", ?"content": ?""|"type": ?"(?:response\.(?:created|in_progress)|message_start|ping)"'
)
# vLLM's error in a complete response if prefill's KV did not arrive. Its other errors contain more text.
_LATE_ERROR = re.compile(rb'"message": ?"Internal server error"')
_ERROR = re.compile(rb'^ ?\{"(?:error": ?\{|type": ?"error")')
_EVENT_DATA = re.compile(rb"^data:(.*)$", re.MULTILINE)


class Reached(enum.Enum):
    """The stage that a request had reached when it failed."""

    UNSENT = "unsent"
    """No instance has received the request."""
    SENT = "sent"
    """The request was sent, and no byte of a response has arrived."""
    HEAD = "head"
    """The response has begun, and the client has received nothing of it."""
    RELAYED = "relayed"
    """The client has received a part of the response."""


class Trouble(enum.Enum):
    """The cause of the failure of a leg."""

    UNREACHABLE = "unreachable"
    """The router could not connect, or a pair was not ready."""
    DEATH = "death"
    """The connection was lost, the instance stopped responding, or it reports that its engine has died."""
    ERROR = "error"
    """The instance refused the request for a reason that is not in the request: status 429 or 5xx."""
    HAND_OVER = "hand-over"
    """The KV transfer between prefill and decode failed. Either instance may be the cause."""
    REJECTION = "rejection"
    """The instance refused the request because of its content.

    This is any other status that is not a success. From FastDeploy, it is 500 with the type ``invalid_request_error``.
    """
    STALL = "stall"
    """A stream sends no data, although its instance is alive."""


class LegFailed(Exception):
    """A leg failed before the first byte of the response. ``response`` is the instance's error response, or None."""

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
            instance: the instance of the leg.
            message: the failure in one sentence.
            response: the instance's own error response, if it sent one.
            reached: how far the request had got.
            trouble: the cause of the failure.
            is_stale: whether the leg used an idle connection that the instance had probably closed before.
        """
        super().__init__(message)
        self.instance = instance
        self.response = response
        self.reached = reached
        self.trouble = trouble
        self.is_stale = is_stale


class StreamStalled(TimedOut):
    """An instance sent no data of a running stream for too long."""


class Leg:
    """A request at one instance. The instance's load includes the request until ``finish``."""

    __slots__ = ("_tokens", "_work", "exchange", "instance", "is_finished", "queued_before", "span_id")

    def __init__(self, instance: Instance, exchange: Exchange, tokens: int, work: float, span_id: int = 0) -> None:
        """
        Args:
            instance: the instance.
            exchange: the exchange with the instance.
            tokens: number of prompt tokens.
            work: cost of the prefill. The instance's load includes it until ``end_prefill``.
            span_id: id of the leg's span; 0 if the request is not traced.
        """
        self.instance = instance
        self.exchange = exchange
        self.is_finished = False
        self.span_id = span_id
        self.queued_before = instance.load.queued
        """``InstanceLoad.queued`` of the instance before this leg was added."""
        self._tokens = tokens
        self._work = work
        instance.load.add_request(tokens, work)

    @property
    def runs_at_engine(self) -> bool:
        """Return whether the instance may still be processing the request of this leg."""
        return self.exchange.record.sent_at > 0 and not self.exchange.complete

    def move(self, instance: Instance) -> None:
        """Move the request to the load of ``instance``, because a gateway has sent it there instead."""
        self.instance.load.remove_request(self._tokens, self._work)
        self.instance, self.queued_before = instance, instance.load.queued
        instance.load.add_request(self._tokens, self._work)

    def end_prefill(self) -> None:
        """Remove the prompt from the instance's load, because the first token was generated."""
        self.instance.load.remove_prefill(self._tokens, self._work)
        self._tokens, self._work = 0, 0.0

    def finish(self) -> None:
        """Close the exchange, and remove the request from the instance's load. A second call has no effect."""
        if not self.is_finished:
            self.is_finished = True
            self.instance.load.remove_request(self._tokens, self._work)
            if not self.exchange.complete:
                self.exchange.close()


class AttemptOwner(Receiver, Protocol):
    """The request that makes an attempt. It becomes the receiver of the answering leg when the response has begun."""

    def on_begun(self, attempt: Attempt, first: bytes, is_end: bool) -> None:
        """Handle the first bytes of the response. This must not raise an exception.

        Args:
            attempt: the attempt.
            first: the first bytes.
            is_end: whether ``first`` is the whole response.
        """

    def on_not_begun(self, error: Exception) -> None:
        """Handle the failure of an attempt before the response has begun. This must not raise an exception.

        Args:
            error: ``LegFailed``; ``NoRoom`` if the router could not open a connection to any instance; or another
                exception after a bug in the router.
        """


class Attempt:
    """One attempt of a request.

    ``send`` sends the legs. Until the response has begun, the attempt is the receiver of the leg that it waits for.
    Then the owner gets the first bytes from the attempt, and all further bytes from the exchange of the answering leg.
    The code that creates an attempt calls ``finish`` after a complete response, ``break_off`` if the answering leg has
    failed in the middle of the response, and otherwise ``give_up``.
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
            answering: the leg whose response the client gets.
            prefill: the leg at the prefill instance of a pair; None without a pair.
            engine_ids: ids of the request's sequences at engines, for an abort; None if no abort is needed.
            set_decode_request: called with prefill's response; sets the request of the answering leg. None if both legs
                are sent together.
            may_err_late: whether decode reports missing KV of prefill as its own error. In a stream, this error comes
                after the first events.
            hold_bytes: a response that is not an event stream is held back up to this size until it is complete, so
                that another attempt can follow if a leg dies.
            aborter: sends aborts.
            on_trouble: called with an instance and the error of a failed exchange.
        """
        self.answering = answering
        self.prefill = prefill
        self.engine_ids = engine_ids
        self.sent_at = 0.0
        self.deaths = 0
        """Number of legs whose connections were lost after the request was sent."""
        self.prefilled_at = 0.0
        """Time of the first token, a value of ``time.perf_counter``; 0 before it."""
        self.prefill_answer = b""
        """Prefill's response after it has arrived. Only the beginning and the end of a long response are stored."""
        self.is_event_stream = False
        """Whether the response consists of server-sent events; set when the response has begun."""
        self._set_decode_request = set_decode_request
        self._may_err_late = may_err_late
        self._awaited = answering if prefill is None or set_decode_request is None else prefill
        self._hold_bytes = hold_bytes
        self._aborter = aborter
        self._on_trouble = on_trouble
        self._owner: AttemptOwner | None = None  # until the response has begun, or the attempt has failed
        self._begun = False
        self._chunks: list[bytes] = []  # bytes that were received from the awaited leg
        self._size = 0
        self._wanted = 0  # number of bytes of an incomplete response that the next step needs; 0 before its head
        self._num_preamble = 0  # number of bytes in complete lines of a stream's preamble
        self._timer: asyncio.TimerHandle | None = None
        self._refusal_timer: asyncio.TimerHandle | None = None
        self._prefill_end: asyncio.Future[None] | None = None

    def send(self, owner: AttemptOwner) -> None:
        """Send the legs now. If prefill comes first, the answering leg is sent after prefill has responded."""
        self._owner = owner
        self.sent_at = time.perf_counter()
        if self.prefill is not None and self._set_decode_request is None:
            self.prefill.exchange.send(_PrefillReceiver(self))
        self._awaited.exchange.send(self)

    def on_data(self, data: bytes, is_end: bool) -> None:
        """Receive bytes from the leg that the attempt waits for.

        This is prefill's leg if it is sent first, then the answering leg until its response has begun.
        """
        try:
            self._collect(data, is_end)
        except Exception as exc:  # ``LegFailed``; or another exception after a bug, which the owner logs
            self._report_failure(exc)

    def on_failed(self, error: Exception) -> None:
        """Handle the failure of the leg that the attempt waits for."""
        if isinstance(error, UpstreamError) and not isinstance(error, NoRoom):
            error = self._make_failure(self._awaited, error)
        self._report_failure(error)

    def on_instance_failure(self, instance: Instance, silence: float) -> None:
        """Fail the attempt if a running leg is at ``instance``, which does not respond to probes.

        If the response to the client has begun, prefill's leg is not needed any more. Then only the answering leg can
        fail, and only if it has received no data for ``silence`` seconds.
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
        """Return whether the event stream has begun, and no data has arrived since ``since``.

        Args:
            since: a value of ``time.perf_counter``.
        """
        leg = self.answering
        return self._begun and self.is_event_stream and not leg.is_finished and leg.exchange.is_silent(since)

    def on_stall(self, seconds: float) -> None:
        """Fail the answering leg, because its stream has sent no data for ``seconds``."""
        message = f"{self.answering.instance.key} has sent no data of the stream for {seconds:g} s"
        self.answering.exchange.fail(StreamStalled(message))

    def finish(self) -> None:
        """End the attempt after the client got the whole response. Prefill's response may end a short time later."""
        self.answering.finish()
        if self._timer is not None:
            self._timer.cancel()
        prefill = self.prefill
        if prefill is not None and not prefill.is_finished:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PREFILL_GRACE_SECONDS, self.give_up)

    def break_off(self, error: UpstreamError) -> None:
        """End the attempt, because the answering leg has failed in the middle of the response."""
        instance = self.answering.instance
        self._on_trouble(instance, error)
        instance.record_failure(time.monotonic(), str(error))
        self.give_up(culprit=instance)

    def give_up(self, culprit: Instance | None = None) -> bool:
        """Immediately close the connections to all instances of the attempt, and abort the request at their engines.

        ``culprit`` gets no abort, because it has failed. Without ``engine_ids``, no instance gets an abort.

        Returns:
            Whether an instance other than ``culprit`` may still have been processing the request.
        """
        self._owner = None
        for timer in (self._timer, self._refusal_timer):
            if timer is not None:
                timer.cancel()
        legs = [leg for leg in (self.answering, self.prefill) if leg is not None and not leg.is_finished]
        running = [leg.instance for leg in legs if leg.runs_at_engine and leg.instance is not culprit]
        for leg in legs:
            leg.finish()
        for instance in running:
            if self.engine_ids is not None:
                self._aborter.abort_soon(instance, self.engine_ids.list_ids())
        return bool(running)

    async def await_prefill_end(self) -> None:
        """After the loss of the answering leg, wait briefly, so that ``deaths`` counts prefill, too, if it is lost."""
        prefill = self.prefill
        if prefill is not None and not prefill.is_finished and prefill.runs_at_engine:
            self._prefill_end = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._prefill_end}, timeout=OTHER_LEG_SECONDS)

    def on_prefill_end(self, answer: bytes, error: Exception | None) -> None:
        """Handle the end or the failure of prefill's response, if both legs were sent together.

        A failure also fails the answering leg.
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
        elif isinstance(failure, LegFailed) and not self._begun and self._may_lose_answering(failure.trouble):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(OTHER_LEG_SECONDS, self._on_prefill_failed, failure)
        else:
            self._on_prefill_failed(failure)

    def _may_lose_answering(self, trouble: Trouble) -> bool:
        """Return whether the answering leg may be lost a moment after prefill's leg has failed with ``trouble``.

        If so, the attempt waits for this loss, so that ``deaths`` counts both legs.
        """
        return trouble is Trouble.DEATH or (trouble is Trouble.UNREACHABLE and self.answering.runs_at_engine)

    def _collect(self, data: bytes, is_end: bool) -> None:
        """Store bytes of the leg that the attempt waits for.

        When there are enough bytes, begin the response, send decode's leg, or report a failure.
        """
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
            # vLLM's decode sends only this error if it cannot get prefill's KV.
            if leg is self.answering and self._may_err_late and _is_late_error(failure.response):
                failure.trouble = Trouble.HAND_OVER
            self._report_failure(failure)
        elif leg is self.prefill:
            self._send_decode(leg, body)
        elif not self._may_err_late or not self.is_event_stream or self._has_token(body, is_end):
            self._begin(body, is_end)
        else:
            self._chunks.append(body)

    def _count_wanted(self, leg: Leg, is_refusal: bool, is_end: bool) -> int:
        """Return how many bytes ``_collect`` waits for, if the response is not complete. The head has arrived.

        If the response is a refusal, start the time limit for its body.

        Args:
            leg: the leg with the response.
            is_refusal: whether the status is not 2xx.
            is_end: whether the whole response has arrived.
        """
        if is_refusal:
            if not is_end:
                loop, status = asyncio.get_running_loop(), leg.exchange.status
                late = (
                    f"{leg.instance.key} answered with {status}, and its body did not arrive within "
                    f"{REFUSAL_SECONDS:g} s"
                )
                self._refusal_timer = loop.call_later(REFUSAL_SECONDS, leg.exchange.fail, TimedOut(late))
            return ERROR_BYTES
        if leg is self.prefill:
            return ANSWER_BYTES
        self.is_event_stream = _is_event_stream(leg.exchange.headers)
        return 1 if self.is_event_stream else max(1, self._hold_bytes)

    def _send_decode(self, leg: Leg, answer: bytes) -> None:
        """Send the answering leg, after prefill has responded."""
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
        """Return whether the stream contains an event with a token; see ``_find_token``.

        Raises:
            LegFailed: the stream begins with an error.
        """
        # ``data[:self._num_preamble]`` has complete lines of the preamble, which are not examined again.
        event = _find_token(data, self._num_preamble)
        if event is None and not is_end and len(data) <= PREAMBLE_BYTES:
            self._num_preamble = max(data.rfind(b"\n", self._num_preamble) + 1, self._num_preamble)
            return False
        if event is not None and _ERROR.search(event):
            message = f"{self.answering.instance.key} sent an error instead of a response: {event.decode()[:500]}"
            raise LegFailed(self.answering.instance, message, trouble=Trouble.HAND_OVER)
        return True

    def _begin(self, first: bytes, is_end: bool) -> None:
        """Pass the first bytes of the response to the owner, which becomes the receiver of all further bytes."""
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
        """Report to the owner that the attempt has failed. Later calls have no effect."""
        owner, self._owner = self._owner, None
        if self._refusal_timer is not None:
            self._refusal_timer.cancel()
        self._awaited.exchange.receiver = None
        if owner is not None:
            owner.on_not_begun(error.with_traceback(None))  # the traceback would form a reference cycle

    def _on_prefill_failed(self, failure: LegFailed | NoRoom) -> None:
        if not self._begun:
            self.answering.exchange.fail(failure)
            return
        _log.info("prefill failed after decode had begun its response: %s", failure)
        last_heard, loop = self.answering.exchange.last_heard, asyncio.get_running_loop()
        self._timer = loop.call_later(SILENCE_SECONDS, self._fail_if_silent, last_heard, str(failure))

    def _fail_if_silent(self, since: float, why: str) -> None:
        """Fail decode's leg if it has sent nothing since ``since``: then it does not have the prompt's KV."""
        exchange = self.answering.exchange
        if not self.answering.is_finished and exchange.last_heard == since:
            decode = self.answering.instance.key
            exchange.fail(TimedOut(f"{decode} has sent no data for {SILENCE_SECONDS:g} s after prefill failed: {why}"))

    def _find_prefill_failure(self, leg: Leg, error: Exception | None) -> LegFailed | NoRoom | None:
        if isinstance(error, NoRoom):
            return error
        if isinstance(error, UpstreamError):
            return self._make_failure(leg, error)
        body = self.prefill_answer
        if not 200 <= leg.exchange.status < 300:
            return _make_refusal(leg, body)
        # FastDeploy's prefill reports this error only in its own response, which has status 200.
        if body.find(_PD_ERROR) >= 0 and _has_pd_error(body):
            message = f"{leg.instance.key} could not send the prompt's KV to the decode instance"
            return LegFailed(leg.instance, message, trouble=Trouble.HAND_OVER)
        return None

    def _make_failure(self, leg: Leg, error: UpstreamError) -> LegFailed:
        self._on_trouble(leg.instance, error)
        failure = LegFailed(leg.instance, str(error), **_judge(leg), is_stale=isinstance(error, StaleConnection))
        failure.__cause__ = error
        self.deaths += failure.trouble is Trouble.DEATH
        return failure


class _PrefillReceiver:
    """Receiver of prefill's response if both legs are sent together. It stores the response's beginning and end."""

    __slots__ = ("_attempt", "_chunks", "_size")

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._chunks: list[bytes] = []
        self._size = 0

    def on_data(self, data: bytes, is_end: bool) -> None:
        """Store bytes of prefill's response. At the end of the response, report it to the attempt."""
        self._chunks.append(data)
        self._size += len(data)
        if self._size > 4 * KEPT_BYTES:  # not after every piece, because joining copies
            body = b"".join(self._chunks)
            self._chunks, self._size = [body[:KEPT_BYTES], body[-KEPT_BYTES:]], 2 * KEPT_BYTES
        if is_end:
            self._attempt.on_prefill_end(b"".join(self._chunks), None)

    def on_failed(self, error: Exception) -> None:
        """Report the failure of prefill's exchange to the attempt."""
        self._attempt.on_prefill_end(b"".join(self._chunks), error)


class _Judgement(TypedDict):
    reached: Reached
    trouble: Trouble


def _judge(leg: Leg) -> _Judgement:
    """Return how far the request of a failed leg (an exchange with one instance) had got, and the cause of the failure.

    Call this only if the response was not complete.
    """
    if not leg.exchange.record.sent_at:
        return {"reached": Reached.UNSENT, "trouble": Trouble.UNREACHABLE}
    return {"reached": Reached.HEAD if leg.exchange.status else Reached.SENT, "trouble": Trouble.DEATH}


def _is_event_stream(headers: Headers) -> bool:
    """Return whether the response consists of server-sent events, and is not compressed."""
    found = dict(headers)
    return found.get(b"content-type", b"").startswith(b"text/event-stream") and b"content-encoding" not in found


def _find_token(data: bytes, start: int) -> bytes | None:
    """Return the first event after ``start`` that has a token or an error; None if there is none yet.

    Engines send the first events of a stream (its preamble) before the first token.
    """
    events = (found[1] for found in _EVENT_DATA.finditer(data, start))
    return next((event for event in events if not _PREAMBLE.search(event)), None)


def _has_pd_error(body: bytes) -> bool:
    """Return whether a response, or one of its events, is an error about the KV transfer.

    The text "PD Error" alone is not enough, because users and models may write it, too.
    """
    for document in (body, *_EVENT_DATA.findall(body)):
        value = load_object(document)
        if value is not None and PD_ERROR in str(value.get("error")):
            return True
    return False


def _is_late_error(response: Response | None) -> bool:
    return response is not None and response.status >= 500 and _LATE_ERROR.search(response.body) is not None


def _make_refusal(leg: Leg, body: bytes) -> LegFailed:
    response = Response(leg.exchange.status, leg.exchange.headers, body)
    message = f"{leg.instance.key} answered with {response.status}"
    trouble = Trouble.REJECTION
    if response.status in REDIRECTIONS:
        message += ", a redirection; the router neither follows nor forwards redirections"
    elif response.status >= 500:
        trouble = Trouble.ERROR
        if _HAND_OVER_ERROR.search(body):
            trouble = Trouble.HAND_OVER
        elif _ENGINE_DEATH.search(body):
            trouble = Trouble.DEATH
        elif _CONTENT_ERROR.search(body) and _CLEARED_ERROR not in body:
            trouble = Trouble.REJECTION
    elif response.status == 429:
        trouble = Trouble.ERROR
    return LegFailed(leg.instance, message, response, trouble=trouble)
