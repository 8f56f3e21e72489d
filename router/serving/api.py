"""The endpoints whose answers are generated, and what their bodies have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

__all__ = ["GENERATING", "Api", "EngineIds"]


class Api(NamedTuple):
    """An endpoint that generates: a pair may work on its requests."""

    id_prefix: str
    """Engines name a request's sequences ``<prefix><request_id>_<number>``."""


GENERATING: Mapping[str, Api] = {
    "/v1/chat/completions": Api("chatcmpl-"),
    "/v1/completions": Api("cmpl-"),
}
"""By path."""


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
        """The id of each sequence."""
        return [f"{self.whole}_{number}" for number in range(self.sequences)]

    def find_meant(self, asked: Collection[str]) -> Collection[str]:
        """Those of the ids ``asked`` that mean this request: its own id, or its sequences'."""
        return {self.request_id, self.whole, *self.list_ids()}.intersection(asked)
