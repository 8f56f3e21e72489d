"""The HTTP paths of the orders to an instance, with FastDeploy's methods, bodies and status codes.

As all paths but those for clients they are for those who reach the instance itself: a router forwards none of them.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from engine.serving.control import Control, ControlFailed

__all__ = ["add_control_paths"]

log = logging.getLogger(__name__)


def add_control_paths(app: FastAPI, control: Control) -> None:
    """Let ``app`` take orders."""

    @app.post("/v1/pause")
    async def pause(_: Request) -> Response:
        return await _carry_out("pause", control.pause())

    @app.post("/v1/resume")
    async def resume(_: Request) -> Response:
        return await _carry_out("resume", control.resume())

    @app.get("/v1/is_paused")
    async def is_paused(_: Request) -> Response:
        async def describe() -> dict[str, bool]:
            return {"is_paused": await control.find_out_if_paused()}

        return await _carry_out("is_paused", describe())


async def _carry_out(order: str, carrying_out: Awaitable[Any]) -> Response:
    """FastDeploy's answer to an order: what came of it, or the sentence that says why it failed."""
    order_id = f"control-{uuid.uuid4()}"
    status, message, result = 200, "Success", None
    try:
        result = await carrying_out
    except ControlFailed as exc:
        status, message = 500, f"Failed to run control method {order}: {order_id} {exc}"
        log.error("%s", message)
    told = "success" if status == 200 else "error"
    content = {"request_id": order_id, "status": told, "error_message": message, "result": result}
    return JSONResponse(content, status)
