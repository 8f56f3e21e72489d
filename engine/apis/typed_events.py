"""Server-sent events that name their type."""

from __future__ import annotations

from typing import Any

import orjson

__all__ = ["encode_typed_event"]


def encode_typed_event(kind: str, **members: Any) -> bytes:
    """Encode an event with its type, which is also a member of its data."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **members}) + b"\n\n"
