"""The strict stand-ins for vLLM and SGLang accept correct requests and report each violation of a rule."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.router.conftest import MakeStandIn
from tests.router.stand_in import LoopThread, StandIn
from tests.support.strict_sglang import StrictSglang
from tests.support.strict_vllm import Connector, StrictVllm
from tests.support.toy_model import answer_text, decode, next_tokens

TEXT = " ".join(f"word{number}" for number in range(40))
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 5},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 5},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 5},
    "/v1/messages": {"system": "s", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 5},
}
CHAT = ASKED["/v1/chat/completions"]
SEND = {"do_remote_decode": True, "do_remote_prefill": False}
NIXL = {**SEND, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
ID = {"X-Request-Id": "r1"}


def ask(instance: StandIn, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.post(instance.url + path, json=body, headers=headers or ID, trust_env=False, timeout=20, verify=False)


def limit_to_one(path: str) -> dict[str, Any]:
    """Return a client's body with the limit of one token for prefill."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {**ASKED[path], limit: 1, "stream": False}


def read_text(path: str, stream: str) -> str:
    """Return the text of a stream of one of the four APIs."""
    deltas = []
    for line in stream.split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if path in ("/v1/messages", "/v1/responses"):
            delta = event.get("delta", "")
            deltas.append(delta.get("text", "") if isinstance(delta, dict) else delta)
        for choice in event.get("choices", ()):
            deltas.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return "".join(deltas)


@pytest.fixture
def vllm(stand_in: MakeStandIn) -> Callable[..., tuple[StrictVllm, StandIn, StandIn]]:
    def start(connector: Connector = "nixl", **settings: Any) -> tuple[StrictVllm, StandIn, StandIn]:
        strict, prefill, decode_ = StrictVllm(connector, **settings), stand_in("prefill"), stand_in("decode")
        strict.serve(prefill, stand_in("mixed") if connector == "mooncake" else None)
        strict.serve(decode_)
        return strict, prefill, decode_

    return start


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stream": True}, "stream is true"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream is true"),
        ({"stream_options": {"include_usage": True}}, "Stream options"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"min_tokens": 4}, "min_tokens must be"),
        ({"max_tokens": 5}, "the limit is 5"),
        ({"max_completion_tokens": 5}, "the limit is 5"),
        ({"max_tokens": 5, "max_completion_tokens": 1}, "the limit is 1"),
        ({"kv_transfer_params": None}, "kv_transfer_params is None"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "do not say"),
        ({"kv_transfer_params": {**NIXL, "remote_host": "h"}}, "remote_host"),
        ({"kv_transfer_params": {**SEND, "transfer_id": "t"}}, "transfer_id"),
        ({"n": 2}, "several"),
        ({"disaggregate_info": {}}, "disaggregate_info"),
    ],
)
def test_vllm_prefill_reports_forbidden_fields(vllm: Any, change: dict[str, Any], sentence: str) -> None:
    strict, prefill, _ = vllm()
    ask(
        prefill,
        "/v1/chat/completions",
        {**limit_to_one("/v1/chat/completions"), "kv_transfer_params": NIXL, **change},
    )
    assert sentence in "".join(strict.violations)


