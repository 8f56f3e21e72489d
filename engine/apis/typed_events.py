"""Server-sent events that name their type."""

from __future__ import annotations

from typing import Any

import orjson

__all__ = ["encode_typed_event"]


def encode_typed_event(kind: str, **members: Any) -> bytes:
    """An event of a type, which stands in its data, too."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **members}) + b"\n\n"
