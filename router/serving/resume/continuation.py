"""The request for the next instance: the client's request with the tokens so far, in the format of its engine.

FastDeploy, and our own engine, append ``completion_token_ids`` to the prompt. Completions of vLLM and SGLang take the
ids of prompt and answer as the prompt. vLLM's chat takes them in ``kv_transfer_params``, instead of the prompt that it
would create from the messages; a version without this feature creates the prompt from the messages, the last of which
is the text so far. The merger compares the prompt that the instance then reports with the expected one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from router.fleet import EngineKind
from router.http import whole_number

__all__ = ["CannotContinue", "continue_stream", "count_remaining", "needs_prompt", "resume_by_ids"]

# vLLM's default for completions without a length limit.
_COMPLETION_TOKENS = 16


class Merger(Protocol):
    """The content that the client's stream has shown so far (``StreamMerger``)."""

    @property
    def members(self) -> Mapping[str, Any]:
        """Members of the client's request."""

    @property
    def num_reasoning(self) -> int:
        """Number of ``shown_ids`` that are reasoning."""

    @property
    def prompt_ids(self) -> list[int] | None:
        """The prompt's tokens, if the instance reported them."""

    @property
    def shown_ids(self) -> Sequence[int]:
        """The tokens that the client has received."""

    @property
    def text(self) -> str:
        """Text of these tokens."""

    def expect_prompt(self, ids: Sequence[int] | None) -> None:
        """Compare the prompt that the next instance reports with this one."""


class CannotContinue(Exception):
    """The stream cannot continue exactly. The message has the reason."""


def needs_prompt(engine: EngineKind) -> bool:
    """Return whether such engines continue only from ids of prompt and answer: then the prompt's ids must be stored."""
    return engine is not EngineKind.FASTDEPLOY


def continue_stream(merger: Merger, engine: EngineKind, is_chat: bool) -> dict[str, Any]:
    """Return the members to set in the request to an instance of ``engine``; empty if it begins again.

    Raises:
        CannotContinue: this engine cannot continue.
    """
    members, shown = merger.members, merger.shown_ids
    merger.expect_prompt(None)
    if not shown:
        return {}
    if not needs_prompt(engine):
        return {**resume_by_ids(members, shown), **_count_reasoning(merger)}
    prompt = merger.prompt_ids
    if prompt is None:
        raise CannotContinue("the ids of its prompt are not known")
    ids = [*prompt, *shown]
    merger.expect_prompt(ids)
    if not is_chat:
        limits = _count_limits(members, shown)
        if "max_tokens" not in members:
            limits["max_tokens"] = max(1, _COMPLETION_TOKENS - len(shown))
        return {"prompt": ids, **limits}
    if merger.num_reasoning:
        raise CannotContinue("it has shown reasoning, whose parser would begin again")
    # With continue_final_message, the last message is the beginning of the answer, given by the client.
    messages = list(members["messages"])
    given = messages.pop() if members.get("continue_final_message") else {}
    text = given.get("content")
    if not isinstance(text, str | None):
        raise CannotContinue("its last message is in parts")
    messages.append({"role": "assistant", **given, "content": (text or "") + merger.text})
    return {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "kv_transfer_params": {"prompt_token_ids": ids},
        **_count_limits(members, shown),
    }


def resume_by_ids(members: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    """Return FastDeploy's members: the ids generated so far."""
    sent = members.get("completion_token_ids")
    added: dict[str, Any] = {"completion_token_ids": [*(sent if isinstance(sent, list) else ()), *ids]}
    added |= _count_limits(members, ids)
    if members.get("echo"):
        added["echo"] = False  # the first segment contains the echo
    return added


def count_remaining(members: Mapping[str, Any], generated: int) -> int | None:
    """Return how many tokens are still to be generated; None if there is no limit."""
    limit = whole_number(members.get("max_completion_tokens")) or whole_number(members.get("max_tokens"))
    return None if limit is None else max(0, limit - generated)


def _count_reasoning(merger: Merger) -> dict[str, int]:
    """Return FastDeploy's limits of reasoning, and of the answer after it, minus the tokens already generated.

    FastDeploy counts a request's tokens from its first one on, and detects at the end of the prompt whether it reasons.

    Raises:
        CannotContinue: the remaining limits are not known exactly.
    """
    members, shown, reasoning = merger.members, len(merger.shown_ids), merger.num_reasoning
    is_reasoning = reasoning == shown
    limits = {}
    limit = whole_number(members.get("reasoning_max_tokens"))
    if limit is not None and reasoning and is_reasoning:
        if shown >= limit:
            raise CannotContinue("it has reasoned for as long as it may, and the end of its reasoning was not shown")
        limits["reasoning_max_tokens"] = limit - shown
    limit = whole_number(members.get("response_max_tokens"))
    if limit is not None and not is_reasoning:
        if reasoning:  # the tokens that separate the two are unknown
            raise CannotContinue("it has a limit of tokens behind its reasoning, of which some were shown")
        limits["response_max_tokens"] = max(1, limit - shown)
    return limits


def _count_limits(members: Mapping[str, Any], ids: Sequence[int]) -> dict[str, int]:
    """Return the client's token limits, minus the tokens already generated."""
    limits = {}
    for name, least in (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0)):
        limit = whole_number(members.get(name))
        if limit is not None:
            limits[name] = max(least, limit - len(ids))
    return limits
