"""FastDeploy's dialect, the default: both instances get the request, and prefill writes to decode's connector port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.dialects.base import PairDialect
from engine.generation import PairInfo
from engine.protocol import GenerationBody

__all__ = ["FastDeployDialect"]


class FastDeployDialect(PairDialect):
    """Reads ``disaggregate_info``."""

    def __init__(self) -> None:
        self.registration: dict[str, Any] = {}

    def read_pairs(self, body: GenerationBody, request_id: str, num_prompts: int) -> Sequence[PairInfo | None]:
        return [body.disaggregate_info] * num_prompts
