"""Hints how long to cache a prompt's blocks: ``cache_control``, as in Anthropic's API.

    {"type": "ephemeral", "ttl": "1h"}

On a request it means the whole prompt, on a message or on a part of its content the prompt up to there. The pool is
asked not to evict those blocks for that time, which starts again with each request that has the hint. It is only a
hint: a pool that is full of such blocks evicts them, too, and a pool without this feature ignores it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic_core import PydanticCustomError

__all__ = ["CacheControl", "CacheHint", "CacheMark", "count_common", "find_marks", "seconds_kept"]

_TTL = re.compile(r"(\d{1,5})([smh])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600}
_MAX_SECONDS = 24 * 3600
"""The maximum that a Mooncake master grants by default (``--max_kv_soft_pin_ttl``)."""


class CacheControl(BaseModel):
    """A hint: 5 minutes by default."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["ephemeral"]
    ttl: str = "5m"

    @field_validator("ttl")
    @classmethod
    def _check_ttl(cls, ttl: str) -> str:
        match = _TTL.fullmatch(ttl)
        if match is None or not 0 < int(match[1]) * _UNITS[match[2]] <= _MAX_SECONDS:
            raise PydanticCustomError("ttl", "Input should be a time such as 5m or 1h, and at most 24h")
        return ttl

    @property
    def seconds(self) -> float:
        """The time in seconds."""
        return float(int(self.ttl[:-1]) * _UNITS[self.ttl[-1]])


@dataclass(frozen=True)
class CacheHint:
    """A request to cache the first ``num_tokens`` tokens of a prompt for ``seconds``."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class CacheMark:
    """A hint in a conversation, for its messages up to one of them.

    Attributes:
        message: the index of that message.
        text: its content up to the mark; None: all of it.
        seconds: how long to cache these.
    """

    message: int
    text: str | None
    seconds: float


def find_marks(messages: Sequence[dict[str, Any]]) -> Iterator[CacheMark]:
    """Yield the hints in a conversation.

    Raises:
        ValueError: a hint is invalid; the message is the end of a sentence that says where and why.
    """
    for index, message in enumerate(messages):
        content = message.get("content")
        text = ""
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text += part["text"]
                if part.get("cache_control") is not None:
                    where = f"messages.{index}.content.{number}.cache_control"
                    yield CacheMark(index, text, _read_control(part["cache_control"], where))
        if message.get("cache_control") is not None:
            yield CacheMark(index, None, _read_control(message["cache_control"], f"messages.{index}.cache_control"))


def seconds_kept(hints: Sequence[CacheHint], end: int) -> float:
    """Return how long to cache tokens up to ``end``; 0: no hint covers them."""
    return max((hint.seconds for hint in hints if hint.num_tokens >= end), default=0.0)


def count_common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many leading tokens two prompts share."""
    return next((i for i, (one, other) in enumerate(zip(tokens, others, strict=False)) if one != other), len(others))


def _read_control(value: object, where: str) -> float:
    try:
        return CacheControl.model_validate(value).seconds
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        path = ".".join([where, *map(str, error["loc"])])
        raise ValueError(f"{path}: {error['msg']}") from None