def test_nixl_decode_refuses_wrong_transfer_parameters(vllm: Any) -> None:
    strict, prefill, decode_ = vllm(lease_s=0.0)

    def get_params(request_id: str) -> Any:
        body = {**limit_to_one("/v1/chat/completions"), "kv_transfer_params": NIXL}
        answered = ask(prefill, "/v1/chat/completions", body, {"X-Request-Id": request_id})
        return answered.json()["kv_transfer_params"]

    def check_refusal(params: Any, request_id: str, sentence: str) -> None:
        strict.violations.clear()
        headers = {"X-Request-Id": request_id}
        assert ask(decode_, "/v1/chat/completions", {**CHAT, "kv_transfer_params": params}, headers).status_code == 500
        streamed = ask(decode_, "/v1/chat/completions", {**CHAT, "stream": True, "kv_transfer_params": params}, headers)
        assert (streamed.status_code, "Internal server error" in streamed.text) == (200, True)
        assert len(strict.violations) == 2
        assert all(sentence in violation for violation in strict.violations)

    check_refusal(get_params("a"), "a", "lease")
    strict.lease_s = 30.0
    check_refusal(get_params("b"), "other", "X-Request-Id")
    check_refusal({**get_params("c"), "tp_size": 2}, "c", "changed")
    check_refusal({"remote_request_id": "x"}, "d", "no prefill gave out")
    params = get_params("e")
    ask(decode_, "/v1/chat/completions", {**CHAT, "kv_transfer_params": params}, {"X-Request-Id": "e"})
    check_refusal(params, "e", "twice")
    params = get_params("f")
    strict.violations.clear()
    strict.restart(prefill)
    headers = {"X-Request-Id": "f"}
    assert ask(decode_, "/v1/chat/completions", {**CHAT, "kv_transfer_params": params}, headers).status_code == 500
    assert strict.violations == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_nixl_legs_accept_the_ids_of_their_prompt(vllm: Any, path: str) -> None:
    strict, prefill, decode_ = vllm()
    ids = {"prompt_token_ids": list(range(40))}
    returned = ask(prefill, path, {**limit_to_one(path), "kv_transfer_params": {**NIXL, **ids}}).json()[
        "kv_transfer_params"
    ]
    assert "prompt_token_ids" not in returned
    body = {**ASKED[path], "stream": True, "kv_transfer_params": {**returned, **ids}}
    assert read_text(path, ask(decode_, path, body).text) == decode(next_tokens(list(range(40)), 5))
    assert (strict.violations, strict.transfers, strict.stranded) == ([], 1, 0)


def test_both_nixl_legs_must_get_the_ids(vllm: Any) -> None:
    strict, prefill, decode_ = vllm()
    path = "/v1/chat/completions"
    returned = ask(prefill, path, {**limit_to_one(path), "kv_transfer_params": NIXL}).json()["kv_transfer_params"]
    ask(decode_, path, {**CHAT, "kv_transfer_params": {**returned, "prompt_token_ids": [1, 2]}})
    assert "not the one that prefill computed" in "".join(strict.violations)


@pytest.mark.parametrize("ids", [[], [-1], ["1"], [True], 7])
def test_wrong_ids_of_a_prompt_are_refused(vllm: Any, ids: object) -> None:
    strict, _, decode_ = vllm("kvstore")
    params = {"prompt_token_ids": ids}
    assert ask(decode_, "/v1/chat/completions", {**CHAT, "kv_transfer_params": params}).status_code == 400
    assert "list of non-negative integers" in "".join(strict.violations)


def test_legs_must_have_the_parameters_of_the_clients_request(vllm: Any) -> None:
    strict, prefill, decode_ = vllm("kvstore")
    strict.asked["1"] = {**CHAT, "number": "1", "temperature": 0.5}
    marked = {"kv_transfer_params": {"do_remote_decode": True}}
    ask(prefill, "/v1/chat/completions", {**limit_to_one("/v1/chat/completions"), **marked, "number": "1"})
    ask(decode_, "/v1/chat/completions", {**strict.asked["1"], "max_tokens": 4})
    assert strict.violations == ["temperature was 0.5, and came as None", "max_tokens was 5, and came as 4"]


def test_mooncake_legs_can_run_concurrently(vllm: Any, thread: LoopThread) -> None:
    strict, prefill, decode_ = vllm("mooncake")
    address = f"http://127.0.0.1:{prefill.extra_fields['bootstrap_port']}"
    engine = httpx.get(f"{address}/query", trust_env=False, verify=False).json()["0"]["engine_id"]
    fetch = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "t1"}
    fetch |= {"remote_engine_id": engine, "remote_bootstrap_addr": address}

    async def both() -> Any:
        async with httpx.AsyncClient(trust_env=False, timeout=20, verify=False) as client:

            def post(instance: StandIn, body: dict[str, Any]) -> Any:
                return client.post(instance.url + "/v1/chat/completions", json=body, headers=ID)

            waiting = asyncio.ensure_future(post(decode_, {**CHAT, "kv_transfer_params": fetch}))
            while not strict.waiting:
                await asyncio.sleep(0.01)
            send = {**SEND, "transfer_id": "t1"}
            await post(prefill, {**limit_to_one("/v1/chat/completions"), "kv_transfer_params": send})
            return (await waiting).json()

    answered = thread.run(both())
    assert answered["choices"][0]["message"]["content"] == answer_text("/v1/chat/completions", CHAT)
    assert strict.violations == []
    ask(decode_, "/v1/chat/completions", {**CHAT, "kv_transfer_params": fetch})
    ask(decode_, "/v1/chat/completions", {**CHAT, "kv_transfer_params": {**fetch, "transfer_id": "t2", "tp_size": 1}})
    unknown = {**fetch, "transfer_id": "t3", "remote_engine_id": "old"}
    assert ask(decode_, "/v1/chat/completions", {**CHAT, "kv_transfer_params": unknown}).status_code == 500
    assert [violation.split()[1] for violation in strict.violations] == ["transfer_id", "kv_transfer_params"]


