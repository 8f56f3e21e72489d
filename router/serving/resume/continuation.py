"""The request for the next instance: the client's, with the tokens so far, in the form that its engine takes.

FastDeploy, and our own engine, append ``completion_token_ids`` to the prompt. Completions of vLLM and SGLang take the
ids of prompt and answer as the prompt. vLLM's chat takes them in ``kv_transfer_params``, in place of the prompt that it
would make of the messages; a version that does not know this makes the prompt of the messages, with the text so far as
the last one. The merger compares the prompt that the instance then tells with the one that it should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from router.fleet import EngineKind
from router.http import whole_number

__all__ = ["CannotContinue", "continue_stream", "count_remaining", "needs_prompt", "resume_by_ids"]

# Of vLLM's completions that do not say how long they may be.
_COMPLETION_TOKENS = 16


class Merger(Protocol):
    """What the client's stream has shown so far (``StreamMerger``)."""

    @property
    def members(self) -> Mapping[str, Any]:
        """Of the client's request."""

    @property
    def num_reasoning(self) -> int:
        """The number of ``shown_ids`` that are reasoning."""

    @property
    def prompt_ids(self) -> list[int] | None:
        """The prompt's tokens, where the instance reported them."""

    @property
    def shown_ids(self) -> Sequence[int]:
        """The tokens that the client has."""

    @property
    def text(self) -> str:
        """Their text."""

    def expect_prompt(self, ids: Sequence[int] | None) -> None:
        """Compare the prompt that the next instance reports with this one."""


class CannotContinue(Exception):
    """The stream cannot go on exactly; the message says why."""


def needs_prompt(engine: EngineKind) -> bool:
    """Whether engines of this kind go on only from ids of prompt and answer, so that the prompt's must be kept."""
    return engine is not EngineKind.FASTDEPLOY


def continue_stream(merger: Merger, engine: EngineKind, is_chat: bool) -> dict[str, Any]:
    """The members to set in the request to an instance of ``engine``; none where it begins again.

    Raises:
        CannotContinue: this engine could not go on.
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
    # A client that has the engine continue its own message has given the beginning of the answer.
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
    """In FastDeploy's form: the ids generated so far."""
    sent = members.get("completion_token_ids")
    added: dict[str, Any] = {"completion_token_ids": [*(sent if isinstance(sent, list) else ()), *ids]}
    added |= _count_limits(members, ids)
    if members.get("echo"):
        added["echo"] = False  # the first segment has done it
    return added


def count_remaining(members: Mapping[str, Any], generated: int) -> int | None:
    """How many tokens are still wanted; None if no number was given."""
    limit = whole_number(members.get("max_completion_tokens")) or whole_number(members.get("max_tokens"))
    return None if limit is None else max(0, limit - generated)


def _count_reasoning(merger: Merger) -> dict[str, int]:
    """FastDeploy's limits of reasoning, and of the answer behind it, less what was generated.

    FastDeploy counts a request's tokens from its first one on, and sees by the end of the prompt whether it reasons.

    Raises:
        CannotContinue: what is left is not known exactly.
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
        if reasoning:  # which tokens lie between the two is not known
            raise CannotContinue("it has a limit of tokens behind its reasoning, of which some were shown")
        limits["response_max_tokens"] = max(1, limit - shown)
    return limits


def _count_limits(members: Mapping[str, Any], ids: Sequence[int]) -> dict[str, int]:
    """The limits of tokens that the client gave, less those that were generated."""
    limits = {}
    for name, least in (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0)):
        limit = whole_number(members.get(name))
        if limit is not None:
            limits[name] = max(least, limit - len(ids))
    return limits
