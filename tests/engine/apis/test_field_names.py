"""Errors have the field names of the requested API, not those of the chat API."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.apis.messages import MessagesBody
from engine.apis.plain_body import PASSED_ON, PlainBody
from engine.apis.responses_body import ResponsesBody

PLAIN: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Where is the river?", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Where is the river?"}], "max_tokens": 2},
}
KINDS: dict[str, type[PlainBody]] = {"/v1/responses": ResponsesBody, "/v1/messages": MessagesBody}
WRONG: list[Any] = [-5, "wrong", {"a": 1}, ["x"] * 17, "x" * 9999, [{"role": "user", "content": "x" * 9999}]]


@pytest.mark.parametrize("path", PLAIN)
def test_an_error_names_a_field_of_the_request(instance: SimpleNamespace, path: str) -> None:
    fields = sorted({*KINDS[path].model_fields, *PASSED_ON} - {"model", "previous_response_id"})
    refused = set()
    with httpx.Client(base_url=instance.url, trust_env=False, timeout=60) as client:
        for name in fields:
            for value in WRONG:
                sent = {**PLAIN[path], name: value}
                answer = client.post(path, json=sent)
                if answer.status_code == 200:
                    continue
                error = answer.json()["error"]
                assert answer.status_code == 400, (name, value, error)
                if path == "/v1/responses":
                    assert str(error["param"]).partition(".")[0] in sent, (name, value, error)
                field = error["message"].partition(":")[0].partition(".")[0]
                assert field in sent or field.startswith("the prompt has"), (name, value, error)
                refused.add(name)
    assert len(refused) > len(fields) / 2
