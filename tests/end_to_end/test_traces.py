"""A trace of a request through the router, prefill and decode, at a real OTLP receiver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from tests.end_to_end.cluster import QUESTION
from tests.end_to_end.traced import CLIENT, TRACE, TracedSystem, ask_for_trace, draw_trace, traced_system
from tests.support.otlp import ReceivedSpan

# Several processes read their clocks, one after another.
SLACK = 0.02


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[TracedSystem]:
    with traced_system(tmp_path_factory.mktemp("traced"), model) as running:
        yield running


def test_the_spans_of_a_request_to_a_pair_are_one_tree(traced: TracedSystem) -> None:
    receiver = traced.receiver
    began, ended = ask_for_trace(traced, 800, 2)

    (request,) = receiver.wait_for(1, service="kvrouter", kind="server")
    assert {span.trace_id for span in receiver.spans} == {TRACE}
    assert {span.error for span in receiver.spans} == {None}
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
    assert decoding.attributes["engine.decoded_tokens"] == 799
    # The span ends with the stream.
    assert began < decoding.start < decoding.end <= ended + SLACK
    assert decode.end - decoding.end < 0.5 * (decoding.end - decoding.start)
    saves = receiver.find(name="save")
    assert {save.parent_id for save in saves} == {prefill.span_id, decode.span_id}

    drawn = ElementTree.fromstring(draw_trace(receiver.spans))
    titles = [title.text or "" for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert [title.partition(":")[0] for title in titles[1:3]] == [request.name, "attempt"]
    assert len(titles) == 1 + len(receiver.spans)


def test_the_spans_of_an_aborted_request_have_its_status(traced: TracedSystem) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3000, "stream": True, "ignore_eos": True}
    url = f"{traced.router.url}/v1/chat/completions"
    headers = {"traceparent": f"00-{TRACE[::-1]}-{CLIENT}-01"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60, trust_env=False) as response:
        next(response.iter_lines())
    (request,) = traced.receiver.wait_for(1, kind="server", service="kvrouter", trace_id=TRACE[::-1])
    (decoding,) = traced.receiver.wait_for(1, name="decode", trace_id=TRACE[::-1])
    (served,) = traced.receiver.wait_for(1, name="decode instance", trace_id=TRACE[::-1])
    assert request.error == "the client left"
    assert decoding.error == served.error
    assert served.error in ("the client left", "the request was aborted")
    assert served.attributes["engine.finish_reason"] == "abort"
