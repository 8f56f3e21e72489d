"""Event streams: relayed at once, but never cut within an event. Instances are stand-ins."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.serving.relay import EVENT_BYTES, ClientResponse, _find_events_end
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import Behaviour, Received, Responder, never_answers, stalls
from tests.support.waiting import wait_until


def send(*chunks: bytes, cut: bool = False, content_type: str = "text/event-stream") -> Behaviour:
    """Return a behaviour that streams these chunks in separate segments, and then ends or breaks off."""

    async def behave(request: Received, respond: Responder) -> None:
        await respond.start_stream(content_type)
        for chunk in chunks:
            await respond.chunk(chunk)
            await asyncio.sleep(0.01)
        if cut:
            respond.cut()
        else:
            await respond.end_stream()

    return behave


def read_events(data: bytes) -> list[str]:
    """Return the data of each event like a client's parser."""
    assert data.endswith(b"\n\n")
    return [event.removeprefix("data: ") for event in data.decode().split("\n\n")[:-1]]


def test_each_event_is_relayed_before_the_next_exists(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    may_continue = asyncio.Event()

    async def wait_for_client(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event("first")
        await may_continue.wait()
        await respond.event("second")
        await respond.end_stream()

    router = make_router(stand_in("mixed", wait_for_client))
    with router.stream() as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: first\n\n"
        router.thread.loop.call_soon_threadsafe(may_continue.set)
        assert b"".join(pieces) == b"data: second\n\n"


def test_a_stream_with_split_events_is_relayed_unchanged(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    chunks = [b"data: 1\n", b"\ndata: 2\n\nda", b"ta: 3\r\n\r\n: comment\n\ndata", b": [DONE]\n\n"]
    with make_router(stand_in("mixed", send(*chunks))).stream() as response:
        assert response.read() == b"".join(chunks)


def test_a_last_event_without_its_blank_line_is_forwarded(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    with make_router(stand_in("mixed", send(b"data: 1\n\n", b"data: 2"))).stream() as response:
        assert response.read() == b"data: 1\n\ndata: 2"


@pytest.mark.parametrize("part", [b"", b'data: {"half', b"data: 3\n", b"data"])
def test_a_stream_that_breaks_off_ends_with_an_error_event_and_done(
    make_router: MakeRouter, stand_in: MakeStandIn, part: bytes
) -> None:
    chunks = [b"data: 1\n\n", b"data: 2\n\n", *([part] if part else [])]
    instance = stand_in("mixed", send(*chunks, cut=True))
    with make_router(instance).stream() as response:
        events = read_events(response.read())
    assert (events[:2], events[3]) == (["1", "2"], "[DONE]")
    error = json.loads(events[2])["error"]
    assert (error["code"], error["type"]) == ("mixed_failed", "upstream_error")
    assert instance.key in error["message"]


def test_a_running_prefill_is_aborted_when_decode_breaks_off(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    async def break_off(request: Received, respond: Responder) -> None:
        while not prefill.running:
            await asyncio.sleep(0.01)
        await send(b"data: 1\n\n", cut=True)(request, respond)

    prefill, decode = stand_in("prefill", never_answers), stand_in("decode", break_off)
    with make_router(prefill, decode, splitwise=True).stream(request_id="r") as response:
        assert "decode_failed" in read_events(response.read())[1]
    wait_until(lambda: prefill.aborted == [{"req_ids": ["chatcmpl-r_0"]}], "the abort at prefill")
    assert decode.aborted == []


def test_another_instance_serves_a_stream_that_fails_before_its_first_event(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    bad, good = stand_in("mixed", send(cut=True)), stand_in("mixed", send(b"data: 1\n\n"))
    router = make_router(bad, good)
    for _ in range(2):
        with router.stream() as response:
            assert response.read() == b"data: 1\n\n"
    assert len(bad.received) >= 1


def test_a_stream_that_times_out_ends_with_an_error_event(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    with make_router(stand_in("mixed", stalls("1")), request_timeout_secs=0.3).stream() as response:
        events = read_events(response.read())
    assert (events[0], json.loads(events[1])["error"]["code"], events[2]) == ("1", "request_timeout", "[DONE]")


def test_a_compressed_stream_is_relayed_unchanged(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    async def send_compressed(request: Received, respond: Responder) -> None:
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: br\r\ncontent-length: 9\r\n\r\n"
        )
        await respond.raw(head + b"\x00\n\n\x01\x02\x03\x04\x05\x06")

    with make_router(stand_in("mixed", send_compressed)).stream() as response:
        assert b"".join(response.iter_raw()) == b"\x00\n\n\x01\x02\x03\x04\x05\x06"


def test_a_slow_client_slows_the_instance_down(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    # Much more than the kernel buffers, because its buffer for the router may grow to 32 MB.
    total_events, event = 6144, b"data: " + b"x" * 32760 + b"\n\n"
    responders: list[Responder] = []

    async def send_much(request: Received, respond: Responder) -> None:
        responders.append(respond)
        await respond.start_stream()
        for _ in range(total_events):
            await respond.chunk(event)
        await respond.end_stream()

    router = make_router(stand_in("mixed", send_much))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.connect(("127.0.0.1", router.port))
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        wait_until(lambda: _has_paused(responders), "the pause of the instance")
        assert responders[0].bytes_sent < total_events * len(event) / 4
        received = 0
        client.settimeout(20)
        while received < total_events * len(event):
            received += len(client.recv(1 << 20))
    wait_until(lambda: responders[0].bytes_sent > total_events * len(event), "the instance to send the rest")


def _has_paused(responders: list[Responder]) -> bool:
    """Return whether the instance has begun to send, but sends nothing for a time."""
    if not responders or not responders[0].bytes_sent:
        return False
    before = responders[0].bytes_sent
    time.sleep(0.3)
    return responders[0].bytes_sent == before


_event_bytes = st.lists(
    st.sampled_from([b"data: 1", b"\n", b"\r", b"\n\n", b"\r\n\r\n", b"x", b"\r\n"]), max_size=12
).map(b"".join)


@given(_event_bytes)
def test_splitting_events_ends_at_the_last_blank_line(data: bytes) -> None:
    end = _find_events_end(data)
    whole, rest = data[:end], data[end:]
    assert not whole or whole.endswith((b"\n\n", b"\r\n\r\n"))
    assert b"\n\n" not in rest
    assert b"\r\n\r\n" not in rest


@given(_event_bytes, _event_bytes)
def test_splitting_needs_to_search_only_new_bytes(buffered: bytes, new: bytes) -> None:
    buffered = buffered[_find_events_end(buffered) :]
    assert _find_events_end(buffered + new, len(buffered)) == _find_events_end(buffered + new)


class CountingBytes(bytes):
    """Bytes that count how many of them were searched."""

    searched = 0

    def rfind(self, mark: Any, start: Any = 0, end: Any = None) -> int:
        self.searched += len(self) - start
        return super().rfind(mark, start)

    def __contains__(self, mark: Any) -> bool:
        self.searched += len(self)
        return super().__contains__(mark)


def test_the_buffered_bytes_of_an_event_are_not_searched_again() -> None:
    data = CountingBytes(b"x" * 100_000)
    _find_events_end(data, len(data) - 10)
    assert data.searched < 100


def test_an_endless_event_is_forwarded_at_the_limit() -> None:
    endless = b"x" * (EVENT_BYTES + 1)
    assert _find_events_end(endless) == len(endless)


@given(st.lists(_event_bytes, max_size=6))
def test_pieces_of_events_are_joined(pieces: list[bytes]) -> None:
    response = ClientResponse(SimpleNamespace())  # type: ignore[arg-type]
    relayed = [response._take_whole_events(piece, is_end=False) for piece in pieces]
    relayed.append(response._take_whole_events(b"", is_end=True))
    assert b"".join(relayed) == b"".join(pieces)
    assert all(each == b"" or each.endswith((b"\n\n", b"\r\n\r\n")) for each in relayed[:-1])


def test_a_piece_of_a_long_event_is_not_copied_with_the_pieces_before_it() -> None:
    response = ClientResponse(SimpleNamespace())  # type: ignore[arg-type]
    for piece in (b"x" * (EVENT_BYTES // 2), b"x"):
        response._take_whole_events(piece, is_end=False)
    tracemalloc.start()
    try:
        response._take_whole_events(b"x", is_end=False)
        assert tracemalloc.get_traced_memory()[1] < EVENT_BYTES // 4
    finally:
        tracemalloc.stop()


def test_a_resumed_stream_may_be_longer_than_its_first_instance_announced(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    def send_with_length(length: int, *events: bytes) -> Behaviour:
        async def behave(request: Received, respond: Responder) -> None:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
            await respond.raw(head % length + b"".join(events))
            await asyncio.sleep(0.01)
            respond.cut()

        return behave

    first, last = chat_event("a", 1), chat_event("b", 2)
    bad = stand_in("mixed", send_with_length(len(first + last), first))
    good = stand_in("mixed", send(chat_event("again, and longer", 2), b"data: [DONE]\n\n"))
    router = make_router(bad, good, stream_resume_count=1)
    counts = set()
    while not bad.received:
        with router.stream(return_token_ids=True) as response:
            counts.add(response.read().count(b"again, and longer"))
    assert counts == {1}


@pytest.mark.parametrize("engine", ["fastdeploy", "vllm"])
def test_ids_are_hidden_in_the_form_of_the_engine_that_answers(
    make_router: MakeRouter, stand_in: MakeStandIn, engine: str
) -> None:
    name, left = ("token_ids", {"token_ids": None}) if engine == "vllm" else ("completion_token_ids", {})

    def event(**ids: Any) -> bytes:
        chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None, **ids}]}
        return b"data: %s\n\n" % json.dumps(chunk, separators=(",", ":")).encode()

    bad = stand_in("mixed", send(cut=True))
    good = stand_in("mixed", send(*(event(**{name: [number]}) for number in range(3))))
    bad.extra_fields["engine"], good.extra_fields["engine"] = "fastdeploy" if engine == "vllm" else "vllm", engine
    router = make_router(bad, good)
    while not bad.received:
        with router.stream() as response:
            assert response.read() == 3 * event(**left)


def test_an_engine_failure_with_broken_http_after_it_is_one_failure(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    error = b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}\n\n'

    async def fail_twice(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.chunk(chat_event("a", 1))
        await asyncio.sleep(0.01)
        await respond.raw(b"%x\r\n%s\r\nno chunk\r\n" % (len(error), error))
        await respond.peer_left.wait()

    bad = stand_in("mixed", fail_twice)
    good = stand_in("mixed", send(chat_event("b", 2), b"data: [DONE]\n\n"))
    router = make_router(bad, good, stream_resume_count=1)
    have_failed = set()
    while not bad.received:
        with router.stream(return_token_ids=True) as response:
            have_failed.add(b"error" in response.read())
    assert have_failed == {False}


def chat_event(text: str, token: int) -> bytes:
    """Make an event of a chat with the id of its token."""
    choice = {"index": 0, "delta": {"content": text}, "token_ids": [token], "finish_reason": None}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: %s\n\n" % json.dumps(chunk).encode()
