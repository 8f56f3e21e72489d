"""One attempt at a request: a prefill/decode pair, or a mixed instance alone; all its legs watched.

The answering leg (decode, or mixed) is the one whose bytes the client gets. In a pair both legs are sent at once;
prefill's answer is drained. Until the first byte of the answer is there, a failure of either leg is a failure of the
attempt: the other leg is aborted and the caller may try another pair. Afterwards prefill has done its part, and
what becomes of its connection no longer matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence

import orjson

from router.fleet import Instance
from router.http.errors import NoRoom, StaleConnection, TimedOut, UpstreamError
from router.http.exchange import Exchange
from router.http.message import Answer, Headers
from router.serving.aborts import Aborter

__all__ = ["Attempt", "Leg", "LegFailed"]

_log = logging.getLogger("router.serving.attempt")

ERROR_BYTES = 1024 * 1024
# The body of a refusal comes with its head, or is not worth waiting for.
REFUSAL_SECONDS = 2.0
PD_ERROR = "PD Error"
# Decode began to answer, then prefill failed: if decode has what it needs, its next bytes come in less.
SILENCE_SECONDS = 30.0
# Prefill's last bytes may come after decode's when the answer is short; after this long it is aborted.
PREFILL_GRACE_SECONDS = 5.0


_EVENT_DATA = re.compile(rb"^data:(.*)$", re.MULTILINE)


class LegFailed(Exception):
    """A leg failed before the first byte of the answer: with the instance's own ``answer``, or without any."""

    def __init__(
        self,
        instance: Instance,
        message: str,
        answer: Answer | None = None,
        *,
        stale: bool = False,
        in_hand_over: bool = False,
    ) -> None:
        """
        Args:
            stale: only an idle connection had been closed: the same instance may be asked again.
            in_hand_over: prefill and decode did not come together; which of them is to blame is not known.
        """
        super().__init__(message)
        self.instance = instance
        self.answer = answer
        self.stale = stale
        self.in_hand_over = in_hand_over
        # Whether it says something of the instance, rather than of the request.
        self.another_may_serve = in_hand_over or answer is None or answer.status == 429 or answer.status >= 500


class Leg:
    """A request at one instance; the instance's load counts it until ``finish``."""

    __slots__ = ("_tokens", "_work", "exchange", "finished", "instance", "queued")

    def __init__(self, instance: Instance, exchange: Exchange, tokens: int, work: float) -> None:
        """
        Args:
            tokens: the prompt's.
            work: what its prefill will cost, counted until ``prefilled``.
        """
        self.instance = instance
        self.exchange = exchange
        self.finished = False
        self._tokens = tokens
        self._work = work
        candidate = instance.load
        self.queued = candidate.queued
        """The instance's ``InstanceLoad.queued`` before this leg."""
        candidate.requests += 1
        candidate.tokens += tokens
        candidate.queued += work

    def succeeded(self) -> None:
        """Its answer is a good one, as far as it has come."""
        if self.instance.breaker.failures:
            self.instance.record_success(time.monotonic())

    @property
    def runs_at_engine(self) -> bool:
        """Whether the instance may still be working on it."""
        return self.exchange.sent and not self.exchange.complete

    def prefilled(self) -> None:
        """The first token is there."""
        candidate = self.instance.load
        candidate.tokens -= self._tokens
        candidate.queued -= self._work
        self._tokens, self._work = 0, 0.0

    def finish(self) -> None:
        """Close the exchange and stop counting the request; a second call does nothing."""
        if not self.finished:
            self.finished = True
            self.exchange.close()
            self.prefilled()
            self.instance.load.requests -= 1


