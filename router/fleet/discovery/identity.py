"""Identity: finds out which engine runs at an address. Used by service discovery and by ``router.register``."""

from __future__ import annotations

from typing import Any

import orjson

from router.fleet.models import parse_models
from router.fleet.registration import RegistrationError
from router.http import Address, ConnectionPool, Response, UpstreamError

__all__ = ["ask_identity"]

ASK_SECONDS = 4.0
# ``owned_by`` of the models of our own engine. FastDeploy's models have "fastdeploy".
OUR_OWNER = "fastdeploy-kvstore"


async def ask_identity(upstream: ConnectionPool, address: Address) -> dict[str, Any]:
    """Query the engine at ``address``, and return fields of its registration: ``engine`` and others.

    Our engine also gets ``cache_salt``, SGLang ``role`` and ``bootstrap_port``.

    Raises:
        RegistrationError: the engine does not respond, or requires an API key.
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
        raise RegistrationError(f"its server does not report its engine: {exc}") from exc
    if models.status in (401, 403):
        raise RegistrationError(
            "its server requires an API key, so its engine is not known; set the label kvrouter/engine"
        )
    return {"engine": "openai"}


async def _ask(upstream: ConnectionPool, address: Address, path: str) -> Response:
    return await upstream.fetch(address, "GET", path, timeout=ASK_SECONDS)


def _find_owner(models: Response) -> str:
    """Return ``owned_by`` of the first model that the engine lists; ``""`` if it lists none."""
    try:
        listed = parse_models(models.body) if models.status == 200 else []
    except ValueError:
        listed = []
    return str((listed[0].get("owned_by") if listed else "") or "").lower()


def _read_object(response: Response) -> dict[str, Any]:
    """Return the JSON object in a successful response; an empty object if there is none."""
    try:
        found = orjson.loads(response.body) if response.status == 200 else {}
    except orjson.JSONDecodeError:
        found = {}
    return found if isinstance(found, dict) else {}


def _read_sglang(info: dict[str, Any]) -> dict[str, Any]:
    mode, port = info["disaggregation_mode"], info.get("disaggregation_bootstrap_port")
    found: dict[str, Any] = {"engine": "sglang", "role": mode if mode in ("prefill", "decode") else "mixed"}
    if mode == "prefill" and isinstance(port, int):
        found["bootstrap_port"] = port
    return found
