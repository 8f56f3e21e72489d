"""The paths under /kvcache of a real instance in this process, as routers and operators ask them."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from kvstore_backend.manifest import parse_manifest

SYSTEM = "you are a good friend, and answer with few words. it is 2026-11-22 15:04:05 now."


def chat(client: TestClient, system: str, request_id: str) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "tell me about the river"}]
    body = {"messages": messages, "max_tokens": 1, "request_id": request_id}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    return messages


def test_an_instance_says_what_its_blocks_are(client: TestClient) -> None:
    told = client.get("/kvcache").json()
    manifest = parse_manifest(told["manifest"])
    assert (manifest.digest, manifest.block_size, manifest.facts["block_hashes"]) == (told["digest"], 16, "kvstore")
    assert set(told["pool"]) == {"ready", "detail", "url"}
    assert told["pool"]["url"].startswith("file:///")
    assert isinstance(told["cached_blocks"], int)


def test_a_request_a_prompt_and_an_inquiry_are_explained(client: TestClient) -> None:
    chat(client, SYSTEM, "first")
    messages = chat(client, SYSTEM.replace("15:04:05", "16:20:00"), "second")
    told = client.get("/kvcache/why_miss/chatcmpl-second").json()
    assert told["reason"] == "parts"
    assert "message 1, the system's: a timestamp: '0000-00-00 00:00:00'" in told["sentence"]
    assert "inquiry" not in told
    asked = {"request_id": "second", "inquiry": True}
    inquiry: dict[str, Any] = client.post("/kvcache/why_miss", json=asked).json()["inquiry"]
    assert client.post("/kvcache/kin", json=inquiry).json()["sentence"] == told["sentence"]
    prompt = {"messages": messages, "compare_with": {"prompt": "the river"}}
    assert client.post("/kvcache/why_miss", json=prompt).json()["reason"] in ("hit", "parts", "new", "pool_away")
    assert client.post("/kvcache/why_miss", json={"prompt": [1, 2]}).json()["reason"] in ("below_block", "pool_away")


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/kvcache/why_miss", {}, 400, "give either prompt, a text or token ids, or messages"),
        (
            "/kvcache/kin",
            {"token_ids": [1], "leading": 0, "seconds_ago": 0, "manifest": {}},
            400,
            "manifest: it is not",
        ),
        ("/kvcache/kin", {"token_ids": "x", "leading": 0, "seconds_ago": 0, "manifest": {}}, 400, "token_ids"),
    ],
)
def test_what_makes_no_sense_is_refused(client: TestClient, path: str, body: object, status: int, said: str) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text


def test_a_request_that_is_not_known_is_a_404(client: TestClient) -> None:
    answer = client.get("/kvcache/why_miss/unheard-of")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_request")