class Attempt:
    """One attempt at a request.

    ``begin`` gives the first bytes of the answer, ``more`` the following ones; ``fail`` ends both from outside.
    Whoever makes an attempt calls ``finish`` after a whole answer, and ``give_up`` otherwise. ``is_event_stream``
    says, once it has begun, whether the answer is server-sent events.
    """

    __slots__ = (
        "_aborter",
        "_begun",
        "_grace",
        "_hold_bytes",
        "_on_trouble",
        "answering",
        "engine_ids",
        "is_event_stream",
        "prefill",
        "prefilled_at",
        "sent_at",
    )

    def __init__(
        self,
        answering: Leg,
        prefill: Leg | None,
        engine_ids: Sequence[str],
        *,
        hold_bytes: int,
        aborter: Aborter,
        on_trouble: Callable[[Instance, Exception], None],
    ) -> None:
        """
        Args:
            hold_bytes: so much of an answer that is no event stream is held until it is whole, so that a leg dying
                half-way can still be made good.
        """
        self.answering = answering
        self.prefill = prefill
        self.engine_ids = engine_ids
        """What the engines call the request's sequences."""
        self.sent_at = 0.0
        self.prefilled_at = 0.0
        """When the first token was there, on ``time.perf_counter``; 0 until then."""
        self._hold_bytes = hold_bytes
        self._aborter = aborter
        self._on_trouble = on_trouble
        self.is_event_stream = False
        self._begun = False
        self._grace: asyncio.TimerHandle | None = None

    async def begin(self) -> bytes:
        """Send all legs at once and wait for the first bytes of the answer, or for as many as are to be held.

        Raises:
            LegFailed: a leg failed.
            NoRoom: a leg could not be sent, to whichever instance.
            Exception: whatever ``fail`` was given.
        """
        self.sent_at = time.perf_counter()
        if self.prefill is not None:
            self.prefill.exchange.drain(self._prefill_ended)
        exchange = self.answering.exchange
        try:
            status = await exchange.head()
            if not 200 <= status < 300:
                raise await _refusal(self.answering)
            self.is_event_stream = _is_event_stream(exchange.headers)
            is_held = self._hold_bytes and not self.is_event_stream
            first = await (exchange.read(self._hold_bytes) if is_held else exchange.chunk())
        except NoRoom:
            raise
        except UpstreamError as exc:
            raise self._broken(self.answering, exc) from exc
        self._begun = True
        self.answering.succeeded()
        if self.prefill is None:
            self.prefilled_at = time.perf_counter() if self.is_event_stream else 0.0
            self.answering.prefilled()
        return first

    async def more(self, sink: Callable[[bytes], bool] | None = None) -> bytes:
        """The next bytes of the answer that ``sink`` did not take (see ``Exchange.chunk``); ``b""`` at its end.

        Raises:
            UpstreamError: the answering leg failed.
            Exception: whatever ``fail`` was given.
        """
        try:
            return await self.answering.exchange.chunk(sink)
        except UpstreamError as exc:
            self._on_trouble(self.answering.instance, exc)
            raise

    def fail(self, error: Exception) -> None:
        """Give up all legs now, and make ``begin`` or ``more`` raise ``error``."""
        self.answering.exchange.fail(error)
        self.give_up()

    def instance_failed(self, instance: Instance, silence: float) -> None:
        """``instance`` answers no probes: fail if it works on this attempt, and has been silent for so many seconds."""
        leg = self.answering if self.answering.instance is instance else self.prefill
        if leg is None or leg.finished or leg.instance is not instance:
            return
        message = f"{instance.key} stopped answering: {instance.trouble}"
        if not self._begun:
            self.answering.exchange.fail(LegFailed(instance, message))
        elif leg is self.answering and time.monotonic() - leg.exchange.last_heard > silence:
            leg.exchange.fail(TimedOut(message))

    def finish(self) -> None:
        """The client has the whole answer; prefill gets a moment to end its own."""
        self.answering.finish()
        prefill = self.prefill
        if prefill is not None and not prefill.finished:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(PREFILL_GRACE_SECONDS, self._give_up_leg, prefill)

    def give_up(self, culprit: Instance | None = None) -> None:
        """Close all legs at once, and abort those that still run at their engines; not at the ``culprit``."""
        for leg in (self.answering, self.prefill):
            if leg is not None:
                self._give_up_leg(leg, culprit)

    def _give_up_leg(self, leg: Leg, culprit: Instance | None = None) -> None:
        if leg.finished:
            return
        runs = leg.runs_at_engine
        leg.finish()
        if runs and leg.instance is not culprit and self.engine_ids:
            self._aborter.abort_soon(leg.instance, self.engine_ids)

    def _prefill_ended(self) -> None:
        """Prefill's answer was read to its end, or failed: tell the answering leg if prefill did."""
        leg = self.prefill
        assert leg is not None
        if leg.finished:
            return
        failure = self._prefill_failure(leg)
        leg.finish()
        if self._grace is not None:
            self._grace.cancel()
        if failure is None:
            self.prefilled_at = time.perf_counter()
            leg.succeeded()
        elif self._begun:
            _log.info("prefill failed after decode had begun to answer: %s", failure)
            heard = self.answering.exchange.last_heard
            asyncio.get_running_loop().call_later(SILENCE_SECONDS, self._fail_if_silent, heard, str(failure))
        else:
            self.answering.exchange.fail(failure)

    def _fail_if_silent(self, since: float, why: str) -> None:
        """Give up decode if nothing has come from it: what it sent was no sign that it had the prompt's KV."""
        exchange = self.answering.exchange
        if not self.answering.finished and exchange.last_heard == since:
            decode = self.answering.instance.key
            exchange.fail(TimedOut(f"{decode} has sent nothing for {SILENCE_SECONDS:g} s, since prefill failed: {why}"))

    def _prefill_failure(self, leg: Leg) -> LegFailed | NoRoom | None:
        exchange = leg.exchange
        if isinstance(exchange.error, NoRoom):
            return exchange.error
        if isinstance(exchange.error, UpstreamError):
            return self._broken(leg, exchange.error)
        if not 200 <= exchange.status < 300:
            return _refused(leg, exchange.drained)
        # FastDeploy's prefill says so to its own client alone, in an answer of status 200.
        if _tells_pd_error(exchange.drained):
            return LegFailed(leg.instance, f"{leg.instance.key} could not hand over to decode", in_hand_over=True)
        return None

    def _broken(self, leg: Leg, error: UpstreamError) -> LegFailed:
        self._on_trouble(leg.instance, error)
        return LegFailed(leg.instance, str(error), stale=isinstance(error, StaleConnection))


