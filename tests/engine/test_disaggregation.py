"""Hand-over: decode (D) gets the result of prefill (P). If P fails, D computes the prompt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator

import pytest

from engine.disaggregation import HandoverReceiver, HandoverResult, Prompt, hand_over
from engine.scheduling.request import Request, SamplingParams, Sequence
from tests.engine.event_loop import eventually, in_event_loop
from tests.support.ports import free_port

HOST = "127.0.0.1"
PATIENT = 30.0
SHORT = 0.3
PROMPT = Prompt.of_sequence(Sequence(Request("r", tuple(range(255)), SamplingParams(1)), 2))


@contextlib.asynccontextmanager
async def start_receiver(silence_seconds: float = PATIENT) -> AsyncIterator[HandoverReceiver]:
    """Start D's receiver on a free port. It closes a connection after ``silence_seconds`` without a message."""
    receiver = HandoverReceiver(None, silence_seconds, expiry_seconds=silence_seconds)
    await receiver.start_listening(socket.create_server((HOST, 0)))
    try:
        yield receiver
    finally:
        await receiver.stop_listening()


@contextlib.asynccontextmanager
async def connect(receiver: HandoverReceiver) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect as a P. The test chooses its messages."""
    reader, writer = await asyncio.open_connection(HOST, receiver.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def begin(request_id: str, **changes: object) -> bytes:
    return line(**{"type": "begin", "request_id": request_id, **PROMPT.to_message(), **changes})


def line(**message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def list_message_types(reader: asyncio.StreamReader) -> list[str]:
    """Return the types of all messages until the other side closes the connection."""
    return [json.loads(message)["type"] async for message in reader]


async def prefill(receiver: HandoverReceiver, request_id: str, own: int = 0, pool: int = 0) -> None:
    """Run a P without faults."""
    async with hand_over(HOST, receiver.port, request_id, PROMPT) as decode:
        decode.report_save(own, pool)


@in_event_loop
async def test_a_waiting_request_gets_the_cached_tokens_of_p() -> None:
    async with start_receiver() as receiver:
        waiting = asyncio.create_task(receiver.wait_for_prompt("r", PROMPT))
        await eventually(lambda: receiver.num_pending, "the request to wait")
        await prefill(receiver, "r", 32, 16)
        assert await waiting == HandoverResult(own_cached_tokens=32, pool_cached_tokens=16)
        assert not receiver.num_pending


@in_event_loop
async def test_a_request_can_arrive_after_p_has_finished() -> None:
    async with start_receiver() as receiver:
        await prefill(receiver, "r", 32, 16)
        await eventually(lambda: receiver.num_pending, "P's result to arrive")
        assert await receiver.wait_for_prompt("r", PROMPT) == HandoverResult(32, 16)
        assert not receiver.num_pending


@in_event_loop
async def test_p_may_compute_much_longer_than_the_limit_of_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.disaggregation.prefill.ALIVE_SECONDS", SHORT / 10)
    async with start_receiver(SHORT) as receiver:
        waiting = asyncio.create_task(receiver.wait_for_prompt("r", PROMPT))
        async with hand_over(HOST, receiver.port, "r", PROMPT) as decode:
            await asyncio.sleep(3 * SHORT)  # P computes
            assert not waiting.done()
            decode.report_save(0, 0)
        assert await waiting == HandoverResult(0, 0)


@in_event_loop
async def test_d_computes_the_prompt_if_p_reports_a_failure() -> None:
    async with start_receiver() as receiver:
        waiting = asyncio.create_task(receiver.wait_for_prompt("r", PROMPT))
        async with hand_over(HOST, receiver.port, "r", PROMPT) as decode:
            decode.report_failure("prefill ended with abort")
        assert await waiting is None
        assert not receiver.num_pending


@in_event_loop
async def test_d_computes_the_prompt_if_p_raises_an_error() -> None:
    async with start_receiver() as receiver:
        waiting = asyncio.create_task(receiver.wait_for_prompt("r", PROMPT))
        with pytest.raises(ZeroDivisionError):
            async with hand_over(HOST, receiver.port, "r", PROMPT):
                raise ZeroDivisionError
        assert await waiting is None


@in_event_loop
async def test_d_computes_the_prompt_if_p_sends_nothing_more() -> None:
    async with start_receiver(SHORT) as receiver, connect(receiver) as (_, to_d):
        to_d.write(begin("r"))
        assert await receiver.wait_for_prompt("r", PROMPT) is None
        assert not receiver.num_pending


@in_event_loop
async def test_the_result_of_a_late_p_expires() -> None:
    async with start_receiver(SHORT) as receiver:
        assert await receiver.wait_for_prompt("r", PROMPT) is None
        await prefill(receiver, "r")
        await eventually(lambda: receiver.num_pending, "P's result to arrive")
        await eventually(lambda: not receiver.num_pending, "P's result to expire")


@in_event_loop
async def test_results_without_a_request_expire() -> None:
    async with start_receiver(SHORT) as receiver:
        for i in range(20):
            await prefill(receiver, str(i))
        await eventually(lambda: receiver.num_pending, "P's results to arrive")
        await eventually(lambda: not receiver.num_pending, "P's results to expire")


@in_event_loop
async def test_d_forgets_a_request_that_is_cancelled_while_p_computes() -> None:
    async with start_receiver() as receiver:
        waiting = asyncio.create_task(receiver.wait_for_prompt("r", PROMPT))
        async with connect(receiver) as (from_d, to_d):
            to_d.write(begin("r"))
            assert json.loads(await from_d.readline())["type"] == "refused", "there is no memory for the blocks"
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not receiver.num_pending
            assert await list_message_types(from_d) == []


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\xfe\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"5\n",
        b"[]\n",
        b"{}\n",
        b"\n",
        b"",
        b"x" * 1_000_000 + b"\n",
        b"[" * 60_000 + b"\n",
        line(type="begin"),
        line(type="begin", request_id=7),
        line(type="ready", own_cached_tokens=0, pool_cached_tokens=0),
    ],
    ids=lambda sent: repr(sent[:40]),
)
@in_event_loop
async def test_d_closes_connections_with_invalid_first_messages(sent: bytes) -> None:
    async with start_receiver() as receiver, connect(receiver) as (from_d, to_d):
        waiting = asyncio.create_task(receiver.wait_for_prompt("r", PROMPT))
        to_d.write(sent)
        to_d.write_eof()
        with contextlib.suppress(ConnectionError):
            assert await from_d.read() == b""
        await prefill(receiver, "r")
        assert await waiting == HandoverResult(0, 0)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\xfe\n",
        b"x" * 1_000_000 + b"\n",
        b"{}\n",
        line(type="ready"),
        line(type="ready", own_cached_tokens="many", pool_cached_tokens=0),
        line(type="ready", own_cached_tokens=[], pool_cached_tokens=0),
        line(type="saved", own_cached_tokens=-1, pool_cached_tokens=0),
        line(type="saved", own_cached_tokens=128, pool_cached_tokens=128),
        line(type="hooray"),
        begin("r"),
    ],
    ids=lambda sent: repr(sent[:40]),
)
@in_event_loop
async def test_an_invalid_message_of_p_counts_as_a_failure(sent: bytes) -> None:
    async with start_receiver() as receiver, connect(receiver) as (_, to_d):
        to_d.write(begin("r") + sent)
        assert await receiver.wait_for_prompt("r", PROMPT) is None
        assert not receiver.num_pending


@in_event_loop
async def test_p_continues_if_d_cannot_be_reached() -> None:
    async with hand_over(HOST, free_port(), "r", PROMPT) as decode:
        decode.report_save(0, 0)


@in_event_loop
async def test_an_error_of_p_is_raised_even_if_d_cannot_be_reached() -> None:
    with pytest.raises(ZeroDivisionError):
        async with hand_over(HOST, free_port(), "r", PROMPT):
            raise ZeroDivisionError


@in_event_loop
async def test_p_continues_if_d_closes_the_connection() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.transport.abort()

    server = await asyncio.start_server(close, HOST, 0)
    async with hand_over(HOST, server.sockets[0].getsockname()[1], "r", PROMPT) as decode:
        await eventually(lambda: not decode.is_wanted, "P to notice")
        decode.report_save(0, 0)
    server.close()


@in_event_loop
async def test_each_of_many_requests_gets_the_result_of_its_own_p() -> None:
    async with start_receiver() as receiver:
        numbers = list(range(200))
        waiting = {i: asyncio.create_task(receiver.wait_for_prompt(str(i), PROMPT)) for i in numbers[::2]}
        random.Random(0).shuffle(numbers)
        await asyncio.gather(*(prefill(receiver, str(i), own=i) for i in numbers))
        waiting |= {i: asyncio.create_task(receiver.wait_for_prompt(str(i), PROMPT)) for i in numbers if i % 2}
        for i, task in waiting.items():
            assert await task == HandoverResult(i, 0)
        assert not receiver.num_pending
