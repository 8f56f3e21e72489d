"""Spans of requests, sent to a real OTLP receiver. Instances are stand-ins."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from router.http import ClientRequest
from router.telemetry import Tracer, open_tracer
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import answers, cuts, never_answers, streams
from tests.support.otlp import (
    NAMES_OF_OPENTELEMETRY,
    OtlpReceiver,
    ReceivedSpan,
    hide_opentelemetry,
    list_genai_names,
    receive_spans,
)
from tests.support.ports import free_port
from tests.support.waiting import wait_until

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": "vendor=1"}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """Start a receiver for the spans of this test's routers."""
    with receive_spans(monkeypatch) as server:
        yield server


def chat(router: RouterUnderTest, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    """Send a chat completion."""
    fields = {"messages": [], "model": "m", **body}
    return router.client.post("/v1/chat/completions", json=fields, headers=headers)


def find_children(receiver: OtlpReceiver, parent: ReceivedSpan) -> list[ReceivedSpan]:
    return receiver.find(parent_id=parent.span_id)


def is_within(inner: ReceivedSpan, outer: ReceivedSpan) -> bool:
    """Return whether the time of ``inner`` is within that of ``outer``, except for rounding to nanoseconds."""
    return outer.start - 1e-6 <= inner.start <= inner.end <= outer.end + 1e-6


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """List the log's messages about spans."""
    return [record.getMessage() for record in caplog.records if "tracing" in record.name]


def test_a_request_its_attempt_and_its_legs_form_one_tree_under_the_clients_span(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode", streams("a", "b"))
    router = make_router(prefill, decode, splitwise=True)
    assert chat(router, TRACED, request_id="r", stream=True).status_code == 200
    (request,) = receiver.wait_for(1, kind="server")
    assert (request.trace_id, request.parent_id, request.service) == (TRACE, CLIENT, "kvrouter")
    assert request.name == "POST /v1/chat/completions"
    expected = {"http.response.status_code": 200, "gen_ai.request.model": "m", "router.request_id": "r"}
    assert expected.items() <= request.attributes.items()
    (attempt,) = find_children(receiver, request)
    first, second = sorted(find_children(receiver, attempt), key=lambda leg: leg.name, reverse=True)
    assert [(leg.name, leg.kind, leg.attributes["router.instance"]) for leg in (first, second)] == [
        ("prefill leg", "client", prefill.key),
        ("decode leg", "client", decode.key),
    ]
    assert first.attributes["router.policy"] == "pool_aware"
    assert first.attributes["router.predicted_cached_tokens"] == 0
    assert {span.error for span in receiver.spans} == {None}
    assert {span.trace_id for span in receiver.spans} == {TRACE}
    assert is_within(attempt, request)
    assert is_within(second, attempt)
    assert second.start <= second.events["first byte"] <= second.end
    for leg, instance in ((first, prefill), (second, decode)):
        (got,) = instance.received
        assert got.header("traceparent") == f"00-{TRACE}-{leg.span_id}-01"
        assert got.header("tracestate") == "vendor=1"


def test_a_request_without_a_trace_begins_one(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance)
    chat(router, request_id="r")
    (request,) = receiver.wait_for(1, kind="server")
    (leg,) = receiver.wait_for(1, kind="client")
    assert request.parent_id == ""
    assert instance.received[0].header("traceparent") == f"00-{request.trace_id}-{leg.span_id}-01"
    assert router.client.get("/admin/explain/r").json()["trace_id"] == request.trace_id


def test_the_span_of_a_request_has_the_ids_that_fastdeploys_users_search_for(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    chat(make_router(stand_in()), {"X_BD_LOGID": "log-1"}, req_id="q", session_id="s")
    (request,) = receiver.wait_for(1, kind="server")
    expected = {"router.x_bd_logid": "log-1", "router.req_id": "q", "session.id": "s"}
    assert expected.items() <= request.attributes.items()


def test_a_retried_request_has_two_attempts_and_the_failed_one_names_its_error(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    prefill, good, bad = stand_in("prefill"), stand_in("decode"), stand_in("decode", answers(500, b""))
    router = make_router(prefill, good, bad, splitwise=True, decode_policy="round_robin")
    for number in range(2):
        assert chat(router, request_id=f"r{number}").status_code == 200
    (retried,) = [got.json["request_id"] for got in bad.received]
    receiver.wait_for(2, kind="server")
    first, second = receiver.find(name="attempt", router_request_id=retried)
    assert (first.attributes["router.attempt"], second.attributes["router.attempt"]) == (1, 2)
    assert first.end <= second.start
    assert (first.error, second.error) == (f"{bad.key} answered with 500", None)
    (failed,) = [leg for leg in find_children(receiver, first) if leg.name == "decode leg"]
    assert (failed.error, failed.attributes["http.response.status_code"]) == (f"{bad.key} answered with 500", 500)
    assert [leg.error for leg in find_children(receiver, second)] == [None, None]
    assert len({span.span_id for span in receiver.spans}) == len(receiver.spans)


def test_decode_after_prefill_gets_the_id_of_its_leg_or_has_no_leg(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    prefill.extra_fields = decode.extra_fields = {"engine": "openai"}
    router = make_router(prefill, decode, splitwise=True)
    assert chat(router, TRACED).status_code == 200
    first, second = receiver.wait_for(2, kind="client")
    assert (first.name, second.name) == ("prefill leg", "decode leg")
    assert first.end <= second.start
    assert decode.received[0].header("traceparent") == f"00-{TRACE}-{second.span_id}-01"
    receiver.spans.clear()
    prefill.behave = answers(400, b"{}")
    assert chat(router, TRACED).status_code == 400
    (alone,) = receiver.wait_for(1, kind="client")
    assert (alone.name, alone.error) == ("prefill leg", f"{prefill.key} answered with 400")


def test_a_failed_request_is_an_error_with_a_description(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router = make_router(stand_in("mixed", cuts()))
    assert chat(router).status_code == 502
    (request,) = receiver.wait_for(1, kind="server")
    assert "closed the connection" in (request.error or "")
    assert request.attributes["error.type"] == "mixed_failed"


def test_the_spans_of_a_canceled_request_say_that_the_client_left(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router = make_router(stand_in("mixed", never_answers))
    with pytest.raises(httpx.ReadTimeout):
        router.client.post("/v1/chat/completions", json={"messages": []}, timeout=0.2)
    (request,) = receiver.wait_for(1, kind="server")
    (leg,) = receiver.wait_for(1, kind="client")
    assert (request.error, leg.error) == ("the client left", "given up: the client left")


def test_the_span_of_a_refused_request_is_no_error(receiver: OtlpReceiver, make_router: MakeRouter) -> None:
    router = make_router()
    assert router.client.post("/v1/chat/completions", content=b"{").status_code == 400
    (request,) = receiver.wait_for(1, kind="server")
    assert (request.error, request.attributes["error.type"]) == (None, "invalid_body")


def test_an_unsampled_request_is_not_traced_and_its_headers_are_forwarded(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    router = make_router(instance)
    unsampled = {"traceparent": f"00-{TRACE}-{CLIENT}-00", "tracestate": "vendor=1"}
    chat(router, unsampled)
    chat(router)
    receiver.wait_for(1, kind="client")
    assert {header: instance.received[0].header(header) for header in unsampled} == unsampled
    assert TRACE not in {span.trace_id for span in receiver.spans}


def test_the_sampler_of_the_standard_variables_decides_and_instances_get_its_decision(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-router")
    instance = stand_in()
    router = make_router(instance)
    chat(router)
    chat(router, TRACED)
    (request,) = receiver.wait_for(1, kind="server")
    assert (request.trace_id, request.service) == (TRACE, "my-router")
    assert (instance.received[0].header("traceparent") or "").endswith("-00")


def test_an_invalid_header_begins_a_new_trace(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    instance = stand_in()
    chat(make_router(instance), {"traceparent": "00-nonsense-01", "tracestate": "vendor=1"})
    (request,) = receiver.wait_for(1, kind="server")
    assert request.parent_id == ""
    (got,) = instance.received
    assert got.header("tracestate") is None
    assert [value[3:35] for name, value in got.headers if name == "traceparent"] == [request.trace_id]


def test_the_span_of_a_prefill_leg_that_ends_late_has_the_time_of_that_end(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.serving.attempt.PREFILL_GRACE_SECONDS", 0.5)
    monkeypatch.setattr("router.telemetry.tracing.LATE_LEG_SECONDS", 2.0)

    router = make_router(stand_in("prefill", never_answers), stand_in("decode"), splitwise=True)
    chat(router)
    (leg,) = receiver.wait_for(1, name="prefill leg")
    (request,) = receiver.wait_for(1, kind="server")
    assert leg.end - request.end > 0.4


def test_a_router_sends_all_spans_before_it_stops(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100000")
    router = make_router(stand_in())
    chat(router)
    router.stop()
    receiver.wait_for(1, kind="server")


@pytest.mark.parametrize("failure", ["stopped", "hangs"])
def test_a_failing_receiver_delays_no_request_and_is_reported_once(
    failure: str,
    receiver: OtlpReceiver,
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_answer = threading.Event()

    def hang() -> int:
        may_answer.wait(60)
        return 200

    receiver.answer = hang
    if failure == "stopped":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    router = make_router(stand_in())
    tracer = router.app.tracer
    assert tracer is not None
    assert chat(router).status_code == 200
    wait_until(lambda: list_warnings(caplog), "the warning")
    for _ in range(3):
        assert chat(router).status_code == 200
    start = time.monotonic()
    tracer.close()
    assert time.monotonic() - start < 15  # the SDK itself would take half a minute
    may_answer.set()
    (message,) = list_warnings(caplog)
    assert "does not accept spans by OTLP over HTTP" in message


def test_the_log_says_when_the_receiver_accepts_spans_again(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.telemetry.tracing")
    receiver.answer = lambda: 400
    router = make_router(stand_in())
    chat(router)
    wait_until(lambda: "does not accept spans" in caplog.text, "the warning")
    receiver.answer = lambda: 200
    chat(router)
    wait_until(lambda: "accepts spans again; 3 spans were lost" in caplog.text, "the recovery")


def test_without_opentelemetry_one_sentence_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_opentelemetry(monkeypatch)
    assert open_tracer("http://c:4318") is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert "http://c:4318" in message
    assert "pip install '/path/to/this/repository[tracing]'" in message


def test_a_traceparent_that_is_not_ascii_is_removed(receiver: OtlpReceiver) -> None:
    tracer = Tracer(receiver.url)
    request = ClientRequest(None, "POST", b"/v1/x", "/v1/x", [(b"traceparent", b"\xff")], "1.1", True)  # type: ignore[arg-type]
    trace = tracer.begin_trace(request)
    assert trace is not None
    assert (trace.parent, request.headers) == (None, [])
    tracer.close()


@pytest.mark.parametrize("opted_in", ["gen_ai_latest_experimental", "http, gen_ai_latest_experimental"])
def test_the_newest_genai_names_are_sent_if_the_user_opts_in(
    monkeypatch: pytest.MonkeyPatch,
    receiver: OtlpReceiver,
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    opted_in: str,
) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", opted_in)
    usage = {"prompt_tokens": 300, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 128}}
    router = make_router(stand_in(behave=answers(200, json.dumps({"choices": [], "usage": usage}).encode())))
    assert chat(router, TRACED).status_code == 200
    (request,) = receiver.wait_for(1, kind="server")
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvrouter",
        "gen_ai.usage.input_tokens": 300,
        "gen_ai.usage.cache_read.input_tokens": 128,
    }
    assert expected.items() <= request.attributes.items()
    assert set(expected) <= list_genai_names(request) <= NAMES_OF_OPENTELEMETRY


def test_the_newest_genai_names_are_not_sent_by_default(
    receiver: OtlpReceiver, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    assert chat(make_router(stand_in()), TRACED).status_code == 200
    (request,) = receiver.wait_for(1, kind="server")
    assert not {"gen_ai.operation.name", "gen_ai.usage.cache_read.input_tokens"} & request.attributes.keys()
