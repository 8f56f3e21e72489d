"""The endpoints that generate tokens, and how their bodies differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

__all__ = ["GENERATING", "Api", "EngineIds"]


class Api(NamedTuple):
    """An endpoint that generates tokens. A pair may serve its requests."""

    id_prefix: str
    """Prefix of a sequence's id at FastDeploy's engines: ``<prefix><request_id>_<index>``."""
    token_limits: tuple[str, ...]
    """Members that limit the generated tokens. The router sets its own limit in the first, and in others if sent."""
    may_end_early: bool = False
    """Whether an end-of-text token always ends the response, because the API has no ``ignore_eos``."""
    takes_rid: bool = False
    """Whether SGLang accepts a request's id (``rid``) at this endpoint."""
    is_chat: bool = False
    stores_answers: bool = False
    """Whether the instance may store its responses, so that later requests can continue them."""
    is_continuable: bool = False
    """Whether another instance can continue a response, and the segments can be merged into one response."""


GENERATING: Mapping[str, Api] = {
    "/v1/chat/completions": Api(
        "chatcmpl-", ("max_tokens", "max_completion_tokens"), takes_rid=True, is_chat=True, is_continuable=True
    ),
    "/v1/completions": Api("cmpl-", ("max_tokens",), takes_rid=True, is_continuable=True),
    "/v1/responses": Api("resp_", ("max_output_tokens",), stores_answers=True),
    "/v1/messages": Api("msg_", ("max_tokens",), may_end_early=True),
}
"""The endpoints that generate tokens, by path."""


class EngineIds(NamedTuple):
    """The ids of one request's sequences at engines: ``<prefix><request id>_<index>``."""

    prefix: str
    request_id: str
    sequences: int

    @property
    def whole(self) -> str:
        """The id of the request at an engine, without the index of a sequence."""
        return self.request_id if self.request_id.startswith(self.prefix) else self.prefix + self.request_id

    def list_ids(self) -> list[str]:
        """Return the engine's id of each sequence of the request. A request with ``n`` choices has ``n`` sequences."""
        return [f"{self.whole}_{number}" for number in range(self.sequences)]

    def matching_ids(self, asked: Collection[str]) -> Collection[str]:
        """Return the ids in ``asked`` that are an id of this request or of one of its sequences."""
        return {self.request_id, self.whole, *self.list_ids()}.intersection(asked)
