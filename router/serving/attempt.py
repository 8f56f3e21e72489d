"""One attempt at a request: a prefill/decode pair, or a mixed instance alone; all its legs watched.

A leg is an exchange with one instance. The answering leg (decode, or mixed) is the one whose bytes the client gets. In
a pair both legs are sent at once, and prefill's response is consumed; or decode is asked once prefill has answered, as
the pair's dialect has it. Until the first byte of the response is there, a failure of either leg is a failure of the
attempt: the other leg is aborted and the caller may try another pair. Afterwards prefill has done its part, and the end
of its connection no longer matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable
from typing import TypedDict

import orjson

from router.fleet import Instance
from router.http import Exchange, Headers, NoRoom, Response, StaleConnection, TimedOut, UpstreamError
from router.serving.aborts import Aborter
from router.serving.reading.api import EngineIds
from router.serving.retry import LegFailed, Reached, Trouble

__all__ = ["REDIRECTIONS", "Attempt", "Leg", "StreamStalled"]

_log = logging.getLogger("router.serving.attempt")

ERROR_BYTES = 1024 * 1024
# The body of a refusal comes with its head, or is not worth waiting for.
REFUSAL_SECONDS = 2.0
PD_ERROR = "PD Error"
# Where one leg of a pair is lost, the other one may be, by the same request: so long is waited to know it.
OTHER_LEG_SECONDS = 0.05
# Decode began to answer, then prefill failed: if decode has the prompt's KV, its next bytes come in less.
SILENCE_SECONDS = 30.0
# Prefill's last bytes may come after decode's when the response is short; after this long it is aborted.
PREFILL_GRACE_SECONDS = 5.0
# Of these statuses, a client would follow the Location. 300, 304 and 305 are answers.
REDIRECTIONS = frozenset({301, 302, 303, 307, 308})

_PD_ERROR = PD_ERROR.encode()
# FastDeploy's and SGLang's.
_HAND_OVER_ERROR = re.compile(rb"PD Error|(?:Prefill|Decode) (?:bootstrap|transfer|handshake) failed")
# What vLLM answers with when its engine has died: of EngineDeadError, and of older versions.
_ENGINE_DEATH = re.compile(
    rb"EngineCore encountered an issue|EngineDeadError|Background loop (?:has errored|is stopped)"
)
# A stream whose preamble goes on for longer is relayed as it comes. It may name the ids of the whole prompt.
PREAMBLE_BYTES = 1024 * 1024
# Of an answer of one token.
ANSWER_BYTES = 16 * 1024 * 1024
# What vLLM's streams begin with before there is a token: chat, responses, messages.
_PREAMBLE = re.compile(
    rb'"role": ?"assistant", ?"content": ?""|"type": ?"(?:response\.(?:created|in_progress)|message_start|ping)"'
)
# What vLLM says in a whole answer where prefill's KV did not come; of other troubles it says more.
_LATE_ERROR = re.compile(rb'"message": ?"Internal server error"')
_ERROR = re.compile(rb'^ ?\{"(?:error": ?\{|type": ?"error")')
_EVENT_DATA = re.compile(rb"^data:(.*)$", re.MULTILINE)


class StreamStalled(TimedOut):
    """A stream that had begun brought nothing for too long."""


class Leg:
    """A request at one instance; the instance's load counts it until ``finish``."""

    __slots__ = ("_tokens", "_work", "exchange", "instance", "is_finished", "queued_before", "span_id")

    def __init__(self, instance: Instance, exchange: Exchange, tokens: int, work: float, span_id: int = 0) -> None:
        """
        Args:
            tokens: the prompt's.
            work: the cost of its prefill, counted until ``end_prefill``.
            span_id: of its span, where the request is traced.
        """
        self.instance = instance
        self.exchange = exchange
        self.is_finished = False
        self.span_id = span_id
        self.queued_before = instance.load.queued
        """The work that was queued at the instance before this leg."""
        self._tokens = tokens
        self._work = work
        instance.load.add_request(tokens, work)

    @property
    def runs_at_engine(self) -> bool:
        """Whether the instance may still be working on it."""
        return self.exchange.record.sent_at > 0 and not self.exchange.complete

    def end_prefill(self) -> None:
        """The first token is there."""
        self.instance.load.remove_prefill(self._tokens, self._work)
        self._tokens, self._work = 0, 0.0

    def finish(self) -> None:
        """Close the exchange and stop counting the request; a second call does nothing."""
        if not self.is_finished:
            self.is_finished = True
            self.instance.load.remove_request(self._tokens, self._work)
            if not self.exchange.complete:
                self.exchange.close()


