"""A request's hints for how long to cache the prompt's blocks: Anthropic's ``cache_control``, OpenAI's fields.

An example of ``cache_control``::

    {"type": "ephemeral", "ttl": "1h"}

In the body of a request, ``cache_control`` applies to the whole prompt. In a message, or in a part of a message's
content, it applies to the prompt up to the end of that message or part. OpenAI's ``prompt_cache_retention`` and
``prompt_cache_options`` apply to the whole prompt. With the mode ``explicit``, ``prompt_cache_options`` applies only to
the prompt up to each part with ``prompt_cache_breakpoint``.

The instance pins these blocks in the pool for the given time. A request with the hint starts the time again if half
of it is over. A pool may still evict pinned blocks if all of its blocks are pinned. A pool that cannot pin blocks
ignores hints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic_core import PydanticCustomError

__all__ = ["CacheControl", "CacheHint", "CacheMark", "CacheOptions", "find_marks", "seconds_kept"]

_AnyHint = TypeVar("_AnyHint", bound=BaseModel)

_TTL = re.compile(r"(\d{1,5})([smh])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600}
_MAX_SECONDS = 24 * 3600
"""Maximum time of a hint: the default maximum of a Mooncake master (``--max_kv_soft_pin_ttl``)."""


class _Timed(BaseModel):
    """Base class of hints: has the time ``ttl``, such as ``5m``."""

    model_config = ConfigDict(extra="ignore")

    ttl: str

    @field_validator("ttl")
    @classmethod
    def _check_ttl(cls, ttl: str) -> str:
        match = _TTL.fullmatch(ttl)
        if match is None or not 0 < int(match[1]) * _UNITS[match[2]] <= _MAX_SECONDS:
            raise PydanticCustomError("ttl", "Input should be a time such as 5m or 1h, and at most 24h")
        return ttl

    @property
    def seconds(self) -> float:
        """The time ``ttl`` in seconds."""
        return float(int(self.ttl[:-1]) * _UNITS[self.ttl[-1]])


class CacheControl(_Timed):
    """Anthropic's field ``cache_control``; the default time is 5 minutes."""

    type: Literal["ephemeral"]
    ttl: str = "5m"


class CacheOptions(_Timed):
    """OpenAI's field ``prompt_cache_options``; the default time is 30 minutes."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: str = "30m"


class _Breakpoint(_Timed):
    """OpenAI's ``prompt_cache_breakpoint``; if it has no ``ttl``, the time of ``prompt_cache_options`` is used."""

    mode: Literal["explicit"]
    ttl: str = ""


@dataclass(frozen=True)
class CacheHint:
    """A hint in tokens: cache the blocks of the first ``num_tokens`` tokens of a prompt for ``seconds``."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class CacheMark:
    """A hint at a message of a conversation: cache the prompt up to this message, or up to a part of its content.

    Attributes:
        message: the index of the message.
        text: the content of the message up to the end of the part, or None if the hint is for the whole message.
        seconds: how long to cache this part of the prompt, in seconds.
    """

    message: int
    text: str | None
    seconds: float


def find_marks(messages: Sequence[dict[str, Any]], breakpoint_seconds: float) -> Iterator[CacheMark]:
    """Yield the hints at messages of a conversation and at parts of their contents.

    Args:
        messages: the conversation, as in chat's field ``messages``.
        breakpoint_seconds: the time of a ``prompt_cache_breakpoint`` without ``ttl``.

    Raises:
        ValueError: a hint is invalid; the message names the hint and says what is wrong.
    """
    for index, message in enumerate(messages):
        content = message.get("content")
        text = ""
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text += part["text"]
                where = f"messages.{index}.content.{number}"
                if part.get("cache_control") is not None:
                    control = _check(CacheControl, part["cache_control"], f"{where}.cache_control")
                    yield CacheMark(index, text, control.seconds)
                if part.get("prompt_cache_breakpoint") is not None:
                    mark = _check(_Breakpoint, part["prompt_cache_breakpoint"], f"{where}.prompt_cache_breakpoint")
                    yield CacheMark(index, text, mark.seconds if mark.ttl else breakpoint_seconds)
        if message.get("cache_control") is not None:
            control = _check(CacheControl, message["cache_control"], f"messages.{index}.cache_control")
            yield CacheMark(index, None, control.seconds)


def seconds_kept(hints: Sequence[CacheHint], end: int) -> float:
    """Return for how many seconds to cache a block that ends at token ``end``; 0: no hint includes this token."""
    return max((hint.seconds for hint in hints if hint.num_tokens >= end), default=0.0)


def _check(kind: type[_AnyHint], value: object, where: str) -> _AnyHint:
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        path = ".".join([where, *map(str, error["loc"])])
        raise ValueError(f"{path}: {error['msg']}") from None
