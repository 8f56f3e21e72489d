"""The parts that the Responses API and the Messages API have in common: request bodies, and events with a type."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar

import orjson
from pydantic import ConfigDict

from engine.protocol import ApiError, Body, RequestId, name_field

__all__ = ["PASSED_ON", "PlainBody", "encode_typed_event"]

PASSED_ON = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "cache_control",
        "cache_salt",
        "chat_template_kwargs",
        "completion_token_ids",
        "disaggregate_info",
        "ignore_eos",
        "kv_transfer_params",
        "min_tokens",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "repetition_penalty",
        "seed",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Fields of chat that Responses and Messages accept, too. The chat request gets them and checks them."""


class PlainBody(Body):
    """Base class of the bodies of Responses and Messages. Unknown fields are refused, as OpenAI and Anthropic do."""

    model_config = ConfigDict(extra="allow")

    ignored: ClassVar[frozenset[str]] = frozenset({"priority", "service_tier"})
    """The fields that are accepted and ignored."""

    model: str | None = None
    stream: bool = False
    request_id: RequestId | None = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any]) -> None:
        """Raise ``ApiError`` if a field is unknown, or is unsupported and would change the answer."""
        super().check_fields(fields)
        known = {*cls.model_fields, *cls.ignored, *cls.unsupported, *PASSED_ON}
        for name in fields:
            if name not in known:
                shown = name_field(name)
                nearest = difflib.get_close_matches(shown, known, 1)
                hint = f"did you mean {nearest[0]}?" if nearest else "leave the field out"
                raise ApiError(400, f"{shown}: this API has no such field; {hint}", param=shown)

    def fields_of_chat(self) -> dict[str, Any]:
        """Return the fields that are passed to the chat request."""
        passed_on = {name: value for name, value in (self.model_extra or {}).items() if name in PASSED_ON}
        return {**passed_on, "request_id": self.request_id}


def encode_typed_event(kind: str, **members: Any) -> bytes:
    """Return a server-sent event. ``kind`` is the name of the event, and the member ``type`` of its data."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **members}) + b"\n\n"