class Attempt:
    """One attempt at a request.

    ``begin`` gives the first bytes of the response; those that follow are taken from the answering leg's exchange.
    ``fail`` ends both from outside. The maker of an attempt calls ``finish`` after a whole response, and ``give_up``
    or ``break_off`` otherwise. ``is_event_stream`` says, once it has begun, whether the response is server-sent events.
    """

    __slots__ = (
        "_aborter",
        "_ask_decode",
        "_awaited",
        "_begun",
        "_hold_bytes",
        "_may_err_late",
        "_on_trouble",
        "_prefill_end",
        "_timer",
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
        ask_decode: Callable[[bytes], None] | None = None,
        may_err_late: bool = False,
        hold_bytes: int,
        aborter: Aborter,
        on_trouble: Callable[[Instance, Exception], None],
    ) -> None:
        """
        Args:
            engine_ids: the names of the request's sequences at engines; None where it cannot be aborted by them.
            ask_decode: gives the answering leg its request, made of prefill's answer; None where it has one, and both
                are sent at once.
            may_err_late: decode says that it could not have prefill's KV by an error of its own, in a stream only when
                that has begun.
            hold_bytes: so much of a response that is no event stream is held until it is whole, so that a leg dying
                half-way can still be made good.
        """
        self.answering = answering
        self.prefill = prefill
        self.engine_ids = engine_ids
        self.sent_at = 0.0
        self.deaths = 0
        """How many of its connections were lost after the request was sent on them."""
        self.prefilled_at = 0.0
        """When the first token was there, on ``time.perf_counter``; 0 until then."""
        self.prefill_answer = b""
        """Prefill's response, once it is there: of a long one its beginning and its end."""
        self.is_event_stream = False
        self._ask_decode = ask_decode
        self._may_err_late = may_err_late
        self._awaited = answering if prefill is None or ask_decode is None else prefill
        self._hold_bytes = hold_bytes
        self._aborter = aborter
        self._on_trouble = on_trouble
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._prefill_end: asyncio.Future[None] | None = None

    def send(self, on_begin: Callable[[], None]) -> bool:
        """Send the legs now, and call ``on_begin`` once the answering one has a response, or has failed.

        Then ``take_whole`` gives a response that is there already, and for any other ``begin`` goes on.

        Returns:
            False if that cannot be, because decode is asked after prefill; then nothing is sent.
        """
        if self._ask_decode is not None:
            return False
        self.sent_at = time.perf_counter()
        if self.prefill is not None:
            self.prefill.exchange.consume(self._on_prefill_end)
        self.answering.exchange.begin(on_begin)
        return True

    def take_whole(self) -> bytes | None:
        """The response, if it has come whole and is neither a refusal nor an event stream; else None."""
        answering, exchange = self.answering, self.answering.exchange
        if not exchange.complete or not 200 <= exchange.status < 300 or _is_event_stream(exchange.headers):
            return None
        self._begun = True
        if answering.instance.breaker.failures:
            answering.instance.record_success(time.monotonic())
        if self.prefill is None:
            answering.end_prefill()
        return exchange.take_whole()

    async def begin(self) -> bytes:
        """Send the legs and wait for the first bytes of the response, or for as many as are to be held.

        Raises:
            LegFailed: a leg failed.
            NoRoom: a leg could not be sent, to any instance.
            Exception: the one that ``fail`` was called with.
        """
        was_sent, self.sent_at = self.sent_at, self.sent_at or time.perf_counter()
        if self._ask_decode is not None:
            answer = await self._await_prefill()
            if not self.answering.is_finished:  # else it was given up as prefill's answer came: see ``fail``
                self._ask_decode(answer)
        elif self.prefill is not None and not was_sent:
            self.prefill.exchange.consume(self._on_prefill_end)
        exchange = self.answering.exchange
        try:
            status = await exchange.head()
            if not 200 <= status < 300:
                raise await self._read_answer_refusal()  # no variable: its traceback will lead here
            self.is_event_stream = _is_event_stream(exchange.headers)
            if exchange.complete:
                first = exchange.take_whole()
            elif self._hold_bytes and not self.is_event_stream:
                first = await exchange.read(self._hold_bytes)
            else:
                first = await exchange.chunk()
            if self._may_err_late and self.is_event_stream:
                first = await self._read_preamble(first)
        except NoRoom:
            raise
        except UpstreamError as exc:
            raise self._make_failure(self.answering, exc) from exc
        self._begun = True
        if self.answering.instance.breaker.failures:
            self.answering.instance.record_success(time.monotonic())
        if self.prefill is None:
            self.prefilled_at = time.perf_counter() if self.is_event_stream else 0.0
            self.answering.end_prefill()
        return first

    def fail(self, error: Exception) -> None:
        """Give up all legs now, and make the task that waits for bytes of the response get ``error``."""
        self._awaited.exchange.fail(error)
        self.answering.exchange.fail(error)  # which is asked next, where prefill has just answered
        self.give_up()

    def on_instance_failure(self, instance: Instance, silence: float) -> None:
        """``instance`` answers no probes: fail if it works on this attempt, and has been silent for so many seconds."""
        leg = self.answering if self.answering.instance is instance else self.prefill
        if leg is None or leg.is_finished or leg.instance is not instance:
            return
        message = f"{instance.key} stopped answering: {instance.trouble}"
        if not self._begun:
            self._awaited.exchange.fail(LegFailed(instance, message, **_judge(leg)))
        elif leg is self.answering and time.perf_counter() - leg.exchange.last_heard > silence:
            leg.exchange.fail(TimedOut(message))

    def is_stalled(self, since: float) -> bool:
        """Whether its event stream has begun, and nothing has come since then, on ``time.perf_counter``."""
        leg = self.answering
        return self._begun and self.is_event_stream and not leg.is_finished and leg.exchange.is_silent(since)

    def on_stall(self, seconds: float) -> None:
        """Nothing has come of the stream for so long: the answering leg fails."""
        message = f"{self.answering.instance.key} has sent nothing of the stream for {seconds:g} s"
        self.answering.exchange.fail(StreamStalled(message))

    def finish(self) -> None:
        """The client has the whole response; prefill gets a moment to end its own."""
        self.answering.finish()
        if self._timer is not None:
            self._timer.cancel()
        prefill = self.prefill
        if prefill is not None and not prefill.is_finished:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PREFILL_GRACE_SECONDS, self.give_up)

    def break_off(self, error: UpstreamError) -> None:
        """The answering leg failed in the middle of the response: give up the other one."""
        instance = self.answering.instance
        self._on_trouble(instance, error)
        instance.record_failure(time.monotonic(), str(error))
        self.give_up(culprit=instance)

    def give_up(self, culprit: Instance | None = None) -> None:
        """Close all legs at once, and abort those that still run at their engines; not at the ``culprit``."""
        if self._timer is not None:
            self._timer.cancel()
        legs = [leg for leg in (self.answering, self.prefill) if leg is not None and not leg.is_finished]
        running = [leg.instance for leg in legs if leg.runs_at_engine]
        for leg in legs:
            leg.finish()
        for instance in running:
            if instance is not culprit and self.engine_ids is not None:
                self._aborter.abort_soon(instance, self.engine_ids.list_ids())

    async def await_prefill_end(self) -> None:
        """The answering leg was lost: wait a moment whether prefill's is lost, too, so that ``deaths`` counts it."""
        prefill = self.prefill
        if prefill is not None and not prefill.is_finished and prefill.runs_at_engine:
            self._prefill_end = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._prefill_end}, timeout=OTHER_LEG_SECONDS)

    async def _await_prefill(self) -> bytes:
        """Send prefill's leg, and give its whole answer.

        Raises:
            LegFailed: it failed, or decode does meanwhile.
            NoRoom: it could not be sent, to any instance.
        """
        leg = self.prefill
        assert leg is not None
        try:
            if not 200 <= await leg.exchange.head() < 300:
                raise await _read_refusal(leg)
            self.prefill_answer = await leg.exchange.read(ANSWER_BYTES)
        except NoRoom:
            raise
        except UpstreamError as exc:
            raise self._make_failure(leg, exc) from exc
        leg.finish()
        self.prefilled_at = time.perf_counter()
        if leg.instance.breaker.failures:
            leg.instance.record_success(time.monotonic())
        self._awaited = self.answering
        return self.prefill_answer

    async def _read_answer_refusal(self) -> LegFailed:
        failure = await _read_refusal(self.answering)
        # Of vLLM's decode this is all that it says where it cannot have prefill's KV.
        if self._may_err_late and _tells_late_error(failure.response):
            failure.trouble = Trouble.HAND_OVER
        return failure

    async def _read_preamble(self, first: bytes) -> bytes:
        """The beginning of a stream to its first token.

        Raises:
            LegFailed: there is an error instead.
        """
        exchange = self.answering.exchange
        # ``first[:seen]`` is whole lines of the preamble: only what follows them is looked at.
        said, seen = None, 0
        while (said := _find_token(first, seen)) is None and not exchange.is_taken and len(first) <= PREAMBLE_BYTES:
            seen = max(first.rfind(b"\n", seen) + 1, seen)
            first += await exchange.chunk()
        if said is not None and _ERROR.search(said):
            message = f"{self.answering.instance.key} has an error instead of an answer: {said.decode()[:500]}"
            raise LegFailed(self.answering.instance, message, trouble=Trouble.HAND_OVER)
        return first

    def _on_prefill_end(self) -> None:
        """Prefill's response was read to its end, or failed: tell the answering leg if prefill did."""
        leg = self.prefill
        assert leg is not None
        if leg.is_finished:
            return
        self.prefill_answer = leg.exchange.kept_body
        failure = self._find_prefill_failure(leg)
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

    def _on_prefill_failed(self, failure: LegFailed | NoRoom) -> None:
        if not self._begun:
            self.answering.exchange.fail(failure)
            return
        _log.info("prefill failed after decode had begun to answer: %s", failure)
        heard, loop = self.answering.exchange.last_heard, asyncio.get_running_loop()
        self._timer = loop.call_later(SILENCE_SECONDS, self._fail_if_silent, heard, str(failure))

    def _fail_if_silent(self, since: float, why: str) -> None:
        """Give up decode if nothing has come from it: its first bytes were no sign that it had the prompt's KV."""
        exchange = self.answering.exchange
        if not self.answering.is_finished and exchange.last_heard == since:
            decode = self.answering.instance.key
            exchange.fail(TimedOut(f"{decode} has sent nothing for {SILENCE_SECONDS:g} s, since prefill failed: {why}"))

    def _find_prefill_failure(self, leg: Leg) -> LegFailed | NoRoom | None:
        exchange = leg.exchange
        if isinstance(exchange.error, NoRoom):
            return exchange.error
        if isinstance(exchange.error, UpstreamError):
            return self._make_failure(leg, exchange.error)
        body = self.prefill_answer
        if not 200 <= exchange.status < 300:
            return _make_refusal(leg, body)
        # FastDeploy's prefill says so to its own client alone, in a response of status 200.
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


