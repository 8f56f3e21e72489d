"""The HTTP paths of an instance's commands, with FastDeploy's methods, bodies and status codes.

A router does not forward these paths. So only callers that reach the instance itself can use them.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from engine.serving.control import TAGS, ControlFailed
from engine.serving.http_server import read_body
from engine.serving.instance import Instance

__all__ = ["add_control_paths"]

log = logging.getLogger(__name__)


def add_control_paths(app: FastAPI, instance: Instance) -> None:
    """Add the paths of the commands to the application of ``instance``."""

    @app.post("/v1/pause")
    async def pause(_: Request) -> Response:
        return await _execute("pause", instance.control.pause())

    @app.post("/v1/resume")
    async def resume(_: Request) -> Response:
        return await _execute("resume", instance.control.resume())

    @app.get("/v1/is_paused")
    async def is_paused(_: Request) -> Response:
        async def describe() -> dict[str, bool]:
            return {"is_paused": await instance.control.find_out_if_paused()}

        return await _execute("is_paused", describe())

    @app.post("/v1/sleep")
    async def sleep(request: Request) -> Response:
        return await _execute("sleep", instance.control.sleep(await _read_tags(request)))

    @app.post("/v1/wakeup")
    async def wake_up(request: Request) -> Response:
        return await _execute("wakeup", instance.control.wake_up(await _read_tags(request)))

    @app.post("/v1/update_weights")
    async def update_weights(request: Request) -> Response:
        fields = await _read_fields(request)
        _check_type(fields, "version", str, "a string")
        _check_type(fields, "verify_checksum", bool, "a boolean")
        if fields.get("verify_checksum"):
            raise _InvalidParameter("verify_checksum must be false: a checkpoint folder has no checksums to verify")
        return await _execute("update_weights", instance.control.update_weights(fields.get("version") or ""))

    @app.get("/clear_load_weight")
    async def clear_weights(_: Request) -> Response:
        if not instance.control.has_dynamic_weights:
            return _refuse_dynamic()
        return await _execute("sleep", instance.control.sleep(TAGS))

    @app.get("/update_model_weight")
    async def restore_weights(_: Request) -> Response:
        if not instance.control.has_dynamic_weights:
            return _refuse_dynamic()
        return await _execute("wakeup", instance.control.wake_up(TAGS))

    @app.exception_handler(_InvalidParameter)
    async def on_invalid_parameter(_: Request, error: _InvalidParameter) -> Response:
        return JSONResponse({"error": "Invalid parameter type", "message": str(error)}, 400)


class _InvalidParameter(Exception):
    """Raised if a parameter of a command is wrong; the message is one sentence."""


def _refuse_dynamic() -> Response:
    """Return FastDeploy's error response for an instance that cannot change its weights."""
    return JSONResponse({"error": "Dynamic Load Weight Disabled."}, 404)


async def _read_fields(request: Request) -> dict[str, Any]:
    """Return the parameters of a command: members of the JSON body, or of the query if there is no body."""
    body = await read_body(request)
    if not body:
        return dict(request.query_params)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise _InvalidParameter(f"the body is not valid JSON: {exc}") from None
    if not isinstance(fields, dict):
        raise _InvalidParameter("the body must be a JSON object")
    return fields


async def _read_tags(request: Request) -> list[str]:
    """Return the parameter ``tags`` of a command as a list; if it is missing, return all ``TAGS``."""
    tags = (await _read_fields(request)).get("tags")
    if tags is None:
        return list(TAGS)
    named = tags.split(",") if isinstance(tags, str) else tags
    if not isinstance(named, list) or not all(isinstance(tag, str) for tag in named):
        raise _InvalidParameter(f"tags must be a list of {', '.join(TAGS)}, or a text with these, separated by commas")
    return named


def _check_type(fields: Mapping[str, Any], name: str, kind: type, text: str) -> None:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise _InvalidParameter(f"{name} must be {text}")


async def _execute(command: str, execution: Awaitable[Any]) -> Response:
    """Wait for a command, and return FastDeploy's response: with the result, or with the reason of the failure."""
    command_id = f"control-{uuid.uuid4()}"
    status, message, result = 200, "Success", None
    try:
        result = await execution
    except ControlFailed as exc:
        status, message = 500, f"Failed to run control method {command}: {command_id} {exc}"
        log.error("%s", message)
    status_text = "success" if status == 200 else "error"
    content = {"request_id": command_id, "status": status_text, "error_message": message, "result": result}
    return JSONResponse(content, status)
