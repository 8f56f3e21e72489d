"""Requests that generate nothing reach an instance that can serve them, and are not changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Received, Responder, StandIn

# Every byte, line ends, the beginning of a boundary, and text like a form's field and a JSON member.
AUDIO = bytes(range(256)) * 300 + b'\r\n--\r\nname="file"\r\n"model":"none"'
RERANK = b'{ "model":"reranker", "query":"a\\u00e9",  "documents":["one",\t"two"], "top_n":1.0, "max_tokens": 7 }'
SCORE = b'{"model":"reranker","text_1":["caf\xc3\xa9"],"text_2":["tea",  "milk"],"truncate_prompt_tokens":-1}'
PASSED = [
    *(("/v1/rerank", RERANK), ("/rerank", RERANK), ("/v2/rerank", RERANK), ("/v1/score", SCORE), ("/score", SCORE)),
    *(("/tokenize", b'{"model":"reranker","prompt":"x"}'), ("/detokenize", b'{"model":"reranker","tokens":[1]}')),
    *(("/pooling", b'{"model":"reranker","input":"x"}'), ("/classify", b'{"model":"reranker","input":"x"}')),
]


async def echo(request: Received, respond: Responder) -> None:
    """Answer with the bytes of the request."""
    await respond.answer(200, request.body, ("content-type", request.header("content-type") or ""))


def serve_model(instance: StandIn, model: str) -> StandIn:
    instance.models, instance.behave = (model,), echo
    return instance


def transcribe(router: RouterUnderTest, path: str, model: str | None) -> Any:
    fields = {"language": "en", "response_format": "verbose_json", "temperature": "0.0"}
    request = router.client.build_request(
        "POST",
        path,
        data=fields if model is None else {**fields, "model": model},
        files={"file": ("a \u00e9.wav", AUDIO, "audio/wav")},
    )
    request.read()
    return router.client.send(request)


@pytest.mark.parametrize(("path", "body"), PASSED)
@pytest.mark.parametrize("splitwise", [False, True])
def test_requests_to_score_and_tokenize_reach_an_instance_of_their_model_unchanged(
    make_router: MakeRouter, stand_in: MakeStandIn, path: str, body: bytes, splitwise: bool
) -> None:
    role = "decode" if splitwise else "mixed"
    other, expected = serve_model(stand_in(role), "writer"), serve_model(stand_in(role), "reranker")
    prefill = [serve_model(stand_in("prefill"), "reranker")] * splitwise
    router = make_router(other, expected, *prefill, splitwise=splitwise)
    answer = router.client.post(f"{path}?x=%20y", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.content) == (200, body)
    (got,) = expected.received
    assert (got.method, got.target, got.body) == ("POST", f"{path}?x=%20y", body)
    assert [len(each.received) for each in (other, *prefill)] == [0] * (1 + splitwise)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
@pytest.mark.parametrize("splitwise", [False, True])
def test_a_form_with_a_file_reaches_an_instance_of_its_model_unchanged(
    make_router: MakeRouter, stand_in: MakeStandIn, path: str, splitwise: bool
) -> None:
    role = "decode" if splitwise else "mixed"
    other, expected = serve_model(stand_in(role), "writer"), serve_model(stand_in(role), "whisper")
    prefill = [serve_model(stand_in("prefill"), "whisper")] * splitwise
    answer = transcribe(make_router(other, expected, *prefill, splitwise=splitwise), path, "whisper")
    sent = answer.request
    (got,) = expected.received
    assert (got.method, got.target) == ("POST", path)
    assert (got.header("content-type"), got.body) == (sent.headers["content-type"], sent.content)
    assert (answer.status_code, answer.content) == (200, sent.content)
    assert [len(each.received) for each in (other, *prefill)] == [0] * (1 + splitwise)


def test_the_error_about_an_unknown_model_in_a_form_suggests_a_name(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router = make_router(serve_model(stand_in(), "writer"), serve_model(stand_in(), "whisper"))
    answer = transcribe(router, "/v1/audio/transcriptions", "wisper")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'wisper'; did you mean" in error["message"]
    assert "whisper" in error["message"]


def test_a_form_without_a_model_goes_to_any_instance(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(serve_model(stand_in(), "writer"), serve_model(stand_in(), "whisper"))
    answer = transcribe(router, "/v1/audio/transcriptions", None)
    assert (answer.status_code, answer.content) == (200, answer.request.content)


@pytest.mark.parametrize("path", ["/scores", "/score/x", "/v2/nothing", "/v1/chat/completions/batch"])
def test_other_paths_outside_v1_are_not_forwarded(make_router: MakeRouter, stand_in: MakeStandIn, path: str) -> None:
    instance = serve_model(stand_in(), "m")
    answer = make_router(instance).client.post(path, content=b"{}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")
    assert not instance.received