class _Judgement(TypedDict):
    reached: Reached
    trouble: Trouble


def _judge(leg: Leg) -> _Judgement:
    """How far the request of a leg got that ended without a whole response, and what that says of the instance."""
    if not leg.exchange.record.sent_at:
        return {"reached": Reached.UNSENT, "trouble": Trouble.UNREACHABLE}
    return {"reached": Reached.HEAD if leg.exchange.status else Reached.SENT, "trouble": Trouble.DEATH}


def _is_event_stream(headers: Headers) -> bool:
    """Whether the response is server-sent events, and not compressed."""
    found = dict(headers)
    return found.get(b"content-type", b"").startswith(b"text/event-stream") and b"content-encoding" not in found


def _find_token(data: bytes, start: int) -> bytes | None:
    """The first event from ``start`` that is more than a stream's preamble; None where there is none yet."""
    events = (found[1] for found in _EVENT_DATA.finditer(data, start))
    return next((event for event in events if not _PREAMBLE.search(event)), None)


def _tells_pd_error(body: bytes) -> bool:
    """Whether a response, or one of its events, is an error of hand-over; users and models may write of one, too."""
    for document in (body, *_EVENT_DATA.findall(body)):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(document)
            if isinstance(value, dict) and PD_ERROR in str(value.get("error")):
                return True
    return False


def _tells_late_error(response: Response | None) -> bool:
    return response is not None and response.status >= 500 and _LATE_ERROR.search(response.body) is not None


async def _read_refusal(leg: Leg) -> LegFailed:
    late = f"{leg.instance.key} answered with {leg.exchange.status}, and no more within {REFUSAL_SECONDS:g} s"
    timer = asyncio.get_running_loop().call_later(REFUSAL_SECONDS, leg.exchange.fail, TimedOut(late))
    try:
        return _make_refusal(leg, await leg.exchange.read(ERROR_BYTES))
    finally:
        timer.cancel()


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
