"""Routes: all paths of the router, with their methods and the access that they require.

The router checks every request against this table. It forwards a request to an instance only if the path is marked as
forwarded. A path that is not in the table gets status 404, even if a handler for it exists. So no client can reach an
engine's control endpoints (``/v1/pause``, ``/v1/update_weights``, ``/v1/load_lora_adapter``) through the router. The
tests generate their cases from this table.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

__all__ = ["FORWARDED", "ROUTES", "Access", "Route", "find_route"]


class Access(Enum):
    """Access that a path requires if keys and tokens are configured. The values are descriptions for people."""

    OPEN = "everybody"
    CLIENT = "clients"
    CLIENT_OR_ADMIN = "clients, the admin"
    INSTANCE = "instances, the admin"
    INSTANCE_IF_ADMIN = "instances, the admin; without an admin token, everybody"
    ADMIN = "the admin"


class Route(NamedTuple):
    """A path, its methods, and the access that it requires."""

    path: str
    """Path in FastAPI's notation: ``{name}`` is one segment, ``{name:path}`` one or more segments."""
    methods: tuple[str, ...]
    """Allowed methods. GET includes HEAD."""
    access: Access
    is_forwarded: bool = False
    """Whether the router forwards a request for this path to an instance."""

    def takes(self, method: str) -> bool:
        """Return whether the path allows this method."""
        return method in self.methods or (method == "HEAD" and "GET" in self.methods)


def _forward(path: str, *methods: str) -> Route:
    return Route(path, methods or ("POST",), Access.CLIENT, is_forwarded=True)


def _serve(access: Access, path: str, *methods: str) -> Route:
    return Route(path, methods or ("GET",), access)


ROUTES: tuple[Route, ...] = (
    # Paths of FastDeploy, vLLM and SGLang for clients.
    _forward("/v1/chat/completions"),
    _forward("/v1/completions"),
    _forward("/v1/responses"),
    _forward("/v1/responses/{response_id}", "GET", "DELETE"),
    _forward("/v1/responses/{response_id}/cancel"),
    _forward("/v1/responses/{response_id}/input_items", "GET"),
    _forward("/v1/messages"),
    _forward("/v1/messages/count_tokens"),
    _forward("/v1/embeddings"),
    _forward("/v1/rerank"),
    _forward("/v1/score"),
    _forward("/v1/classify"),
    _forward("/v1/reward"),
    _forward("/v1/decisions"),
    _forward("/v1/tokenize"),
    _forward("/v1/detokenize"),
    _forward("/v1/audio/transcriptions"),
    _forward("/v1/audio/translations"),
    _forward("/v1/audio/speech"),
    _forward("/v1/images/generations"),
    _forward("/v1/images/edits"),
    _forward("/tokenize"),
    _forward("/detokenize"),
    _forward("/score"),
    _forward("/rerank"),
    _forward("/v2/rerank"),
    _forward("/v2/embed"),
    _forward("/pooling"),
    _forward("/classify"),
    # Paths for clients to which the router itself responds.
    _serve(Access.CLIENT, "/v1/models"),
    _serve(Access.CLIENT, "/v1/models/{model_id:path}"),
    _serve(Access.CLIENT_OR_ADMIN, "/v1/abort_requests", "POST"),
    # Paths for probes and monitoring.
    _serve(Access.OPEN, "/health"),
    _serve(Access.OPEN, "/ready"),
    _serve(Access.OPEN, "/metrics"),
    _serve(Access.OPEN, "/prometheus_targets"),
    _serve(Access.OPEN, "/registered_number"),
    _serve(Access.ADMIN, "/health_generate"),
    # Paths for instances, which may have a token of their own, and which call /admin/drain before they stop.
    _serve(Access.INSTANCE, "/register", "POST"),
    _serve(Access.INSTANCE, "/decode_instances"),
    # Paths of RFC 1403 of Mooncake for other schedulers, with /register.
    _serve(Access.INSTANCE, "/unregister", "POST"),
    _serve(Access.INSTANCE, "/query", "POST"),
    _serve(Access.INSTANCE, "/query_by_hash", "POST"),
    _serve(Access.INSTANCE_IF_ADMIN, "/admin/drain", "GET", "POST"),
    # Paths for operators.
    _serve(Access.ADMIN, "/registered"),
    _serve(Access.ADMIN, "/admin/pause", "POST"),
    _serve(Access.ADMIN, "/admin/resume", "POST"),
    _serve(Access.ADMIN, "/admin/weight", "POST"),
    _serve(Access.ADMIN, "/admin/clear_prefix_cache", "POST"),
    _serve(Access.ADMIN, "/admin/requests"),
    _serve(Access.ADMIN, "/admin/explain/{request_id:path}"),
    _serve(Access.ADMIN, "/openapi.json"),
    _serve(Access.ADMIN, "/docs"),
    _serve(Access.ADMIN, "/redoc"),
)
"""All paths of the router. A request for another path gets status 404."""

_EXACT = {route.path: route for route in ROUTES if "{" not in route.path}

FORWARDED = tuple(path for path, route in _EXACT.items() if route.is_forwarded)
"""The paths without placeholders whose requests are forwarded to an instance."""


def find_route(path: str) -> Route | None:
    """Return the route of a path without query and percent-escapes; None if the router has no such path."""
    route = _EXACT.get(path)
    if route is None:
        route = next((each for pattern, each in _PATTERNS if pattern.fullmatch(path)), None)
    return route


def _compile_path(path: str) -> re.Pattern[str]:
    # A segment may contain only characters that every server reads in the same way. It must not contain an escape,
    # which could be decoded twice, a ';' or a backslash.
    text = re.sub(r"\\{\w+:path\\}", ".+", re.escape(path))
    return re.compile(re.sub(r"\\{\w+\\}", r"[A-Za-z0-9_.:~-]+", text), re.DOTALL)


_PATTERNS = tuple((_compile_path(route.path), route) for route in ROUTES if "{" in route.path)
