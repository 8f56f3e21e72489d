"""The request fields that both APIs share, and those that they pass to chat."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar

from pydantic import ConfigDict

from engine.protocol import ApiError, Body, RequestId

__all__ = ["PASSED_ON", "PlainBody"]

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
        "repetition_penalty",
        "seed",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Chat fields that mean the same here and are checked there."""


class PlainBody(Body):
    """A request for one answer in text. Unlike chat, it refuses unknown fields, as the owners of the APIs do."""

    model_config = ConfigDict(extra="allow")

    ignored: ClassVar[frozenset[str]] = frozenset({"priority", "service_tier"})
    """Fields that are accepted and ignored."""

    model: str | None = None
    stream: bool = False
    request_id: RequestId | None = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any]) -> None:
        """Refuse unknown fields, and fields that would change the answer in a way that this engine does not support."""
        super().check_fields(fields)
        known = {*cls.model_fields, *cls.ignored, *cls.unsupported, *PASSED_ON}
        for name in fields:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {nearest[0]}?" if nearest else "leave it out"
                raise ApiError(400, f"{name}: this engine knows no such field in this API; {hint}", param=name)

    def fields_of_chat(self) -> dict[str, Any]:
        """Return the fields that chat has under the same names."""
        passed_on = {name: value for name, value in (self.model_extra or {}).items() if name in PASSED_ON}
        return {**passed_on, "request_id": self.request_id}