def _is_event_stream(headers: Headers) -> bool:
    """Whether the answer is server-sent events, and not compressed."""
    found = dict(headers)
    return found.get(b"content-type", b"").startswith(b"text/event-stream") and b"content-encoding" not in found


def _tells_pd_error(answer: bytes) -> bool:
    """Whether an answer, or one of its events, is an error of hand-over; users and models may write of one, too."""
    if PD_ERROR.encode() not in answer:
        return False
    for document in (answer, *_EVENT_DATA.findall(answer)):
        with contextlib.suppress(orjson.JSONDecodeError):
            said = orjson.loads(document)
            if isinstance(said, dict) and PD_ERROR in str(said.get("error")):
                return True
    return False


async def _refusal(leg: Leg) -> LegFailed:
    late = f"{leg.instance.key} answered with {leg.exchange.status}, and no more within {REFUSAL_SECONDS:g} s"
    timer = asyncio.get_running_loop().call_later(REFUSAL_SECONDS, leg.exchange.fail, TimedOut(late))
    try:
        return _refused(leg, await leg.exchange.read(ERROR_BYTES))
    finally:
        timer.cancel()


def _refused(leg: Leg, body: bytes) -> LegFailed:
    answer = Answer(leg.exchange.status, leg.exchange.headers, body)
    message = f"{leg.instance.key} answered with {answer.status}"
    in_hand_over = answer.status >= 500 and PD_ERROR.encode() in body
    return LegFailed(leg.instance, message, answer, in_hand_over=in_hand_over)
