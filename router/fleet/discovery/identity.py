"""Identity: finds out which engine a server runs. Used by service discovery and by ``router.register``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kvcommon.json_objects import load_object
from router.fleet.models import parse_models

__all__ = ["Fetch", "IdentityHidden", "ask_identity", "ask_sglang"]

# ``owned_by`` of the models of our own engine. FastDeploy's models have "fastdeploy".
OUR_OWNER = "fastdeploy-kvstore"

Fetch = Callable[[str], Awaitable[tuple[int, bytes]]]
"""Sends GET to a path of the server, and returns the status and the body of the response."""


class IdentityHidden(Exception):
    """The server requires an API key before it reports which engine it runs."""


async def ask_identity(fetch: Fetch) -> dict[str, Any]:
    """Query which engine a server runs, and return fields of its registration: ``engine`` and others.

    The fields of our engine also have ``cache_salt``; those of SGLang have ``role`` and ``bootstrap_port``.

    Raises:
        IdentityHidden: the server requires an API key.
    """
    status, models = await fetch("/v1/models")
    owner = _find_owner(models) if status == 200 else ""
    if owner.startswith("fastdeploy"):
        return {"engine": "fastdeploy", **({"cache_salt": True} if owner == OUR_OWNER else {})}
    if owner in ("", "vllm") and "version" in await _fetch_object(fetch, "/version"):
        return {"engine": "vllm"}
    if owner in ("", "sglang") and (found := await ask_sglang(fetch)):
        return found
    if status in (401, 403):
        raise IdentityHidden("requires an API key, so its engine is not known")
    return {"engine": "openai"}


async def ask_sglang(fetch: Fetch) -> dict[str, Any]:
    """Query the registration fields of an SGLang server; empty if the server is not SGLang, or does not report them."""
    for path in ("/server_info", "/get_server_info"):  # the second path is the earlier name of the first
        info = await _fetch_object(fetch, path)
        if "disaggregation_mode" in info:
            mode, port = info["disaggregation_mode"], info.get("disaggregation_bootstrap_port")
            found = {"engine": "sglang", "role": mode if mode in ("prefill", "decode") else "mixed"}
            return {**found, "bootstrap_port": port} if mode == "prefill" and isinstance(port, int) else found
    return {}


def _find_owner(models: bytes) -> str:
    """Return ``owned_by`` of the first model in a list of models; ``""`` if there is none."""
    try:
        listed = parse_models(models)
    except ValueError:
        listed = []
    return str((listed[0].get("owned_by") if listed else "") or "").lower()


async def _fetch_object(fetch: Fetch, path: str) -> dict[str, Any]:
    """Return the JSON object in a successful response; an empty object if there is none."""
    status, body = await fetch(path)
    return (load_object(body) if status == 200 else None) or {}
