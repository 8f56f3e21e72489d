"""The endpoints that generate answers, and how their bodies differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

__all__ = ["GENERATING", "Api", "EngineIds"]


class Api(NamedTuple):
    """An endpoint that generates an answer: a pair may serve its requests."""

    id_prefix: str
    """Prefix in the ids of FastDeploy's engines for a request's sequences: ``<prefix><request_id>_<number>``."""
    token_limits: tuple[str, ...]
    """Members that limit the tokens of an answer: the first always, the others if a client sends them."""
    may_end_early: bool = False
    """Whether generation cannot be forced to continue after an end-of-text token (``ignore_eos``)."""
    takes_rid: bool = False
    """Whether SGLang accepts an id from the client (``rid``)."""
    is_chat: bool = False
    stores_answers: bool = False
    """Whether the instance may store its answers, so that later requests can continue them."""
    is_continuable: bool = False
    """Whether another instance can continue its answer, and the parts can be merged into one."""


GENERATING: Mapping[str, Api] = {
    "/v1/chat/completions": Api(
        "chatcmpl-", ("max_tokens", "max_completion_tokens"), takes_rid=True, is_chat=True, is_continuable=True
    ),
    "/v1/completions": Api("cmpl-", ("max_tokens",), takes_rid=True, is_continuable=True),
    "/v1/responses": Api("resp_", ("max_output_tokens",), stores_answers=True),
    "/v1/messages": Api("msg_", ("max_tokens",), may_end_early=True),
}
"""The endpoints by path."""


class EngineIds(NamedTuple):
    """The ids that engines give to the sequences of one request: ``<prefix><request id>_<number>``."""

    prefix: str
    request_id: str
    sequences: int

    @property
    def whole(self) -> str:
        """The id without the number."""
        return self.request_id if self.request_id.startswith(self.prefix) else self.prefix + self.request_id

    def list_ids(self) -> list[str]:
        """Return the id of each sequence."""
        return [f"{self.whole}_{number}" for number in range(self.sequences)]

    def matching_ids(self, asked: Collection[str]) -> Collection[str]:
        """Return those of the ids ``asked`` that mean this request: its own id, or its sequences'."""
        return {self.request_id, self.whole, *self.list_ids()}.intersection(asked)
