"""The paths under ``/kvcache``: the namespace of this instance's blocks, and why a request or a prompt was a miss.

They are for routers and operators: a router forwards only ``/v1`` to instances, so clients cannot reach them. An answer
never has the texts of past requests, only their shapes; it may have the text of a prompt that is sent here.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from engine.apis.completions import Completions
from engine.protocol import ApiError, Body, ChatBody, CompletionBody, parse_body
from engine.serving.http_server import read_body
from engine.telemetry.why_miss.explainer import Inquiry, MissExplainer, list_texts
from kvstore_backend.manifest import ManifestError, parse_manifest
from kvstore_backend.why_miss import Prompt

__all__ = ["add_kvcache_paths"]


class PromptBody(Body):
    """A prompt in the form of ``/v1/completions`` or ``/v1/chat/completions``."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    cache_salt: str = ""


class WhyMissBody(PromptBody):
    """POST /kvcache/why_miss: an ended request, or a prompt and optionally a second one that should be in the pool.

    With ``inquiry`` a request's explanation has the inquiry to other instances, which has the request's tokens.
    """

    compare_with: PromptBody | None = None
    request_id: str = ""
    inquiry: bool = False


class InquiryBody(Body):
    """POST /kvcache/kin: another instance's inquiry."""

    token_ids: list[int]
    salt: str = ""
    leading: int = Field(ge=0)
    seconds_ago: float = Field(ge=0)
    messages: list[tuple[str, str]] = Field(default=[])
    request_id: str = ""
    manifest: dict[str, Any]


def add_kvcache_paths(
    app: FastAPI, explainer: MissExplainer, completions: Completions, pool_url: str, count_cached: Callable[[], int]
) -> None:
    """Add the paths.

    Args:
        app: the application of the instance.
        explainer: explains misses.
        completions: tokenizes prompts in the same way as requests.
        pool_url: names the pool, for operators' commands; empty: there is none.
        count_cached: returns the number of blocks in the instance's own cache.
    """

    @app.get("/kvcache")
    async def describe_blocks() -> Response:
        pool = explainer.pool
        state = None
        if pool is not None:
            state = {"ready": pool.is_ready, "detail": pool.health().detail, "url": pool_url}
        manifest = explainer.manifest
        told = {"digest": manifest.digest, "manifest": manifest.to_json(), "pool": state}
        return JSONResponse({**told, "cached_blocks": count_cached()})

    @app.get("/kvcache/why_miss/{request_id:path}")
    async def explain_request(request_id: str) -> Response:
        return JSONResponse(await _explain_request(explainer, request_id, with_inquiry=False))

    @app.post("/kvcache/why_miss")
    async def explain(request: Request) -> Response:
        body = parse_body(WhyMissBody, await read_body(request))
        if body.request_id:
            return JSONResponse(await _explain_request(explainer, body.request_id, with_inquiry=body.inquiry))
        prompt = await _encode_prompt(completions, body)
        stored = await _encode_prompt(completions, body.compare_with) if body.compare_with else None
        verdict = await asyncio.to_thread(explainer.explain_prompt, prompt, stored)
        return JSONResponse(verdict.to_json())

    @app.post("/kvcache/kin")
    async def find_kin(request: Request) -> Response:
        body = parse_body(InquiryBody, await read_body(request))
        verdict = await asyncio.to_thread(explainer.find_kin, _read_inquiry(body))
        return JSONResponse(verdict.to_json())


async def _explain_request(explainer: MissExplainer, request_id: str, *, with_inquiry: bool) -> dict[str, Any]:
    """Explain why a request was a miss.

    Raises:
        ApiError: 404, it is not known.
    """
    found = await asyncio.to_thread(explainer.explain_request, request_id)
    if found is None:
        message = f"this instance remembers no request {request_id!r}: it went elsewhere, is not over, or is long gone"
        raise ApiError(404, message, code="unknown_request")
    verdict, asked = found
    told = {"request_id": request_id, **verdict.to_json()}
    if with_inquiry:
        told["inquiry"] = {**_describe_inquiry(asked), "manifest": explainer.manifest.to_json()}
    return told


def _describe_inquiry(asked: Inquiry) -> dict[str, Any]:
    return {
        "token_ids": list(asked.token_ids),
        "salt": asked.salt,
        "leading": asked.leading,
        "seconds_ago": time.monotonic() - asked.asked_at,
        "messages": asked.messages,
        "request_id": asked.request_id,
    }


def _read_inquiry(body: InquiryBody) -> Inquiry:
    """Parse another instance's inquiry.

    Raises:
        ApiError: its manifest or its tokens are invalid.
    """
    try:
        manifest = parse_manifest(body.manifest)
    except ManifestError as exc:
        raise ApiError(400, f"manifest: {exc}", param="manifest") from None
    asked_at = time.monotonic() - body.seconds_ago
    tokens = _pack_tokens(body.token_ids)
    return Inquiry(tokens, body.salt, body.leading, asked_at, body.messages, body.request_id, manifest)


async def _encode_prompt(completions: Completions, body: PromptBody) -> Prompt:
    """Return the tokens of the prompt in ``body``.

    Raises:
        ApiError: there is no prompt, or it cannot be tokenized.
    """
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either prompt, a text or token ids, or messages", param="prompt")
    if body.messages is not None:
        tokens = await completions.encode_chat(parse_body(ChatBody, orjson.dumps({"messages": body.messages})))
    else:
        plain = parse_body(CompletionBody, orjson.dumps({"prompt": body.prompt}))
        [tokens] = await completions.encode_prompts(plain)
    return Prompt(_pack_tokens(tokens), body.cache_salt, messages=list_texts(body.messages or ()))


def _pack_tokens(tokens: list[int]) -> array[int]:
    """Pack token ids into 32-bit integers.

    Raises:
        ApiError: a token id does not fit in 32 bits.
    """
    try:
        return array("I", tokens)
    except OverflowError:
        raise ApiError(400, "token ids must be integers in [0, 2**32)", param="prompt") from None
