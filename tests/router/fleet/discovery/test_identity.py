"""Identification of a server's engine. Servers are tables with the answers of real ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.fleet import IdentityHidden, ask_identity

VERSION = {"/version": {"version": "0.32.0"}}
SGLANG = {"disaggregation_mode": "null", "disaggregation_bootstrap_port": 8998, "version": "0.5.23"}
PREFILL = {**SGLANG, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9001}
OF_SGLANG = {"engine": "sglang", "role": "mixed"}


@pytest.mark.parametrize(
    ("owner", "answers", "identity"),
    [
        ("FastDeploy", {}, {"engine": "fastdeploy"}),
        ("fastdeploy-kvstore", {}, {"engine": "fastdeploy", "cache_salt": True}),
        ("vllm", VERSION, {"engine": "vllm"}),
        (None, VERSION, {"engine": "vllm"}),  # with --api-key it does not list its models
        ("tensorrt_llm", VERSION, {"engine": "openai"}),
        ("sglang", {"/server_info": SGLANG}, OF_SGLANG),
        ("sglang", {"/server_info": PREFILL}, {**OF_SGLANG, "role": "prefill", "bootstrap_port": 9001}),
        ("", {"/get_server_info": SGLANG}, OF_SGLANG),  # the old name of the path
        ("", {"/server_info": {"vllm_config": "..."}, **VERSION}, {"engine": "vllm"}),  # vLLM's path for developers
        ("llamacpp", {}, {"engine": "openai"}),
        ("", {}, {"engine": "openai"}),
    ],
)
def test_the_answers_identify_the_engine(owner: str | None, answers: dict[str, Any], identity: dict[str, Any]) -> None:
    assert ask(owner, answers) == identity


def test_a_server_that_requires_a_key_hides_its_engine() -> None:
    with pytest.raises(IdentityHidden, match="requires an API key"):
        ask(None, {})


def ask(owner: str | None, answers: dict[str, Any]) -> dict[str, Any]:
    """Ask a server; without an ``owner``, it requires a key for its models."""

    async def fetch(path: str) -> tuple[int, bytes]:
        if path == "/v1/models" and owner is None:
            return 401, b""
        content = answers.get(path) if path != "/v1/models" else {"data": [{"owned_by": owner}]}
        return (404, b"not here") if content is None else (200, json.dumps(content).encode())

    return asyncio.run(ask_identity(fetch))
