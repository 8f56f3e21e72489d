"""Spans of an instance's requests at a real OTLP receiver. For pairs, see tests/end_to_end/test_traces.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.args import parse_args
from engine.disaggregation import HandoverReceiver
from engine.generation import Generation, Generations, SharedParts
from engine.scheduling.pool_use import PoolUse, Reason
from engine.scheduling.request import Request, SamplingParams, Sequence
from engine.telemetry.tracing import Tracer, list_phases, open_tracer
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.event_loop import in_event_loop
from tests.engine.running import Engine
from tests.support.otlp import (
    NAMES_OF_OPENTELEMETRY,
    OtlpReceiver,
    hide_opentelemetry,
    list_genai_names,
    receive_spans,
)
from tests.support.waiting import wait_until

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = [(b"traceparent", f"00-{TRACE}-{CALLER}-01".encode())]
MODEL = ["--model", "m"]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with receive_spans(monkeypatch) as made:
        yield made


@pytest.fixture
def tracer(receiver: OtlpReceiver) -> Iterator[Tracer]:
    made = Tracer(receiver.url)
    yield made
    made.close()


@pytest.fixture
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine(tiny_checkpoint, store=MemoryStore(1 << 26)) as running:
        yield running


@pytest.fixture
def begin(engine: Engine, word_tokenizer: Any, tracer: Tracer) -> Callable[..., Generation]:
    """Return a function that begins the generation of a request with the given headers."""
    parts = (engine.core, word_tokenizer, "mixed", engine.block_size, HandoverReceiver())
    generations = Generations(SharedParts(*parts, tracer=tracer))

    def start(headers: list[tuple[bytes, bytes]] = TRACED, max_tokens: int = 5) -> Generation:
        tracer.enter_request(headers)
        params = SamplingParams(max_tokens, temperature=0, ignore_eos=True)
        return generations.begin(Request("r", tuple(range(1, 101)), params), None)

    return start


async def answer(generation: Generation) -> None:
    async for _ in generation.pieces():
        pass


@in_event_loop
async def test_the_spans_of_a_request_and_its_phases_have_the_span_of_the_client_as_parent(
    begin: Callable[..., Generation], receiver: OtlpReceiver
) -> None:
    generation = begin()
    await answer(generation)
    (request,) = await asyncio.to_thread(receiver.wait_for, 1, kind="server")
    assert (request.trace_id, request.parent_id, request.error) == (TRACE, CALLER, None)
    attributes = {"engine.role": "mixed", "engine.finish_reason": "length", "engine.request_id": "r"}
    counts = {"gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 5}
    assert (attributes | counts).items() <= request.attributes.items()
    assert counts.keys() <= list_genai_names(request) <= NAMES_OF_OPENTELEMETRY
    await asyncio.to_thread(receiver.wait_for, 1, name="save")
    phases = receiver.find(parent_id=request.span_id)
    assert next(phase.name for phase in phases if phase.name != "save") == "queue"
    assert {phase.name for phase in phases} == {"queue", "look-up", "prefill", "decode", "save"}
    prefill, decode = (next(phase for phase in phases if phase.name == name) for name in ("prefill", "decode"))
    assert request.start <= prefill.start <= prefill.end <= decode.start <= decode.end <= request.end
    assert prefill.attributes == {"engine.computed_tokens": 100}
    (save,) = (phase for phase in phases if phase.name == "save")
    assert save.attributes["engine.pool.saved_blocks"] > 0


@in_event_loop
async def test_an_unsampled_request_is_not_traced_and_a_request_without_a_trace_begins_one(
    begin: Callable[..., Generation], receiver: OtlpReceiver
) -> None:
    await answer(begin([(b"traceparent", f"00-{TRACE}-{CALLER}-00".encode())]))
    await answer(begin([]))
    (request,) = await asyncio.to_thread(receiver.wait_for, 1, kind="server")
    assert request.parent_id == ""
    assert request.trace_id != TRACE


@in_event_loop
async def test_an_abort_and_a_disconnect_are_errors_of_the_request_and_its_last_phase(
    begin: Callable[..., Generation], receiver: OtlpReceiver
) -> None:
    aborted = begin(max_tokens=100)
    async for _ in aborted.pieces():
        aborted.abort()
    pieces = begin(max_tokens=100).pieces()
    await anext(pieces)
    await pieces.aclose()
    requests = await asyncio.to_thread(receiver.wait_for, 2, kind="server")
    assert [request.error for request in requests] == ["the request was aborted", "the client left"]
    for request in requests:
        assert request.attributes["engine.finish_reason"] == "abort"
        decodes = await asyncio.to_thread(receiver.wait_for, 1, parent_id=request.span_id, name="decode")
        assert [decode.error for decode in decodes] == [request.error]


@in_event_loop
async def test_a_failed_step_is_an_error_with_a_message(
    begin: Callable[..., Generation], engine: Engine, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.core, "_run_chunks", fail)
    await answer(begin())
    (request,) = await asyncio.to_thread(receiver.wait_for, 1, kind="server")
    assert request.error == "the engine failed while computing this request; the instance's log says why"
    (prefill,) = receiver.find(name="prefill")
    assert prefill.error == request.error


def sequence_with(**times: Any) -> Sequence:
    sequence = Sequence(Request("r", (1, 2, 3), SamplingParams(4)), 16)
    for name, value in times.items():
        setattr(sequence, name, value)
    return sequence


def test_a_sequence_that_never_reached_the_engine_has_no_phases() -> None:
    assert list(list_phases(sequence_with(), 9.0, "aborted")) == []


def test_a_sequence_that_never_ran_has_only_a_queue_phase_with_the_reason() -> None:
    (queue,) = list_phases(sequence_with(submitted_at=1.0, ended_at=3.0), 9.0, "aborted")
    assert queue[:3] == ("queue", 1.0, 3.0)
    assert queue.trouble == "aborted"


def test_a_load_is_between_two_queue_phases_if_the_sequence_waits_after_it() -> None:
    sequence = sequence_with(
        submitted_at=1.0, look_up=(2.0, 3.0), load=(3.0, 4.0), started_at=5.0, first_token_at=6.0, ended_at=8.0
    )
    sequence.token_ids += [4, 5]
    assert [phase[:3] for phase in list_phases(sequence, 9.0)] == [
        ("queue", 1.0, 2.0),
        ("look-up", 2.0, 3.0),
        ("load", 3.0, 4.0),
        ("queue", 4.0, 5.0),
        ("prefill", 5.0, 6.0),
        ("decode", 6.0, 8.0),
    ]


def test_a_handed_over_prompt_has_no_prefill_phase() -> None:
    sequence = sequence_with(submitted_at=1.0, first_token_at=1.5, started_at=2.0, ended_at=8.0)
    sequence.token_ids += [4, 5]
    assert [phase[:3] for phase in list_phases(sequence, 9.0)] == [("queue", 1.0, 2.0), ("decode", 2.0, 8.0)]


def test_a_failed_look_up_has_the_reason() -> None:
    use = PoolUse(Reason.FAILED, "pool away: gone")
    sequence = sequence_with(submitted_at=1.0, look_up=(1.0, 2.0), pool_use=use)
    assert {phase.name: phase.trouble for phase in list_phases(sequence, 3.0)}["look-up"] == "pool away: gone"


@pytest.mark.parametrize(
    ("environ", "receiver"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:4318/v1/traces"}, "http://t:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, ""),
    ],
)
def test_the_standard_variables_set_the_receiver_of_spans(environ: dict[str, str], receiver: str) -> None:
    assert parse_args(MODEL, environ).trace_receiver == receiver


def test_a_warning_names_the_packages_to_install_for_tracing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_opentelemetry(monkeypatch)
    assert open_tracer("http://c:4318") is None
    assert "pip install '/path/to/this/repository[tracing]'" in caplog.text


def test_one_warning_reports_that_the_receiver_accepts_no_spans(
    tracer: Tracer, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine.telemetry.tracing")
    receiver.answer = lambda: 400

    def send() -> None:
        tracer.enter_request(TRACED)
        trace = tracer.begin_request()
        assert trace is not None
        trace.end(sequence_with(), "mixed", 0, "abort", (), "the client left")

    send()
    wait_until(lambda: "does not accept spans" in caplog.text, "the warning")
    receiver.answer = lambda: 200
    send()
    wait_until(lambda: "accepts spans again; 1 spans were lost" in caplog.text, "the message of the recovery")
    assert len(caplog.records) == 2
