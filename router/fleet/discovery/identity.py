"""Identity: which engine answers at an address. ``router.register`` uses it, too, for the server next to it."""

from __future__ import annotations

from typing import Any

import orjson

from router.fleet.models import parse_models
from router.fleet.registration import RegistrationError
from router.http import Address, ConnectionPool, Response, UpstreamError

__all__ = ["ask_identity"]

ASK_SECONDS = 4.0
# Owner of our own engine's models. FastDeploy's models have an owner without the second word.
OUR_OWNER = "fastdeploy-kvstore"


async def ask_identity(upstream: ConnectionPool, address: Address) -> dict[str, Any]:
    """Query the engine at ``address``; return the fields ``engine`` and, for SGLang, ``role`` and ``bootstrap_port``.

    Raises:
        RegistrationError: it does not answer.
    """
    try:
        models = await _ask(upstream, address, "/v1/models")
        owner = _find_owner(models)
        if owner.startswith("fastdeploy"):
            return {"engine": "fastdeploy", **({"cache_salt": True} if owner == OUR_OWNER else {})}
        if owner in ("", "vllm") and "version" in _read_object(await _ask(upstream, address, "/version")):
            return {"engine": "vllm"}
        for path in ("/server_info", "/get_server_info") if owner in ("", "sglang") else ():
            info = _read_object(await _ask(upstream, address, path))
            if "disaggregation_mode" in info:
                return _read_sglang(info)
    except UpstreamError as exc:
        raise RegistrationError(f"it does not tell what it is: {exc}") from exc
    if models.status in (401, 403):
        raise RegistrationError("it wants a key before it tells what it is; say so with the label kvrouter/engine")
    return {"engine": "openai"}


async def _ask(upstream: ConnectionPool, address: Address, path: str) -> Response:
    return await upstream.fetch(address, "GET", path, timeout=ASK_SECONDS)


def _find_owner(models: Response) -> str:
    """Return the owner of the first model that the engine lists."""
    try:
        listed = parse_models(models.body) if models.status == 200 else []
    except ValueError:
        listed = []
    return str((listed[0].get("owned_by") if listed else "") or "").lower()


def _read_object(answer: Response) -> dict[str, Any]:
    """Return the JSON object of a successful response; an empty one otherwise."""
    try:
        found = orjson.loads(answer.body) if answer.status == 200 else {}
    except orjson.JSONDecodeError:
        found = {}
    return found if isinstance(found, dict) else {}


def _read_sglang(info: dict[str, Any]) -> dict[str, Any]:
    mode, port = info["disaggregation_mode"], info.get("disaggregation_bootstrap_port")
    found: dict[str, Any] = {"engine": "sglang", "role": mode if mode in ("prefill", "decode") else "mixed"}
    if mode == "prefill" and isinstance(port, int):
        found["bootstrap_port"] = port
    return found
