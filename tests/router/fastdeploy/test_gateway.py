"""FastDeploy's tests of its Go router's gateway: one request's way to an instance, or to a pair, and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from router.policies import request_features
from router.policies.base import _encode_prompt, chunk_hashes
from router.serving.reading.parsed_request import _make_request_id
from tests.router.conftest import RouterUnderTest
from tests.router.fastdeploy.origins import translates
from tests.router.serving.test_attempt import _send_chat, cuts, hangs
from tests.router.stand_in import Behaviour, Received, Responder, StandIn, answers, chat_answer, stalls, streams
from tests.support.waiting import wait_until

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

GATEWAY = "golang_router/internal/gateway/completions_test.go"


def text(body: bytes) -> Behaviour:
    """Answer with this plain text."""

    async def behave(request: Received, respond: Responder) -> None:
        await respond.answer(200, body, ("content-type", "text/plain"))

    return behave


def idle(router: RouterUnderTest) -> bool:
    """Whether no instance is counted as having a request."""
    return all((each.load.requests, each.load.tokens) == (0, 0) for each in router.app.registry)


def code_of(answer: httpx.Response) -> str:
    """The code of an error, in the Go router's form, to which ours adds it, or in OpenAI's."""
    said: dict[str, Any] = answer.json()
    return str(said["code"] if isinstance(said["error"], str) else said["error"]["code"])


class TestPrompts:
    """The text of a request that policies compare."""

    @pytest.mark.parametrize("texts", [["hello"], ["hello", "hi", "how are you"], []])
    @translates(GATEWAY, "TestExtractPromptFromChatRequest")
    def test_a_chats_texts_are_compared_in_their_order(self, texts: list[str]) -> None:
        roles = ["user", "assistant", "user"]
        messages = [{"role": role, "content": content} for role, content in zip(roles, texts, strict=False)]
        compared = _encode_prompt({"messages": messages}).decode()
        places = [compared.index(f'"{content}"') for content in texts]
        assert places == sorted(places)
        assert bool(compared) is bool(texts)

    @pytest.mark.parametrize(
        ("body", "texts"),
        [
            ({"prompt": "hello world"}, ["hello world"]),
            ({"prompt": ["first", "second", "third"]}, ["first", "second", "third"]),
            ({"prompt": ["", "hello", ""]}, ["hello"]),
            ({"prompt": ""}, []),
            ({"prompt": []}, []),
            ({"other": "field"}, []),
        ],
    )
    @translates(GATEWAY, "TestExtractPromptFromCompletionsRequest")
    def test_prompts_are_compared_in_their_order(self, body: dict[str, Any], texts: list[str]) -> None:
        compared = _encode_prompt(body).decode()
        places = [compared.index(each) for each in texts]
        assert places == sorted(places)
        assert chunk_hashes(body) == []  # of less than a whole chunk nothing is remembered


class TestSessions:
    """The session that a body names."""

    @pytest.mark.parametrize(
        ("body", "session"),
        [
            ({"session_id": "top-level-sid", "messages": []}, "top-level-sid"),
            ({"session_id": "top-level-sid", "extra_body": {"session_id": "extra-body-sid"}}, "top-level-sid"),
            ({"messages": []}, ""),
            ({}, ""),
            ({"session_id": "", "extra_body": {"session_id": ""}}, ""),
            ({"extra_body": {"other_field": "value"}}, ""),
            ({"extra_body": "not-a-map"}, ""),
            ({"session_id": 12345}, ""),
            ({"session_id": True}, ""),
            ({"extra_body": {"session_id": 12345}}, ""),
            ({"session_id": None}, ""),
            (json.loads('{"session_id": "json-sid", "messages": []}'), "json-sid"),
        ],
    )
    @translates(GATEWAY, "TestGetSessionID")
    def test_it_is_text_and_not_empty(self, body: dict[str, Any], session: str) -> None:
        assert request_features(body, 0).key == session

    @pytest.mark.parametrize(
        ("body", "session"),
        [
            ({"messages": [], "extra_body": {"session_id": "extra-body-sid"}}, "extra-body-sid"),
            ({"session_id": "", "extra_body": {"session_id": "extra-body-sid"}}, "extra-body-sid"),
            (json.loads('{"extra_body": {"session_id": "json-extra-sid"}, "messages": []}'), "json-extra-sid"),
        ],
    )
    @translates(GATEWAY, "TestGetSessionID")
    def test_it_may_stand_in_extra_body(self, body: dict[str, Any], session: str) -> None:
        assert request_features(body, 0).key == session


@translates(GATEWAY, "TestNewRequestID")
def test_each_request_without_an_id_gets_its_own() -> None:
    first, second = _make_request_id(), _make_request_id()
    assert first
    assert second
    assert first != second


class TestOneInstance:
    """A request to a mixed instance."""

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    @translates(GATEWAY, "TestChatCompletions", "TestCompletions", "TestCommonCompletions", "TestGetClient")
    def test_a_request_is_answered_by_the_instance(
        self, go_router: MakeRouter, stand_in: MakeStandIn, path: str
    ) -> None:
        instance = stand_in("mixed", answers(200, b'{"choices":[{"text":"test response"}]}'))
        answer = go_router(instance).client.post(path, json={"prompt": "test", "messages": [], "stream": False})
        assert (answer.status_code, answer.content) == (200, b'{"choices":[{"text":"test response"}]}')
        assert [request.target for request in instance.received] == [path]

    @translates(GATEWAY, "TestCommonCompletions")
    def test_a_stream_is_answered_as_it_comes(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        router = go_router(stand_in("mixed", streams("chunk1", "chunk2")))
        with router.stream() as response:
            body = response.read().decode()
        assert body.index("chunk1") < body.index("chunk2") < body.index("data: [DONE]")

    @pytest.mark.parametrize("body", [b"invalid json", b""])
    @translates(GATEWAY, "TestCommonCompletions")
    def test_a_body_that_is_no_json_is_a_400(self, go_router: MakeRouter, stand_in: MakeStandIn, body: bytes) -> None:
        answer = go_router(stand_in()).client.post("/v1/completions", content=body)
        assert answer.status_code == 400
        assert "Invalid JSON format" in answer.json()["error"]

    @pytest.mark.parametrize("stream", [True, False])
    @translates(GATEWAY, "TestRedirect")
    def test_the_bytes_of_an_answer_are_not_changed(
        self, go_router: MakeRouter, stand_in: MakeStandIn, stream: bool
    ) -> None:
        answer = go_router(stand_in("mixed", text(b"test response"))).chat(stream=stream)
        assert answer.content == b"test response"

    @translates(GATEWAY, "TestGetClientWithRetry")
    def test_a_good_answer_is_asked_for_once(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        instance = stand_in("mixed", text(b"success"))
        answer = go_router(instance).chat()
        assert (answer.status_code, answer.content, len(instance.received)) == (200, b"success", 1)

    @translates(GATEWAY, "TestGetClientWithRetry")
    def test_after_a_lost_connection_another_instance_is_asked(
        self, go_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        losing, good = stand_in("mixed", cuts()), stand_in("mixed", text(b"success"))
        router = go_router(losing, good, policy="round_robin")
        assert [router.chat().content for _ in range(2)] == [b"success"] * 2
        assert losing.received

    @translates(GATEWAY, "TestGetClientWithRetry")
    def test_if_every_connection_is_lost_the_request_fails(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        answer = go_router(stand_in("mixed", cuts())).chat()
        assert (answer.status_code, code_of(answer)) == (502, "mixed_failed")

    @translates(GATEWAY, "TestGetClient_Timeout", "TestGetClientWithRetry_TimeoutAcrossRetries")
    def test_an_instance_that_hangs_fails_the_request_when_its_time_is_over(
        self, go_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        hanging = stand_in("mixed", hangs())
        answer = go_router(hanging, request_timeout_secs=0.2).chat()
        assert (answer.status_code, code_of(answer)) == (504, "request_timeout")
        assert len(hanging.received) <= 1  # on a busy machine, time is over before it was sent

    @translates(GATEWAY, "TestGetClientWithRetry_ContextCancelled")
    def test_a_client_that_leaves_ends_the_request(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        hanging = stand_in("mixed", hangs())
        router = go_router(hanging)
        client = _send_chat(router.port, {"messages": []})
        wait_until(lambda: hanging.running == 1, "the request")
        client.close()
        wait_until(lambda: hanging.running == 0 and idle(router), "the end of the request")
        assert len(hanging.received) == 1

    @translates(GATEWAY, "TestRedirect_StreamingHangMidStream")
    def test_a_stream_that_hangs_is_ended_and_what_came_is_the_clients(
        self, go_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        chunk = '{"choices":[{"text":"chunk1"}]}'
        router = go_router(stand_in("mixed", stalls(chunk)), stream_stall_secs=0.3, stream_resume_count=0)
        with router.stream() as response:
            assert response.read().startswith(f"data: {chunk}\n".encode())


class TestPair:
    """A request to a prefill and a decode instance."""

    @pytest.mark.parametrize("prefilled", [b"prefill response", b"", b"test"])
    @translates(GATEWAY, "TestPostToPD", "TestReadPrefillRecv")
    def test_decode_answers_and_prefills_answer_is_read_to_its_end(
        self, go_router: MakeRouter, stand_in: MakeStandIn, prefilled: bytes
    ) -> None:
        prefill, decode = stand_in("prefill", text(prefilled)), stand_in("decode", text(b"decode response"))
        router = go_router(prefill, decode, splitwise=True)
        answer = router.chat()
        assert (answer.status_code, answer.content) == (200, b"decode response")
        wait_until(lambda: idle(router) and len(prefill.answered) == 1, "prefill's answer")

    @translates(GATEWAY, "TestChatCompletions")
    def test_the_client_is_told_the_urls_of_the_pair(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        prefill, decode = stand_in("prefill"), stand_in("decode")
        headers = go_router(prefill, decode, splitwise=True).chat().headers
        assert (headers["X-Router-Prefill-URL"], headers["X-Router-Decode-URL"]) == (prefill.url, decode.url)

    @pytest.mark.parametrize("dead", ["prefill", "decode"])
    @translates(GATEWAY, "TestPostToPD")
    def test_if_one_of_the_pair_cannot_be_reached_the_request_fails(
        self, go_router: MakeRouter, stand_in: MakeStandIn, dead: str
    ) -> None:
        pair = {"prefill": stand_in("prefill", hangs()), "decode": stand_in("decode", hangs())}
        router = go_router(*pair.values(), splitwise=True)
        pair[dead].stop()
        answer = router.chat()
        assert (answer.status_code, code_of(answer)) == (502, f"{dead}_failed")
        wait_until(lambda: idle(router), "the other one's end")

    @pytest.mark.parametrize("prefill_hangs", [True, False])
    @translates(GATEWAY, "TestPostToPD_DecodeHangs", "TestPostToPD_BothHang")
    def test_if_decode_hangs_the_request_fails_when_its_time_is_over(
        self, go_router: MakeRouter, stand_in: MakeStandIn, prefill_hangs: bool
    ) -> None:
        prefill = stand_in("prefill", hangs() if prefill_hangs else text(b"prefill ok"))
        router = go_router(prefill, stand_in("decode", hangs()), splitwise=True, request_timeout_secs=0.2)
        answer = router.chat()
        assert (answer.status_code, code_of(answer)) == (504, "request_timeout")
        wait_until(lambda: idle(router) and prefill.running == 0, "prefill's end")

    @translates(GATEWAY, "TestPostToPD_PrefillHangs")
    def test_an_answer_of_decode_does_not_wait_for_prefill(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        prefill, decode = stand_in("prefill", hangs()), stand_in("decode", text(b"decode ok"))
        answer = go_router(prefill, decode, splitwise=True).chat()
        assert (answer.status_code, answer.content) == (200, b"decode ok")

    @translates(GATEWAY, "TestPostToPD_ContextCancellation")
    def test_a_client_that_leaves_ends_both(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        prefill, decode = stand_in("prefill", hangs()), stand_in("decode", hangs())
        router = go_router(prefill, decode, splitwise=True)
        client = _send_chat(router.port, {"messages": []})
        wait_until(lambda: (prefill.running, decode.running) == (1, 1), "both requests")
        client.close()
        wait_until(lambda: (prefill.running, decode.running) == (0, 0) and idle(router), "the end of both")

    @translates(GATEWAY, "TestPostToPD_PrefillSlowButCompletes")
    def test_a_slow_prefill_does_no_harm(self, go_router: MakeRouter, stand_in: MakeStandIn) -> None:
        prefilled = asyncio.Event()

        async def slowly(request: Received, respond: Responder) -> None:
            await asyncio.sleep(0.05)
            await respond.answer(200, b"prefill done")
            prefilled.set()

        async def after_it(request: Received, respond: Responder) -> None:
            await prefilled.wait()
            await respond.answer(200, b"decode done")

        router = go_router(stand_in("prefill", slowly), stand_in("decode", after_it), splitwise=True)
        assert router.chat().content == b"decode done"

    @pytest.mark.parametrize("hanging", [stalls("first-chunk"), hangs()], ids=["in a stream", "before its answer"])
    @translates(GATEWAY, "TestReadPrefillRecv_StreamHang", "TestReadPrefillRecv_NonStreamHang")
    def test_a_prefill_that_hangs_behind_decodes_answer_is_ended(
        self, go_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, hanging: Behaviour
    ) -> None:
        monkeypatch.setattr("router.serving.attempt.PREFILL_GRACE_SECONDS", 0.05)
        prefill, decode = stand_in("prefill", hanging), stand_in("decode", answers(200, chat_answer()))
        router = go_router(prefill, decode, splitwise=True)
        assert router.chat().status_code == 200
        wait_until(lambda: idle(router) and prefill.running == 0, "prefill's end")
