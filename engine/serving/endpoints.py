"""The HTTP paths of an instance, except the paths of commands (``control_paths.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import orjson
import prometheus_client
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute

from engine.apis.completion_response import BegunResponse
from engine.apis.messages import ConversationBody, MessagesBody
from engine.apis.responses_body import ResponsesBody
from engine.generation import list_unknown_ids
from engine.protocol import (
    AbortBody,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from engine.serving.control_paths import add_control_paths
from engine.serving.http_server import (
    CLIENT_LEFT,
    HttpMiddleware,
    add_error_handlers,
    encode_request_id,
    find_request_id,
    read_body,
)
from engine.serving.instance import Instance
from engine.telemetry.tracing import Tracer

__all__ = ["create_app"]

_BodyT = TypeVar("_BodyT", ChatBody, CompletionBody, MessagesBody, ResponsesBody)


def create_app(instance: Instance) -> FastAPI:
    """Create the HTTP application of ``instance``."""
    # FastAPI's documentation pages are off, because they load scripts from the internet.
    app = FastAPI(
        title="fastdeploy-kvstore engine",
        lifespan=instance.run_lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )

    add_error_handlers(app)
    app.add_middleware(HttpMiddleware)
    _add_completions(app, instance)
    _add_operator_paths(app, instance)
    _add_state(app, instance)
    add_control_paths(app, instance)
    return app


def _add_completions(app: FastAPI, instance: Instance) -> None:
    """Add the paths that clients use: completions, chat, Responses, Messages and tokens."""

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _complete(request, ChatBody, instance.completions.begin_chat, instance.tracer)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await _complete(request, CompletionBody, instance.completions.begin_completion, instance.tracer)

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        return await _complete(request, ResponsesBody, instance.responses.begin_response, instance.tracer)

    @app.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "").lower() in ("1", "true"):
            message = "stream: this engine streams a response only when it is created; leave the parameter out"
            raise ApiError(400, message, param="stream")
        return JSONResponse(instance.responses.retrieve_response(response_id))

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        return JSONResponse(instance.responses.delete_response(response_id))

    @app.post("/v1/messages")
    async def message(request: Request) -> Response:
        return await _complete(request, MessagesBody, instance.messages.begin_message, instance.tracer)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = parse_body(ConversationBody, await read_body(request))
        return JSONResponse(await instance.messages.count_tokens(body))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeBody, await read_body(request))
        return JSONResponse(await instance.completions.tokenize_prompt(body))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await read_body(request))
        return JSONResponse(instance.completions.detokenize_tokens(body))


def _add_operator_paths(app: FastAPI, instance: Instance) -> None:
    """Add the paths with which routers and operators abort requests and clear the prefix cache."""

    @app.post("/v1/abort_requests")
    async def abort(request: Request) -> Response:
        body = parse_body(AbortBody, await read_body(request))
        if not body.abort_all and not body.req_ids:
            message = 'the body must have "req_ids", a list of request ids, or "abort_all": true'
            raise ApiError(400, message, param="req_ids")
        generations = instance.generations
        aborted = generations.abort_all() if body.abort_all else generations.abort_requests(body.req_ids)
        not_found = [] if body.abort_all else list_unknown_ids(body.req_ids, aborted)
        return JSONResponse({"code": 0, "message": "success", "aborted": aborted, "not_found": not_found})

    @app.post("/clear_prefix_cache")
    @app.post("/reset_prefix_cache")  # vLLM's path
    async def clear_prefix_cache(request: Request) -> Response:
        if request.query_params.get("reset_external", "").lower() in ("1", "true"):  # vLLM's query for the pool
            message = (
                "reset_external: an instance clears only its own cache, not the shared pool; leave the parameter out"
            )
            raise ApiError(400, message, param="reset_external")
        if not instance.core.is_alive:
            raise ApiError(503, "the engine of this instance has ended; the instance's log says why")
        instance.core.clear_prefix_cache()
        return JSONResponse({"status": "success"})


def _add_state(app: FastAPI, instance: Instance) -> None:
    """Add the paths that return the state of the model and of the instance."""

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse(instance.completions.list_models())

    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> Response:
        return JSONResponse(instance.completions.describe_model(model_id))

    @app.get("/kvcache")
    async def describe_blocks() -> Response:
        return JSONResponse(instance.describe_blocks())

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if instance.core.is_alive and not instance.generations.is_broken else 503)

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        return await health()

    @app.get("/load")
    async def list_paths() -> Response:
        routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path.split("/")[1] == "v1"]
        listed = [
            {"path": each.path, "methods": sorted(each.methods or ()), "tags": list(each.tags)} for each in routes
        ]
        return JSONResponse({"routes": listed})

    @app.get("/ready")
    async def ready() -> Response:
        if obstacle := instance.find_obstacle():
            return JSONResponse({"status": "not ready", "reason": obstacle}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = prometheus_client.generate_latest(instance.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


async def _complete(
    request: Request,
    kind: type[_BodyT],
    begin: Callable[[_BodyT], Awaitable[BegunResponse]],
    tracer: Tracer | None,
) -> Response:
    """Answer a request to one of the APIs for completions.

    The request's id comes from the body, or from the header ``X-Request-Id`` if the body has no id.

    Args:
        request: the HTTP request.
        kind: the class of its body.
        begin: checks the body and begins the response.
        tracer: creates spans, or None if requests are not traced.
    """
    if tracer is not None:
        tracer.enter_request(request.headers.raw)
    body = parse_body(kind, await read_body(request))
    sent_id = find_request_id(request.headers.raw)
    body.request_id = body.request_id or sent_id or None
    response = await begin(body)
    answer = await _respond_unless_left(request, response)
    answer.raw_headers.append(encode_request_id(sent_id or response.request.request_id))
    return answer


async def _respond_unless_left(request: Request, response: BegunResponse) -> Response:
    """Return the response: a stream, or one object. If the client disconnects before the object, abort the answer."""
    if response.is_stream:
        return StreamingResponse(response.stream_events(), media_type="text/event-stream")

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting = asyncio.ensure_future(response.collect_whole())
    leaving = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=CLIENT_LEFT)
        return Response(orjson.dumps(collecting.result()), media_type="application/json")
    finally:
        for task in (collecting, leaving):
            task.cancel()
