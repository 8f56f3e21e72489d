"""A trace of one request through router, prefill and decode instance, at a real OTLP receiver."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.end_to_end.cluster import QUESTION, Instance, Router, instance, router
from tests.support import plain_http
from tests.support.mooncake import mooncake_master
from tests.support.otlp import OtlpReceiver, ReceivedSpan

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
UNSAMPLED = {"traceparent": f"00-{TRACE[::-1]}-{CLIENT}-00"}
# Clocks are read one after the other, and in different processes.
SLACK = 0.005


class System(NamedTuple):
    """One of each."""

    receiver: OtlpReceiver
    router: Router
    prefill: Instance
    decode: Instance


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[System]:
    folder, receiver = tmp_path_factory.mktemp("traced"), OtlpReceiver()
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "100", "NO_PROXY": "127.0.0.1"}
    with (
        mooncake_master(folder / "master.log") as master,
        router(folder, "--workers", "2", environ=env) as running_router,
    ):
        flags = ("--router", f"127.0.0.1:{running_router.port}", "--splitwise-role")
        decoding = ("decode", "--enable-output-caching")
        with (
            instance(folder, model, *flags, "prefill", master=master, environ=env) as prefill,
            instance(folder, model, *flags, *decoding, master=master, environ=env) as decode,
        ):
            running_router.wait_for(prefill=1, decode=1)
            yield System(receiver, running_router, prefill, decode)
    receiver.close()


def stream(system: System, question: str, headers: dict[str, str], **fields: object) -> float:
    """One streamed answer; the time of its end."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True, **fields}
    url = f"{system.router.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60, trust_env=False) as response:
        assert response.status_code == 200
        assert response.read().endswith(b"data: [DONE]\n\n")
    return time.time()


def test_one_request_to_a_pair_is_one_tree_from_the_router_to_the_last_phase(traced: System) -> None:
    receiver = traced.receiver
    stream(traced, QUESTION, UNSAMPLED, max_tokens=2)  # brings the prompt's beginning into the pool
    traced.prefill.wait_for_saves()
    plain_http.post(f"{traced.prefill.url}/clear_prefix_cache")
    began = time.time()
    ended = stream(traced, QUESTION + QUESTION, {"traceparent": f"00-{TRACE}-{CLIENT}-01"}, max_tokens=80)

    (request,) = receiver.wait_for(1, service="kvrouter", kind="server")
    receiver.wait_for(2, name="save")
    assert {span.trace_id for span in receiver.spans} == {TRACE}
    assert {span.trouble for span in receiver.spans} == {None}
    assert request.parent_id == CLIENT

    def only_child(parent: ReceivedSpan, name: str) -> ReceivedSpan:
        (child,) = receiver.find(parent_id=parent.span_id, name=name)
        assert parent.start - SLACK <= child.start <= child.end <= parent.end + SLACK, (parent, child)
        return child

    attempt = only_child(request, "attempt")
    prefill = only_child(only_child(attempt, "prefill leg"), "prefill instance")
    decode = only_child(only_child(attempt, "decode leg"), "decode instance")
    for served, role in ((prefill, "prefill"), (decode, "decode")):
        assert (served.kind, served.service, served.attributes["engine.role"]) == ("server", "kvengine", role)
    names = [span.name for span in receiver.find(parent_id=prefill.span_id) if span.end - span.start > 0]
    assert [name for name in names if name not in ("queue", "save")] == ["look-up", "load", "prefill", "hand-over"]
    assert "queue" in names
    look_up, load, computed = (only_child(prefill, name) for name in ("look-up", "load", "prefill"))
    assert look_up.end <= load.start <= load.end <= computed.start + SLACK
    assert load.attributes["engine.pool_cached_tokens"] > 0
    given, taken = only_child(prefill, "hand-over"), only_child(decode, "hand-over")
    assert given.attributes["engine.handover"] == taken.attributes["engine.handover"] == "directly"
    assert taken.start < given.end
    decoding = only_child(decode, "decode")
    assert taken.end <= decoding.start + SLACK
    assert decoding.attributes["engine.decoded_tokens"] == 79
    # It lasts to the end of the stream, as the client saw it.
    assert began < decoding.start < decoding.end <= ended + SLACK
    assert decode.end - decoding.end < 0.5 * (decoding.end - decoding.start)
    saves = receiver.find(name="save")
    assert {save.parent_id for save in saves} == {prefill.span_id, decode.span_id}


def test_a_request_that_is_aborted_says_so_at_both_ends(traced: System) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3000, "stream": True, "ignore_eos": True}
    url = f"{traced.router.url}/v1/chat/completions"
    headers = {"traceparent": f"00-{TRACE[::-1]}-{CLIENT}-01"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60, trust_env=False) as response:
        next(response.iter_lines())
    (request,) = traced.receiver.wait_for(1, kind="server", service="kvrouter", trace_id=TRACE[::-1])
    (decoding,) = traced.receiver.wait_for(1, name="decode", trace_id=TRACE[::-1])
    (served,) = traced.receiver.wait_for(1, name="decode instance", trace_id=TRACE[::-1])
    assert request.trouble == "the client left"
    assert decoding.trouble == served.trouble
    assert served.trouble in ("the client left", "the request was aborted")
    assert served.attributes["engine.finish_reason"] == "abort"