@pytest.fixture
def sglang(stand_in: MakeStandIn) -> tuple[StrictSglang, StandIn, StandIn]:
    strict, prefill, decode_ = StrictSglang(), stand_in("prefill"), stand_in("decode")
    strict.serve(prefill, 9001)
    strict.serve(decode_)
    return strict, prefill, decode_


def ask_both(thread: LoopThread, pair: tuple[StandIn, StandIn], path: str, *bodies: dict[str, Any]) -> list[Any]:
    async def both() -> list[Any]:
        async with httpx.AsyncClient(trust_env=False, timeout=20, verify=False) as client:
            posts = (client.post(one.url + path, json=body) for one, body in zip(pair, bodies, strict=True))
            return list(await asyncio.gather(*posts))

    return thread.run(both())


BOOTSTRAP = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9001, "bootstrap_room": 2**63 - 1}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bootstrap_room": None}, "without bootstrap_room"),
        ({"bootstrap_room": 2**63}, "no number of 63 bits"),
        ({"bootstrap_room": -1}, "no number of 63 bits"),
        ({"bootstrap_room": True}, "no number of 63 bits"),
        ({"bootstrap_room": [1]}, "1 prompts"),
        ({"bootstrap_port": 8998}, "no prefill instance"),
        ({"n": 2}, "one room"),
        ({"kv_transfer_params": {}, "bootstrap_room": None}, "another engine's"),
    ],
)
def test_sglang_refuses_wrong_fields(sglang: Any, change: dict[str, Any], sentence: str) -> None:
    strict, prefill, _ = sglang
    assert ask(prefill, "/v1/chat/completions", {**CHAT, **BOOTSTRAP, **change}).status_code == 400
    assert sentence in "".join(strict.violations)


def test_a_sglang_leg_without_its_partner_waits_until_it_is_aborted(sglang: Any, thread: LoopThread) -> None:
    strict, prefill, decode_ = sglang

    async def leave(instance: StandIn, **body: Any) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=20, verify=False) as client:
            url = instance.url + "/v1/chat/completions"
            waiting = asyncio.ensure_future(client.post(url, json={**CHAT, **BOOTSTRAP, **body}))
            while not strict.waiting:
                await asyncio.sleep(0.01)
            if "rid" in body:
                await client.post(instance.url + "/abort_request", json={"rid": body["rid"]})
            else:
                waiting.cancel()
            while strict.waiting:
                await asyncio.sleep(0.01)
            await asyncio.gather(waiting, return_exceptions=True)

    thread.run(leave(prefill, bootstrap_room=1))
    thread.run(leave(decode_, bootstrap_room=2, rid="x"))
    assert ask(prefill, "/v1/chat/completions", {**CHAT, **BOOTSTRAP, "bootstrap_room": 1}).status_code == 400
    assert strict.violations == ["prefill: bootstrap_room 1 used twice"]


def test_sglang_legs_must_be_equal(sglang: Any, thread: LoopThread) -> None:
    strict, prefill, decode_ = sglang
    bodies = {**CHAT, **BOOTSTRAP}, {**CHAT, **BOOTSTRAP, "temperature": 1}

    async def one_then_the_other() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=20, verify=False) as client:
            path = "/v1/chat/completions"
            waiting = asyncio.ensure_future(client.post(prefill.url + path, json=bodies[0]))
            while not strict.waiting:
                await asyncio.sleep(0.01)
            assert (await client.post(decode_.url + path, json=bodies[1])).status_code == 400
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    thread.run(one_then_the_other())
    assert strict.violations == [f"decode: the legs of bootstrap_room {2**63 - 1} differ in temperature"]
