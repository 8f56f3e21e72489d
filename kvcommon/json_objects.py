"""Parses JSON objects."""

from __future__ import annotations

from typing import Any

import orjson

__all__ = ["load_object"]


def load_object(data: bytes | str) -> dict[str, Any] | None:
    """Return the JSON object in ``data``; None if ``data`` is anything else."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
